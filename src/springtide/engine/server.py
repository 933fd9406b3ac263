"""The engine's process: a `LocalEngine` behind a Unix socket.

Owns: the mapping of RPC methods to the engine. Invariants: many clients may connect; a client that goes away has its
turns aborted and its sessions released; a fault in the engine ends the process, so every client learns of it at once.
Called by: `process.start_process` with entry `springtide.engine.server:main`.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any

import torch

from springtide import wire
from springtide.config import make_config
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


class EngineHandler:
    """Answers one RPC a method of the engine, and remembers which client opened which session."""

    _METHODS = frozenset({"generate", "generate_many", "load", "drop", "pin", "pause", "resume", "release", "stats"})

    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine
        self._sessions: defaultdict[wire.Peer, set[str]] = defaultdict(set)

    async def handle(self, peer: wire.Peer, method: str, payload: dict[str, Any]) -> Any:
        if method not in self._METHODS:
            raise wire.WireError(f"an engine has no method {method!r}; it has {', '.join(sorted(self._METHODS))}")
        if method == "generate":
            self._sessions[peer].add(payload["session"])
        elif method == "generate_many":
            self._sessions[peer].update(request["session"] for request in payload["requests"])
        elif method == "release":
            self._sessions[peer].discard(payload["session"])
        return await getattr(self._engine, method)(**payload)

    def disconnected(self, peer: wire.Peer) -> None:
        for session in sorted(self._sessions.pop(peer, ())):
            self._engine.forget(session)
