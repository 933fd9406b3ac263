"""`InProcessClient`: suites played in this very process, without workers.

Owns: the suites' shared resources, each opened once, by the first episode that needs it. Invariants: a shared resource
is entered and left by one task, so any context manager works; one that fails to open makes that episode unavailable
(`setup`) and is tried again by the next.
Called by: tests, scripts, the checker; an environment worker is this client behind a socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections.abc import Iterable
from types import TracebackType
from typing import Any

from springtide.env.environment import Environment
from springtide.env.guard import authored
from springtide.env.registry import load_suite
from springtide.env.runner import EpisodeRunner, Note
from springtide.env.session import EnvironmentUnavailable
from springtide.env.suite import Suite, SuiteError
from springtide.trace import TaskRef

_IN_PLACE_S = 600.0  # what runs in place has no deadline of its own


class InProcessClient:
    """An `EnvClient` over suites, given by name or as `Suite`. Use it as `async with`.

    `note` hears of every call of an author's code before it is made: a process that dies of one cannot tell.
    """

    def __init__(self, suites: Iterable[str | Suite], *, note: Note | None = None) -> None:
        self.note = note
        self._by_use: dict[str, Suite] = {}
        for item in suites:
            suite = load_suite(item) if isinstance(item, str) else item
            use = item if isinstance(item, str) else suite.name
            for name in {use, suite.name}:  # a configuration says `FILE.py:Class`, a task the suite's own name
                if self._by_use.setdefault(name, suite) is not suite:
                    raise SuiteError(f"two suites are called {name!r}; rename one")
        self._shared: dict[type[Environment], _Shared] = {}
        self._numbers = itertools.count(1)

    async def __aenter__(self) -> InProcessClient:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None):
        await self.close()

    async def close(self) -> None:
        """Leave what the suites share, all of it. Raises: what an author's `shared` raises on its way out."""
        opened, self._shared = self._shared, {}
        async with contextlib.AsyncExitStack() as stack:
            for environment, shared in opened.items():
                stack.push_async_callback(shared.close)
                stack.callback(self._say, f"in the end of {environment.__name__}.shared")

    def _say(self, what: str) -> None:
        if self.note is not None:
            self.note(what, _IN_PLACE_S)

    def suite(self, name: str) -> Suite:
        """The suite of that name. Raises: SuiteError."""
        if name not in self._by_use:
            raise SuiteError(f"suite {name!r} was not loaded here; there are {', '.join(sorted(self._by_use))}")
        return self._by_use[name]

    async def catalog(self, suite: str, split: str, level: str | None) -> tuple[TaskRef, ...]:
        with authored(f"{suite}.tasks"):
            return tuple(task.ref for task in self.suite(suite).select(split, level))

    async def open(self, task: TaskRef, visit: int, member: int, retry: int, deadline_s: float) -> EpisodeRunner:
        suite = self.suite(task.suite)
        session_id = f"{task.id}:{visit}:{member}:{retry}:{os.getpid()}-{next(self._numbers)}"
        try:
            async with asyncio.timeout(deadline_s):
                shared = await self.shared(suite.environment)
                self._say(f"in {suite.environment.__name__}.__init__ or its tasks, task {task.id}")
                with authored(f"{suite.name}.tasks or {suite.environment.__name__}"):
                    environment = suite.environment(suite.task(task), shared)
                return await EpisodeRunner.open(environment, session_id=session_id, note=self.note)
        except TimeoutError:
            raise EnvironmentUnavailable("setup", f"{session_id} did not start within {deadline_s:g} s") from None
        except EnvironmentUnavailable:
            raise
        except Exception as error:  # author's code (tasks, __init__), or a suite that changed
            raise EnvironmentUnavailable("setup", f"{type(error).__name__}: {error}") from error

    async def shared(self, environment: type[Environment]) -> Any:
        """The environment's shared value, opened on first use. Raises: EnvironmentUnavailable(setup)."""
        shared = self._shared.get(environment)
        if shared is None or shared.failed:
            self._say(f"in {environment.__name__}.shared")
            shared = self._shared[environment] = _Shared(environment)
        return await shared.value()


class _Shared:
    """One environment class's shared resource, held open by a task of its own."""

    def __init__(self, environment: type[Environment]) -> None:
        self._name = environment.__name__
        self._leave = asyncio.Event()
        self._opened: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._keeper = asyncio.create_task(self._keep(environment))

    @property
    def failed(self) -> bool:
        return self._opened.done() and self._opened.exception() is not None

    async def value(self) -> Any:
        return await asyncio.shield(self._opened)

    async def close(self) -> None:
        self._leave.set()
        await self._keeper

    async def _keep(self, environment: type[Environment]) -> None:
        try:
            with authored(f"{self._name}.shared"):
                async with environment.shared() as value:
                    self._opened.set_result(value)
                    await self._leave.wait()
        except Exception as error:  # author's code: any failure is the environment's
            if self._opened.done():
                raise
            detail = f"{self._name}.shared: {type(error).__name__}: {error}"
            self._opened.set_exception(EnvironmentUnavailable("setup", detail))
            self._opened.exception()  # marked as seen: its caller may have left meanwhile
