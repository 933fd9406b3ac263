"""An environment worker process: `InProcessClient` behind a socket, with leases, draining and a watchdog.

Owns: the sessions of one process. Invariants: a session whose lease is not renewed, or whose client is gone, is closed
and counted; a process that holds a call that cannot be stopped, or has played `Requires.max_episodes`, asks to be
replaced and goes on serving until it is; a blocked event loop ends the process, with every thread's traceback in its
log; an isolated episode runs in a child of this process, and only that child dies with it.
Called by: `env.local.LocalRunner` (starts `main` through `springtide.process`), and itself for isolated episodes.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from springtide.env.guard import HungCall
from springtide.env.inprocess import InProcessClient
from springtide.env.remote import RemoteSession, open_remote, unavailable
from springtide.env.runner import EpisodeRunner
from springtide.env.session import EnvironmentUnavailable, FinishReason, Observation
from springtide.process import Process, ProcessFailed, start_process
from springtide.trace import Message, Outcome, TaskRef, ToolCall
from springtide.wire import ConnectionLost, DeadlineExceeded, Peer, RemoteError, serve

log = logging.getLogger(__name__)
T = TypeVar("T")

# A thread that computes in Python gives the interpreter lock up this often; the default of 5 ms would be the delay it
# adds to every other session's reply.
_SWITCH_S = 0.001


class UnknownSession(Exception):
    """No such session here: its lease ran out, or it was closed."""


class Retired(Exception):
    """This process takes no new sessions: a successor has its address."""


async def main(socket_path: str, args: dict[str, Any]) -> None:
    """Serve environments until cancelled. `args`: suites, lease_s, block_s, log_dir, alone (one isolated episode)."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    sys.setswitchinterval(_SWITCH_S)
    async with InProcessClient(args["suites"]) as client, asyncio.TaskGroup() as tasks:
        worker = _Worker(client, args, tasks)
        try:
            async with serve(socket_path, worker.handle, on_disconnect=worker.disconnected):
                tasks.create_task(worker.reap())
                await worker.beat()
        finally:
            await worker.close_all()


class _Held:
    """One session: who asked for it, how long it may be left alone, how many calls run on it."""

    def __init__(self, session: EpisodeRunner | _Isolated, peer: Peer) -> None:
        self.session, self.peer = session, peer
        self.expires, self.calls, self.counted = 0.0, 0, False


