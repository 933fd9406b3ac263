"""A rank: one program of a run in a process of its own, called over the wire, restarted when it dies.

Owns: the life of one supervised process and how often it may be restarted. Invariants: a call to a rank that is down
fails at once with `ConnectionLost`; a rank that is up but answers nothing is killed, and has died like any other; every
restart is said; a rank that keeps dying ends the run with the end of its log; every wait for a rank to come up has a
deadline that says what it waits for.
Called by: `runtime.local`. A Ray runtime will offer the same methods.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from springtide.process import Process, ProcessFailed, start_process, task_group
from springtide.wire import ConnectionLost, DeadlineExceeded

log = logging.getLogger(__name__)

_EXPLAIN_S = 1.0
_RESTARTS, _WINDOW_S = 5, 120.0  # more deaths than this in the window are a fault of the program, not of the machine


class Rank:
    """One supervised program. `restart = False`: its death ends the run (a trainer, whose state dies with it)."""

    def __init__(
        self,
        name: str,
        entry: str,
        args: dict[str, Any],
        *,
        log_dir: Path,
        socket_path: str,
        start_s: float,
        restart: bool,
        silent_s: float,
        prepare: Callable[[Rank], Awaitable[None]] | None = None,
    ) -> None:
        self.name, self._entry, self._args = name, entry, args
        self._log_path, self.socket_path, self._start_s = log_dir / f"{name}.log", socket_path, start_s
        self._restart, self._silent_s, self._prepare = restart, silent_s, prepare
        self.process: Process | None = None
        self.up = asyncio.Event()
        self.restarts = 0
        self.live = 0  # episodes in flight, for a rollout worker

    async def run(self) -> None:
        """Keep the program alive until cancelled. Raises: ProcessFailed when it may not be restarted (again)."""
        deaths: deque[float] = deque()
        while True:
            try:
                failure = await self._live()
            except ProcessFailed as error:  # of no use if it never started, unless it was killed
                if not deaths and not error.killed:
                    raise
                failure = error
            deaths.append(time.monotonic())
            while deaths[0] < time.monotonic() - _WINDOW_S:
                deaths.popleft()
            if not self._restart or len(deaths) > _RESTARTS:
                raise failure
            self.restarts += 1
            log.warning("%s; it is started again (its log: %s)", str(failure).partition(";")[0], self._log_path)

    async def _live(self) -> ProcessFailed:
        """One process from start to end; how it ended. Raises: ProcessFailed if it did not start."""
        async with start_process(
            self.name,
            self._entry,
            self._args,
            log_path=self._log_path,
            socket_path=self.socket_path,
            deadline_s=self._start_s,
            silent_s=self._silent_s,
        ) as process:
            self.process = process
            try:
                if self._prepare is not None:
                    await self._prepare(self)
                self.up.set()
                await process.exited.wait()
            except ConnectionLost:
                await process.exited.wait()  # it died while it was prepared
            finally:
                self.up.clear()
                self.process = None
            return process.failure()

    async def call(self, method: str, *, deadline_s: float, **payload: Any) -> Any:
        """Call the program now. Raises: ConnectionLost (down, or died meanwhile), DeadlineExceeded, RemoteError."""
        if self.process is None:
            raise ConnectionLost(f"{self.name} is down ({method})")
        return await self.process.client.call(method, deadline_s=deadline_s, **payload)

    @property
    def silence_s(self) -> float:
        """How long ago it answered last; 0 while it is down or starts."""
        return 0.0 if self.process is None else self.process.silence_s

    async def wait_up(self) -> None:
        try:
            async with asyncio.timeout(self._start_s):
                await self.up.wait()
        except TimeoutError:
            raise DeadlineExceeded(f"{self.name} did not come up within {self._start_s:g} s") from None


class Pool:
    """Rollout workers: hands out the least loaded one that is up."""

    def __init__(self, ranks: list[Rank], start_s: float) -> None:
        self._ranks, self._start_s = ranks, start_s

    async def acquire(self) -> Rank:
        until = time.monotonic() + self._start_s
        while True:
            up = [r for r in self._ranks if r.up.is_set()]
            if up:
                return min(up, key=lambda r: r.live)
            if time.monotonic() > until:
                raise ProcessFailed(f"no rollout worker came up within {self._start_s:g} s")
            await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def keep_alive(ranks: list[Rank]) -> AsyncIterator[None]:
    """Run all `ranks` (started together) while the block lasts. One that fails for good ends it: ProcessFailed."""
    async with task_group() as supervisors:
        tasks = [supervisors.create_task(rank.run(), name=rank.name) for rank in ranks]
        await asyncio.gather(*(rank.wait_up() for rank in ranks))
        try:
            yield
        except ConnectionLost:
            # The rank whose death explains it is noticed in a moment, and says more.
            await asyncio.sleep(_EXPLAIN_S)
            raise
        for task in tasks:
            task.cancel()
