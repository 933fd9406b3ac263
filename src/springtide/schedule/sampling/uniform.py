"""Uniform sampling: every task once in a random order, then again in another order, for ever.

Owns: that order. Invariant: the k-th draw of a suite depends on (seed, suite, k) only, whatever its visits came to, so
a resumed run continues exactly where the ledger says drawing stopped, and skips nothing (NeMo-RL#3599). With more
groups in flight than tasks, one is drawn while it plays.
Called by: `rollout.draws`.
"""

from __future__ import annotations

import random

from springtide.schedule.sampling.tracked import Sampler


class UniformSampler(Sampler):
    """See the module."""

    _epoch, _order = -1, list[int]()

    def _choose(self, draw: int) -> int:
        epoch, place = divmod(draw, len(self._tasks))
        if epoch != self._epoch:
            self._order = list(range(len(self._tasks)))
            random.Random(f"{self._seed}/{self._suite}/{epoch}").shuffle(self._order)
            self._epoch = epoch
        return self._order[place]
