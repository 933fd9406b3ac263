"""How long a run's loop has run, and where that time went.

Owns: the seconds by cause that every step reports. Invariants: the time of all incarnations adds up; one cause at a
time.
Called by: the driver.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

WAITS = {  # a cause of the clock, in words
    "cold_start": "the cold start on gold",
    "train": "the trainer's step",
    "publish": "every engine to hold the new weights",
    "checkpoint": "the checkpoint",
    "evaluate": "the evaluation",
}


@dataclass(slots=True)
class Clock:
    """How long the run's loop has run, over all incarnations, and where that time went, in seconds by cause."""

    elapsed_before: float = 0.0
    spent: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    since: float | None = None  # None: it stands still
    cause: str | None = None  # of what the loop does now

    @contextlib.contextmanager
    def measure(self, cause: str) -> Iterator[None]:
        begun, self.cause = time.monotonic(), cause
        try:
            yield
        finally:
            self.spent[cause] += time.monotonic() - begun
            self.cause = None

    @property
    def elapsed(self) -> float:
        return self.elapsed_before + (0.0 if self.since is None else time.monotonic() - self.since)

    def start(self) -> None:
        self.since = time.monotonic()
        self.spent.clear()

    def stop(self) -> None:
        self.elapsed_before, self.since = self.elapsed, None
