"""Supervised child processes: started with a clean interpreter, reached over a socket, dead with their parent.

Owns: a child's whole life (`start_process` is a context). Invariants: a child whose parent died, however it died,
exits within a second, also a stopped one (a line leads from each to its parent, and ends with it; the kernel wakes
those that are stopped); a child that is watched answers on that line from a thread of its own, whatever its event loop
does, or is killed; what a child prints goes to its log file; leaving the context terminates the child, then kills it;
a directory of `scratch_directory` goes with the process that made it, also when that is killed.
Called by: the driver for its ranks and workers, the local environment runner, the engines' supervisors.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Protocol

from springtide.wire import Client, ConnectionLost, DeadlineExceeded, path_of

Main = Callable[[str, dict[str, Any]], Awaitable[None]]
SILENT_S = 60.0  # a rank that answers no ping for this long is killed, and has crashed
CONTROL_S = 2 * SILENT_S  # deadline of a short call to a rank: one that is silent is killed before, which says more
_TERMINATE_S = 5.0  # a child gets this long to leave in good order before it is killed
_PING_S = 1.0  # from an answer to the next ping
_LOOKS = 10  # at a silent child, before it is killed: that we ourselves were stopped for an hour is one of them
_PINGS = 4096  # bytes, one a ping: many may be unanswered
# Waits for its input's end, which the death of its parent is, however it came; what still writes has ended before the
# second time.
_SWEEP = 'read -r _; rm -rf -- "$1"; sleep 2; rm -rf -- "$1"'
_COMPUTING = 0.1  # of a look, counted where a thread computes or waits for a disk: it may hold the interpreter's lock


class ProcessFailed(Exception):
    """A child did not start, or ended by itself. The text holds its exit status and the end of its log.

    killed: it got SIGKILL (from us for its silence, from the kernel for its memory), which says nothing of the program.
    final: to start it again would not help.
    """

    def __init__(self, text: str, *, killed: bool = False, final: bool = False) -> None:
        super().__init__(text)
        self.killed, self.final = killed, final


class Supervised(Protocol):
    """A program that runs under supervision somewhere: here as a `Process`, or on a node of a cluster."""

    name: str
    log_path: Path
    client: Client
    exited: asyncio.Event

    @property
    def pid(self) -> int: ...

    @property
    def silence_s(self) -> float: ...

    def kill(self) -> None: ...

    def failure(self, when: str = "") -> ProcessFailed: ...


class Launcher(Protocol):
    """Starts a program; `start_process` says what each argument means, and is the launcher of this machine."""

    def __call__(
        self,
        name: str,
        entry: str,
        args: dict[str, Any],
        *,
        log_path: Path,
        socket_path: str | None = None,
        deadline_s: float = 120.0,
        silent_s: float | None = None,
        python: str | None = None,
    ) -> AbstractAsyncContextManager[Supervised]: ...


@contextlib.contextmanager
def scratch_directory(prefix: str = "springtide-", parent: Path | None = None) -> Iterator[Path]:
    """A new directory that goes when the block ends, or with this process, whatever ends it."""
    path = tempfile.mkdtemp(prefix=prefix, dir=parent)
    try:
        sweeper = start_sweeper(_SWEEP, path)
        try:
            yield Path(path)
        finally:
            sweeper.kill()
            assert sweeper.stdin is not None
            sweeper.stdin.close()
            sweeper.wait()
    finally:
        shutil.rmtree(path, ignore_errors=True)


def start_sweeper(script: str, *args: str) -> subprocess.Popen[bytes]:
    """A shell that runs `script` with `args` in a session of its own; its input ends with this process, if not before.

    Its environment is bare: by theirs a dead Ray's processes are found.
    """
    return subprocess.Popen(
        ["/bin/sh", "-c", script, "springtide-sweeper", *args],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # what is sent to a terminal's programs or to our group is not meant for it
        env={"PATH": os.environ.get("PATH", os.defpath)},
    )


def root_cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The exception to show of a task group's: a process that failed explains the connections that were lost."""
    leaves: list[BaseException] = []

    def collect(error: BaseException) -> None:
        if isinstance(error, BaseExceptionGroup):
            for inner in error.exceptions:
                collect(inner)
        else:
            leaves.append(error)

    collect(group)
    return next((e for e in leaves if isinstance(e, ProcessFailed)), leaves[0])


