"""Entries of child processes for the tests of `springtide.process`."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from typing import Any

from springtide.wire import serve


async def echo(socket_path: str, args: dict[str, Any]) -> None:
    async def handle(peer: Any, method: str, payload: dict[str, Any]) -> Any:
        if method == "pid":
            return os.getpid()
        if method == "prefix":  # whose virtual environment
            return sys.prefix
        if method == "take":  # a version, as a program that holds a role
            args["took"] = (*args.get("took", ()), payload["version"])
        if method == "spawn":  # a grandchild that would outlive us if nobody cared
            return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid
        if method == "block":  # the event loop
            time.sleep(1.5)
        if method == "compute":  # without giving up the interpreter's lock
            sum(range(40_000_000))
        return args

    async with serve(socket_path, handle):
        await asyncio.Event().wait()


async def once(socket_path: str, args: dict[str, Any]) -> None:
    """As `echo`, where `args["marker"]` is no file yet, which it is then."""
    if os.path.exists(args["marker"]):
        raise RuntimeError("it was here before")
    open(args["marker"], "w").close()
    await echo(socket_path, args)


async def broken(socket_path: str, args: dict[str, Any]) -> None:
    raise RuntimeError("the model file is missing")


async def never(socket_path: str, args: dict[str, Any]) -> None:
    await asyncio.Event().wait()
