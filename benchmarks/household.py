"""What policies that cannot do the tasks of `household` reach at each of its levels.

Baselines, each without a model, on tasks of `test`:
  nothing    only asks what it holds (at `quick`: goes to and fro), until the turn limit
  uniform    draws uniformly from the actions that are possible now
  by tool    draws a tool among those that can do something now, then its argument
  majority   the commonest gold of the training tasks of the same families
  prompt     a script made of the prompt alone by one who understands it all, but reads no reply and guesses numbers
  keywords   not counted as a baseline, for it reads: possible actions on what the task names go first, else it walks on
Success is the suite's own goal, checked after every action. Called by: the command line, which stores the figures and
writes them into docs/household.md; tests/test_suite_household_houses.py, on fewer tasks.
"""

from __future__ import annotations

import itertools
import json
import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from baselines import success_row, write_page
from common import Load, arguments, emit, report

from springtide.suites.household.expert import play
from springtide.suites.household.furnishings import PLACES
from springtide.suites.household.generate import MAX_TURNS, SIZES, draw
from springtide.suites.household.goals import Errands, kind_of
from springtide.suites.household.world import TOOLS, Call, Goal, Impossible, World, world_of

Payload = dict[str, Any]
Policy = Callable[[World, Payload, str, random.Random], Iterator[Call]]
MOST, MOST_AT_THE_TOP = 10.0, 2.0  # percent
_TRAINING = 1200  # tasks whose gold `majority` has seen
_FOLLOW = 0.7  # how often `keywords` takes up what the task names
_GAINS = {"heat": "heat", "cool": "cool", "clean": "clean", "hot": "heat", "cold": "cool"}


def succeeds(payload: Payload, level: str, policy: Policy, seed: str) -> bool:
    """Whether a policy reaches the goal of a task within the level's turns."""
    world, goal = world_of(payload)
    return reaches(world, goal, itertools.islice(policy(world, payload, level, random.Random(seed)), MAX_TURNS[level]))


def reaches(world: World, goal: Goal | Errands, calls: Iterable[Call]) -> bool:
    """Whether the goal holds after any of the calls. An impossible one changes nothing."""
    for call in calls:
        try:
            world.act(*call)
        except Impossible:
            continue
        if goal.holds(world):
            return True
    return False


def nothing(world: World, payload: Payload, level: str, rng: random.Random) -> Iterator[Call]:
    """Acts, and changes nothing but where it stands."""
    while True:
        for place in payload["places"][:2]:
            yield ("inventory", {}) if "inventory" in TOOLS[level] else ("go", {"place": place})


def uniform(world: World, payload: Payload, level: str, rng: random.Random) -> Iterator[Call]:
    while True:
        yield rng.choice(world.valid(TOOLS[level]))


def by_tool(world: World, payload: Payload, level: str, rng: random.Random) -> Iterator[Call]:
    while True:
        calls: dict[str, list[Call]] = defaultdict(list)
        for call in world.valid(TOOLS[level]):
            calls[call[0]].append(call)
        yield rng.choice(calls[rng.choice(list(calls))])


def keywords(world: World, payload: Payload, level: str, rng: random.Random) -> Iterator[Call]:
    words = set(re.findall(r"[a-z]+", payload["instruction"].lower()))
    words |= {word.removesuffix("s") for word in words} | {word.removesuffix("es") for word in words}

    def named(call: Call) -> bool:
        tool, name = call[0], next(iter(call[1].values()))
        if tool in ("open", "shut"):
            return tool == "open"
        item = world.items.get(name)
        return kind_of(name) in words or (item is not None and item.colour in words)

    while True:
        calls = [call for call in world.valid(TOOLS[level]) if call[0] not in ("examine", "inventory")]
        hits = [call for call in calls if named(call)]
        yield rng.choice(hits if hits and rng.random() < _FOLLOW else [call for call in calls if call[0] == "go"])


