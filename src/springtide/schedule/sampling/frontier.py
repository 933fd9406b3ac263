"""Frontier sampling (SCALECUA; reference scalecua_glm5v 2.1): most draws where the policy wins about half the time.

Owns: the Gaussian weights and the cut to candidates. `w_i = exp(-(p_i - m)^2 / (2 s^2))`; the 3B tasks of largest w are
the frontier, equal weights in an order drawn anew each batch; (1 - g) B draws of a batch fall on them in proportion to
w, g B uniformly outside. Draws are made one by one, from what is known by then: as long as no outcome comes in between,
B in a row are the published batch, drawn without replacement. Where the frontier is all in flight, the draw goes
outside, and where the outside is empty or in flight, into the frontier. Called by: `rollout.draws`.
"""

from __future__ import annotations

import numpy as np

from springtide.schedule.sampling.tracked import Sampler, choose


class FrontierSampler(Sampler):
    """See the module."""

    def weights(self) -> np.ndarray:
        """float64 [tasks]: the Gaussian of each capability."""
        return np.exp(-((self._p - self._rules.centre) ** 2) / (2 * self._rules.width**2))

    def _choose(self, draw: int) -> int:
        rules, weights = self._rules, self.weights()
        free = self._free(draw)
        # Tasks in flight keep their places, so the frontier does not slide down while a batch is drawn. What cools down
        # or is retired does not: it would hold a place that nobody can take.
        entitled = free.copy()
        entitled[list(self._flying.values())] = True
        order = self._random("order", draw // rules.batch).permutation(len(weights))
        best = order[np.argsort(-np.where(entitled, weights, -1.0)[order], kind="stable")]
        frontier = np.zeros_like(free)
        frontier[best[: rules.candidates * rules.batch]] = True
        inside, outside = free & frontier, free & ~frontier
        random_ = self._random(draw)
        if outside.any() and (self._explores(draw) or not inside.any()):
            return choose(outside.astype(float), random_)
        return choose(np.where(inside, weights, 0.0), random_)
