"""Drills in the form of `household`: search places for the object of a colour, treat it if asked, bring it.

Rooms mix the suite's places and objects with pseudo-words; whether a pseudo-place is closed shows when it is visited.
A few drills hold a slip (a place visited twice over, a wrong one first), shown and not taught, so that the way back
from one is. Called by: `drills.DRILLS`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from scripts.nano.dialogue import Dialogue, Signatures, Turn
from scripts.nano.drills.words import Lexicon

from springtide.suites.household.phrases import OOD_PHRASES, PHRASES
from springtide.suites.household.tables import COLOURS, RECEPTACLES, THINGS

TOOLS: Signatures = (
    ("go", ("place",)), ("open", ("place",)), ("take", ("object",)), ("put", ("place",)), ("heat", ("object",)),
    ("cool", ("object",)), ("clean", ("object",)),
)  # fmt: skip
_KINDS = {"place": 4, "heat": 1, "cool": 1, "clean": 1}
_REAL_PLACE, _REAL_THING, _SLIP = 0.7, 0.6, 0.15


@dataclass(frozen=True)
class _Place:
    name: str
    prep: str
    closed: bool
    does: str


def household_drill(rng: random.Random, lexicon: Lexicon) -> Dialogue:
    """One made-up room, errand and its execution."""
    kind = rng.choices(list(_KINDS), list(_KINDS.values()))[0]
    places = _places(rng, lexicon, kind)
    appliance = next((p for p in places if p.does == kind), None)
    dest = rng.choice([p for p in places if not p.closed and not p.does])
    searched = [p for p in places if p is not dest]
    if kind != "place" and len(searched) > 1 and rng.random() < 0.8:
        homes = [p for p in searched if p is not appliance]
    else:
        homes = searched
    home = homes[0] if rng.random() < 0.55 else rng.choice(homes)
    colours = rng.sample(COLOURS, len(COLOURS))
    colour, others = colours[0], colours[1:]
    thing, *more = _things(rng, lexicon, 1 + 2 * len(places))
    holds = {p.name: [f"{rng.choice(others)} {more.pop()}" for _ in range(rng.choice((0, 1, 1, 2)))] for p in places}
    holds[home.name] = holds[home.name][:1]
    holds[home.name].insert(rng.randint(0, len(holds[home.name])), f"{colour} {thing}")

    def look(place: _Place) -> str:
        return ", ".join(holds[place.name]) or "empty"

    turns: list[Turn] = []
    if rng.random() < _SLIP:
        turns.append(Turn(("go", {"place": dest.name}), look(dest), learn=False))
    opened: set[str] = set()
    for place in searched:
        turns.append(Turn(("go", {"place": place.name}), "closed" if place.closed else look(place)))
        if place.closed:
            turns.append(Turn(("open", {"place": place.name}), look(place)))
            opened.add(place.name)
        if place is home:
            break
    turns.append(Turn(("take", {"object": thing}), "ok"))
    holds[home.name].remove(f"{colour} {thing}")
    if appliance is not None:
        if appliance is not home:
            shown = "closed" if appliance.closed and appliance.name not in opened else look(appliance)
            turns.append(Turn(("go", {"place": appliance.name}), shown))
        turns.append(Turn((kind, {"object": thing}), "ok"))
    turns.append(Turn(("go", {"place": dest.name}), look(dest)))
    turns.append(Turn(("put", {"place": dest.name}), "ok"))
    text = rng.choice(PHRASES[kind][:-OOD_PHRASES]).format(
        object=f"the {colour} item", dest=f"{dest.prep} the {dest.name}", place=f"the {dest.name}"
    )
    prompt = f"{text[0].upper()}{text[1:]} Places: {', '.join(p.name for p in places)}"
    return Dialogue("household", TOOLS, prompt, tuple(turns))


def _places(rng: random.Random, lexicon: Lexicon, kind: str) -> list[_Place]:
    """Three or four places in random order: one is open, and one can do what `kind` asks for."""
    usual = [r for r in RECEPTACLES.values() if not r.ood]
    found: dict[str, _Place] = {}
    able = [r for r in usual if r.does == kind]
    if able:
        found[able[0].name] = _Place(able[0].name, able[0].prep, able[0].closed, able[0].does)
    size = rng.choice((3, 4))
    while len(found) < size or not any(not p.closed and not p.does for p in found.values()):
        if len(found) >= size:
            found.popitem()
        if rng.random() < _REAL_PLACE:
            r = rng.choice(usual)
            if r.does != kind:
                found[r.name] = _Place(r.name, r.prep, r.closed, r.does)
        else:
            word = lexicon.word(rng)
            found[word] = _Place(word, rng.choice(("on", "in")), rng.random() < 0.3, "")
    places = list(found.values())
    rng.shuffle(places)
    return places


def _things(rng: random.Random, lexicon: Lexicon, count: int) -> list[str]:
    usual = [t.name for t in THINGS.values() if not t.ood and not t.lamp]
    real = rng.sample(usual, count)
    made = lexicon.words(rng, count)
    return [r if rng.random() < _REAL_THING else m for r, m in zip(real, made)]
