"""Whether a reply gives a row's answer: the verifiers of data sets of questions.

Owns: which part of a text is its answer, and when two answers are equal. Invariants: pure; a reply without an answer is
wrong and never an error; numbers are compared exactly unless a tolerance is given.
Called by: `env.dataset`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fractions import Fraction

Verifier = Callable[[str, Sequence[str]], bool]
"""(the reply's text, the row's accepted answers) -> is one of them given?"""

_NUMBER = re.compile(
    r"(?<![\w.])[-+]?(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d{1,300}(?:\.\d{0,300})?|\.\d{1,300})(?:e[-+]?\d{1,3}(?!\d))?(?:/\d{1,300})?",
    re.ASCII | re.IGNORECASE,
)
_LETTER = re.compile(r"(?<![A-Za-z'])\(?([A-Z])\)?(?![A-Za-z'])")
_LED = re.compile(r"(?:####|\banswer\s*(?:is|:|=))[ \t]*:?", re.IGNORECASE)


def final(text: str, extract: re.Pattern[str] | None = None) -> str | None:
    """The part of a text that is its answer; None: it gives none.

    extract: the last match of it, its first group if it has one. Without: what the last \\boxed{...} holds, else the
    line after the last "####", "answer:" or "answer is", else all of it.
    """
    if extract is not None:
        found = list(extract.finditer(text))
        return (found[-1][1] if extract.groups else found[-1][0]) if found else None
    if (start := text.rfind("\\boxed{")) >= 0:
        depth, begin = 0, start + len("\\boxed")
        for i in range(begin, len(text)):
            depth += {"{": 1, "}": -1}.get(text[i], 0)
            if depth == 0:
                return text[begin + 1 : i]
    for led in reversed(list(_LED.finditer(text))):
        if line := text[led.end() :].strip().partition("\n")[0].strip():
            return line
    return text.strip()


def number(text: str) -> Fraction | None:
    """The last number in a text: 1,234.5, -2e3 or 3/4; None: there is none."""
    found = _NUMBER.findall(text)
    if not found:
        return None
    above, _, below = found[-1].replace(",", "").partition("/")
    if below and not int(below):
        return None
    return Fraction(above) / Fraction(below or 1)


def exact(reply: str, answers: Sequence[str]) -> bool:
    return reply.strip() in {answer.strip() for answer in answers}


def numeric(tolerance: float) -> Verifier:
    """tolerance: relative; 0: equal as numbers."""

    def verify(reply: str, answers: Sequence[str]) -> bool:
        given = number(reply)
        wanted = [w for answer in answers if (w := number(answer)) is not None]
        return given is not None and any(abs(given - w) <= Fraction(tolerance) * abs(w) for w in wanted)

    return verify


def letter(text: str) -> str | None:
    """The last letter that stands alone, as in "(B)" or "B."; of small ones, only where there is nothing else."""
    stripped = text.strip().strip("().:").upper()
    if len(stripped) == 1 and stripped.isalpha():
        return stripped
    found = _LETTER.findall(text)
    # "I" and "A" are also words: where they begin a sentence, another letter is meant.
    chosen = [c for c in found if c not in "AI"] or found
    return chosen[-1] if chosen else None


def choice(reply: str, answers: Sequence[str]) -> bool:
    return (given := letter(reply)) is not None and given in {letter(answer) for answer in answers}


def matches(reply: str, answers: Sequence[str]) -> bool:
    return any(re.search(answer, reply) is not None for answer in answers)
