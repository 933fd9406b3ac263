"""Words for drills: pseudo-words from syllables, and the proper names that training prompts utter.

Invariant: everything follows from the generator passed in. Called by: the makers of drills.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

_ONSETS = (
    *"bcdfghjklmnprstvwz",
    "br",
    "ch",
    "cl",
    "dr",
    "fl",
    "gr",
    "kr",
    "pl",
    "qu",
    "sh",
    "sk",
    "st",
    "th",
    "tr",
    "",
)
_VOWELS = (*"aeiou", *"aeiou", "ai", "ea", "ee", "ie", "ou", "oo")
_CODAS = ("", "", "", *"lmnrstdkpg", "ck", "nd", "ng", "rt", "st", "x", "th")
_REAL_NAME = 0.35  # of drilled names; the rest are names nobody has


class Lexicon:
    """Names for things. `names`: proper names of the training side."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = [n for n in names if len(n) <= 16] or ["Aldo"]

    def word(self, rng: random.Random) -> str:
        """A lower-case pseudo-word of one or two syllables, at least three letters long."""
        while True:
            syllables = rng.choice((1, 2, 2))
            text = "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS) for _ in range(syllables))
            if 3 <= len(text) <= 9:
                return text

    def words(self, rng: random.Random, count: int) -> list[str]:
        """So many different pseudo-words."""
        found: dict[str, None] = {}
        while len(found) < count:
            found[self.word(rng)] = None
        return list(found)

    def name(self, rng: random.Random) -> str:
        """A proper name of one or two words: real, recombined, or made up."""
        if rng.random() < _REAL_NAME:
            return rng.choice(self.names)
        parts = [self._part(rng) for _ in range(rng.choice((1, 1, 2)))]
        return " ".join(parts)

    def _part(self, rng: random.Random) -> str:
        if rng.random() < 0.3:
            return rng.choice(rng.choice(self.names).split())
        return self.word(rng).capitalize()


def plural(noun: str) -> str:
    """The plural, as the suites' prompts write it."""
    if noun.endswith("s"):
        return noun
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return noun[:-1] + "ies"
    return noun + ("es" if noun.endswith(("x", "ch", "sh")) else "s")
