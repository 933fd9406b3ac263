"""What policies that do not read the question reach at each level of `kg`, and what gold takes.

Baselines, each without a model, on tasks of `test`:
  nothing    lists the relations of the named entity until the turn limit
  valid      a random tool that can be called, with random arguments that are valid; at its last turn an answer
  constant   the final text that answers most training tasks, at once
  plan       the program that answers most training tasks, whatever is asked
  plan X     the same among the training tasks that look the same: `type`, of the first entity named; `asked`, the type
             asked for; `operators`, the words that end, compare, meet and count, in their order; `length`, in words
  plan two   the same for the two of these that do best on the very tasks it is judged on; all pairs are in the result
  type       walks at random until a variable holds entities of the type that is asked for, and answers with it; where a
             number is asked for, it counts what it reached after one step in two
The type that is asked for is told to `type`: it is an upper bound of what guessing it from the wording gets.
"""

from __future__ import annotations

import asyncio
import functools
import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from baselines import success_row, write_page
from common import Load, Row, arguments, emit, report

from springtide.env import EpisodeRunner, Message, Task
from springtide.suites.kg import SUITE
from springtide.suites.kg.environment import KnowledgeGraph
from springtide.suites.kg.graph import Graph
from springtide.suites.kg.programs import calls, evaluate
from springtide.suites.kg.spread import SETS, Glance, glance, values
from springtide.trace import ToolCall

Move = tuple[str, dict[str, Any]]  # a tool and its arguments; ("", {"text": ...}) is plain text
Policy = Callable[[EpisodeRunner, int, random.Random, bool], Move]  # runner, turn, rng, whether it is the last turn
MOST, TASKS = 10.0, 500  # percent; tasks of `test` that are played
PROGRAMS, ANSWERED = 25, 60  # that a plan is chosen among; training tasks that it is chosen by, where there are more
Cell = tuple[Any, ...]


@functools.cache
def graph() -> Graph:
    return Graph()


def message(move: Move) -> Message:
    name, arguments_ = move
    if not name:
        return Message("assistant", arguments_["text"])
    return Message("assistant", "", (ToolCall("c", name, json.dumps(arguments_)),))


def gold(task: Task) -> list[Move]:
    return calls(task.payload["program"], task.payload["entities"])


def nothing(runner: EpisodeRunner, turn: int, rng: random.Random, last: bool) -> Move:
    return "get_relations", {"variable": runner.environment.task.payload["entities"][0]}


def valid(runner: EpisodeRunner, turn: int, rng: random.Random, last: bool) -> Move:
    env = runner.environment
    assert isinstance(env, KnowledgeGraph)
    variables = [f"#{i}" for i in range(len(env._variables))]
    sets = [v for v, known in zip(variables, env._variables, strict=True) if known.kind != "number"]
    ones = [*env._entities, *(v for v in sets if len(env._variable(v).values) == 1)]
    options: dict[str, list[Move]] = {name: [] for name in ("", *(t["function"]["name"] for t in runner.tools))}
    options[""] = [("", {"text": f"Final Answer: {v}"}) for v in variables]
    options["get_relations"] = [("get_relations", {"variable": v}) for v in (*env._entities, *sets)]
    options["count"] = [("count", {"variable": v}) for v in sets]
    for (lookup, variable), names in env._listed.items():
        for name in names:
            if lookup == "get_relations":
                options["get_neighbors"].append(("get_neighbors", {"variable": variable, "relation": name}))
                continue
            for tool in ("argmax", "argmin"):
                options[tool].append((tool, {"variable": variable, "attribute": name}))
            for tool in {"above", "below"} & set(options):
                compared = [{"variable": variable, "attribute": name, "than": one} for one in ones]
                options[tool] += [(tool, c) for c in compared if graph().value(_one(env, c["than"]), name) is not None]
    if "intersection" in options:
        options["get_attributes"] = [("get_attributes", {"variable": v}) for v in sets]
        options["intersection"] = [
            ("intersection", {"a": a, "b": b})
            for a in sets for b in sets
            if a < b and env._variable(a).values & env._variable(b).values
        ]  # fmt: skip
    if last:
        return rng.choice(options[""] or [("", {"text": "Final Answer: #0"})])
    return rng.choice(options[rng.choice([name for name, moves in options.items() if moves])])


def _one(env: KnowledgeGraph, name: str) -> str:
    return name if name in env._entities else next(iter(env._variable(name).values))


def constant(runner: EpisodeRunner, turn: int, rng: random.Random, last: bool) -> Move:
    return "", {"text": _most_common_answer(runner.environment.task.level)}


@functools.cache
def _most_common_answer(level: str) -> str:
    return Counter(gold(t)[-1][1]["text"] for t in SUITE.select("train", level)).most_common(1)[0][0]


def plan_by(names: tuple[str, ...]) -> Policy:
    """The policy that plays what its training tasks with the same values of these features were best answered by."""

    def play(runner: EpisodeRunner, turn: int, rng: random.Random, last: bool) -> Move:
        task = runner.environment.task
        fitted = _plans(task.level, names)
        program = fitted.get(cell(task, names)) or next(iter(fitted.values()))
        moves = calls(program, (task.payload["entities"] * 3)[:3])
        return moves[min(turn, len(moves) - 1)]

    return play


