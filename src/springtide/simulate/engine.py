"""One rollout rank: how fast it decodes what, what its KV holds, and what it must compute again.

Owns: the engine's clock. Between two events the set of sequences that decode is constant, so each advances at the same
rate, and an event comes only where a turn ends: `v` counts the tokens that every decoding sequence has got since the
start, and one that joined at v with n tokens to sample ends at v + n. Prefill stops decoding for as long as it takes,
as chunks of a prompt that fill whole steps do. Invariants: KV in use never exceeds the capacity, unless a single
sequence is larger; work done is conserved whatever the order; a prompt token is either served from KV or computed, and
what is computed again has one cause.
Formulas: `schedule.roofline` (Williams et al. 2009); KV is evicted least recently used, as vLLM's prefix cache does.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from typing import Literal

from springtide.schedule.roofline import Roofline, causal_pairs

Cause = Literal["fresh", "eviction", "sync", "migration"]
CAUSES: tuple[Cause, ...] = ("fresh", "eviction", "sync", "migration")


class Turn:
    """A sequence that decodes or waits for room. context: tokens of its prompt; count: tokens it samples; keep, prefix:
    of the context, what its last turn left in KV, and what it shares with its group; moved: it was elsewhere before;
    ends: `v` at its last token."""

    __slots__ = ("context", "count", "ends", "keep", "key", "moved", "own", "prefix", "version", "visit")

    def __init__(self, key: tuple[int, int], context: int, count: int, keep: int, prefix: int, moved: bool) -> None:
        self.key, self.visit = key, key[0]
        self.context, self.count, self.keep, self.prefix, self.moved = context, count, keep, prefix, moved
        self.own = context + count - prefix  # KV until it ends, its group's prompt apart
        self.ends = 0.0
        self.version = 0  # of the weights it began with


class _Prompt:
    """KV of a prompt that a group shares. live: of the sequences that decode, those that use it."""

    __slots__ = ("live", "tokens", "version")

    def __init__(self, tokens: int, version: int) -> None:
        self.tokens, self.version, self.live = tokens, version, 0


class Engine:
    """See the module. `speed` scales all rates (a slower or faster rank)."""

    def __init__(self, roofline: Roofline, capacity: int) -> None:
        self._roofline, self.capacity = roofline, capacity
        self.stamp = 0  # changes whenever the next end does
        self.version = 0
        self._v, self._t, self._frozen = 0.0, 0.0, 0.0  # tokens a sequence has got, as of a time; prefilling until
        self._rate = 0.0  # of v
        self._running: dict[tuple[int, int], Turn] = {}
        self._ends: list[tuple[float, int, Turn]] = []
        self._order = 0
        self._queue: deque[Turn] = deque()  # no room yet
        self._contexts = 0.0  # tokens of the running, as of `_t`
        self._held = 0  # KV that the running need until they end
        self._cache: OrderedDict[tuple[int, int], tuple[int, int]] = OrderedDict()  # key -> tokens, version
        self._cached = 0
        self._prompts: OrderedDict[int, _Prompt] = OrderedDict()  # by visit
        self._prompt_tokens = self._live_prompt_tokens = 0
        self._steps: dict[int, float] = {}  # seconds of a step without context, by sequences
        one = roofline.engine_step_s(decode=1)
        self._read_s = (roofline.engine_step_s(decode=1, context=1e9) - one) / 1e9  # of one token's keys and values
        self.busy_s = 0.0
        self.prefilled: dict[Cause, int] = dict.fromkeys(CAUSES, 0)
        self.hits = 0
        self.decoded = 0.0

    # --- time ---------------------------------------------------------------------------------------------------------

    def advance(self, now: float) -> None:
        """Let time pass until `now`, which is not beyond `next_end`."""
        if now <= self._t:
            return
        if self._running:
            self.busy_s += now - self._t
            decoding = now - max(self._t, self._frozen)
            if decoding > 0:
                got = decoding * self._rate
                self._v += got
                self._contexts += got * len(self._running)
                self.decoded += got * len(self._running)
        self._t = now

    def next_end(self) -> float | None:
        """When the next turn ends, if nothing comes in between."""
        if not self._ends:
            return None
        left = max(0.0, self._ends[0][0] - self._v)
        begins = max(self._t, self._frozen)
        return begins + (left / self._rate if self._rate else 0.0)

    def _changed(self) -> None:
        """The set of those that decode is another: so is the rate."""
        self.stamp += 1
        count = len(self._running)
        if not count:
            self._rate = 0.0
            return
        ahead = max(0.0, self._ends[0][0] - self._v) * count / 2  # contexts half-way to the next end
        step_s = self._steps.get(count)
        if step_s is None:
            step_s = self._steps[count] = self._roofline.engine_step_s(decode=count)
        self._rate = 1.0 / (step_s + self._read_s * (self._contexts + ahead))

    # --- turns --------------------------------------------------------------------------------------------------------

    def start(self, turn: Turn, now: float) -> None:
        """A turn arrives. `advance(now)` comes first."""
        self.advance(now)
        if self._queue or not self._fits(turn):
            self._queue.append(turn)
            return
        self._admit(turn)
        self._changed()

    def ended(self, now: float) -> Turn:
        """The turn that ends now: its context stays in KV until something needs the room."""
        self.advance(now)
        self._v = max(self._v, self._ends[0][0])
        turn = heapq.heappop(self._ends)[2]
        self._leave(turn)
        self._cache[turn.key] = (turn.own, turn.version)
        self._cached += turn.own
        self._evict()
        self._next()
        self._changed()
        return turn

    def abort(self, key: tuple[int, int], now: float) -> None:
        """Forget a sequence, whatever it does."""
        self.advance(now)
        if (turn := self._running.get(key)) is not None:
            self._ends = [entry for entry in self._ends if entry[2] is not turn]
            heapq.heapify(self._ends)
            self._contexts += turn.ends - self._v  # `_leave` takes all that it would have got
            self._leave(turn)
        self._queue = deque(t for t in self._queue if t.key != key)
        self.forget(key)
        self._next()
        self._changed()

    def clear(self, now: float) -> None:
        """The rank plays no more: nothing of it is left."""
        self.advance(now)
        self._running.clear()
        self._ends.clear()
        self._queue.clear()
        self._cache.clear()
        self._prompts.clear()
        self._contexts, self._held, self._cached, self._prompt_tokens, self._live_prompt_tokens = 0.0, 0, 0, 0, 0
        self._changed()

    def publish(self, version: int, seconds: float, now: float) -> None:
        """New weights: decoding stops while they load, and KV of the old serves nothing that starts later."""
        self.advance(now)
        self.version = version
        self._frozen = max(self._frozen, now) + seconds
        self._changed()

    def forget(self, key: tuple[int, int]) -> None:
        """Give its KV back."""
        if (entry := self._cache.pop(key, None)) is not None:
            self._cached -= entry[0]

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def used(self) -> int:
        """Tokens of KV in use, cached ones included."""
        return self._held + self._cached + self._prompt_tokens

    # --- KV -----------------------------------------------------------------------------------------------------------

    def _fits(self, turn: Turn) -> bool:
        if not self._running:
            return True  # what is larger than all of it would wait for ever
        prompt = self._prompts.get(turn.visit)
        more = turn.own + (turn.prefix if prompt is None or not prompt.live else 0)
        return self._held + self._live_prompt_tokens + more <= self.capacity

    def _admit(self, turn: Turn) -> None:
        prompt, own = self._prompts.get(turn.visit), self._cache.get(turn.key)
        served = prompt is not None and prompt.version == self.version
        hit = 0
        if served:
            hit = turn.keep if own is not None and own[1] == self.version else turn.prefix
        self.forget(turn.key)
        if prompt is None:
            prompt = self._prompts[turn.visit] = _Prompt(turn.prefix, self.version)
            self._prompt_tokens += turn.prefix
        prompt.version = self.version
        self._prompts.move_to_end(turn.visit)
        if not prompt.live:
            self._live_prompt_tokens += prompt.tokens
        prompt.live += 1
        computed, again = turn.context - hit, max(0, turn.keep - hit)
        cause: Cause = (
            "migration" if turn.moved else "sync" if own is not None and own[1] != self.version else "eviction"
        )
        self.prefilled[cause] += again
        self.prefilled["fresh"] += computed - again
        self.hits += hit
        self._frozen = max(self._frozen, self._t) + self._roofline.prefill_s(computed, causal_pairs(computed, hit))
        turn.version = self.version
        self._running[turn.key] = turn
        self._held += turn.own
        self._contexts += turn.context
        turn.ends = self._v + turn.count
        self._order += 1
        heapq.heappush(self._ends, (turn.ends, self._order, turn))
        self._evict()

    def _leave(self, turn: Turn) -> None:
        del self._running[turn.key]
        self._held -= turn.own
        self._contexts -= turn.context + turn.count
        prompt = self._prompts[turn.visit]
        prompt.live -= 1
        if not prompt.live:
            self._live_prompt_tokens -= prompt.tokens
        if not self._running:
            self._contexts = 0.0

    def _next(self) -> None:
        while self._queue and self._fits(self._queue[0]):
            self._admit(self._queue.popleft())

    def _evict(self) -> None:
        """Drop what was used least recently until all fits: idle contexts, then prompts of which nobody decodes."""
        while self.used > self.capacity and self._cache:
            self._cached -= self._cache.popitem(last=False)[1][0]
        if self.used > self.capacity:
            for visit in [v for v, prompt in self._prompts.items() if not prompt.live]:
                if self.used <= self.capacity:
                    break
                self._prompt_tokens -= self._prompts.pop(visit).tokens

    def done(self, visit: int) -> None:
        """Its group is over: nobody shares its prompt any more."""
        if (prompt := self._prompts.pop(visit, None)) is not None:
            self._prompt_tokens -= prompt.tokens
            if prompt.live:
                self._live_prompt_tokens -= prompt.tokens
