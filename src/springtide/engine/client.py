"""The client's end of an engine process: the Engine protocol over `wire`, with a deadline behind every call.

Owns: deadlines and their wording. Invariants: no call waits for ever; an engine's refusal arrives as `EngineError`, a
lost engine as `ConnectionLost` at once. Torch-free.
Called by: rollout workers (each connects to each engine), the driver, evaluation.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Literal, Unpack

import numpy as np

from springtide.engine.protocol import EngineError, EngineStats, Generation, Options, Sampling
from springtide.wire import Client, ConnectionLost, DeadlineExceeded, RemoteError


@dataclass(frozen=True, slots=True)
class EngineDeadlines:
    """Seconds. `generate` covers queueing, pauses and decoding; `load` also waits for a slot to drain."""

    generate: float = 600.0
    load: float = 120.0
    control: float = 30.0


class EngineClient:
    """Implements `engine.protocol.Engine` over a connection. Use `async with EngineClient.connect(path)`.

    Every method raises ConnectionLost if the engine goes away, DeadlineExceeded if it does not answer in time, and
    EngineError if it refuses; a fault in the weights (`FingerprintMismatch`) arrives as RemoteError of that kind.
    """

    def __init__(self, client: Client, deadlines: EngineDeadlines | None = None) -> None:
        self._client, self._deadlines = client, deadlines or EngineDeadlines()

    @classmethod
    @contextlib.asynccontextmanager
    async def connect(
        cls, address: str, *, name: str = "engine", deadline_s: float = 120.0
    ) -> AsyncIterator[EngineClient]:
        """Connect within `deadline_s` (the engine may still be starting)."""
        async with Client.connect(address, name=name, deadline_s=deadline_s) as client:
            yield cls(client)

    @property
    def name(self) -> str:
        return self._client.name

    async def generate(
        self, session: str, ids: np.ndarray, sampling: Sampling, **options: Unpack[Options]
    ) -> Generation:
        """See `Engine.generate`. After a deadline the turn is ended; a cancelled caller releases its session."""
        turn = {"session": session, "ids": ids, "sampling": sampling, **options}
        try:
            return await self._call("generate", self._deadlines.generate, **turn)
        except DeadlineExceeded as error:
            with contextlib.suppress(ConnectionLost, DeadlineExceeded):
                await self.release(session)
            raise DeadlineExceeded(
                f"{error}: session {session}, {len(ids)} prompt tokens, at most {sampling.max_new_tokens} new"
            ) from None

    async def generate_many(self, requests: tuple[dict[str, Any], ...]) -> tuple[Generation | str, ...]:
        """See `LocalEngine.generate_many`: turns that run together and alone, bit-reproducibly."""
        return await self._call("generate_many", self._deadlines.generate, requests=requests)

    async def load(self, version: int) -> None:
        await self._call("load", self._deadlines.load, version=version)

    async def drop(self, version: int) -> None:
        await self._call("drop", self._deadlines.load, version=version)

    async def pin(self, version: int) -> None:
        await self._call("pin", self._deadlines.control, version=version)

    async def pause(self, mode: Literal["keep", "abort"]) -> None:
        await self._call("pause", self._deadlines.control, mode=mode)

    async def resume(self) -> None:
        await self._call("resume", self._deadlines.control)

    async def release(self, session: str) -> None:
        await self._call("release", self._deadlines.control, session=session)

    async def stats(self) -> EngineStats:
        return await self._call("stats", self._deadlines.control)

    async def _call(self, method: str, deadline_s: float, **payload: Any) -> Any:
        try:
            return await self._client.call(method, deadline_s=deadline_s, **payload)
        except RemoteError as error:
            if error.kind == "EngineError":
                raise EngineError(error.message) from None
            raise
