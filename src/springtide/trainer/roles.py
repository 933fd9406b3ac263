"""Which rank does what, live: ranks are announced as they come up and die, and trainer ranks are lent and taken back.

Owns: the announcements, and changes of role under way. Invariants: a change is an event only when the program of the
new role is up, or that of the old one has ended and its memory is free; a guest that dies is a trainer rank that came
home.
Called by: the driver.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

from springtide.config import Config
from springtide.process import task_group
from springtide.runtime.local import Runtime
from springtide.runtime.ranks import Rank
from springtide.schedule.events import Measured, RankJoined, RankLeft, Role, RoleChanged, SwitchRole
from springtide.schedule.readiness import Readiness


class Roles:
    """apply: the one way in for events."""

    def __init__(self, config: Config, runtime: Runtime, state: Readiness, apply: Callable[..., None]) -> None:
        self._config, self._runtime, self._state, self._apply = config, runtime, state, apply
        self._tasks: asyncio.TaskGroup | None = None
        self._changing: dict[str, asyncio.Task[None]] = {}

    @contextlib.asynccontextmanager
    async def announced(self) -> AsyncIterator[None]:
        """Tell the policy of every rank during the block, and of what becomes of it."""
        engines = [rank for rank in self._runtime.engines if rank is not self._runtime.stale]
        async with task_group() as self._tasks:
            for engine in engines:
                engine.changed = self._engine
                self._engine(engine)
            for guest in self._runtime.guests.values():
                guest.changed = self._guest
            try:
                yield
            finally:
                for rank in (*engines, *self._runtime.guests.values()):
                    rank.changed = None
                for task in self._changing.values():
                    task.cancel()

    def open_trainers(self) -> None:
        """Announce the trainer's ranks: from now on they wait for data, and may be lent meanwhile."""
        for rank in self._runtime.trainer.ranks:
            if rank.name not in self._state.ranks:
                budget, lendable = self._config.engine.kv_tokens, self._config.trainer.lend
                self._apply(RankJoined(time.time(), rank.name, "trainer", budget, lendable))

    def ask(self, action: SwitchRole) -> None:
        """Carry out a change of role beside everything else."""
        assert self._tasks is not None
        if action.rank not in self._changing:
            change = self._change(action.rank, action.role)
            self._changing[action.rank] = self._tasks.create_task(change, name=f"{action.rank} to {action.role}")

    async def settled(self) -> None:
        """Until no change is under way."""
        await asyncio.gather(*self._changing.values())

    async def _change(self, name: str, role: Role) -> None:
        begun = time.monotonic()
        try:
            await (self._runtime.lend(name) if role == "rollout" else self._runtime.take_back(name))
        finally:
            del self._changing[name]
        now = time.time()
        self._apply(RoleChanged(now, name, role), Measured(now, "switch", time.monotonic() - begun))

    def _engine(self, rank: Rank) -> None:
        up, known = rank.up.is_set(), rank.name in self._state.ranks
        if up and not known:
            self._apply(RankJoined(time.time(), rank.name, "rollout", self._config.engine.kv_tokens))
        elif known and not up:
            self._apply(RankLeft(time.time(), rank.name))

    def _guest(self, guest: Rank) -> None:
        name = next(name for name, rank in self._runtime.guests.items() if rank is guest)
        plays = name in self._state.ranks and self._state.ranks[name].role == "rollout"
        if plays and guest.role == "rollout" and not guest.up.is_set():  # it died
            self.ask(SwitchRole(name, "trainer"))