@contextlib.asynccontextmanager
async def task_group() -> AsyncIterator[asyncio.TaskGroup]:
    """A TaskGroup that raises its root cause instead of an exception group."""
    try:
        async with asyncio.TaskGroup() as tasks:
            yield tasks
    except BaseExceptionGroup as group:
        raise root_cause(group) from None


class Process:
    """A running child: `client` calls it once it listens, `exited` is set when it ends, `pid` is its process id."""

    client: Client

    def __init__(self, name: str, process: asyncio.subprocess.Process, log_path: Path, line: socket.socket) -> None:
        self.name, self._process, self.log_path, self._line = name, process, log_path, line
        self._answered = time.monotonic()
        self._killed_after: float | None = None  # seconds of silence
        self.exited = asyncio.Event()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    def kill(self) -> None:
        """SIGKILL the child and everything it started in its process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    @property
    def silence_s(self) -> float:
        """How long ago it answered last, where it is watched."""
        return time.monotonic() - self._answered

    async def kill_if_silent(self, bound_s: float) -> None:
        """Ping it for as long as it lives, and kill it once it has answered nothing for `bound_s`."""
        loop, look_s, silent_s = asyncio.get_running_loop(), bound_s / _LOOKS, 0.0
        with contextlib.suppress(ConnectionError):  # it has ended
            while silent_s < bound_s:
                try:
                    async with asyncio.timeout(look_s):
                        await loop.sock_sendall(self._line, b"?")
                        if not await loop.sock_recv(self._line, _PINGS):
                            return
                except TimeoutError:
                    silent_s += look_s * (_COMPUTING if _computes(self.pid) else 1.0)
                    continue
                self._answered, silent_s = time.monotonic(), 0.0
                await asyncio.sleep(min(_PING_S, look_s))
            self._killed_after = bound_s
            self.kill()

    def ending(self) -> str:
        """How the child ended, as one line."""
        if self._killed_after is not None:
            return f"{self.name} answered nothing for {self._killed_after:g} s and was killed"
        return f"{self.name} ended with status {self.returncode}"

    def failure(self, when: str = "") -> ProcessFailed:
        """The error to raise when the child ended by itself."""
        return ProcessFailed(
            f"{self.ending()}{when}; {log_tail(self.log_path)}", killed=self.returncode == -signal.SIGKILL
        )


@contextlib.asynccontextmanager
async def start_process(
    name: str,
    entry: str,
    args: dict[str, Any],
    *,
    log_path: Path,
    socket_path: str | None = None,
    deadline_s: float = 120.0,
    silent_s: float | None = None,
    python: str | None = None,
) -> AsyncIterator[Process]:
    """Run `entry` ("package.module:function") in a child and connect to it.

    The function is `async def main(socket_path: str, args: dict)`: it serves `socket_path` with `wire.serve` and
    returns or is cancelled to end. `args` must be JSON. `socket_path` (default: a fresh one) lets a restarted child be
    found where its predecessor was. `silent_s`: once it answers no ping for this long, also as it starts, it is killed.
    `python`: the interpreter of a virtual environment that holds what `entry` needs, if not ours.
    Raises: ProcessFailed if it does not listen in `deadline_s`, or `python` is not there.
    """
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as held:
        log_file = held.enter_context(open(log_path, "ab"))
        socket_path = socket_path or f"{held.enter_context(scratch_directory())}/s"
        Path(path_of(socket_path)).unlink(missing_ok=True)
        if python is not None and shutil.which(python) is None:
            raise ProcessFailed(f"{name}: there is no interpreter {python}; make its virtual environment", final=True)
        line, childs_end = socket.socketpair()
        held.enter_context(line).setblocking(False)
        with childs_end:
            child = await asyncio.create_subprocess_exec(
                python or sys.executable,
                "-m",
                "springtide.process",
                str(childs_end.fileno()),
                stdin=asyncio.subprocess.PIPE,
                stdout=log_file,
                stderr=asyncio.subprocess.STDOUT,
                pass_fds=(childs_end.fileno(),),
                start_new_session=True,
                # One thread a process: threads that spin for each other are far slower on shared cores.
                env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
            )
        process = Process(name, child, log_path, line)
        pings = asyncio.create_task(process.kill_if_silent(silent_s)) if silent_s is not None else None
        client: Client | None = None

        async def watch() -> None:
            await child.wait()
            process.exited.set()

        watcher = asyncio.create_task(watch())
        try:
            assert child.stdin is not None
            child.stdin.write(json.dumps({"name": name, "entry": entry, "socket": socket_path, "args": args}).encode())
            with contextlib.suppress(ConnectionError):
                await child.stdin.drain()
            child.stdin.close()
            process.client = client = await connect(process, path_of(socket_path), deadline_s)
            yield process
        finally:
            if pings is not None:
                pings.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await pings
            await _end(child)
            if client is not None:
                await client.close()
            await watcher


async def connect(process: Supervised, path: str, deadline_s: float) -> Client:
    """Reach a program that was started. Raises: ProcessFailed if it ends first, or does not listen in `deadline_s`."""
    waiter = asyncio.create_task(process.exited.wait())
    opener = asyncio.create_task(Client.open(path, name=process.name, deadline_s=deadline_s))
    try:
        await asyncio.wait({waiter, opener}, return_when=asyncio.FIRST_COMPLETED)
        if opener.done() and not opener.exception():
            return opener.result()
        if waiter.done():
            raise process.failure(" while starting")
        raise ProcessFailed(f"{opener.exception()}; {log_tail(process.log_path)}")
    finally:
        for task in (waiter, opener):
            if not task.done():
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, ConnectionLost, DeadlineExceeded):
                    await task


async def _end(child: asyncio.subprocess.Process) -> None:
    if child.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            child.terminate()
        try:
            async with asyncio.timeout(_TERMINATE_S):
                await child.wait()
        except TimeoutError:
            pass
    with contextlib.suppress(ProcessLookupError):  # also what the child itself left in its group
        os.killpg(child.pid, signal.SIGKILL)
    await child.wait()


def log_tail(path: Path, lines: int = 12) -> str:
    """The end of a log, for an error's text."""
    try:
        text = path.read_text(errors="replace").strip().splitlines()[-lines:]
    except OSError:
        return "no log"
    return f"the end of {path}:\n  " + "\n  ".join(text) if text else f"{path} is empty"


