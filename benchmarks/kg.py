"""What policies that do not read the question reach at each level of `kg`, and what gold takes.

Baselines, each without a model, on tasks of `test`:
  nothing    lists the relations of the named entity until the turn limit
  valid      a random tool that can be called, with random arguments that are valid; at its last turn an answer
  constant   the final text that answers most training tasks, at once
  plan       the program that answers most training tasks, whatever is asked
  plan type  the same among the training tasks about the same type of entity
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
from springtide.trace import ToolCall

Move = tuple[str, dict[str, Any]]  # a tool and its arguments; ("", {"text": ...}) is plain text
Policy = Callable[[EpisodeRunner, int, random.Random, bool], Move]  # runner, turn, rng, whether it is the last turn
MOST, TASKS = 10.0, 500  # percent; tasks of `test` that are played


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


def plan(runner: EpisodeRunner, turn: int, rng: random.Random, last: bool) -> Move:
    return _follow(runner, turn, _plans(runner.environment.task.level)[""])


def plan_by_type(runner: EpisodeRunner, turn: int, rng: random.Random, last: bool) -> Move:
    plans = _plans(runner.environment.task.level)
    return _follow(runner, turn, plans.get(graph().kind(runner.environment.task.payload["entities"][0]), plans[""]))


def _follow(runner: EpisodeRunner, turn: int, program: list[Any]) -> Move:
    entities = runner.environment.task.payload["entities"]
    moves = calls(program, (entities * 3)[:3])
    return moves[min(turn, len(moves) - 1)]


@functools.cache
def _plans(level: str) -> dict[str | None, list[Any]]:
    by_kind: dict[str | None, Counter[str]] = {}
    for task in SUITE.select("train", level):
        for kind in ("", graph().kind(task.payload["entities"][0])):
            by_kind.setdefault(kind, Counter())[json.dumps(task.payload["program"])] += 1
    return {kind: json.loads(found.most_common(1)[0][0]) for kind, found in by_kind.items()}


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
    "plan": plan,
    "plan type": plan_by_type,
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
            for name, policy in POLICIES.items():
                won = asyncio.run(successes(policy, tasks))
                rows.append(success_row(f"{level}: {name}", won, len(tasks), len(tasks), most=MOST))
    note = f"Up to {size} tasks of `test` a level, each played once; intervals are Wilson's."
    result = report("kg", rows, load, quick=options.quick, notes=[note])
    emit(result, as_json=options.json)
    write_page(result)


if __name__ == "__main__":
    main()
