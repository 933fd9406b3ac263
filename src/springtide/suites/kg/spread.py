"""What a question shows at a glance, and a choice of templates that such a glance tells little about.

`glance` is what a policy can see without reading: the type of the first named entity, the type asked for, the words
that end, compare, meet or count, in their order, and the length. `apart` leaves out templates and questions so that no
program answers another's; `flat` leaves out templates until each of these features, and each two together, have so many
different programs behind their values that the one played for each is right for few.
Called by: the writer of `hard` and `expert`, and the benchmark that plays such policies.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import lru_cache
from itertools import combinations
from typing import Any, TypeVar

from springtide.suites.kg.graph import Graph
from springtide.suites.kg.programs import Program, Value

FEATURES = ("type", "asked", "operators", "length")
SETS = tuple((*((f,) for f in FEATURES), *combinations(FEATURES, 2)))
_WORDS = 10  # a step of length

T = TypeVar("T")
Glance = dict[str, Any]
_DIRECTION = {"max": "end", "min": "end", "above": "compare", "below": "compare"}


def glance(program: Program, text: str, entities: Sequence[str], answer: Value, graph: Graph) -> Glance:
    """The visible features of a question; `text` has places for the entities' names."""
    one = min(answer)
    return {
        "type": graph.kind(entities[0]),
        "asked": "number" if isinstance(one, int) else graph.kind(one),
        "operators": _operators(program),
        "length": len(text.split()) // _WORDS,
    }


def _operators(program: Program) -> tuple[str, ...]:
    """In the order of the question's words."""
    own = () if program[0] in ("entity", "hop") else (program[0],)
    return sum((_operators(part) for part in program[1:] if isinstance(part, list)), own)


Questions = dict[str, list[tuple[str, ...]]]  # part -> the entities of each question


def apart(templates: Sequence[tuple[T, Program, Questions]], graph: Graph) -> list[tuple[T, Questions]]:
    """Templates none of whose questions another's program answers too, among those about the same first type.

    Taken in order: one is left out if it or one before it would lose all its questions of a part.
    """

    @lru_cache(maxsize=500_000)
    def found(program: Any, entities: tuple[str, ...]) -> Value:
        if program[0] == "entity":
            return frozenset([entities[program[1] % len(entities)]])  # what is asked of one is tried on two
        inner = found(program[1], entities)
        if not inner:
            return inner
        match program:
            case ("hop", _, relation):
                return graph.follow(inner, relation)
            case ("and", _, other):
                return inner & found(other, entities)
            case ("count", _):
                return frozenset([len(inner)])
            case ("max" | "min" as end, _, attribute):
                return graph.extreme(inner, attribute, end == "max")
            case (side, _, attribute, other):
                than = found(other, entities)
                return graph.beyond(inner, attribute, than, side == "above") if len(than) == 1 else frozenset()
        raise ValueError(f"no such program: {program}")

    def left(program: Any, questions: Questions, others: Sequence[Any]) -> Questions:
        return {
            part: [e for e in asked if all(found(other, e) != found(program, e) for other in others)]
            for part, asked in questions.items()
        }

    kept: dict[str | None, list[tuple[T, Any, Questions]]] = {}
    for template, nested, questions in templates:
        program = _frozen(nested)
        group = kept.setdefault(graph.kind(next(iter(questions.values()))[0][0]), [])
        own = left(program, questions, [other for _, other, _ in group])
        if all(own.values()):
            theirs = [(t, other, left(other, asked, [program])) for t, other, asked in group]
            if all(all(asked.values()) for _, _, asked in theirs):
                group[:] = [*theirs, (template, program, own)]
    return [(template, questions) for group in kept.values() for template, _, questions in group]


def _frozen(program: Program) -> Any:
    return tuple(_frozen(part) if isinstance(part, list) else part for part in program)


def flat(seen: Sequence[Glance], programs: Sequence[str], one: float, two: float, least: int) -> list[int]:
    """Places of the templates that are left once, for every feature (and every two), at most the share `one` (`two`)
    of them is right for whoever plays one program for each of its values.

    Those that look like the fewest others go first, a hundredth at a time, but for the last `least` of a kind (which
    operators, whichever way they point). None are left if that cannot be.
    """
    kept = list(range(len(seen)))
    kinds = [tuple(sorted(_DIRECTION.get(name, name) for name in look["operators"])) for look in seen]
    while kept:
        alone: defaultdict[int, float] = defaultdict(float)
        for names in SETS:
            cells: dict[Any, Counter[str]] = {}
            for i in kept:
                cells.setdefault(values(seen[i], names), Counter())[programs[i]] += 1
            best = {cell: max(found.values()) for cell, found in cells.items()}
            if sum(best.values()) > (one if len(names) == 1 else two) * len(kept):
                for i in kept:
                    cell = values(seen[i], names)
                    alone[i] += best[cell] / cells[cell].total()
        if not alone:
            break
        left = Counter(kinds[i] for i in kept)
        gone: set[int] = set()
        for i in sorted(kept, key=lambda i: -alone[i]):
            if left[kinds[i]] > least and len(gone) <= len(kept) // 100:
                left[kinds[i]] -= 1
                gone.add(i)
        kept = [i for i in kept if i not in gone] if gone else []
    return kept


def values(seen: Glance, names: Sequence[str]) -> tuple[Any, ...]:
    return tuple(seen[name] for name in names)
