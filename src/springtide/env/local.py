"""Environments in worker processes of this machine: `LocalRunner` supervises them, `LocalClient` opens sessions.

Owns: the workers' lives and their addresses. Invariants: an address is a stable path (a symbolic link to the socket of
the worker now in that place), so a client finds a replaced worker without being told; a worker that dies takes only its
own sessions with it (`worker_lost`); one that asks to be replaced goes on serving its sessions beside its successor
until they end or `drain_s` passes; a worker that cannot start again stops the run with the reason.
Called by: the driver (`LocalRunner`), rollout workers (`LocalClient`), the checker and tests (both).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from springtide.env.remote import RemoteSession, open_remote, unavailable
from springtide.env.session import EnvironmentUnavailable
from springtide.process import (
    SILENT_S,
    Launcher,
    ProcessFailed,
    Supervised,
    root_cause,
    scratch_directory,
    start_process,
)
from springtide.trace import TaskRef
from springtide.wire import Client, ConnectionLost, DeadlineExceeded, RemoteError

log = logging.getLogger(__name__)

LEASE_S = 60.0
BLOCK_S = 60.0  # an event loop that has not turned for this long is stuck in someone's code
_DRAIN_S = 300.0
_PING_S = 0.25  # how soon a worker's wish to be replaced is seen; a death is seen at once
# An answer may be this late: a worker's own deadlines come first, and one that is stopped or stuck is killed before, so
# that its sessions are lost with it and nothing that is late is the environment's fault.
_GRACE_S = max(SILENT_S, BLOCK_S) + 15.0
_START_FAILURES = 4  # in a row; then the run stops, for nothing will mend itself
_CATALOG_S = 300.0
_CONNECT_S = 0.5  # then the address is read anew: its worker may have been replaced
_PROOF_S = 5.0
_RENEW_S = 10.0  # a worker that does not answer must not cost the sessions of others their leases
_LOST = (ConnectionLost, DeadlineExceeded, RemoteError)


class LocalRunner:
    """`workers` processes that play `suites` (names or FILE.py:Class). Use it as `async with`.

    launch, directory: how each is started, and where its address lies (default: here, and a directory of its own).
    `addresses` are what clients are given. Raises: ProcessFailed, on entry if a worker does not start, and in the
    block (whose task is cancelled) if one cannot be started again.
    """

    def __init__(
        self,
        suites: Sequence[str],
        workers: int,
        log_dir: Path,
        *,
        lease_s: float = LEASE_S,
        block_s: float = BLOCK_S,
        start_s: float = 120.0,
        silent_s: float = SILENT_S,
        launch: Launcher = start_process,
        directory: Path | None = None,
    ) -> None:
        self._args = {"suites": list(suites), "lease_s": lease_s, "block_s": block_s, "log_dir": str(log_dir)}
        self._workers, self._log_dir, self._launch, self._directory = workers, log_dir, launch, directory
        self._block_s, self._start_s, self._silent_s = block_s, start_s, silent_s
        self._counts: Counter[str] = Counter()
        self._running: dict[Supervised, Counter[str]] = {}
        self._held = contextlib.ExitStack()
        self.addresses: tuple[str, ...] = ()

    @property
    def counts(self) -> dict[str, int]:
        """Events since the start over all workers, ended ones included, as of the last ping.

        `opened`, episodes by status (`environment_error_<cause>` for errors), `unavailable_<cause>` for starts that
        failed, `hung`, `expired` leases, `abandoned` by a client that went away; of workers: `lost`, `blocked`,
        `replaced`.
        """
        return dict(sum(self._running.values(), self._counts.copy()))

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the running workers, draining ones included."""
        return tuple(process.pid for process in self._running)

    async def __aenter__(self) -> LocalRunner:
        loop = asyncio.get_running_loop()
        self._entered_by, self._interrupted = asyncio.current_task(), False
        directory = self._directory or self._held.enter_context(scratch_directory("springtide-env-"))
        self.addresses = tuple(f"{directory}/w{i}" for i in range(self._workers))
        started: list[asyncio.Future[None]] = [loop.create_future() for _ in self.addresses]
        self._task = asyncio.create_task(self._supervise_all(started))
        try:
            all_started: asyncio.Future[Any] = asyncio.gather(*started)
            await asyncio.wait((self._task, all_started), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            await self._stop()
            raise
        if self._task.done():
            await self._stop()
        self._task.add_done_callback(self._interrupt)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None):
        self._task.remove_done_callback(self._interrupt)
        await self._stop()

    def _interrupt(self, task: asyncio.Task[None]) -> None:
        assert self._entered_by is not None
        self._interrupted = True
        self._entered_by.cancel(f"environment workers: {task.exception()}")

    async def _stop(self) -> None:
        """End every worker. Raises: ProcessFailed if supervision had failed."""
        self._task.cancel()
        try:
            await self._task
        except asyncio.CancelledError:
            pass
        except BaseExceptionGroup as group:
            if self._interrupted and self._entered_by is not None:
                self._entered_by.uncancel()
            raise root_cause(group) from None
        finally:
            self._held.close()

    async def _supervise_all(self, started: list[asyncio.Future[None]]) -> None:
        async with asyncio.TaskGroup() as tasks:
            for address, future in zip(self.addresses, started, strict=True):
                tasks.create_task(self._supervise(address, future, tasks))

    async def _supervise(self, address: str, started: asyncio.Future[None], tasks: asyncio.TaskGroup) -> None:
        """Keep a worker behind `address`, one life after another."""
        failures, number = 0, 0
        previous: _Life | None = None
        while True:
            life = _Life(address, number)
            number += 1
            tasks.create_task(self._live(life))
            try:
                await life.up
            except ProcessFailed as error:
                failures += 1
                if error.final or not (started.done() or error.killed) or failures == _START_FAILURES:
                    raise
                log.warning("an environment worker did not start (%d in a row): %s", failures, error)
                await asyncio.sleep(0.1 * 2**failures)
                continue
            failures = 0
            if previous is not None:
                previous.succeeded = True
            elif not started.done():
                started.set_result(None)
            previous = life
            await life.over.wait()

    async def _live(self, life: _Life) -> None:
        """One worker from start to end."""
        name = f"env-{Path(life.address).name}"
        try:
            async with self._launch(
                name,
                "springtide.env.worker:main",
                self._args,
                log_path=self._log_dir / f"{name}.log",
                socket_path=life.socket,
                deadline_s=self._start_s,
                silent_s=self._silent_s,
            ) as process:
                self._running[process] = Counter()
                life.take_address()
                try:
                    await self._watch(process, life)
                finally:
                    life.over.set()
                    self._counts += self._running.pop(process)
        except ProcessFailed as error:
            life.up.set_exception(error)

    async def _watch(self, process: Supervised, life: _Life) -> None:
        """Return when the worker ended, or was replaced and has nothing left to do."""
        drain_until = 0.0
        while not process.exited.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_PING_S):
                    await process.exited.wait()
            try:
                state = await process.client.call("ping", deadline_s=self._block_s + _GRACE_S)
                self._running[process] = Counter(state["counts"])
                if state["replace"] and not life.over.is_set():
                    log.warning("%s is being replaced: %s", process.name, state["replace"])
                    self._counts["replaced"] += 1
                    life.over.set()
                if life.succeeded:
                    if not drain_until:
                        drain_until = time.monotonic() + _DRAIN_S
                        await process.client.call("retire", deadline_s=_GRACE_S)
                    elif state["sessions"] == 0 or time.monotonic() > drain_until:
                        return
            except ConnectionLost:
                break
            except DeadlineExceeded:  # its own watchdog should have ended it: it is stopped or starved
                self._counts["blocked"] += 1
                process.kill()
        await process.exited.wait()
        self._counts["lost"] += 1
        log.warning("lost an environment worker: %s", process.failure())


