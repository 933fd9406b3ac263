"""Trainer ranks for tests: real processes, started once, that are made into one world after another."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from springtide.process import scratch_directory
from springtide.runtime.ranks import Rank, keep_alive
from springtide.runtime.world import World

_MEETINGS = itertools.count()


class Processes:
    """Trainer processes that wait for `init`; `world` makes some of them one."""

    def __init__(self, ranks: list[Rank], loop: asyncio.AbstractEventLoop, directory: Path) -> None:
        self.ranks, self._loop, self._directory = ranks, loop, directory

    def world(self, size: int, model: Path, config: dict[str, Any], **more: Any) -> Live:
        """The first `size` processes with the model, each with its own place in the world."""
        meet = f"file://{self._directory}/meet-{next(_MEETINGS)}"
        live = Live(World(self.ranks[:size]), self._loop)

        async def start() -> tuple[Any, ...]:
            return await asyncio.gather(
                *(
                    rank.call(
                        "init",
                        deadline_s=60,
                        config=config,
                        model=str(model),
                        world={"rank": i, "size": size, "meet": meet},
                        **more,
                    )
                    for i, rank in enumerate(self.ranks[:size])
                )
            )

        live.started = live.wait(start())
        return live


class Live:
    """A world, called from the test's thread."""

    started: tuple[Any, ...]

    def __init__(self, world: World, loop: asyncio.AbstractEventLoop) -> None:
        self.world, self.loop = world, loop

    def wait(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(45)

    def __call__(self, method: str, **payload: Any) -> Any:
        return self.wait(self.world.call(method, deadline_s=60, **payload))


@contextlib.contextmanager
def processes(count: int, logs: Path) -> Iterator[Processes]:
    """`count` trainer processes, until the block ends."""
    loop = asyncio.new_event_loop()
    up, over = threading.Event(), asyncio.Event()
    failed: list[BaseException] = []
    with scratch_directory() as sockets:
        ranks = [
            Rank(
                f"trainer-{i}", "springtide.trainer.rank:main", {}, log_dir=logs, socket_path=f"{sockets}/{i}",
                start_s=120.0, restart=False, silent_s=60.0,
            )
            for i in range(count)
        ]  # fmt: skip

        async def live() -> None:
            try:
                async with keep_alive(ranks):
                    up.set()
                    await over.wait()
            except BaseException as error:
                failed.append(error)
            finally:
                up.set()

        thread = threading.Thread(target=loop.run_until_complete, args=(live(),))
        thread.start()
        up.wait()
        try:
            if failed:
                raise failed[0]
            yield Processes(ranks, loop, sockets)
        finally:
            loop.call_soon_threadsafe(over.set)
            thread.join()
            loop.close()
