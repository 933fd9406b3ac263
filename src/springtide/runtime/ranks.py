"""A rank: one program of a run in a process of its own, called over the wire, restarted when it dies.

Owns: the life of one supervised process, how often it may be restarted, and which role it holds. Invariants: a call to
a rank that is down fails at once with `ConnectionLost`; a rank that is up but answers nothing, or cannot be reached any
more, is killed, and has died like any other; every restart is said; a rank that keeps dying ends the run with the end
of its log; every wait for a rank to come up has a deadline that says what it waits for; a role's program has ended,
and its memory is free, before that of the next role starts.
Called by: `runtime.local`. Where the process lives is its launcher's affair (`runtime.launch`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from springtide.process import Launcher, ProcessFailed, Supervised, start_process, task_group
from springtide.wire import ConnectionLost, DeadlineExceeded

log = logging.getLogger(__name__)

Role = Literal["rollout", "reference", "trainer"]

_EXPLAIN_S = 1.0
_NOTICED_S = 0.05  # until a broken connection is noticed by whoever supervises
_UNREACHED_S = 5.0  # a process whose connection broke gets this long to be seen dead; then it is unreachable
_RESTARTS, _WINDOW_S = 5, 120.0  # more deaths than this in the window are a fault of the program, not of the machine


@dataclass(frozen=True, slots=True)
class Program:
    """What a rank runs: `entry` with `args`, in the interpreter `python` if not ours.

    take: the method by which it takes a published version, for one that can hold a role.
    """

    entry: str
    args: dict[str, Any] = field(default_factory=dict)
    python: str | None = None
    take: str = ""


class Rank:
    """One supervised program at a time: `entry`, or, where that is None, none until a role of `roles` is assumed.

    `restart = False`: its death ends the run (a trainer, whose state dies with it).
    """

    def __init__(
        self,
        name: str,
        entry: str | None,
        args: dict[str, Any],
        *,
        log_dir: Path,
        socket_path: str,
        start_s: float,
        restart: bool,
        silent_s: float,
        prepare: Callable[[Rank], Awaitable[None]] | None = None,
        launch: Launcher = start_process,
        roles: Mapping[Role, Program] | None = None,
    ) -> None:
        self.name, self._launch = name, launch
        self._log_path, self.socket_path, self._start_s = log_dir / f"{name}.log", socket_path, start_s
        self._restart, self._silent_s, self._prepare = restart, silent_s, prepare
        self._program = Program(entry, args) if entry is not None else None
        self._roles = roles or {}
        self.role: Role | None = None
        self._version: int | None = None
        self._switch, self._empty = asyncio.Event(), asyncio.Event()
        self.process: Supervised | None = None
        self.up, self._came_up = asyncio.Event(), False
        self.changed: Callable[[Rank], None] | None = None  # called when `up` was set or cleared
        self.restarts = 0
        self.live = 0  # episodes in flight, for a rollout worker

    async def run(self) -> None:
        """Keep the program alive until cancelled. Raises: ProcessFailed when it may not be restarted (again)."""
        deaths: deque[float] = deque()
        while True:
            while self._program is None:
                self._switch.clear()
                self._empty.set()
                await self._switch.wait()
            self._switch.clear()
            self._empty.clear()
            try:
                failure = await self._live(self._program)
            except ProcessFailed as error:  # of no use if it never started, unless it was killed
                if error.final or (not deaths and not error.killed):
                    raise
                failure = error
            if failure is None:
                continue  # as what its new role asks for
            deaths.append(time.monotonic())
            while self._came_up and deaths[0] < time.monotonic() - _WINDOW_S:
                deaths.popleft()
            self._came_up = False  # what never comes up again, however long each start takes, has no more than these
            if not self._restart or len(deaths) > _RESTARTS:
                raise failure
            self.restarts += 1
            log.warning("%s; it is started again (its log: %s)", str(failure).partition(";")[0], self._log_path)

    async def _live(self, program: Program) -> ProcessFailed | None:
        """A process from start to end; how it ended, None for a new role. Raises: ProcessFailed if not started."""
        async with self._launch(
            self.name,
            program.entry,
            program.args,
            log_path=self._log_path,
            socket_path=self.socket_path,
            deadline_s=self._start_s,
            silent_s=self._silent_s,
            python=program.python,
        ) as process:
            self.process = process
            try:
                if self._prepare is not None:
                    await self._prepare(self)
                if self._version is not None:
                    await self.call(program.take, deadline_s=self._start_s, version=self._version)
                if not self._switch.is_set():
                    self.up.set()
                    self._came_up = True
                    self._tell()
                await _first(process.exited, process.client.lost, self._switch)
            except ConnectionLost:
                pass  # it died while it was prepared
            finally:
                self.up.clear()
                self.process = None
                self._tell()
            if self._switch.is_set():
                return None
            try:
                async with asyncio.timeout(_UNREACHED_S):
                    await process.exited.wait()
            except TimeoutError:
                log.warning("the connection to %s broke; it is killed", self.name)
                process.kill()
                await process.exited.wait()
            return process.failure()

    def _tell(self) -> None:
        if self.changed is not None:
            self.changed(self)

    async def assume(self, role: Role, version: int | None, *, deadline_s: float) -> None:
        """Hold `role` with the weights of `version`; None: with those that its program starts with.

        The program of another role ends first. One that holds the role already only takes the version; so does, by
        itself, one that is started again. Raises: ValueError (no such role here), DeadlineExceeded, RemoteError.
        """
        if role not in self._roles:
            held = ", ".join(self._roles) or "none"
            raise ValueError(f"{self.name} has no program for the role {role}; it has {held}")
        self._version = version
        if role == self.role and self.up.is_set():
            if version is not None:
                await self.call_again(self._roles[role].take, deadline_s=deadline_s, version=version)
            return
        self.role, self._program = role, self._roles[role]
        self.up.clear()
        self._switch.set()
        try:
            async with asyncio.timeout(deadline_s):
                await self.up.wait()
        except TimeoutError:
            raise DeadlineExceeded(f"{self.name} did not hold the role {role} within {deadline_s:g} s") from None

    async def rest(self, *, deadline_s: float) -> None:
        """Hold no role: returns once the program has ended and its memory is free. Raises: DeadlineExceeded."""
        self.role, self._program, self._version = None, None, None
        self.up.clear()
        self._switch.set()
        try:
            async with asyncio.timeout(deadline_s):
                await self._empty.wait()
        except TimeoutError:
            raise DeadlineExceeded(f"{self.name} did not end within {deadline_s:g} s") from None

    async def call(self, method: str, *, deadline_s: float, **payload: Any) -> Any:
        """Call the program now. Raises: ConnectionLost (down, or died meanwhile), DeadlineExceeded, RemoteError."""
        if self.process is None:
            raise ConnectionLost(f"{self.name} is down ({method})")
        return await self.process.client.call(method, deadline_s=deadline_s, **payload)

    async def call_again(self, method: str, *, deadline_s: float, **payload: Any) -> Any:
        """`call`, for what may be asked twice: a successor is asked again, once it holds what its predecessor held.

        Raises: ConnectionLost (it holds no role any more), DeadlineExceeded, RemoteError.
        """
        while True:
            await self.wait_up()
            try:
                return await self.call(method, deadline_s=deadline_s, **payload)
            except ConnectionLost:
                if self._program is None:
                    raise
                await asyncio.sleep(_NOTICED_S)

    @property
    def silence_s(self) -> float:
        """How long ago it answered last; 0 while it is down or starts."""
        return 0.0 if self.process is None else self.process.silence_s

    async def wait_up(self) -> None:
        """Until its program is up; at once if it has none yet. Raises: DeadlineExceeded."""
        if self._program is None:
            return
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


async def _first(*events: asyncio.Event) -> None:
    """Until one of them is set."""
    tasks = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
