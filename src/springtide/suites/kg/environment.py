"""`KnowledgeGraph`: one question, answered by walking the graph with tools.

Owns the episode: its variables and what the policy has looked up. Invariants: a variable never changes once made and
is never empty; a relation or attribute can be used only after the lookup that lists it for that variable or entity, so
knowing the graph by heart saves no step; only entities of the question can be named; the answer is a variable, right
if it equals the program's result as a set. The tools and the answer's form follow AgentBench's knowledge graph task;
`hard` and `expert` add comparisons and attributes that count neighbours. The tasks of `quick` and `standard` are
frozen, since springtide-nano was built on them.
Called by: `springtide.env` through the suite `kg`.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from springtide.env import Check, Environment, Limits, Outcome, Requires, Task, TaskList, ToolError, tool
from springtide.suites.kg.programs import Value, calls, evaluate
from springtide.suites.kg.schema import plural

if TYPE_CHECKING:
    from springtide.suites.kg.graph import Graph

_DATA = Path(__file__).with_name("data")
_FILES = {"quick": "questions", "standard": "questions", "hard": "deep", "expert": "deep"}
_TOOLS = ("get_relations", "get_neighbors", "intersection", "get_attributes", "argmax", "argmin", "count")
_TOOLS_OF = {"quick": ("get_relations", "get_neighbors", "count"), "standard": _TOOLS}  # deeper: all
_TURNS = {"quick": 6, "hard": 24, "expert": 32}  # where not `max_turns`
_SHOWN = 3  # names of a variable's entities that a standard reply shows
_ANSWER = re.compile(r"Final Answer:\s*(#\d+)")
_HOW = """\
Answer the question by walking a knowledge graph with the tools. Tools that find something put it into a new variable \
(#0, #1, ...). A relation or attribute can be used once get_relations or get_attributes has listed it. When a variable \
holds exactly the answer, reply without a tool call: Final Answer: #k, with the variable's number for k.
Question: {question}
Entities: {entities}"""


@lru_cache
def _questions(file: str) -> dict[str, Any]:
    return json.loads(gzip.decompress((_DATA / f"{file}.json.gz").read_bytes()))


@dataclass(frozen=True, slots=True)
class Variable:
    """What a tool found: names of entities of one type, `kind`, or (kind "number") one number."""

    values: Value
    kind: str


class KnowledgeGraph(Environment):
    """Questions of several steps over a graph of geography, music, chemistry and words."""

    name = "kg"
    version = "1"
    levels = ("quick", "standard", "hard", "expert")
    max_turns = 15
    requires = Requires(memory_mb=1)

    shared: Graph

    @classmethod
    def tasks(cls, split: str, level: str) -> Sequence[Task]:
        questions = _questions(_FILES[level])[level]
        rows, templates = questions[split], questions["templates"]
        limits: Limits | None = replace(cls.limits, max_turns=_TURNS[level]) if level in _TURNS else None

        def make(index: int) -> Task:
            template, entities = rows[index]
            text, program = templates[template]
            payload = {"skeleton": text, "entities": entities, "program": program}
            return cls.make_task(split, level, index, payload, limits=limits)

        return TaskList(len(rows), make)

    if not TYPE_CHECKING:

        @classmethod
        @asynccontextmanager
        async def shared(cls) -> AsyncIterator[Graph]:
            from springtide.suites.kg.graph import Graph

            yield await asyncio.to_thread(Graph)

    async def start(self) -> str:
        self._variables: list[Variable] = []
        self._listed: dict[tuple[str, str], tuple[str, ...]] = {}  # (lookup tool, variable or entity) -> names
        self._answer: Variable | None = None
        self._quick = self.task.level == "quick"
        self._entities: list[str] = self.task.payload["entities"]
        question = self.task.payload["skeleton"].format(*self._entities)
        return question if self._quick else _HOW.format(question=question, entities=", ".join(self._entities))

    def offered(self) -> Sequence[str]:
        return _TOOLS_OF.get(self.task.level) or tuple(self.tools)

    # --- tools -------------------------------------------------------------------------------------------------------

    @tool
    async def get_relations(self, variable: str) -> str:
        """List the relations of a variable, or of an entity of the question.

        When a variable holds exactly the answer, reply in plain text: Final Answer: #k
        variable: a variable (#0) or an entity's name
        """
        found = self.shared.relations(self._named(variable), self.task.level)
        return self._list("get_relations", variable, list(found), "relations")

    @tool
    async def get_neighbors(self, variable: str, relation: str) -> str:
        """Follow a relation that get_relations listed. What it leads to becomes a new variable.

        variable: a variable (#0) or an entity's name
        relation: one of the relations listed for it
        """
        entities = self._named(variable)
        self._require("get_relations", variable, relation)
        return self._make(self.shared.follow(entities, relation))

    @tool
    async def intersection(self, a: str, b: str) -> str:
        """Put what two variables have in common into a new variable.

        a: a variable
        b: another variable of the same type
        """
        left, right = self._variable(a), self._variable(b)
        common = left.values & right.values
        if not common and left.kind != right.kind:
            raise ToolError(
                f"{a} holds {plural(left.kind)} and {b} {plural(right.kind)}; only the same type can have a common part"
            )
        if not common:
            raise ToolError(f"{a} and {b} have nothing in common; no variable was made")
        return self._make(common)

    @tool
    async def get_attributes(self, variable: str) -> str:
        """List the numerical attributes of a variable.

        variable: a variable
        """
        found = self.shared.attributes(self._named(variable), self.task.level)
        return self._list("get_attributes", variable, list(found), "numerical attributes")

    @tool
    async def argmax(self, variable: str, attribute: str) -> str:
        """Put what has the highest value of an attribute that get_attributes listed into a new variable.

        variable: a variable
        attribute: one of the attributes listed for it
        """
        return self._extreme(variable, attribute, highest=True)

    @tool
    async def argmin(self, variable: str, attribute: str) -> str:
        """Put what has the lowest value of an attribute that get_attributes listed into a new variable.

        variable: a variable
        attribute: one of the attributes listed for it
        """
        return self._extreme(variable, attribute, highest=False)

    @tool
    async def count(self, variable: str) -> str:
        """Count a variable. The number becomes a new variable.

        variable: a variable
        """
        return self._make(frozenset([len(self._variable(variable).values)]), "number")

    @tool
    async def above(self, variable: str, attribute: str, than: str) -> str:
        """Put what has a higher value of an attribute than one other thing into a new variable.

        variable: a variable
        attribute: one of the attributes that get_attributes listed for it
        than: a variable that holds one thing, or an entity's name
        """
        return self._beyond(variable, attribute, than, above=True)

    @tool
    async def below(self, variable: str, attribute: str, than: str) -> str:
        """Put what has a lower value of an attribute than one other thing into a new variable.

        variable: a variable
        attribute: one of the attributes that get_attributes listed for it
        than: a variable that holds one thing, or an entity's name
        """
        return self._beyond(variable, attribute, than, above=False)

    # --- answer and judge --------------------------------------------------------------------------------------------

    async def reply(self, text: str) -> str | None:
        answers = _ANSWER.findall(text)
        if not answers:
            return "Call a tool, or end with the variable that holds the answer: Final Answer: #k"
        try:
            self._answer = self._variable(answers[-1])
        except ToolError as error:
            self.end(f"answered with an unknown variable: {error}")  # an answer is final, a wrong one too
        else:
            self.end("answered")
        return None

    async def score(self) -> Outcome:
        expected = evaluate(self.task.payload["program"], self._entities, self.shared)
        given: Value = self._answer.values if self._answer is not None else frozenset()
        right = given == expected
        overlap = 2 * len(given & expected) / (len(given) + len(expected))
        evidence = f"given {len(given)}, expected {len(expected)}, common {len(given & expected)}"
        checks = (Check("exact set", float(right), evidence=evidence), Check("f1", overlap, weight=0.0))
        return Outcome("completed", reward=float(right), success=right, checks=checks)

    async def gold(self) -> list[tuple[str, dict[str, Any]]]:
        return calls(self.task.payload["program"], self._entities)

    # --- the episode's state -----------------------------------------------------------------------------------------

    def _variable(self, name: str) -> Variable:
        """Raises: ToolError if there is no such variable."""
        if re.fullmatch(r"#\d{1,6}", name) and int(name[1:]) < len(self._variables):
            return self._variables[int(name[1:])]
        known = ", ".join(f"#{i}" for i in range(len(self._variables))) or "none yet"
        raise ToolError(f"there is no variable {name[:40]!r}; there are: {known}")

    def _named(self, name: str) -> list[str]:
        """The entities a variable or an entity's name stands for. Raises: ToolError."""
        if name in self._entities:
            return [name]
        if not name.startswith("#"):
            known = ", ".join([*self._entities, *(f"#{i}" for i in range(len(self._variables)))])
            raise ToolError(f"{name[:40]!r} is neither a variable nor an entity of the question; there are: {known}")
        variable = self._variable(name)
        if variable.kind == "number":
            raise ToolError(f"{name} is a number; it has no relations or attributes")
        return sorted(variable.values)

    def _list(self, lookup: str, variable: str, names: list[str], what: str) -> str:
        """Note that the names are known for the variable, and list them in an order that tells nothing."""
        if not names:
            raise ToolError(f"{variable} has no {what}")
        random.Random(f"{self.task.seed}/{variable}").shuffle(names)
        self._listed[lookup, variable] = tuple(names)
        return (" " if self._quick else ", ").join(names)  # at quick every name is one word

    def _require(self, lookup: str, variable: str, name: str) -> None:
        """Raises: ToolError unless the lookup listed the name for the variable."""
        listed = self._listed.get((lookup, variable))
        if listed is None:
            raise ToolError(f"call {lookup}({variable}) first: what it lists can be used")
        if name not in listed:
            raise ToolError(f"{lookup}({variable}) did not list {name[:40]!r}; it listed: {', '.join(listed)}")

    def _extreme(self, variable: str, attribute: str, highest: bool) -> str:
        entities = self._named(variable)
        self._require("get_attributes", variable, attribute)
        return self._make(self.shared.extreme(entities, attribute, highest))

    def _beyond(self, variable: str, attribute: str, than: str, above: bool) -> str:
        entities, other = self._named(variable), self._named(than)
        self._require("get_attributes", variable, attribute)
        if len(other) != 1 or self.shared.value(other[0], attribute) is None:
            held = f"holds {len(other)} things" if len(other) != 1 else f"has no value of {attribute}"
            raise ToolError(f"{than} {held}; compare with one thing that has a value of {attribute}")
        found = self.shared.beyond(entities, attribute, other, above)
        if not found:
            raise ToolError(f"nothing in {variable} has a {'higher' if above else 'lower'} {attribute} than {than}")
        return self._make(found)

    def _make(self, values: Value, kind: str | None = None) -> str:
        """A new variable, and the reply that tells of it."""
        if kind is None:
            kind = self.shared.kind(min(values)) or ""  # a relation leads to one type
        self._variables.append(Variable(values, kind))
        name = f"#{len(self._variables) - 1}"
        if kind == "number":
            return f"{name}: {next(iter(values))}"
        if self._quick:
            return f"{name}: {kind}"
        shown = ", ".join(sorted(values)[:_SHOWN]) + (", ..." if len(values) > _SHOWN else "")
        return f"{name}: {len(values)} {kind if len(values) == 1 else plural(kind)} ({shown})"
