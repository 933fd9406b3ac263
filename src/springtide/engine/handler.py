"""An engine's answers to the wire: one RPC a method, and whose sessions are whose.

Owns: the mapping of RPC methods to the engine. Invariants: many clients may connect; a client that goes away has its
turns aborted and its sessions released. Torch-free.
Called by: `engine.server`, `engine.vllm`.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Protocol

from springtide import wire
from springtide.engine.protocol import Engine


class ServedEngine(Engine, Protocol):
    def forget(self, session: str) -> None:
        """`release`, for callers that cannot wait."""
        ...


class EngineHandler:
    """Answers one RPC a method of the engine, and remembers which client opened which session."""

    _METHODS = frozenset({"generate", "generate_many", "load", "drop", "pin", "pause", "resume", "release", "stats"})

    def __init__(self, engine: ServedEngine) -> None:
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
