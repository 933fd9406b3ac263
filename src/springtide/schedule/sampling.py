"""Which task is drawn next.

Owns: the order in which a suite's tasks are visited. Pure: the k-th draw of a suite depends on (seed, suite, k) only,
so a resumed run continues exactly where the ledger says drawing stopped, and skips nothing (NeMo-RL#3599).
Called by: the driver.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from springtide.trace import TaskRef


class UniformSampler:
    """Every task once in a random order, then again in another order, for ever."""

    def __init__(self, suite: str, tasks: Sequence[TaskRef], seed: int) -> None:
        if not tasks:
            raise ValueError(f"suite {suite} has no tasks to draw")
        self._suite, self._tasks, self._seed = suite, tasks, seed
        self._epoch, self._order = -1, list[int]()

    def task(self, draw: int) -> TaskRef:
        """The task of the `draw`-th draw (from 0)."""
        epoch, place = divmod(draw, len(self._tasks))
        if epoch != self._epoch:
            self._order = list(range(len(self._tasks)))
            random.Random(f"{self._seed}/{self._suite}/{epoch}").shuffle(self._order)
            self._epoch = epoch
        return self._tasks[self._order[place]]
