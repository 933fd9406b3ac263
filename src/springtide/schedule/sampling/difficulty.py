"""Sampling by the variance of a task's outcome, `w = 4 p (1 - p)` (EvoCUA-1.5's VAS; reference scalecua_glm5v 2.2).

Owns: those weights. Of all draws, the `explore` share is uniform, since a task at p = 0 or 1 weighs nothing.
Called by: `rollout.draws`.
"""

from __future__ import annotations

import numpy as np

from springtide.schedule.sampling.tracked import Sampler, choose


class DifficultySampler(Sampler):
    """See the module."""

    def weights(self) -> np.ndarray:
        """float64 [tasks]: four times the variance of one outcome."""
        return 4 * self._p * (1 - self._p)

    def _choose(self, draw: int) -> int:
        free = self._free(draw)
        weights = np.where(free, self.weights(), 0.0)
        even = self._explores(draw) or not weights.any()
        return choose(free.astype(float) if even else weights, self._random(draw))
