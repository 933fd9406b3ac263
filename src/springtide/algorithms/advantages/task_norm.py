"""Task advantage normalisation: every suite's advantages get the same scale before they meet in one loss.

    A'_i = (A_i - mu_s) / (sigma_s + 1e-6)

mu_s and sigma_s are the mean and the (population) deviation of A over all action tokens of suite s: a trajectory
counts once for each token it sampled. `batch`: over this step's groups. `running`: over the suite's last 64 consumed
groups, frozen at the step's start; a suite without history uses this step's groups.

Source: AgentRL (arXiv 2510.04206) section 3.2, equation 1; its "task" is our suite.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

EPSILON = 1e-6  # AgentRL's
WINDOW = 64  # groups: DESIGN section 9; about 8 steps of 24 groups over 3 suites


@dataclass(frozen=True, slots=True)
class Moments:
    """Sums over action tokens: how many, of A, and of A squared. Adding moments pools them."""

    tokens: int = 0
    total: float = 0.0
    squares: float = 0.0

    @classmethod
    def of(cls, advantages: np.ndarray, tokens: np.ndarray) -> Moments:
        """advantages: float64 [N]; tokens: int [N], the action tokens each stands on."""
        if advantages.shape != tokens.shape or advantages.ndim != 1:
            raise ValueError(f"moments: {advantages.shape} advantages for {tokens.shape} token counts")
        return cls(
            int(tokens.sum()), float((tokens * advantages).sum()), float((tokens * advantages * advantages).sum())
        )

    def __add__(self, other: Moments) -> Moments:
        return Moments(self.tokens + other.tokens, self.total + other.total, self.squares + other.squares)

    @property
    def mean(self) -> float:
        return self.total / self.tokens if self.tokens else 0.0

    @property
    def std(self) -> float:
        return math.sqrt(max(self.squares / self.tokens - self.mean**2, 0.0)) if self.tokens else 0.0


def task_norm(advantages: np.ndarray, statistics: Moments) -> np.ndarray:
    """Normalise one suite's advantages (float64 [N]) by that suite's `statistics`. Returns: float64 [N]."""
    return (advantages - statistics.mean) / (statistics.std + EPSILON)


@dataclass(frozen=True, slots=True)
class RunningMoments:
    """Each suite's last `WINDOW` consumed groups, oldest first. Immutable: a step reads one and leaves another."""

    suites: dict[str, tuple[Moments, ...]]

    def of(self, suite: str) -> Moments:
        return sum(self.suites.get(suite, ()), Moments())

    def after(self, consumed: list[tuple[str, Moments]]) -> RunningMoments:
        """The state once these (suite, moments of its raw advantages) groups were consumed, in this order."""
        suites = dict(self.suites)
        for suite, moments in consumed:
            suites[suite] = (*suites.get(suite, ()), moments)[-WINDOW:]
        return RunningMoments(suites)

    def to_json(self) -> dict[str, list[list[float]]]:
        return {s: [[m.tokens, m.total, m.squares] for m in window] for s, window in self.suites.items()}

    @classmethod
    def from_json(cls, data: dict[str, list[list[float]]]) -> RunningMoments:
        return cls({s: tuple(Moments(int(t), total, sq) for t, total, sq in window) for s, window in data.items()})
