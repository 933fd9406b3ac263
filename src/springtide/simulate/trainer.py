"""One optimiser step on simulated ranks: when each group's tokens are trained, and what every rank does meanwhile.

Owns: the trainer's clock. Groups are cut into pieces, so that every rank gets some, and a piece goes to the rank
that is free first. Under `streaming` reference ranks take pieces as they arrive, a trainer's forward pass runs beside
them, and its backward pass waits for the reference's log-probs; under `aggregate` the reference is loaded once all
groups are there, runs, and leaves; `resident` computes both on the same rank; `none` has no reference. Invariant: no
rank does two things at once, and the seconds it works are those of its pieces.
Formulas: forward is a third of the training cost, 2N of 6N operations (`schedule.roofline`).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from springtide.schedule.events import Pipeline
from springtide.schedule.roofline import Roofline


@dataclass(slots=True)
class Step:
    """A step under way. free: when each trainer rank is, references likewise; work: seconds of ranks that compute."""

    pipeline: Pipeline
    free: list[float]
    references: list[float]
    swap_s: float
    work: float = 0.0
    reference_work: float = 0.0
    groups: list[tuple[float, float]] = field(default_factory=list)  # reference, training seconds of one rank

    def feed(self, now: float, reference_s: float, train_s: float, pieces: int) -> None:
        """A group is there. What it costs one rank in all."""
        self.groups.append((reference_s, train_s))
        if self.pipeline == "aggregate":
            return  # computed when all are there
        for _ in range(pieces):
            self._piece(now, reference_s / pieces, train_s / pieces)

    def _piece(self, now: float, reference_s: float, train_s: float) -> None:
        start = max(now, heapq.heappop(self.free))
        if self.pipeline == "resident":
            train_s += reference_s
        end = start + train_s
        self.work += train_s
        if self.pipeline == "streaming":
            ready = max(now, heapq.heappop(self.references)) + reference_s
            heapq.heappush(self.references, ready)
            self.reference_work += reference_s
            end = max(start + train_s / 3, ready) + 2 / 3 * train_s
        heapq.heappush(self.free, end)

    def end(self, now: float, pieces: int) -> float:
        """When the update is done, now that all groups are there."""
        if self.pipeline == "aggregate":
            for which in (0, 1):  # the reference comes, computes and goes; then all is trained
                ranks = [max(now, t) + self.swap_s for t in self.free]
                self.free = _spread(ranks, [group[which] / pieces for group in self.groups for _ in range(pieces)])
            self.work += sum(reference + train for reference, train in self.groups)
        return max(now, *self.free)


def _spread(free: Sequence[float], pieces: Sequence[float]) -> list[float]:
    """When each rank is free once all pieces are computed, the longest first."""
    heap = list(free)
    heapq.heapify(heap)
    for seconds in sorted(pieces, reverse=True):
        heapq.heappush(heap, heapq.heappop(heap) + seconds)
    return heap


def train_s(roofline: Roofline, tokens: float, pairs: float, *, recompute: bool = False) -> float:
    """Forward and backward of a group on one rank."""
    return roofline.forward_s(tokens, pairs) + roofline.backward_s(tokens, pairs, recompute=recompute)
