"""Running an author's code so that neither its exceptions, its exits nor its hanging reach the worker.

Invariants: `guarded` returns or raises within its deadline plus `_LEAVE_S`, whatever the code does short of blocking
the event loop; plain functions run in a thread of their own, so a slow one delays no other episode; only an `Exception`
comes out of the author's code, so that a CancelledError is always our own cancellation.
Limit: Python threads share one interpreter lock. A thread that sleeps or waits costs others nothing; one that computes
in Python costs every other thread up to one switch interval each time it wants to run; one that computes inside a C
call holding the lock (a huge regular expression, say) stops the whole process. Give such an environment
`Requires(isolated=True)`.
Called by: `env.runner` (calls with a deadline), `env.inprocess` and the checker (what runs in place).
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator
from typing import Any

_LEAVE_S = 1.0  # an async function gets this long to unwind once its deadline has passed


class HungCall(Exception):
    """The code was still running when its deadline passed, and cannot be stopped."""


@contextlib.contextmanager
def authored(what: str) -> Iterator[None]:
    """Author's code that is run in place: what is no `Exception` becomes RuntimeError, but for our own cancellation.

    An exit would end the worker with every episode in it; a CancelledError of the author's would pass for ours, and
    whoever waits would wait for ever.
    """
    try:
        yield
    except BaseException as error:
        task = asyncio.current_task()
        ours = isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0
        if isinstance(error, Exception) or ours:
            raise
        raise RuntimeError(f"{what} raised {error!r}") from error


async def guarded(what: str, function: Callable[[], Any], seconds: float, *, threaded: bool) -> Any:
    """Run `function` (awaited, or in a thread) for at most `seconds`.

    Raises: what it raises (RuntimeError for what is no `Exception`); TimeoutError when it was stopped at the deadline;
    HungCall when it could not be stopped.
    """
    late = f"{what} did not end within its deadline of {max(seconds, 0):.3g} s"
    work = asyncio.ensure_future(_threaded(what, function) if threaded else _awaited(what, function))
    try:
        await asyncio.wait({work}, timeout=max(seconds, 0))
        if work.done():
            with authored(what):  # nobody has cancelled the work: a CancelledError in it is the author's
                return work.result()
        work.cancel()
        if threaded:
            raise HungCall(late + " and still runs")
        await asyncio.wait({work}, timeout=_LEAVE_S)
        if not work.done():
            raise HungCall(late + " and ignores cancellation")
        if not work.cancelled():
            work.exception()  # seen: what it raised on its way out does not matter any more
        raise TimeoutError(late)
    except asyncio.CancelledError:
        work.cancel()
        await asyncio.wait({work}, timeout=_LEAVE_S)
        raise


async def _awaited(what: str, function: Callable[[], Any]) -> Any:
    try:
        return await function()
    except (SystemExit, KeyboardInterrupt) as error:  # would end the worker, and every other episode in it
        raise RuntimeError(f"{what} raised {error!r}") from error


async def _threaded(what: str, function: Callable[[], Any]) -> Any:
    loop = asyncio.get_running_loop()
    done: asyncio.Future[tuple[bool, Any]] = loop.create_future()
    context = contextvars.copy_context()

    def deliver(result: tuple[bool, Any]) -> None:
        if not done.done():
            done.set_result(result)

    def run() -> None:
        try:
            result = (True, context.run(function))
        except BaseException as error:  # carried to the caller, exits included
            result = (False, error)
        with contextlib.suppress(RuntimeError):  # the loop has closed: nobody waits any more
            loop.call_soon_threadsafe(deliver, result)

    # A thread a call, not a pool: hung calls would fill a pool and then stop every other episode.
    threading.Thread(target=run, name=what, daemon=True).start()
    ok, value = await done
    if ok:
        return value
    if isinstance(value, SystemExit | KeyboardInterrupt | StopIteration):  # no task may end with one of these
        raise RuntimeError(f"{what} raised {value!r}") from value
    raise value
