"""Drawing houses of several rooms, and errands in them, for `hard`, `expert` and `master`.

Owns those three levels. A task asks for one, two or three errands of different families; objects of the kinds that are
asked for start anywhere but where they are to go. Splits as in `generate`: a hash puts each errand (family, objects,
states, counts, destination) and each room (its kind and its places in listed order) into `train` or `test`.
Invariants: no errand holds at the start; the expert does all of it within the level's bound. Called by: `generate`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from springtide.suites.household.errands import FAMILIES, GIVES, frames, sentence, templates
from springtide.suites.household.expert import play
from springtide.suites.household.furnishings import BLADES, OBJECTS, PLACES
from springtide.suites.household.goals import Errand, Errands, Want, kind_of
from springtide.suites.household.splits import Again, of_split
from springtide.suites.household.tables import ROOMS, Receptacle, Thing
from springtide.suites.household.text import house_prompt
from springtide.suites.household.world import World


@dataclass(frozen=True, slots=True)
class House:
    """A level. Ranges are inclusive. `most_gold` leaves a policy turns for detours."""

    rooms: tuple[int, int]
    places: tuple[int, int]  # a room
    objects: tuple[int, int]  # a room, beside what is asked for
    errands: int
    families: dict[str, int]  # how often each is drawn
    least_gold: int
    most_gold: int
    max_turns: int


_ALL = {f: 1 for f in ("heat", "cool", "clean", "slice", "two", "look", "stow", "exact")} | {"both": 2, "pair": 2}
HOUSES = {
    "hard": House((2, 3), (5, 8), (5, 8), 1, _ALL | {"place": 1, "count": 1}, 6, 32, 40),
    "expert": House((3, 5), (5, 8), (5, 9), 2, _ALL | {"light": 1, "count": 2}, 14, 56, 70),
    "master": House((5, 7), (6, 9), (6, 10), 3, _ALL | {"light": 1, "count": 3, "pair": 3}, 30, 84, 105),
}
_STATES = {"hot": "h", "cold": "c", "clean": "w", "sliced": "s"}  # state -> the letter of what may be done
_LETTERS = {name: letter for letter, name in ROOMS.items()}
_ROOM_SHARE = {"k": 1, "b": 3, "d": 4, "l": 3}  # of the rooms beyond those that the errands need
_AT_HOME = 0.7  # how often an object lies where its kind is usually kept
_SPARE = 0.4  # how often there is one more object of a kind that is asked for
_IN_A_ROOM = 0.35  # how often a destination is one in a certain kind of room
_OTHER_LAMP = 0.5  # how often a second lamp of the asked kind stands in the wrong kind of room
_EXTRA_DOOR = 0.3
_OOD_PLACE = 0.5  # ood: how often a destination is of a kind no training task has
_NUMBERS = range(1, 31)  # objects' numbers are drawn from these, so that none can be guessed
_TRIES = 30


def draw_house(rng: random.Random, split: str, level: str) -> dict[str, Any]:
    """The payload of a task. Raises: Again if this draw makes none."""
    spec = HOUSES[level]
    ood = split == "ood"
    parts = _errands(rng, split, spec)
    rooms = _rooms(rng, split, spec, parts)
    places = [name for _, inside, _ in rooms for name in inside]
    if ood and not any(PLACES[kind_of(name)].ood for name in places):
        raise Again
    where = {name: room for room, inside, _ in rooms for name in inside}
    parts = [_named(rng, part, places) for part in parts]
    items = _objects(rng, spec, parts, where, ood)
    said, skeleton = [], []
    for number, part in enumerate(parts):
        template = rng.choice(templates(part.kind, ood))
        frame = rng.choice(frames(ood)) if number else "{}"
        kind = kind_of(part.place)
        said.append(frame.format(sentence(part, template, PLACES[kind].prep if kind in PLACES else "")))
        skeleton.append(template)
    instruction = " ".join(said)
    goal = Errands(tuple(parts))
    world = World(places, items, rooms)
    assert world.room is not None
    if any(part.holds(world) for part in parts):
        raise Again
    payload = {
        "errands": goal.to_rows(),
        "rooms": rooms,
        "places": places,
        "items": items,
        "instruction": instruction,
        "skeleton": " / ".join(skeleton),
        "prompt": house_prompt(world.room, instruction),
    }
    calls, solved = play(level, world, goal)
    if not solved:
        raise AssertionError(f"the expert does not solve {instruction!r}; rooms {rooms}, items {items}")
    if not spec.least_gold <= len(calls) <= spec.most_gold:
        raise Again
    return payload


# --- errands ----------------------------------------------------------------------------------------------------------


def _errands(rng: random.Random, split: str, spec: House) -> list[Errand]:
    """Errands of different families, about different kinds of objects, all of which belong to the split."""
    parts: list[Errand] = []
    used: set[str] = set()
    families = dict(spec.families)
    while len(parts) < spec.errands:
        family = rng.choices(list(families), list(families.values()))[0]
        for _ in range(_TRIES):
            part = _errand(rng, family, split == "ood")
            names = {want.thing for want in part.wants} | ({part.place} if part.place in OBJECTS else set())
            if not names & used and of_split(split, *_key(part)):
                break
        else:
            raise Again
        parts.append(part)
        used |= names
        if any("sliced" in want.states for want in part.wants):
            used |= set(BLADES)  # a blade that has to stay somewhere cannot cut
        # A place that is shut at the end may hold what an examination needs, and there is one hand.
        for other in {"look": ("look", "stow"), "stow": ("look", "stow")}.get(family, (family,)):
            families.pop(other, None)
    if any(set(BLADES) & {w.thing for w in p.wants} for p in parts) and set(BLADES) <= used:
        raise Again
    return parts


def _errand(rng: random.Random, family: str, ood: bool) -> Errand:
    """One of a family; `exact` has no certain place yet."""
    if family == "light":
        lamp = rng.choice(_lamps(ood))
        return Errand(family, lamp.name, ROOMS[rng.choice(lamp.rooms)])
    wants = _wants(rng, family, ood)
    if family == "look":
        return Errand(family, rng.choice(_lamps(ood)).name, "", wants)
    treated = {state for want in wants for state in want.states}
    kinds = [
        row
        for row in PLACES.values()
        if (ood or not row.ood) and GIVES.get(row.does) not in treated and (family != "stow" or row.closed)
    ]
    new = [row for row in kinds if row.ood]
    place = rng.choice(new if new and rng.random() < _OOD_PLACE else kinds)
    shared = len(place.rooms) > 1 and family != "exact" and rng.random() < _IN_A_ROOM
    return Errand(family, place.name, ROOMS[rng.choice(place.rooms)] if shared else "", wants, shut=family == "stow")


def _wants(rng: random.Random, family: str, ood: bool) -> tuple[Want, ...]:
    if family == "pair":
        while True:
            one, other = rng.sample(list(_STATES), 2)
            first, second = _thing(rng, (one,), ood), _thing(rng, (other,), ood)
            if first != second and not {first, second} & set(BLADES):
                return Want(first, (one,)), Want(second, (other,))
    states: tuple[str, ...] = (GIVES[family],) if family in GIVES else ()
    count = 1
    if family == "both":
        states = rng.choice([s for s in _PAIRS_OF_STATES if _able(s, ood)])
    elif family in ("stow", "look"):
        states = rng.choice(((), ("clean",), ("cold",), ("hot",)))
    elif family == "two":
        count = 2
    elif family == "count":
        states, count = (rng.choice(list(_STATES)),), rng.choice((2, 2, 3))
    elif family == "exact":
        count = rng.choice((1, 2, 3))
    return (Want(_thing(rng, states, ood), states, count, family == "exact"),)


_PAIRS_OF_STATES = tuple(
    (one, other) for one in _STATES for other in _STATES if one < other and {one, other} != {"hot", "cold"}
)


def _able(states: Iterable[str], ood: bool) -> list[str]:
    """Kinds of objects that can get into `states`; in `ood`, only kinds that no training task has."""
    letters = {_STATES[state] for state in states}
    return [t.name for t in OBJECTS.values() if not t.lamp and t.ood == ood and letters <= set(t.can)]


def _thing(rng: random.Random, states: tuple[str, ...], ood: bool) -> str:
    return rng.choice(_able(states, ood))


def _lamps(ood: bool) -> list[Thing]:
    return [t for t in OBJECTS.values() if t.lamp and t.ood == ood]


def _key(part: Errand) -> tuple[str, ...]:
    """What tells errands apart, but for the room and the number of a place."""
    wants = ("+".join([w.thing, *sorted(w.states), str(w.count)]) for w in part.wants)
    return "errand", part.kind, *wants, kind_of(part.place), *([part.room] if part.kind == "light" else [])


# --- rooms ------------------------------------------------------------------------------------------------------------


def _rooms(rng: random.Random, split: str, spec: House, parts: list[Errand]) -> list[tuple[str, list[str], list[str]]]:
    """(name, its places, its doors), the one that the agent starts in first."""
    needs: list[tuple[str, Receptacle | None]] = []  # (letter of a room, what must be in it)
    for part in parts:
        if part.place in PLACES:
            row = PLACES[part.place]
            needs.append((_LETTERS[part.room] if part.room else rng.choice(row.rooms), row))
        else:
            rooms = OBJECTS[part.place].rooms
            needs.append((_LETTERS[part.room] if part.room else rng.choice(rooms), None))
        for want in part.wants:
            needs.append((rng.choice(OBJECTS[want.thing].rooms), None))
            if "sliced" in want.states:
                needs.append(("k", None))
            for state in want.states:
                able = [r for r in PLACES.values() if GIVES.get(r.does) == state and not r.ood]
                if able:
                    needs.append(("k", rng.choice([r for r in able if "k" in r.rooms])))
    letters = list(dict.fromkeys(letter for letter, _ in needs))
    size = rng.randint(*spec.rooms)
    if len(letters) > size:
        raise Again
    while len(letters) < size:
        letter = rng.choices(list(_ROOM_SHARE), list(_ROOM_SHARE.values()))[0]
        if letter != "k" or "k" not in letters:
            letters.append(letter)
    rng.shuffle(letters)
    kinds: list[list[Receptacle]] = []
    for number, letter in enumerate(letters):
        first = letter not in letters[:number]
        must = list(dict.fromkeys(row for where, row in needs if row is not None and where == letter and first))
        kinds.append(_furnish(rng, split, spec, letter, must))
    names = _numbered(rng, [ROOMS[letter] for letter in letters])
    flat = iter(_numbered(rng, [row.name for inside in kinds for row in inside]))
    places = [[next(flat) for _ in inside] for inside in kinds]
    doors: list[list[int]] = [[] for _ in names]
    for new in range(1, size):
        _join(doors, new, rng.randrange(new))
    if size > 2 and rng.random() < _EXTRA_DOOR:
        _join(doors, *rng.sample(range(size), 2))
    start = rng.randrange(size)
    order = [start, *(i for i in range(size) if i != start)]
    return [(names[i], places[i], [names[j] for j in doors[i]]) for i in order]


def _furnish(rng: random.Random, split: str, spec: House, letter: str, must: list[Receptacle]) -> list[Receptacle]:
    """What stands in a room, in listed order; the order makes it a room of the split."""
    bag = [r for r in PLACES.values() if letter in r.rooms and (split == "ood" or not r.ood) for _ in range(r.most)]
    for row in must:
        bag.remove(row)
    chosen = must + rng.sample(bag, max(0, rng.randint(*spec.places) - len(must)))
    for _ in range(_TRIES):
        rng.shuffle(chosen)
        if of_split(split, "room", letter, *(row.name for row in chosen)):
            return chosen
    raise Again


def _join(doors: list[list[int]], one: int, other: int) -> None:
    if other not in doors[one]:
        doors[one].append(other)
        doors[other].append(one)


def _numbered(rng: random.Random, kinds: list[str]) -> list[str]:
    """Names for what is of these kinds, numbered over the whole house in random order."""
    numbers: dict[str, list[int]] = {}
    for kind in kinds:
        numbers.setdefault(kind, []).append(len(numbers.get(kind, ())) + 1)
    for left in numbers.values():
        rng.shuffle(left)
    return [f"{kind} {numbers[kind].pop()}" for kind in kinds]


def _named(rng: random.Random, part: Errand, places: list[str]) -> Errand:
    """An errand about a number of things is about one certain place."""
    if part.kind != "exact":
        return part
    return replace(part, place=rng.choice([name for name in places if kind_of(name) == part.place]))


# --- objects ----------------------------------------------------------------------------------------------------------


def _objects(
    rng: random.Random, spec: House, parts: list[Errand], where: dict[str, str], ood: bool
) -> list[tuple[str, str, str]]:
    """(name, "", place) of everything that lies about, in the order it lies."""
    lying: list[tuple[str, str]] = []  # (kind, place)
    asked: set[str] = set()
    for part in parts:
        if part.place in OBJECTS:
            asked.add(part.place)
            lying += _standing_lamps(rng, part, where)
        for want in part.wants:
            asked.add(want.thing)
            copies = want.count + (rng.random() < _SPARE)
            if want.exact:
                there = rng.choice([n for n in range(5) if n != want.count])
                lying += [(want.thing, part.place)] * there
                copies = max(0, copies - there)
            away = [] if part.kind == "look" else [name for name in where if part.is_named(name, where[name])]
            lying += [(want.thing, _spot(rng, OBJECTS[want.thing], where, away)) for _ in range(copies)]
            if "sliced" in want.states:
                lying.append((BLADES[0], _spot(rng, OBJECTS[BLADES[0]], where, ())))
                asked.add(BLADES[0])
    for room in dict.fromkeys(where.values()):
        letter = _LETTERS[kind_of(room)]
        inside = {name: r for name, r in where.items() if r == room}
        kinds = [t for t in OBJECTS.values() if letter in t.rooms and t.name not in asked and (ood or not t.ood)]
        for _ in range(rng.randint(*spec.objects)):
            thing = rng.choice(kinds)
            lying.append((thing.name, _spot(rng, thing, inside, ())))
    rng.shuffle(lying)
    numbers: dict[str, list[int]] = {}
    items = []
    for kind, place in lying:
        left = numbers.setdefault(kind, rng.sample(_NUMBERS, len(_NUMBERS)))
        items.append((f"{kind} {left.pop()}", "", place))
    return items


def _standing_lamps(rng: random.Random, part: Errand, where: dict[str, str]) -> list[tuple[str, str]]:
    """The lamp that is asked for, and perhaps one of its kind in the wrong kind of room."""
    lamp = OBJECTS[part.place]
    right: Callable[[str], bool] = lambda room: part.room in ("", kind_of(room))  # noqa: E731
    stands = [(part.place, _spot(rng, lamp, {p: r for p, r in where.items() if right(r)}, ()))]
    wrong = {p: r for p, r in where.items() if not right(r)}
    if wrong and rng.random() < _OTHER_LAMP:
        stands.append((part.place, _spot(rng, lamp, wrong, ())))
    return stands


def _spot(rng: random.Random, thing: Thing, where: dict[str, str], away: Iterable[str]) -> str:
    """Where an object lies: mostly a place of a kind it is usually kept at, in a kind of room it is found in."""
    free = [p for p in where if p not in away and not (thing.lamp and PLACES[kind_of(p)].prep == "in")]
    fitting = [p for p in free if _LETTERS[kind_of(where[p])] in thing.rooms]
    homes = [p for p in fitting if kind_of(p) in thing.homes]
    if not free:
        raise Again
    if homes and rng.random() < _AT_HOME:
        return rng.choice(homes)
    return rng.choice(fitting or free)


assert all(set(spec.families) <= set(FAMILIES) for spec in HOUSES.values())
