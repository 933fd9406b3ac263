"""One-turn environments that a random model can learn in a few steps, and some that misbehave."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from springtide import Environment, Task
from springtide.trace import Message

TRAIN = 200


class Letters(Environment):
    """Say letters: the reward is their share in the reply's first 8 characters; a random model has about 0.2."""

    name, version = "letters", "1"
    levels = ("quick",)
    max_turns = 1

    @classmethod
    def tasks(cls, split: str, level: str) -> Sequence[Task]:
        def task(i: int) -> Task:
            tags = ("dev",) if split == "train" and i % 10 == 9 else ()
            return Task(f"{cls.name}/{level}/{split}/{i}", cls.name, "1", split, level, i, i, tags)

        return [task(i) for i in range(TRAIN if split == "train" else 20)]

    async def start(self) -> str:
        self.said = ""
        return f"say {self.task.index % 7}"

    async def reply(self, text: str) -> None:
        self.said = text
        self.end()

    async def score(self) -> float:
        return sum(c.isascii() and c.isalpha() for c in self.said[:8]) / 8

    async def gold(self) -> list[tuple[str, dict[str, str]]]:
        return [("", {"text": "lettersa"})]


class Broken(Letters):
    """Its judge always raises."""

    name = "broken"

    async def score(self) -> float:
        raise RuntimeError("the judge has no data")


class Flat(Letters):
    """Every reply is worth the same."""

    name = "flat"

    async def score(self) -> float:
        return 0.5


class Slow(Letters):
    """Half of its episodes sleep two seconds, in a thread or in the loop."""

    name = "slow"

    async def reply(self, text: str) -> None:
        if self.task.index % 2:
            await asyncio.sleep(2)
        await super().reply(text)


class Flooding(Letters):
    """Every reply is answered with more text than any context holds."""

    name = "flooding"
    max_turns = 3

    async def reply(self, text: str) -> str:  # type: ignore[override]
        self.said = text
        return "x" * 1_000_001


class Flaky(Letters):
    """A third of its episodes fail in their tools, whatever the policy does."""

    name = "flaky"

    async def reply(self, text: str) -> None:
        if len(text) % 3 == 0:
            raise OSError("the back end is down")
        await super().reply(text)


class Pictures(Letters):
    """Answers with an image; every other task begins with one."""

    name, max_turns = "pictures", 2

    async def start(self) -> str | list[Message]:
        return [self.image()] if self.task.index % 2 else "look"

    async def reply(self, text: str) -> list[Message]:  # type: ignore[override]
        return [self.image()]

    async def score(self) -> float:
        return 0.0

    @staticmethod
    def image() -> Message:
        return Message("user", ({"type": "text", "text": "here"}, {"type": "image_url", "image_url": {"url": "x"}}))
