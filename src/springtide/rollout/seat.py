"""A seat: where the turns of one episode are sampled, and whether it may go on.

Owns: the engine of each turn, the session's KV there, and the wait at a tool boundary. Invariants: a paused episode
waits between its tool's answer and its next turn, never inside a tool; a turn whose engine went away is sampled anew,
with the same seed, where the scheduler places the episode next: its environment hears nothing of either; every wait has
a deadline.
Called by: the rollout worker.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np

from springtide.engine.client import EngineClient
from springtide.engine.protocol import EngineError, Generation, Sampling
from springtide.env.session import EnvironmentUnavailable
from springtide.rollout.episode import Boundary
from springtide.wire import Client, ConnectionLost, DeadlineExceeded

_PLACE_S = 7200.0  # only a bound: no policy pauses for longer than half an hour
_LOSSES = 3  # engines that one turn may lose: it may be what kills them

Tell = Callable[[Literal["turn", "returned"], int], None]


class EngineLink:
    """The way to one engine; a restarted engine is found again at its address."""

    def __init__(self, address: str, start_s: float) -> None:
        self._address, self._start_s = address, start_s
        self._wire: Client | None = None
        self._opening = asyncio.Lock()

    @property
    def up(self) -> bool:
        return self._wire is not None and not self._wire.lost.is_set()

    async def client(self) -> EngineClient:
        """The engine now at the address. Raises: DeadlineExceeded if none comes up."""
        async with self._opening:
            if self._wire is None or self._wire.lost.is_set():
                await self.close()
                self._wire = await Client.open(self._address, name="engine", deadline_s=self._start_s)
        return EngineClient(self._wire)

    async def close(self) -> None:
        if self._wire is not None:
            await self._wire.close()


class Seat(Boundary):
    """An `Engine` as one episode sees it. tokens: all that were returned to it, also of turns in no trajectory.

    rank: the engine to begin with, a name in `links`; None: it is told before its first turn. tell: hears of every
    turn's end and every tool's answer; None: nobody schedules this episode. stale: the engine that alone holds that
    version, where engines hold one only.
    """

    def __init__(
        self,
        links: Mapping[str, Any],
        rank: str | None,
        *,
        tell: Tell | None = None,
        parked: bool = False,
        stale: tuple[EngineLink, int] | None = None,
    ) -> None:
        self._links, self._rank, self._tell, self._parked, self._stale = links, rank, tell, parked, stale
        self._at: dict[str, str] = {}  # session -> the rank that holds its KV
        self._moved = asyncio.Event()
        self.tokens = 0

    def move(self, rank: str | None) -> None:
        """Go on at `rank`; None: wait at the next tool boundary."""
        self._parked = rank is None
        if rank is not None:
            self._rank = rank
            self._moved.set()

    async def returned(self, context: int) -> None:
        if self._tell is not None:
            self._tell("returned", context)
        while self._parked:
            self._moved.clear()
            await self._wait("was paused")

    def turn_ended(self, context: int) -> None:
        if self._tell is not None:
            self._tell("turn", context)

    async def generate(
        self, session: str, ids: np.ndarray, sampling: Sampling, *, version: int | None = None, **options: Any
    ) -> Generation:
        turn = {"session": session, "ids": ids, "sampling": sampling, **options}
        generation = None
        if self._stale is not None and version == self._stale[1]:
            with contextlib.suppress(EngineError):  # refreshed meanwhile: then the newest draws this turn
                generation = await (await self._stale[0].client()).generate(version=version, **turn)
            version = None
        losses = 0
        while generation is None:
            self._moved.clear()
            try:
                rank, engine = await self._engine()
                await self._leave(session, rank)
                self._at[session] = rank
                generation = await engine.generate(version=version, **turn)
            except ConnectionLost:
                losses += 1
                if self._tell is None or losses >= _LOSSES:
                    raise
                await self._wait("lost its engine")
        self.tokens += len(generation.ids)
        return generation

    async def release(self, session: str) -> None:
        if self._stale is not None:
            await (await self._stale[0].client()).release(session)
        await self._leave(session, None)

    async def _leave(self, session: str, rank: str | None) -> None:
        """What another rank holds of the session is no longer needed."""
        if (before := self._at.get(session, rank)) == rank or before is None:
            return
        del self._at[session]
        if self._links[before].up:
            with contextlib.suppress(EngineError, ConnectionLost, DeadlineExceeded):
                await (await self._links[before].client()).release(session)

    async def _engine(self) -> tuple[str, Any]:
        """That of its rank, once there is one, and it is up; another's if it is told to move meanwhile."""
        while True:
            while self._rank is None:
                await self._wait("has no rank")
            rank = self._rank
            link = self._links[rank]
            if link.up or self._tell is None:
                return rank, await link.client()
            opening, moved = asyncio.ensure_future(link.client()), asyncio.ensure_future(self._moved.wait())
            try:
                await asyncio.wait((opening, moved), return_when=asyncio.FIRST_COMPLETED)
                if opening.done():
                    return rank, opening.result()
            finally:
                opening.cancel()
                moved.cancel()
            self._moved.clear()

    async def _wait(self, why: str) -> None:
        """Until it is told where to go on. Raises: EnvironmentUnavailable."""
        try:
            async with asyncio.timeout(_PLACE_S):
                await self._moved.wait()
        except TimeoutError:
            detail = f"the episode {why}, and was not placed again within {_PLACE_S:g} s"
            raise EnvironmentUnavailable("infrastructure", detail) from None
