"""Drawing household tasks: which world, which goal, in which words; the same task for an index in every process.

Draws `quick` and `standard` itself and leaves the levels of several rooms to `houses`. `train` and `test` share kinds
of objects and places and the instruction templates; a hash puts each goal (kind, object, destination) and each layout
(places in listed order) into one of the two, so no goal and no arrangement of a room is in both. `ood` has objects,
places, colours and templates that no training task has.
Invariants: the goal does not hold at the start; the expert solves every task within its level's bound; a task has at
least three calls. A draw that fails one of them is drawn again, from the same stream of random numbers.
Called by: `environment.Household.tasks`, the tests.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from springtide.suites.household.expert import play
from springtide.suites.household.goals import kind_of
from springtide.suites.household.houses import HOUSES, draw_house
from springtide.suites.household.phrases import a, plural, skeletons
from springtide.suites.household.splits import Again, of_split, stable_hash
from springtide.suites.household.tables import (
    COLOURS,
    OOD_COLOURS,
    RECEPTACLES,
    ROOMS,
    THINGS,
    Receptacle,
    Thing,
    receptacles_of,
    things_of,
)
from springtide.suites.household.text import prompt_text
from springtide.suites.household.world import world_of

SIZES = {"train": 2400, "test": 600, "ood": 600}
MAX_TURNS = {"quick": 8, "standard": 30, **{level: spec.max_turns for level, spec in HOUSES.items()}}
# How often each kind is drawn. Treating costs two more turns, and the quick level has few to give.
KINDS: dict[str, dict[str, int]] = {
    "quick": {"place": 5, "heat": 1, "cool": 1, "clean": 1},
    "standard": {"place": 1, "heat": 1, "cool": 1, "clean": 1, "look": 1, "two": 1},
}
_MOST_GOLD = {"quick": 7, "standard": 24}  # leaves a policy at least one turn (quick) or six for a detour
# How often an object lies where its kind is usually kept; at quick less, for with few places one could guess it unseen.
_AT_HOME = {"quick": 0.6, "standard": 0.8}
_FIRST = 0.7  # quick: how often the object is at the first place searched; else it is at the second
_SECOND_INSTANCE = 0.3  # standard: how often a one-object goal has a second object that would do
_ROOMS_FOR = {"heat": "k", "cool": "k", "clean": "kb", "look": "dl"}  # other kinds: any room
_TRIES = 20  # looks for a goal or layout of the right split before the draw starts over
_LABELS = range(1, 21)  # standard: object numbers are drawn from these, so that none can be guessed


def draw(split: str, level: str, index: int) -> dict[str, Any]:
    """The payload of a task: goal, room, places, items, instruction, skeleton, prompt. Plain data, same everywhere."""
    rng = random.Random(stable_hash("task", level, split, index))
    while True:
        try:
            if level in HOUSES:
                return draw_house(rng, split, level)
            return _quick(rng, split) if level == "quick" else _standard(rng, split)
        except Again:
            continue


def _quick(rng: random.Random, split: str) -> dict[str, Any]:
    ood = split == "ood"
    kind = _pick_kind(rng, "quick")
    room = rng.choice(_ROOMS_FOR.get(kind, "kbdl"))
    kinds = receptacles_of(room, ood)
    thing, dest = _goal(rng, split, kind, _fitting(room, kind, ood), [r for r in kinds if not r.closed and not r.does])
    assert isinstance(dest, Receptacle)
    rest = [r for r in kinds if r is not dest]
    usual = [r for r in rest if r.name in thing.homes]
    home = rng.choice(usual if usual and rng.random() < _AT_HOME["quick"] else rest)
    after = 0 if rng.random() < _FIRST else 1  # so many places are searched before the one it lies at
    must = [home, *([] if home.does == kind else _appliance(rng, kind, kinds))]
    size = rng.choice((2, 3))
    others = [r for r in rest if r not in must]
    for _ in range(_TRIES):
        searched = must[1:] + rng.sample(others, size - len(must))
        rng.shuffle(searched)
        places = [*searched[:after], home, *searched[after:]]
        places.insert(rng.randint(0, size), dest)
        if of_split(split, "layout", *(p.name for p in places)):
            break
    else:
        raise Again  # with few places to choose from, all orders may belong to the other split
    colours = list(COLOURS + OOD_COLOURS if ood else COLOURS)
    colour = rng.choice(OOD_COLOURS if ood else COLOURS)
    colours.remove(colour)
    items = [(thing.name, colour, home.name)]
    distractors = [t for t in things_of(room, ood) if t is not thing]
    for place in places:
        for _ in range(rng.choice((1, 1, 2)) - (place is home)):
            items.append((_likely(rng, distractors, place).name, rng.choice(colours), place.name))
    rng.shuffle(items)
    goal = {"kind": kind, "thing": thing.name, "colour": colour, "place": dest.name}
    return _finish(rng, split, "quick", room, [p.name for p in places], items, goal, f"the {colour} item", "")


def _standard(rng: random.Random, split: str) -> dict[str, Any]:
    ood = split == "ood"
    kind = _pick_kind(rng, "standard")
    room = rng.choice(_ROOMS_FOR.get(kind, "kbdl"))
    kinds = receptacles_of(room, ood)
    lamps = [t for t in THINGS.values() if t.lamp and t.ood == ood]
    thing, dest = _goal(
        rng, split, kind, _fitting(room, kind, ood), lamps if kind == "look" else [r for r in kinds if r.does != kind]
    )
    must = [dest] if isinstance(dest, Receptacle) else []
    for _ in range(_TRIES):
        places = _places(rng, [*must, *_appliance(rng, kind, kinds)], kinds)
        if of_split(split, "layout", *places) and (not ood or any(RECEPTACLES[kind_of(p)].ood for p in places)):
            break
    else:
        raise Again
    free = [p for p in places if kind_of(p) != dest.name]
    copies = 2 if kind == "two" or rng.random() < _SECOND_INSTANCE else 1
    wanted = [(thing, _usual(rng, thing, free)) for _ in range(copies)]
    if isinstance(dest, Thing):
        other_lamps = [t for t in THINGS.values() if t.lamp and t is not dest and (ood or not t.ood)]
        wanted += [(lamp, _usual(rng, lamp, places)) for lamp in (dest, rng.choice(other_lamps))]
    others = [t for t in things_of(room, ood) if t is not thing]
    for _ in range(rng.randint(8, 14)):
        other = rng.choice(others)
        wanted.append((other, _usual(rng, other, places)))
    rng.shuffle(wanted)
    goal = {"kind": kind, "thing": thing.name, "colour": "", "place": dest.name}
    items = _numbered(rng, wanted)
    return _finish(rng, split, "standard", room, places, items, goal, a(thing.name), plural(thing.name))


def _finish(
    rng: random.Random,
    split: str,
    level: str,
    room: str,
    places: list[str],
    items: list[tuple[str, str, str]],
    goal: dict[str, str],
    thing: str,
    things: str,
) -> dict[str, Any]:
    """Put the goal into words and let the expert prove that the task can be done from what is seen."""
    skeleton = rng.choice([s for k, s in skeletons((goal["kind"],), split == "ood") if k == goal["kind"]])
    place = f"the {goal['place']}"
    prep = RECEPTACLES[goal["place"]].prep if goal["place"] in RECEPTACLES else ""
    text = skeleton.format(object=thing, objects=things, dest=f"{prep} {place}", place=place)
    instruction = text[0].upper() + text[1:]
    payload = {
        "goal": goal,
        "room": ROOMS[room],
        "places": places,
        "items": items,
        "instruction": instruction,
        "skeleton": skeleton,
        "prompt": prompt_text(level, ROOMS[room], places, instruction),
    }
    world, checked = world_of(payload)
    if checked.holds(world):
        raise Again
    calls, solved = play(level, world, checked)
    if not solved:
        raise AssertionError(f"the expert does not solve {instruction!r}; places {places}, items {items}")
    if not 3 <= len(calls) <= _MOST_GOLD[level]:
        raise Again
    return payload


def _pick_kind(rng: random.Random, level: str) -> str:
    return rng.choices(list(KINDS[level]), list(KINDS[level].values()))[0]


def _fitting(room: str, kind: str, ood: bool) -> list[Thing]:
    """Goal objects: those of the room that bear the treatment; in `ood`, only kinds that no training task has."""
    letter = {"heat": "h", "cool": "c", "clean": "w"}.get(kind, "")
    return [t for t in things_of(room, ood) if letter in t.can and t.ood == ood]


def _goal(
    rng: random.Random, split: str, kind: str, things: list[Thing], places: Sequence[Receptacle | Thing]
) -> tuple[Thing, Receptacle | Thing]:
    """An object and a destination (a lamp kind for `look`) whose goal belongs to the split."""
    for _ in range(_TRIES):
        thing, place = rng.choice(things), rng.choice(places)
        if of_split(split, "goal", kind, thing.name, place.name):
            return thing, place
    raise Again


def _appliance(rng: random.Random, kind: str, kinds: tuple[Receptacle, ...]) -> list[Receptacle]:
    """One place that can do a treatment; none for other kinds of task."""
    able = [r for r in kinds if r.does == kind]
    return [rng.choice(able)] if able else []


def _places(rng: random.Random, must: list[Receptacle], kinds: tuple[Receptacle, ...]) -> list[str]:
    """Eight to twelve numbered places, each kind at most as often as a room has it, in random listed order."""
    bag = [r for r in kinds for _ in range(r.most)]
    for receptacle in must:
        bag.remove(receptacle)
    chosen = must + rng.sample(bag, min(len(bag), rng.randint(8, 12) - len(must)))
    counts: dict[str, int] = {}
    names = []
    for receptacle in chosen:
        counts[receptacle.name] = counts.get(receptacle.name, 0) + 1
        names.append(f"{receptacle.name} {counts[receptacle.name]}")
    rng.shuffle(names)
    return names


def _usual(rng: random.Random, thing: Thing, places: list[str]) -> str:
    """Where an object lies: mostly a place of a kind it is usually kept at."""
    homes = [p for p in places if kind_of(p) in thing.homes]
    return rng.choice(homes if homes and rng.random() < _AT_HOME["standard"] else places)


def _likely(rng: random.Random, others: list[Thing], place: Receptacle) -> Thing:
    """Take a distractor out of `others`, mostly one that is usually kept at `place`."""
    fits = [i for i, t in enumerate(others) if place.name in t.homes]
    return others.pop(rng.choice(fits) if fits and rng.random() < _AT_HOME["quick"] else rng.randrange(len(others)))


def _numbered(rng: random.Random, wanted: list[tuple[Thing, str]]) -> list[tuple[str, str, str]]:
    labels: dict[str, list[int]] = {}
    items = []
    for thing, place in wanted:
        left = labels.get(thing.name)
        if left is None:
            left = labels[thing.name] = rng.sample(_LABELS, len(_LABELS))
        if not left:
            raise Again
        items.append((f"{thing.name} {left.pop()}", "", place))
    return items
