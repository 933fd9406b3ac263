"""Resource-Aware Ref-Actor Pipelining: how long a step takes under each way to compute the reference's log-probs.

Owns: the predictions and the choice between them (TideRL 2608.10402; tiderl_async 1.4, computed as in 1.8.3, because
the paper's closed form mixes a sum over ranks with one rank's time). A step's work arrives in pieces; each costs
`reference_s` of a forward pass and `train_s` of forward and backward on one rank.

- `none`: no reference. `resident`: it lies beside the trainer (or is the base of an adapter): one forward pass more.
- `streaming`: a two-stage flow shop. Reference ranks take pieces as they arrive; a trainer's forward pass does not wait
  for them, its backward pass does.
- `aggregate`: pieces gather; then the reference is loaded once, run over all of them, unloaded, and they are trained;
  in as many rounds as are fastest.
- `hidden_s`: the ceiling, a reference that costs nothing.

Invariant: no prediction is shorter than `hidden_s` of the same pieces. Called by: `ers.py`, and the simulator's report.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from springtide.schedule.events import Pipeline

_FORWARD = 1 / 3  # of a training step: 2N of 6N operations
_ROUNDS = 4  # most of `aggregate`: more swaps than that never paid in reach of what is published
HYSTERESIS = 0.05  # a pipeline is left for one that is faster by more (tiderl_async 1.8.3)
DWELL = 2  # steps that a pipeline stays at least


@dataclass(frozen=True, slots=True)
class Piece:
    """Seconds of one piece on one rank: the reference's forward pass, forward and backward; and of the reference's
    weights into or out of memory."""

    reference_s: float
    train_s: float
    swap_s: float


def arrivals(ready: int, total: int, gap_s: float) -> list[float]:
    """When each of `total` groups is there: `ready` at once (RAS), then one every `gap_s` (TPRM)."""
    return [max(0, i - ready + 1) * gap_s for i in range(total)]


def predict_s(pipeline: Pipeline, at: Sequence[float], piece: Piece, trainers: int, references: int = 0) -> float:
    """Seconds until every piece is trained. at: their arrivals, in order. Infinite where the ranks do not suffice."""
    if not at or trainers < 1 or (pipeline == "streaming" and references < 1):
        return 0.0 if not at else math.inf
    if pipeline == "streaming":
        return _streaming_s(at, piece, trainers, references)
    if pipeline == "aggregate":
        return min(_aggregate_s(at, piece, trainers, rounds) for rounds in range(1, min(_ROUNDS, len(at)) + 1))
    return _shared_s(at, piece.train_s + (piece.reference_s if pipeline == "resident" else 0.0), trainers)


def hidden_s(at: Sequence[float], piece: Piece, trainers: int) -> float:
    """The ceiling: the reference fully hidden."""
    return predict_s("none", at, piece, trainers)


def _shared_s(at: Sequence[float], each_s: float, ranks: int) -> float:
    """Pieces to whichever rank is free first."""
    free = [0.0] * ranks
    for arrival in at:
        heapq.heapreplace(free, max(arrival, free[0]) + each_s)
    return max(free)


def _streaming_s(at: Sequence[float], piece: Piece, trainers: int, references: int) -> float:
    reference, trainer = [0.0] * references, [0.0] * trainers
    forward, backward = _FORWARD * piece.train_s, (1 - _FORWARD) * piece.train_s
    for arrival in at:
        known = max(arrival, reference[0]) + piece.reference_s
        heapq.heapreplace(reference, known)
        heapq.heapreplace(trainer, max(max(arrival, trainer[0]) + forward, known) + backward)
    return max(trainer)


def _aggregate_s(at: Sequence[float], piece: Piece, trainers: int, rounds: int) -> float:
    end, done = 0.0, 0
    for index in range(1, rounds + 1):
        upto = len(at) * index // rounds
        each = math.ceil((upto - done) / trainers)
        end = max(end, at[upto - 1]) + 2 * piece.swap_s + each * (piece.reference_s + piece.train_s)
        done = upto
    return end


def choose(now: Pipeline, predicted: Mapping[Pipeline, float], steps_since: int) -> Pipeline:
    """The fastest; but the one of now within its dwell, and unless another is faster by more than the hysteresis."""
    best = min(predicted, key=lambda name: (predicted[name], name != now))
    if now not in predicted or predicted[now] == math.inf:
        return best
    if steps_since < DWELL or predicted[best] >= predicted[now] * (1 - HYSTERESIS):
        return now
    return best
