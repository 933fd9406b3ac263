"""A one-turn environment that a random model can learn in a few steps: say more of the asked letter."""

from __future__ import annotations

from collections.abc import Sequence

from springtide import Environment, Task

TRAIN = 200


class Vowels(Environment):
    """The reward is the share of the reply's first 8 characters that are the letter asked for."""

    name, version = "vowels", "1"
    levels = ("quick",)
    plain_answer = True
    max_turns = 1

    @classmethod
    def tasks(cls, split: str, level: str) -> Sequence[Task]:
        def task(i: int) -> Task:
            tags = ("dev",) if split == "train" and i % 10 == 9 else ()
            payload = {"letter": "ab"[i % 2]}
            return Task(f"vowels/{level}/{split}/{i}", "vowels", "1", split, level, i, i, tags, payload=payload)

        return [task(i) for i in range(TRAIN if split == "train" else 20)]

    async def start(self) -> str:
        self.said = ""
        return f"say {self.task.payload['letter']}"

    async def reply(self, text: str) -> None:
        self.said = text
        self.end()

    async def score(self) -> float:
        return sum(c == self.task.payload["letter"] for c in self.said[:8]) / 8
