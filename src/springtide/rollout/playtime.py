"""The clock of groups: it stands still while an evaluation beside training has the engines.

Owns: how long groups have had to play, and the timeouts that are measured by it. Invariants: an evaluation, however
long, brings no group closer to its deadline; otherwise a second here is a second.
Called by: the feeder.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


class PlayTime:
    """Seconds of play. Used inside one event loop."""

    def __init__(self) -> None:
        self._stood = 0.0  # seconds of former evaluations
        self._since: float | None = None  # when the present one began
        self._timeouts: dict[asyncio.Timeout, float] = {}  # -> when it ends, by this clock

    def now(self) -> float:
        return (asyncio.get_running_loop().time() if self._since is None else self._since) - self._stood

    def stand_still(self, still: bool) -> None:
        """Stop or go on; what is asked for twice happens once."""
        loop_s = asyncio.get_running_loop().time()
        if still and self._since is None:
            self._since = loop_s
        elif not still and self._since is not None:
            self._stood, self._since = self._stood + loop_s - self._since, None
        for timeout, when in self._timeouts.items():
            self._set(timeout, when)

    @contextlib.asynccontextmanager
    async def timeout_at(self, when: float) -> AsyncIterator[None]:
        """As `asyncio.timeout_at`, by this clock. Raises: TimeoutError."""
        async with asyncio.timeout(None) as timeout:
            self._timeouts[timeout] = when
            self._set(timeout, when)
            try:
                yield
            finally:
                del self._timeouts[timeout]

    def _set(self, timeout: asyncio.Timeout, when: float) -> None:
        if not timeout.expired():
            timeout.reschedule(None if self._since is not None else when + self._stood)
