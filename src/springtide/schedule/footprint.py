"""What episodes that act weigh in a rank's token budget, the less the longer they act.

Owns: the choice of decay and a sum that is kept, never computed again. An episode whose tool acts keeps its KV only as
long as nobody needs the room, so the longer it is away, the less of its context counts (ThunderAgent, 2602.13692;
tiderl_async 1.8.2: exponential 2^(-t/T), linear 1 - t/T, or constant 1, as ThunderAgent found the linear one better on
long, periodic tools). Invariants: adding, taking away and reading cost O(1), amortised.
Called by: `pools.py`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Decay:
    """How an acting episode's share of its context falls. seconds: to a half (exponential), to none (linear)."""

    kind: Literal["constant", "exponential", "linear"] = "constant"
    seconds: float = 5.0

    def share(self, acting_s: float) -> float:
        if self.kind == "exponential":
            return 2.0 ** (-acting_s / self.seconds)
        return max(0.0, 1.0 - acting_s / self.seconds) if self.kind == "linear" else 1.0


class Part:
    """One acting episode in a `Footprint`: its tokens, and since when it acts."""

    __slots__ = ("since", "tokens", "within")

    def __init__(self, tokens: int, since: float) -> None:
        self.tokens, self.since, self.within = tokens, since, True


class Footprint:
    """The decayed sum over parts. Parts come in the order of their `since`, and no clock given falls."""

    __slots__ = ("_at", "_decay", "_moment", "_parts", "_sum", "count")

    def __init__(self, decay: Decay) -> None:
        self._decay = decay
        self.count = 0
        self._sum = 0.0  # exponential: as of `_at`; else of the parts that are within
        self._moment = 0.0  # linear: sum of tokens x since
        self._at = 0.0
        self._parts: deque[Part] = deque()  # linear: in order, those taken away still in it

    def add(self, tokens: int, since: float, now: float) -> Part:
        part = Part(tokens, since)
        self.count += 1
        if self._decay.kind == "exponential":
            self._sum = self.value(now) + tokens * self._decay.share(now - since)
            self._at = now
            return part
        self._sum += tokens
        if self._decay.kind == "linear":
            self._moment += tokens * since
            self._parts.append(part)
        return part

    def take(self, part: Part, now: float) -> None:
        self.count -= 1
        if self.count == 0:  # and no rounding is left of those that were
            self._sum = self._moment = 0.0
            self._at = now
            self._parts.clear()
        elif self._decay.kind == "exponential":
            self._sum = self.value(now) - part.tokens * self._decay.share(now - part.since)
            self._at = now
        elif part.within:
            self._leave(part)

    def value(self, now: float) -> float:
        """Tokens that count now."""
        if self._decay.kind == "exponential":
            return max(0.0, self._sum * self._decay.share(now - self._at))
        if self._decay.kind == "constant":
            return self._sum
        parts, seconds = self._parts, self._decay.seconds
        while parts and (not parts[0].within or now - parts[0].since >= seconds):
            if (part := parts.popleft()).within:
                self._leave(part)
        return max(0.0, self._sum - (now * self._sum - self._moment) / seconds)

    def _leave(self, part: Part) -> None:
        part.within = False
        self._sum -= part.tokens
        self._moment -= part.tokens * part.since
