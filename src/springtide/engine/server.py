"""The engine's process: a `LocalEngine` behind a Unix socket.

Invariant: a fault in the engine ends the process, so every client learns of it at once.
Called by: `process.start_process` with entry `springtide.engine.server:main`.
"""

from __future__ import annotations

import asyncio
from typing import Any

import torch

from springtide import wire
from springtide.config import make_config
from springtide.engine.handler import EngineHandler
from springtide.engine.local.engine import EngineSettings, LocalEngine
from springtide.pace import Pace


async def main(socket_path: str, args: dict[str, Any]) -> None:
    """Serve until cancelled. args: `model` and `store` (directories), `config` (the run's tree; its `engine` table)."""
    settings = EngineSettings.of(args["model"], args["store"], args["config"]["engine"])
    if settings.device == "cpu":
        torch.set_num_threads(1)
    async with LocalEngine.open(settings, Pace.of(make_config(args["config"]), "engine")) as engine:
        handler = EngineHandler(engine)
        async with wire.serve(socket_path, handler.handle, on_disconnect=handler.disconnected):
            await asyncio.Event().wait()
