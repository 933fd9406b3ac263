"""What every engine offers: token ids in, token ids and their log-probs out, under a named weight version.

Implemented by `engine.local` (through `engine.client`), later by vLLM. Invariants: a turn is sampled with one version;
its log-probs are those of the distribution it was drawn from (logits divided by the temperature, nothing else);
KV belongs to (session, version), so no prefix computed by other weights is ever used.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypedDict, Unpack

import numpy as np

from springtide.wire import record

EVALUATION = 1  # the priority of an evaluation's turns; training's is 0


@record
@dataclass(frozen=True, slots=True)
class Sampling:
    """How one turn is drawn. Token t of turn `turn` depends on (seed, turn, t) only, never on the batch around it.

    temperature 0 is greedy (log-probs are then those of temperature 1). `stop_ids` end the turn and are kept.
    """

    seed: int
    turn: int
    max_new_tokens: int
    temperature: float = 1.0
    stop_ids: tuple[int, ...] = ()


@record
@dataclass(frozen=True, slots=True)
class Generation:
    """One sampled turn. ids: int32 [T]; logprobs: float32 [T]. `version` is the weight set all of it came from.

    `cached_tokens` of the prompt were not computed again; `computed_tokens` were; `recomputed_tokens` of those had
    been computed before for this session and were lost (evicted, or made by another version). Times in seconds;
    `paused_s` is how long the engine stood still meanwhile, in neither of the other two.
    """

    ids: np.ndarray
    logprobs: np.ndarray
    version: int
    finish: Literal["stop", "length"]
    cached_tokens: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    queue_s: float = 0.0
    decode_s: float = 0.0
    paused_s: float = 0.0


@record
@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot. Token counts are totals since start; `busy_s`, `idle_s`, `paused_s` add up to the engine's life.

    generated_tokens: every token sampled; `aborted_tokens` of them reached no caller, as their turn was ended early.
    """

    versions: tuple[int, ...] = ()
    newest: int = -1
    waiting: int = 0
    running: int = 0
    sessions: int = 0
    kv_tokens: int = 0
    kv_capacity: int = 0
    generated_tokens: int = 0
    aborted_tokens: int = 0
    computed_tokens: int = 0
    cached_tokens: int = 0
    recomputed_tokens: int = 0
    busy_s: float = 0.0
    idle_s: float = 0.0
    paused_s: float = 0.0
    extra: dict[str, Any] = field(default_factory=dict)


class Options(TypedDict, total=False):
    """What more may be said of a turn.

    version: None means the newest loaded. prefix: a group key; sessions that share it share the KV of their common
    start. forced_ids (int32 [T]): follow this continuation instead of sampling and return its true log-probs. priority:
    the waiting turn of the highest number starts first, equals in order of arrival; nothing that runs is interrupted,
    and what is sampled does not depend on it.
    """

    version: int | None
    prefix: str | None
    forced_ids: np.ndarray | None
    priority: int


class EngineError(Exception):
    """An engine refused a request: too long for its context, an unknown version, no room. The text says which."""


class Engine(Protocol):
    """An engine, local or remote. Every method has a deadline of its own behind it (see `engine.client`)."""

    async def generate(
        self, session: str, ids: np.ndarray, sampling: Sampling, **options: Unpack[Options]
    ) -> Generation:
        """Continue `ids` (int32 [P], the whole context) for one turn.

        session: whose KV to keep between turns. Raises: EngineError.
        """
        ...

    async def load(self, version: int) -> None:
        """Pull `version` from the weight store, verify its fingerprint, make it the newest. Frees the oldest slot."""
        ...

    async def drop(self, version: int) -> None: ...

    async def pin(self, version: int) -> None:
        """Keep `version` in its slot until `drop`ped (stale pool, evaluation)."""
        ...

    async def pause(self, mode: Literal["keep", "abort"]) -> None: ...

    async def resume(self) -> None: ...

    async def release(self, session: str) -> None: ...

    async def stats(self) -> EngineStats: ...