@functools.cache
def _plans(level: str, names: tuple[str, ...]) -> dict[Cell, list[Any]]:
    cells: dict[Cell, list[Task]] = {}
    for task in SUITE.select("train", level):
        cells.setdefault(cell(task, names), []).append(task)
    ordered = sorted(cells.items(), key=lambda cell: -len(cell[1]))  # the first is for a cell train does not have
    return {cell: _best([task.payload for task in tasks]) for cell, tasks in ordered}


def _best(asked: list[dict[str, Any]]) -> list[Any]:
    """Of the commonest programs, the one that answers most of the questions; equal ones: the commonest."""
    programs = Counter(json.dumps(a["program"]) for a in asked).most_common(PROGRAMS)
    sample = random.Random("plans").sample(asked, min(len(asked), ANSWERED))
    answers = [(a["entities"], _reached(a["program"], a["entities"])) for a in sample]

    def answered(text: str) -> int:
        program = json.loads(text)
        return sum(_reached(program, entities) == answer for entities, answer in answers)

    return json.loads(max(programs, key=lambda p: (answered(p[0]), p[1]))[0])


def _reached(program: list[Any], entities: list[str]) -> Any:
    return evaluate(program, (entities * 3)[:3], graph())


@functools.cache
def _glance(split: str, level: str, index: int) -> Glance:
    p = SUITE.select(split, level)[index].payload
    return glance(p["program"], p["skeleton"], p["entities"], _reached(p["program"], p["entities"]), graph())


def cell(task: Task, names: tuple[str, ...]) -> Cell:
    return values(_glance(task.split, task.level, task.index), names)


def right_type(runner: EpisodeRunner, turn: int, rng: random.Random, last: bool) -> Move:
    env = runner.environment
    assert isinstance(env, KnowledgeGraph)
    answer = evaluate(env.task.payload["program"], env._entities, graph())
    asked = "number" if isinstance(min(answer), int) else graph().kind(min(answer))
    made = env._variables
    if made and (made[-1].kind == asked or last):
        return "", {"text": f"Final Answer: #{len(made) - 1}"}
    if made and asked == "number" and rng.random() < 0.5:
        return "count", {"variable": f"#{len(made) - 1}"}
    at = f"#{len(made) - 1}" if made else rng.choice(env._entities)
    listed = [(variable, names) for (lookup, variable), names in env._listed.items() if lookup == "get_relations"]
    if listed and (not made or listed[-1][0] == at):
        return "get_neighbors", {"variable": listed[-1][0], "relation": rng.choice(listed[-1][1])}
    return "get_relations", {"variable": at}


POLICIES: dict[str, Policy] = {
    "nothing": nothing,
    "valid": valid,
    "constant": constant,
    "plan": plan_by(()),
    **{f"plan {' + '.join(names)}": plan_by(names) for names in SETS},
    "type": right_type,
}


def sample(level: str, split: str, size: int) -> list[Task]:
    tasks = SUITE.select(split, level)
    return [tasks[i] for i in random.Random(f"{level}/{split}").sample(range(len(tasks)), min(size, len(tasks)))]


async def successes(policy: Policy, tasks: Sequence[Task]) -> int:
    """How many of the tasks a policy answers rightly, each played once."""
    won = 0
    for task in tasks:
        rng = random.Random(f"floor/{task.id}")
        runner = await EpisodeRunner.open(KnowledgeGraph(task, graph()))
        for turn in range(runner.max_turns):
            await runner.act(message(policy(runner, turn, rng, turn == runner.max_turns - 1)), turn)
            if runner.ended:
                break
        won += bool((await runner.finish("turn_limit")).success)
        await runner.close()
    return won


def main() -> None:
    options = arguments(__doc__).parse_args()
    size = 60 if options.quick else TASKS
    rows = []
    with Load() as load:
        for level in SUITE.levels:
            tasks = sample(level, "test", size)
            turns = sorted(len(gold(task)) for task in tasks)
            more = {"tasks": len(tasks), "longest": turns[-1]}
            rows.append(Row(f"{level}: turns of gold", sum(turns) / len(turns), "turns", extra=more))
            won = {name: asyncio.run(successes(policy, tasks)) for name, policy in POLICIES.items()}
            pairs = {name: won.pop(name) for name in list(won) if " + " in name}
            for name, number in won.items():
                if name == "type":
                    row = success_row(f"{level}: plan two", max(pairs.values()), len(tasks), len(tasks), most=MOST)
                    row.extra["won_by_pair"] = pairs
                    rows.append(row)
                rows.append(success_row(f"{level}: {name}", number, len(tasks), len(tasks), most=MOST))
    note = f"Up to {size} tasks of `test` a level, each played once; intervals are Wilson's."
    result = report("kg", rows, load, quick=options.quick, notes=[note])
    emit(result, as_json=options.json)
    write_page(result)


if __name__ == "__main__":
    main()