def _computes(pid: int) -> bool:
    """Whether a thread of the process runs or waits for a disk: none does in one that is stopped or deadlocked."""
    with contextlib.suppress(OSError):  # it has ended; or there is no /proc, and silence is all we know
        for thread in Path(f"/proc/{pid}/task").iterdir():
            if (thread / "stat").read_text().rpartition(") ")[2][0] in "RD":
                return True
    return False


def _child() -> None:
    line = socket.socket(fileno=int(sys.argv[1]))
    line.set_inheritable(False)
    _wake_when_the_parent_dies()

    def answer_until_the_parent_dies() -> None:
        with contextlib.suppress(ConnectionError):
            while pings := line.recv(_PINGS):
                line.sendall(pings)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=answer_until_the_parent_dies, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's to handle
    spec = json.loads(sys.stdin.buffer.read())
    module, _, function = spec["entry"].partition(":")
    main: Main = getattr(importlib.import_module(module), function)

    async def run() -> None:
        task = asyncio.ensure_future(main(spec["socket"], spec["args"]))
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(run())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads of a hung tool must not keep the process


def _wake_when_the_parent_dies() -> None:
    """A stopped process cannot see that its parent is gone: let the kernel continue it, and its own thread ends it.

    Not SIGKILL at once: the kernel would kill this process alone, and what it has started would stay.
    """
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, ctypes.c_ulong(signal.SIGCONT))


if __name__ == "__main__":
    _child()
