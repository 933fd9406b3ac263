"""Environments of three turns, for what happens between turns: weights that change, tools that sleep or hang."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

from tests.letters import Letters

from springtide import Task
from springtide.trace import Limits

TURNS = 3


class Talk(Letters):
    """Say letters three times; each answer takes a moment, so that weights change while an episode plays."""

    name = "talk"
    max_turns = TURNS
    pause_s = 0.1

    async def start(self) -> str:
        self.left = TURNS
        return await super().start()

    async def reply(self, text: str) -> str | None:
        await asyncio.sleep(self.pause_s)
        self.said = text
        self.left -= 1
        if self.left == 0:
            self.end()
            return None
        return "again"


class Slow(Talk):
    """Answers take long enough for a process to start meanwhile."""

    name = "slow"
    pause_s = 2.0


class Sleepers(Talk):
    """In every second task the first answer sleeps two seconds, in a thread; the others answer at once."""

    name = "sleepers"
    sleep_s = 2.0

    def reply(self, text: str) -> str | None:  # type: ignore[override]
        if self.task.index % 2 and self.left == TURNS:
            time.sleep(self.sleep_s)
        self.said = text
        self.left -= 1
        if self.left == 0:
            self.end()
            return None
        return "again"


class NoSleepers(Sleepers):
    """The same without the sleep."""

    name = "nosleepers"
    sleep_s = 0.0


class Hangs(Letters):
    """Every fifth task never answers; in the others about one member in six does not."""

    name = "hangs"
    limits = Limits(max_turns=1, act_s=600.0)

    async def reply(self, text: str) -> None:
        if self.task.index % 5 == 0 or sum(map(ord, text)) % 6 == 0:
            await asyncio.Event().wait()
        await super().reply(text)


class HangsAlways(Hangs):
    """No task is ever answered."""

    name = "hangsalways"

    async def reply(self, text: str) -> None:
        await asyncio.Event().wait()


class NoDev(Letters):
    """Another suite of Letters' name, without a dev tenth."""

    name = "letters"

    @classmethod
    def tasks(cls, split: str, level: str) -> Sequence[Task]:
        return [replace(task, tags=()) for task in super().tasks(split, level)]
