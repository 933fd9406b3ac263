"""What runs on a node of a Ray cluster: an actor that supervises one rank's programs, and what a node says of itself.

Owns: the programs it started: they are children of the actor's process, watched by it as the local runtime watches its
own, and dead with it. Invariants: nothing but names, texts and figures passes Ray's calls; no torch is loaded here.
Called by: `runtime.ray`, by Ray's calls.
"""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import springtide
from springtide.process import Process, ProcessFailed, start_process


@dataclass(slots=True)
class _Running:
    """A program: `process` once it is up, `ending` once it is not."""

    stop: asyncio.Event = field(default_factory=asyncio.Event)
    process: Process | None = None
    ending: asyncio.Task[dict[str, Any]] | None = None


class Host:
    """Supervises the programs of one rank; `where` its process stands is the driver's working directory."""

    def __init__(self, directory: str) -> None:
        os.chdir(directory)
        self._running: dict[str, _Running] = {}

    async def where(self) -> dict[str, Any]:
        import ray

        context = ray.get_runtime_context()
        return {"node": context.get_node_id(), "ip": ray.util.get_node_ip_address(), "pid": os.getpid()}

    async def start(self, key: str, name: str, entry: str, args: str, **options: Any) -> dict[str, Any]:
        """Start a program, called `key` here: `{pid}`, or as `ended`. The options are `start_process`'s."""
        running = self._running[key] = _Running()
        up: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        options["log_path"] = Path(options["log_path"])

        async def live() -> dict[str, Any]:
            try:
                async with start_process(name, entry, json.loads(args), **options) as process:
                    running.process = process
                    up.set_result(process.pid)
                    waits = [asyncio.create_task(event.wait()) for event in (process.exited, running.stop)]
                    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                    for wait in waits:
                        wait.cancel()
                    error = process.failure()
            except ProcessFailed as failed:
                error = failed
            except OSError as failed:  # no log can be written, or no process made
                error = ProcessFailed(f"{name}: {failed}")
            return {"text": str(error), "killed": error.killed, "final": error.final}

        running.ending = asyncio.create_task(live())
        waits: set[asyncio.Future[Any]] = {up, running.ending}
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        return {"pid": up.result()} if up.done() else await running.ending

    async def ended(self, key: str) -> dict[str, Any]:
        """How the program ended, once it has: `{text, killed, final}`, as ProcessFailed."""
        ending = self._running[key].ending
        assert ending is not None
        return await asyncio.shield(ending)

    async def silence(self, key: str) -> float:
        """For how many seconds the program has answered nothing."""
        running = self._running.get(key)
        return running.process.silence_s if running is not None and running.process is not None else 0.0

    async def kill(self, key: str) -> None:
        running = self._running.get(key)
        if running is not None and running.process is not None:
            running.process.kill()

    async def stop(self, key: str) -> None:
        """End the program in good order, wait for it, and forget it; also one that is starting."""
        running = self._running.pop(key, None)
        if running is not None and running.ending is not None:
            running.stop.set()
            if running.process is None:
                running.ending.cancel()
            await asyncio.wait({running.ending})


def describe(paths: list[str], directory: str) -> dict[str, Any]:
    """What a node has: its Springtide, which of `paths` it cannot see, and whether `directory` is there."""
    return {
        "springtide": springtide.__version__,
        "missing": [path for path in paths if not os.path.exists(path)],
        "directory": os.path.isdir(directory),
    }
