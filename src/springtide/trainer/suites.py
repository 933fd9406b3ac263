"""What the suites of a run or an evaluation are called, asked of a child process before anything else starts.

Owns: how long an author's import and `tasks` may take, and what is said when they do not return. Invariants: no
author's code runs in the driver, which it could hold or end; whatever it does, the answer is one line in time that
names the suite and a remedy.
Called by: `trainer.start`, `springtide.api`; the child runs `main`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

from springtide.env.guard import authored
from springtide.env.local import BLOCK_S
from springtide.env.registry import load_suite
from springtide.env.suite import SuiteError
from springtide.process import Process, scratch_directory, start_process
from springtide.wire import ConnectionLost, DeadlineExceeded, Peer, RemoteError, serve

if TYPE_CHECKING:  # the child needs no configuration
    from springtide.config import SuiteEntry


async def name_suites(entries: Sequence[SuiteEntry], *, import_s: float, tasks_s: float = BLOCK_S) -> list[str]:
    """The name of each suite, once its tasks of the entry's split and level are known. Raises: SuiteError.

    The deadlines are an environment worker's: it starts within `runtime.start_s`, and one that is blocked for longer
    than `tasks_s` is ended.
    """
    names = []
    async with _child() as child:
        for entry in entries:
            names.append(await _ask(child, entry.use, "its import", import_s, "name"))
            which = {"split": entry.split, "level": entry.level}
            shown = ", ".join(repr(value) for value in which.values() if value is not None)
            await _ask(child, entry.use, f"tasks({shown})", tasks_s, "tasks", **which)
    return names


async def find_level(use: str, *, import_s: float) -> str:
    """The level of a suite where none is named. Raises: SuiteError."""
    async with _child() as child:
        return str(await _ask(child, use, "its import", import_s, "level"))


@contextlib.asynccontextmanager
async def _child() -> AsyncIterator[Process]:
    with scratch_directory("springtide-suites-") as directory:
        log = directory / "log"
        async with start_process("suites", "springtide.trainer.suites:main", {}, log_path=log) as child:
            yield child


async def _ask(child: Process, use: str, what: str, deadline_s: float, method: str, **payload: Any) -> Any:
    remedy = f"try `springtide doctor env {use}`"
    try:
        return await child.client.call(method, deadline_s=deadline_s, use=use, **payload)
    except DeadlineExceeded:
        child.kill()  # it cannot be asked to leave
        lazy = "make a task when it is asked for (springtide.env.TaskList does)" if method == "tasks" else remedy
        raise SuiteError(f"suite {use}: {what} did not return within {deadline_s:g} s; {lazy}") from None
    except ConnectionLost:
        await child.exited.wait()
        raise SuiteError(f"suite {use}: {what} ended its process with status {child.returncode}; {remedy}") from None
    except RemoteError as error:
        if error.kind == SuiteError.__name__:
            raise SuiteError(error.message) from None
        text = " ".join(error.message.split())
        raise SuiteError(f"suite {use}: {what} raised {error.kind}: {text}; {remedy}") from None


# --- in the child ----------------------------------------------------------------------------------------------------


async def main(socket_path: str, args: dict[str, Any]) -> None:
    """Answer `name`, `level` (the default one) and `tasks` (how many there are) of a suite until cancelled."""

    async def handle(peer: Peer, method: str, payload: dict[str, Any]) -> Any:
        use = payload["use"]
        with authored(use):
            suite = load_suite(use)  # imported once: a second call finds it
            if method == "tasks":
                return len(suite.select(payload["split"], payload["level"]))
            return suite.name if method == "name" else suite.default_level

    async with serve(socket_path, handle):
        await asyncio.Event().wait()
