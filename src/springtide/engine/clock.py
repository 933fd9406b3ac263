"""Where an engine's time goes: busy, idle by cause, paused, adding up to its life.

Called by: the engines. Torch-free.
"""

from __future__ import annotations

import time
from collections import defaultdict


class Clock:
    """Seconds by state, adding up to the engine's life."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._state, self._since = "idle_no_weights", time.monotonic()

    def switch(self, state: str) -> None:
        now = time.monotonic()
        self.seconds[self._state] += now - self._since
        self._state, self._since = state, now

    def tick(self) -> None:
        """Count the present state's time up to now."""
        self.switch(self._state)

    def paused(self) -> float:
        """Seconds paused so far, a pause that goes on included."""
        return self.seconds["paused"] + (time.monotonic() - self._since if self._state == "paused" else 0.0)

    def total(self, prefix: str) -> float:
        return sum(s for state, s in self.seconds.items() if state.startswith(prefix))

    def causes(self, prefix: str) -> dict[str, float]:
        """Seconds by the rest of a state's name behind `prefix`."""
        return {s.removeprefix(prefix): v for s, v in self.seconds.items() if s.startswith(prefix)}