class _Life:
    """One worker process in a place: up, then over (ended, or to be replaced), then succeeded by the next."""

    def __init__(self, address: str, number: int) -> None:
        self.address, self.socket = address, f"{address}.{number}"
        self.up: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.over = asyncio.Event()
        self.succeeded = False

    def take_address(self) -> None:
        """Let clients find this worker from now on."""
        link = f"{self.socket}.link"
        os.symlink(self.socket, link)
        os.replace(link, self.address)
        self.up.set_result(None)


class LocalClient:
    """An `EnvClient` over the workers at `addresses`. Use it as `async with`.

    A new session goes to the worker that holds the fewest of this client's. Leases are renewed here for as long as the
    session object exists and is not closed; one that is forgotten runs out.
    """

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = tuple(addresses)
        self._current: dict[str, tuple[str, Client]] = {}
        self._clients: list[Client] = []
        self._connecting = {address: asyncio.Lock() for address in addresses}
        self._sessions: dict[str, weakref.WeakSet[RemoteSession]] = {a: weakref.WeakSet() for a in addresses}
        self._renewals: asyncio.Task[None] | None = None
        self._renew_s = LEASE_S / 3

    async def __aenter__(self) -> LocalClient:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None):
        if self._renewals is not None:
            self._renewals.cancel()
            await asyncio.gather(self._renewals, return_exceptions=True)
        for client in self._clients:
            await client.close()

    async def catalog(self, suite: str, split: str, level: str | None) -> tuple[TaskRef, ...]:
        """See `EnvClient.catalog`. Raises: EnvironmentUnavailable; SuiteError's text for what the suite lacks."""
        client, _ = await self._any(time.monotonic() + _CATALOG_S)
        try:
            return await client.call("catalog", deadline_s=_CATALOG_S, suite=suite, split=split, level=level)
        except _LOST as error:
            raise unavailable(error, late="infrastructure") from error

    async def open(self, task: TaskRef, visit: int, member: int, retry: int, deadline_s: float) -> RemoteSession:
        """See `EnvClient.open`."""
        until = time.monotonic() + deadline_s
        while True:
            client, address = await self._any(until)
            left = max(until - time.monotonic(), 0.0)
            try:
                session = await open_remote(client, task, visit, member, retry, left, grace_s=_GRACE_S)
            except _LOST as error:
                if isinstance(error, RemoteError) and error.kind == "Retired" and left > 0:
                    await asyncio.sleep(_CONNECT_S / 10)  # its successor has the address by now
                    continue
                raise unavailable(error, late="setup") from error
            self._sessions[address].add(session)
            self._renew_s = min(self._renew_s, session.lease_s / 3)
            if self._renewals is None:
                self._renewals = asyncio.create_task(self._renew())
            return session

    async def _any(self, until: float) -> tuple[Client, str]:
        """A connection to the least busy worker that answers. Raises: EnvironmentUnavailable(worker_lost) in time."""
        while True:
            for address in sorted(self._addresses, key=self._load):
                client = await self._connect(address)
                if client is not None:
                    return client, address
            if time.monotonic() > until:
                where = ", ".join(self._addresses)
                raise EnvironmentUnavailable("worker_lost", f"no environment worker answers at {where}")
            await asyncio.sleep(0.05)

    def _load(self, address: str) -> int:
        return sum(not session.closed for session in self._sessions[address])

    async def _connect(self, address: str) -> Client | None:
        async with self._connecting[address]:
            try:
                target = os.readlink(address)
            except OSError:
                return None
            known, client = self._current.get(address, ("", None))
            if client is not None and known == target:
                if not client.lost.is_set():
                    return client
                await client.close()
                self._clients.remove(client)
                del self._current[address]
            try:
                client = await Client.open(target, name=f"environment worker {target}", deadline_s=_CONNECT_S)
            except DeadlineExceeded:
                return None
            try:  # a dying worker's socket still takes connections: see that somebody answers
                await client.call("ping", deadline_s=_PROOF_S)
            except _LOST:
                await client.close()
                return None
            self._current[address] = (target, client)
            self._clients.append(client)  # its predecessor may still hold sessions, and is closed with this client
            return client

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._renew_s)
            by_client: dict[Client, list[str]] = {}
            for sessions in self._sessions.values():
                for session in sessions:
                    if not session.closed:
                        by_client.setdefault(session.client, []).append(session.id)
            for client, ids in by_client.items():
                with contextlib.suppress(*_LOST):  # the sessions' own calls will tell
                    await client.call("renew_all", deadline_s=_RENEW_S, sessions=ids)