def majority(training: Sequence[Payload]) -> Policy:
    """Knows the gold of some training tasks, and plays the commonest of those of a task's families."""
    golds: dict[str, Counter[str]] = defaultdict(Counter)
    for payload in training:
        level = "quick" if payload.get("goal", {}).get("colour") else "standard"  # the others speak like `standard`
        golds[_families(payload)][json.dumps(play(level, *world_of(payload))[0])] += 1
    best = {families: json.loads(found.most_common(1)[0][0]) for families, found in golds.items()}

    def policy(world: World, payload: Payload, level: str, rng: random.Random) -> Iterator[Call]:
        yield from ((name, given) for name, given in best.get(_families(payload), next(iter(best.values()))))

    return policy


def prompt(world: World, payload: Payload, level: str, rng: random.Random) -> Iterator[Call]:
    """Sweeps the places that the prompt lists, for objects named as the task names them and numbered at random."""
    listed = payload["rooms"][0][1] if "rooms" in payload else payload["places"]
    for things, verbs, kind in _asked(payload):
        target = next((place for place in listed if kind in (place, kind_of(place))), listed[0])
        for thing in things:
            guess = thing if level == "quick" else f"{thing} {rng.randint(1, 30 if 'rooms' in payload else 20)}"
            for place in listed:
                if place != target:
                    yield "go", {"place": place}
                    if PLACES[kind_of(place)].closed:
                        yield "open", {"place": place}
                    yield "take", {"object": guess}
            for verb in verbs:
                for place in listed:
                    if PLACES[kind_of(place)].does == verb:
                        yield "go", {"place": place}
                        yield verb, {"object": guess}
            yield "go", {"place": target}
            if PLACES[kind_of(target)].closed:
                yield "open", {"place": target}
            yield "put", {"place": target}


def _asked(payload: Payload) -> list[tuple[list[str], list[str], str]]:
    """(objects, treatments, destination) of each part of a goal."""
    if "goal" in payload:
        goal = payload["goal"]
        things = [goal["colour"] or goal["thing"]] * (2 if goal["kind"] == "two" else 1)
        return [(things, [_GAINS[goal["kind"]]] if goal["kind"] in _GAINS else [], goal["place"])]
    return [
        (
            [thing for thing, _, count, _ in part["wants"] for _ in range(count)],
            [_GAINS[state] for _, states, _, _ in part["wants"] for state in states if state in _GAINS],
            part["place"],
        )
        for part in payload["errands"]
    ]


def _families(payload: Payload) -> str:
    return "+".join(sorted(part["kind"] for part in payload.get("errands", [payload.get("goal")])))


def measure(level: str, policy: Policy, payloads: Sequence[Payload], episodes: int) -> tuple[int, int]:
    """(successes, episodes), spread evenly over tasks."""
    won = sum(succeeds(payloads[i % len(payloads)], level, policy, f"{level}/{i}") for i in range(episodes))
    return won, episodes


# By name: the policy, and whether it draws (and so plays a task more than once).
UNTRAINED: dict[str, tuple[Policy, bool]] = {
    "nothing": (nothing, False),
    "uniform": (uniform, True),
    "by tool": (by_tool, True),
    "prompt": (prompt, True),
    "keywords": (keywords, True),
}


def main() -> None:
    options = arguments(__doc__).parse_args()
    rows = []
    tasks, training = (100, 200) if options.quick else (SIZES["test"], _TRAINING)
    with Load() as load:
        for level in MAX_TURNS:
            payloads = [draw("test", level, index) for index in range(tasks)]
            learned = majority([draw("train", level, index) for index in range(training)])
            for name, (policy, draws) in {**UNTRAINED, "majority": (learned, False)}.items():
                won, episodes = measure(level, policy, payloads, 2 * tasks if draws else tasks)
                limit = MOST_AT_THE_TOP if name == "uniform" and level == list(MAX_TURNS)[-1] else MOST
                most = None if name == "keywords" else limit
                rows.append(success_row(f"{level}: {name}", won, episodes, tasks, most=most))
    note = f"{SIZES['test']} tasks of `test`, played twice by policies that draw; intervals are Wilson's."
    result = report("household", rows, load, quick=options.quick, notes=[note])
    emit(result, as_json=options.json)
    write_page(result)


if __name__ == "__main__":
    main()
