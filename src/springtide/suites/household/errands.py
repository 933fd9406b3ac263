"""The words of errands: how the levels of several rooms ask for things. Adds to `phrases` what those levels ask beyond.

Owns the templates. As in `phrases`, the last `OOD_PHRASES` of each family, and the last of the frames that join
errands, are used by the `ood` split alone. Read by: `houses`.
"""

from __future__ import annotations

from springtide.suites.household.goals import Errand, Want
from springtide.suites.household.phrases import OOD_PHRASES, PHRASES, a, plural

_STATE = (
    "Put {object} {dest}.",
    "Bring {object} to {place}.",
    "{place} needs {object}.",
    "{dest} there should be {object}.",
    "See that {object} gets to {place}.",
    "What is wanted {dest}: {object}.",
    "Somebody wants {object} {dest}.",
    "Provide {place} with {object}.",
    "{dest}, set down {object}.",
    "Let {object} be found {dest}.",
)
_SLICE = (
    "Slice {object} and put it {dest}.",
    "Slice {object}, then move it to {place}.",
    "Put {object} {dest} after slicing it.",
    "Bring {object} to {place}, sliced.",
    "Find {object}, slice it and leave it {dest}.",
    "{place} needs {object}, sliced.",
    "Get {object} sliced and to {place}.",
    "{dest}, put {object}, sliced.",
    "{object} belongs {dest}, sliced.",
    "Cut {object} up and carry it to {place}.",
)
_STOW = (
    "Put {object} {dest} and shut it.",
    "Shut {object} away {dest}.",
    "Bring {object} to {place} and leave that closed.",
    "{object} belongs {dest}, and that has to be shut.",
    "Find {object}, put it {dest} and close the door or lid on it.",
    "Leave {object} {dest}, shut.",
    "Store {object} {dest}; shut it when you are done.",
    "{dest}, put {object}; then shut it.",
    "Hide {object} {dest}, closed again.",
    "Lock {object} up {dest}: shut it afterwards.",
)
_EXACT = (
    "See to it that exactly {object} lie {dest}, with none left in your hand.",
    "Leave exactly {object} {dest}; you may hold none of them.",
    "{dest} there should be exactly {object}: no more, no fewer, and none in your hand.",
    "Make it exactly {object} {dest}, and hold none.",
    "Bring the number up or down until exactly {object} lie {dest} and you hold none.",
    "{place} is to hold exactly {object}, and your hand none of them.",
    "Take away or add until {place} has exactly {object}; keep none in your hand.",
    "Exactly {object} belong {dest}, the rest anywhere but there and your hand.",
    "Set the count {dest} to exactly {object}, holding none yourself.",
    "Not one more or fewer than {object} may lie {dest}, and none be in your hand.",
)
_LIGHT = (
    "Switch on {object}.",
    "Light {object}.",
    "Leave {object} switched on.",
    "{object} has to be on.",
    "See that {object} is lit.",
    "Turn on {object}.",
    "Find {object} and switch it on.",
    "There should be light from {object}.",
    "Let {object} shine.",
    "Get {object} to burn.",
)

# Families of several objects speak of them with the same words as one in a state.
FAMILIES: dict[str, tuple[str, ...]] = PHRASES | {
    "slice": _SLICE,
    "both": _STATE,
    "count": _STATE,
    "pair": _STATE,
    "stow": _STOW,
    "exact": _EXACT,
    "light": _LIGHT,
}
FRAMES = ("{}", "Also: {}", "Another thing: {}", "And this: {}", "Next to that, one more errand. {}")

_NUMBERS = ("no", "one", "two", "three", "four", "five")
_ADJECTIVES = {"hot": 0, "cold": 0, "clean": 1, "sliced": 2}  # the order they are said in
# The state that a family, or an appliance that does the same, gives; the family's templates say it.
GIVES = {"heat": "hot", "cool": "cold", "clean": "clean", "slice": "sliced"}


def templates(family: str, ood: bool) -> tuple[str, ...]:
    """The templates of a family that a split may use."""
    every = FAMILIES[family]
    return every[-OOD_PHRASES:] if ood else every[:-OOD_PHRASES]


def frames(ood: bool) -> tuple[str, ...]:
    """How an errand after the first may be joined on."""
    return FRAMES[-1:] if ood else FRAMES[:-1]


def sentence(part: Errand, template: str, prep: str) -> str:
    """An errand in the words of a template. `prep`: "on" or "in", for its place."""
    words = " and ".join(_noun(want, GIVES.get(part.kind, "")) for want in part.wants)
    where = f" in a {part.room}" if part.room else ""
    if part.kind == "light":
        words = a(part.place) + where
    named = part.place[-1].isdigit()
    if named:
        place = part.place
    elif len(part.wants) > 1 or (part.wants and part.wants[0].count > 1):
        place = f"one and the same {part.place}{where}"
    else:
        place = a(part.place) + where
    several = "" if not part.wants else plural(part.wants[0].thing)
    text = template.format(object=words, objects=several, place=place, dest=f"{prep} {place}")
    return text[0].upper() + text[1:]


def _noun(want: Want, said: str) -> str:
    """The object of a sentence: "a hot potato", "two clean forks", "exactly" left to the template."""
    states = sorted((state for state in want.states if state != said), key=_ADJECTIVES.__getitem__)
    if want.count == 1 and not want.exact:
        return a(" ".join([*states, want.thing]))
    return " ".join([_NUMBERS[want.count], *states, want.thing if want.count == 1 else plural(want.thing)])
