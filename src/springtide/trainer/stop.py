"""Ctrl-C and SIGTERM: the optimiser step under way is finished, what was learned is saved, and the run ends.

Owns: the two signals while the training loop runs. Invariants: after `_STOP_S`, or when asked again, the run ends at
once and as it stands (its newest checkpoint is whole in any case); a checkpoint never holds half a step; the signals'
handlers are afterwards what they were.
Called by: `springtide.api.train`.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from springtide.trainer.driver import Driver

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_STOP_S = 8.0  # a step and a checkpoint of the quickstart take two or three seconds


class Stop:
    """`asked`: whether a signal came while the block of `on_signals` ran. The block then ends with CancelledError."""

    def __init__(self) -> None:
        self.asked = False

    @contextlib.asynccontextmanager
    async def on_signals(self, driver: Driver) -> AsyncIterator[None]:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        timers: list[asyncio.TimerHandle] = []

        def ask() -> None:
            if self.asked:
                task.cancel()
                return
            self.asked = True
            driver.metrics.doing(f"stopping: a checkpoint within {_STOP_S:g} s; Ctrl-C again ends at once")
            timers.append(loop.call_later(_STOP_S, task.cancel))
            driver.stop(task.cancel)

        with _handled(loop, ask):
            try:
                yield
            except asyncio.CancelledError:
                if self.asked:
                    task.uncancel()
                    await driver.save_stopped()
                raise
            finally:
                for timer in timers:
                    timer.cancel()


@contextlib.contextmanager
def _handled(loop: asyncio.AbstractEventLoop, ask: Callable[[], None]) -> Iterator[None]:
    """`ask` is called on the signals, as far as they are ours to take: in the main thread, and not where ignored."""
    ours = _SIGNALS if threading.current_thread() is threading.main_thread() else ()
    before: dict[signal.Signals, Any] = {s: signal.getsignal(s) for s in ours}
    before = {s: handler for s, handler in before.items() if handler not in (signal.SIG_IGN, None)}
    for number in before:
        loop.add_signal_handler(number, ask)
    try:
        yield
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)