class _Worker:
    def __init__(self, client: InProcessClient, args: dict[str, Any], tasks: asyncio.TaskGroup) -> None:
        self._client, self._args, self._tasks = client, args, tasks
        self._lease_s: float = args["lease_s"]
        self._hung: set[str] = set()
        self._held: dict[str, _Held] = {}
        self._counts: Counter[str] = Counter()
        self._played: Counter[str] = Counter()
        self._replace: str | None = None  # why a successor should be started
        self._retired = False
        self._closing = False

    async def handle(self, peer: Peer, method: str, payload: dict[str, Any]) -> Any:
        if method == "ping":
            return {"sessions": len(self._held), "replace": self._replace, "counts": dict(self._counts)}
        if method == "retire":
            self._retired = True
            return None
        if method == "renew_all":
            for session_id in payload["sessions"]:
                if session_id in self._held:
                    self._renew(self._held[session_id])
            return None
        if method == "catalog":
            return await self._client.catalog(**payload)
        if method == "open":
            return await self._open(peer, **payload)
        return await self._on_session(method, **payload)

    async def _open(
        self, peer: Peer, task: TaskRef, visit: int, member: int, retry: int, start_deadline_s: float
    ) -> dict[str, Any]:
        if self._retired:
            raise Retired("retired")
        requires = self._client.suite(task.suite).environment.requires
        isolated = requires.isolated and not self._args.get("alone")
        session: EpisodeRunner | _Isolated
        try:
            if isolated:
                session = await _Isolated.open(self._args, task, visit, member, retry, start_deadline_s)
            else:
                session = await self._client.open(task, visit, member, retry, start_deadline_s)
        except EnvironmentUnavailable as error:
            if isinstance(error.__cause__, HungCall):
                self._note_hung(task.id)
            self._counts[f"unavailable_{error.cause}"] += 1
            raise
        finally:
            self._counts["opened"] += 1
            if not isolated:
                self._note_played(task.suite, requires.max_episodes)
        held = self._held[session.id] = _Held(session, peer)
        self._renew(held)
        return {
            "id": session.id,
            "messages": session.messages,
            "tools": session.tools,
            "max_turns": session.max_turns,
            "limits": session.limits,
            "lease_s": self._lease_s,
        }

    async def _on_session(self, method: str, session: str, **payload: Any) -> Any:
        held = self._held.get(session)
        if held is None:
            if method == "close":
                return None
            raise UnknownSession(f"no session {session} here: its lease of {self._lease_s:g} s ran out")
        if method == "close":
            return await self._drop(session)
        held.calls += 1
        try:
            if method == "act":
                return await held.session.act(payload["message"], payload["request_id"])
            if method == "finish":
                return self._count(held, await held.session.finish(payload["reason"]))
            if method == "gold":
                return await held.session.gold()
            if method == "renew":
                return None
            raise ValueError(f"unknown method {method}")
        finally:
            held.calls -= 1
            self._renew(held)
            self._look_for_hung(held.session)

    def _renew(self, held: _Held) -> None:
        held.expires = time.monotonic() + self._lease_s

    def _count(self, held: _Held, outcome: Outcome) -> Outcome:
        if not held.counted:
            self._counts[outcome.status if outcome.cause is None else f"environment_error_{outcome.cause}"] += 1
        held.counted = True
        return outcome

    async def _drop(self, session_id: str) -> None:
        held = self._held.pop(session_id, None)
        if held is not None:
            await held.session.close()
            self._look_for_hung(held.session)

    def _note_played(self, suite: str, at_most: int | None) -> None:
        self._played[suite] += 1
        if at_most is not None and self._played[suite] >= at_most:
            self._replace = self._replace or f"{suite} has played its {at_most} episodes here"

    def _look_for_hung(self, session: EpisodeRunner | _Isolated) -> None:
        if isinstance(session, EpisodeRunner) and session.hung and session.id not in self._hung:
            self._hung.add(session.id)
            self._note_hung(session.id)

    def _note_hung(self, what: str) -> None:
        log.warning("%s: a call does not end; this process asks to be replaced", what)
        self._counts["hung"] += 1
        self._replace = self._replace or f"{what} holds a call that does not end"

    def disconnected(self, peer: Peer) -> None:
        """A client went away: nobody will ever ask its sessions anything."""
        if self._closing:
            return
        for session_id in [key for key, held in self._held.items() if held.peer is peer]:
            self._counts["abandoned"] += 1
            self._tasks.create_task(self._drop(session_id))

    async def reap(self) -> None:
        """Close sessions whose lease ran out while nothing was asked of them."""
        while True:
            await asyncio.sleep(min(self._lease_s / 4, 1.0))
            now = time.monotonic()
            for session_id in [key for key, held in self._held.items() if held.calls == 0 and held.expires < now]:
                log.warning("%s: lease of %g s ran out", session_id, self._lease_s)
                self._counts["expired"] += 1
                await self._drop(session_id)

    async def beat(self) -> None:
        """Push the watchdog's moment back for as long as the event loop turns.

        The watchdog is a C thread that needs no interpreter lock: it also ends a process stuck inside a C call.
        """
        try:
            while True:
                faulthandler.dump_traceback_later(self._args["block_s"], exit=True)
                await asyncio.sleep(min(self._args["block_s"] / 4, 1.0))
        finally:
            faulthandler.cancel_dump_traceback_later()

    async def close_all(self) -> None:
        self._closing = True
        await asyncio.gather(*(self._drop(session_id) for session_id in list(self._held)))


_ISOLATED_GRACE_S = 2.0  # an isolated child answers this long after a deadline at the latest, or it is blocked


class _Isolated:
    """A session in a child process of its own, which is killed as soon as it is late."""

    def __init__(self, remote: RemoteSession, process: Process, stack: contextlib.AsyncExitStack) -> None:
        self._remote, self._process, self._stack = remote, process, stack
        self.id, self.messages, self.tools = remote.id, remote.messages, remote.tools
        self.max_turns, self.limits = remote.max_turns, remote.limits

    @classmethod
    async def open(
        cls, args: dict[str, Any], task: TaskRef, visit: int, member: int, retry: int, deadline_s: float
    ) -> _Isolated:
        name = f"isolated-{task.suite}-{os.getpid()}"
        until = time.monotonic() + deadline_s
        async with contextlib.AsyncExitStack() as stack:
            child = start_process(
                name,
                "springtide.env.worker:main",
                {**args, "alone": True},
                log_path=Path(args["log_dir"]) / f"{name}.log",
                deadline_s=deadline_s,
            )
            try:
                process = await stack.enter_async_context(child)
                stack.callback(process.kill)  # once its session is closed, it has nothing to put in order
                left = max(until - time.monotonic(), 0.0)
                remote = await open_remote(process.client, task, visit, member, retry, left, grace_s=_ISOLATED_GRACE_S)
            except ProcessFailed as error:
                raise EnvironmentUnavailable("setup", str(error)) from error
            except (ConnectionLost, DeadlineExceeded, RemoteError) as error:
                raise unavailable(error, late="setup") from error
            return cls(remote, process, stack.pop_all())

    async def act(self, message: Message, request_id: int) -> Observation:
        return await self._or_kill(self._remote.act(message, request_id))

    async def finish(self, reason: FinishReason) -> Outcome:
        return await self._or_kill(self._remote.finish(reason))

    async def gold(self) -> tuple[ToolCall, ...] | None:
        return await self._or_kill(self._remote.gold())

    async def close(self) -> None:
        await self._remote.close()
        await self._stack.aclose()

    async def _or_kill(self, call: Coroutine[Any, Any, T]) -> T:
        try:
            return await call
        except EnvironmentUnavailable:
            self._process.kill()
            raise
