"""Drills in the form of `kg`: two relations one after the other, or a count behind one, in a made-up graph.

Half of the lists show a type of the suite's quick view, half show pseudo-words. There is no graph: replies are names.
Called by: `drills.DRILLS`.
"""

from __future__ import annotations

import random

from scripts.nano.dialogue import Call, Dialogue, Signatures, Turn
from scripts.nano.drills.words import Lexicon, plural

from springtide.suites.kg.schema import QUICK, RELATIONS

TOOLS: Signatures = (
    ("get_relations", ("variable",)),
    ("get_neighbors", ("variable", "relation")),
    ("count", ("variable",)),
)
_PATHS = (
    "What is the {b} of the {a} of {x}?",
    "Name the {b} of {x}'s {a}.",
    "Go from {x} to its {a}, then to the {b}.",
    "Take the {a} of {x} and give its {b}.",
)
_COUNTS = ("How many {a} does {x} have?", "Count the {a} of {x}.")
_SYNONYMS = {"currency": "money", "artist": "band", "track": "song", "genre": "style", "composer": "writer",
             "zone": "time zone"}  # fmt: skip
_SYNONYM_SHARE, _COUNT_SHARE, _REAL_TYPE = 0.3, 0.25, 0.6


def kg_drill(rng: random.Random, lexicon: Lexicon) -> Dialogue:
    """One made-up question and its solution."""
    x = lexicon.name(rng)
    real = rng.random() < _REAL_TYPE
    kind = rng.choice([k for k, view in QUICK.items() if len(view) >= 3]) if real else ""
    a, target, first = _step(rng, lexicon, kind)
    turns = [
        Turn(("get_relations", {"variable": x}), ", ".join(first)),
        Turn(("get_neighbors", {"variable": x, "relation": a}), f"#0: {target}"),
    ]
    if rng.random() < _COUNT_SHARE:
        text = rng.choice(_COUNTS).format(a=plural(a), x=x)
        turns.append(Turn(("count", {"variable": "#0"}), f"#1: {rng.randint(3, 40)}"))
    else:
        b, end, second = _step(rng, lexicon, target if real else "")
        text = rng.choice(_PATHS).format(a=_said(rng, a), b=_said(rng, b), x=x)
        turns.append(Turn(("get_relations", {"variable": "#0"}), ", ".join(second)))
        turns.append(Turn(("get_neighbors", {"variable": "#0", "relation": b}), f"#1: {end}"))
    final: Call = ("", {"text": "Final Answer: #1"})
    return Dialogue("kg", TOOLS, text, (*turns, Turn(final)))


def _step(rng: random.Random, lexicon: Lexicon, kind: str) -> tuple[str, str, list[str]]:
    """A relation, the type it leads to, and the list it is found in."""
    if kind and len(QUICK.get(kind, ())) >= 2:
        listed = list(QUICK[kind])
        if len(listed) > 3 and rng.random() < 0.2:
            listed.remove(rng.choice(listed))
        rng.shuffle(listed)
        relation = rng.choice(listed)
        return relation, RELATIONS[kind][relation].target, listed
    listed = lexicon.words(rng, rng.randint(3, 5))
    relation = rng.choice(listed)
    return relation, relation if rng.random() < 0.7 else lexicon.word(rng), listed


def _said(rng: random.Random, relation: str) -> str:
    return _SYNONYMS[relation] if relation in _SYNONYMS and rng.random() < _SYNONYM_SHARE else relation
