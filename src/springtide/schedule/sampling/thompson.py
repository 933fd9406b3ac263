"""Beta-Thompson sampling (MoPPS, BOTS; reference scalecua_glm5v 2.2): posteriors that forget, and the nearest to 0.5.

Owns: a Beta posterior a task, `a <- (1-l) a + l a0 + s`, `b <- (1-l) b + l b0 + f` for s wins and f failures, l = the
rules' `ema` (BOTS without its implicit evidence, its rho = 0). A draw samples every posterior once and takes the task
nearest to the centre, so a task seldom visited is tried for its width alone. A posterior forgets at its task's visits
only: what was hopeless long ago comes again by the `explore` share, which is uniform.
Called by: `rollout.draws`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from springtide.schedule.sampling.tracked import Rules, Sampler, choose
from springtide.trace import TaskRef

_PRIOR = 2.0  # pseudo-episodes: Beta(1, 1), every rate equally likely, where none was measured before


class ThompsonSampler(Sampler):
    """See the module."""

    def __init__(
        self,
        suite: str,
        tasks: Sequence[TaskRef],
        seed: int,
        rules: Rules | None = None,
        rates: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__(suite, tasks, seed, rules, rates)
        # A measured 0 or 1 is no certainty: both counts stay positive.
        mean = np.clip(self._p, 0.05, 0.95)
        self._prior = np.stack([_PRIOR * mean, _PRIOR * (1 - mean)])  # float64 [2, tasks]: wins, failures
        self._counts = self._prior.copy()

    def _choose(self, draw: int) -> int:
        free = self._free(draw)
        random_ = self._random(draw)
        if self._explores(draw):
            return choose(free.astype(float), random_)
        sampled = random_.beta(*self._counts)
        return int(np.argmin(np.where(free, np.abs(sampled - self._rules.centre), np.inf)))

    def _learn(self, place: int, wins: int, played: int) -> None:
        super()._learn(place, wins, played)
        forget = self._rules.ema
        kept = (1 - forget) * self._counts[:, place] + forget * self._prior[:, place]
        self._counts[:, place] = kept + np.array([wins, played - wins])
