"""A safe whose code stands on a note: a whole environment in twenty-five lines.

springtide doctor env examples/safe.py:Safe
"""

import random

from springtide.env import Environment, TaskList, tool

PLACES = ("desk", "shelf", "drawer")
SPLITS = ("train", "test", "ood")


class Safe(Environment):
    @classmethod
    def tasks(cls, split, level):
        codes = random.Random(0).sample(range(100, 1000), 900)[SPLITS.index(split) :: 3]  # no code is in two splits
        return TaskList(300, lambda i: cls.make_task(split, level, i, {"code": str(codes[i])}))

    async def start(self):
        self.place, self.code, self.typed = self.rng.choice(PLACES), self.task.payload["code"], None
        return f"Open the safe. The code is at one of these: {', '.join(PLACES)}."

    @tool
    async def look(self, place: str) -> str:
        """Say what lies at a place."""
        return self.code if place == self.place else "nothing"

    @tool(final=True)
    async def type(self, code: str) -> str:
        """Type a code into the safe. This ends the task."""
        self.typed = code
        return "click"

    async def score(self):
        return float(self.typed == self.code)

    async def gold(self):
        looks = PLACES[: PLACES.index(self.place) + 1]
        return [*(("look", {"place": place}) for place in looks), ("type", {"code": self.code})]
