"""How a household task is asked for: the instruction templates, by kind of task.

Owns the skeletons (an instruction with its entities removed). The last `OOD_PHRASES` of each kind are used by the
`ood` split alone. Fields: {object} "a cup" or "the red item", {objects} "cups", {dest} "on the shelf", {place}
"the shelf" (for `look`, the lamp). Read by: `generate`.
"""

from __future__ import annotations

OOD_PHRASES = 2

PHRASES: dict[str, tuple[str, ...]] = {
    "place": (
        "Put {object} {dest}.",
        "Move {object} to {place}.",
        "Bring {object} to {place}.",
        "Find {object} and put it {dest}.",
        "Take {object} and leave it {dest}.",
        "{place} needs {object}.",
        "Get {object} to {place}.",
        "{dest}, put {object}.",
        "{object} belongs {dest}.",
        "Carry {object} over to {place}.",
    ),
    "heat": (
        "Heat {object} and put it {dest}.",
        "Heat {object}, then move it to {place}.",
        "Put {object} {dest} after heating it.",
        "Bring {object} to {place}, heated.",
        "Find {object}, heat it and leave it {dest}.",
        "{place} needs {object}, heated.",
        "Get {object} hot and to {place}.",
        "{dest}, put {object}, hot.",
        "{object} belongs {dest}, hot.",
        "Warm {object} up and carry it to {place}.",
    ),
    "cool": (
        "Cool {object} and put it {dest}.",
        "Cool {object}, then move it to {place}.",
        "Put {object} {dest} after cooling it.",
        "Bring {object} to {place}, cooled.",
        "Find {object}, cool it and leave it {dest}.",
        "{place} needs {object}, cooled.",
        "Get {object} cold and to {place}.",
        "{dest}, put {object}, cold.",
        "{object} belongs {dest}, cold.",
        "Chill {object} and carry it to {place}.",
    ),
    "clean": (
        "Clean {object} and put it {dest}.",
        "Clean {object}, then move it to {place}.",
        "Put {object} {dest} after cleaning it.",
        "Bring {object} to {place}, cleaned.",
        "Find {object}, clean it and leave it {dest}.",
        "{place} needs {object}, cleaned.",
        "Get {object} clean and to {place}.",
        "{dest}, put {object}, clean.",
        "{object} belongs {dest}, clean.",
        "Wash {object} and carry it to {place}.",
    ),
    "look": (
        "Look at {object} under {place}.",
        "Examine {object} with {place}.",
        "Use {place} to look at {object}.",
        "Find {object} and look at it under {place}.",
        "Hold {object} and switch on {place}.",
        "Inspect {object} by the light of {place}.",
        "Examine {object} in the light of {place}.",
        "{object} is to be looked at under {place}.",
        "With {place} on, inspect {object}.",
        "Take {object} to {place} and light it.",
    ),
    "two": (
        "Put two {objects} {dest}.",
        "Move two {objects} to {place}.",
        "Bring two {objects} to {place}.",
        "Find two {objects} and put them {dest}.",
        "Take two {objects} and leave them {dest}.",
        "{place} needs two {objects}.",
        "Get two {objects} to {place}.",
        "{dest}, put two {objects}.",
        "Two {objects} belong {dest}.",
        "Carry a pair of {objects} over to {place}.",
    ),
}

_PLURALS = {"knife": "knives", "tomato": "tomatoes", "potato": "potatoes", "diary": "diaries", "trophy": "trophies"}
_PLURALS |= {"scarf": "scarves"}


def plural(noun: str) -> str:
    """The plural of one of this suite's nouns."""
    if noun in _PLURALS:
        return _PLURALS[noun]
    return noun + ("es" if noun.endswith(("s", "x", "ch", "sh")) else "s")


def a(noun: str) -> str:
    """The noun with its indefinite article."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def skeletons(kinds: tuple[str, ...], ood: bool) -> tuple[tuple[str, str], ...]:
    """The (kind, template) pairs a split may use."""
    return tuple(
        (kind, phrase)
        for kind in kinds
        for phrase in (PHRASES[kind][-OOD_PHRASES:] if ood else PHRASES[kind][:-OOD_PHRASES])
    )
