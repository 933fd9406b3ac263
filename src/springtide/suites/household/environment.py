"""`Household`: search, carry, use. One agent in a room or a house, which sees only what lies where it stands.

Levels: `quick` (3 or 4 places named by one word, objects known by colour, one-word replies, eight turns, place and
heat/cool/clean then place); `standard` (all six kinds of ALFWorld's tasks in one room, 8 to 12 numbered places of
which many are closed, thirty turns); then houses of several rooms (`houses`): `hard` (one errand of twelve families),
`expert` (two errands) and `master` (three, five to seven rooms). Reward 1 when the goal's state holds, which also ends
the episode; an action that cannot be done is answered with its reason, costs its turn and nothing more (two in a row
do not end the episode). The tasks of a house are drawn when their episode starts, so that to list a level costs
nothing.
Invariant: the world changes only through the tools. Called by: `springtide.env`, through `SUITE`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from springtide.env import Environment, Limits, Suite, Task, TaskList, ToolError, tool
from springtide.suites.household.expert import play
from springtide.suites.household.generate import MAX_TURNS, SIZES, draw
from springtide.suites.household.houses import HOUSES
from springtide.suites.household.text import refusal_text, reply_text
from springtide.suites.household.world import TOOLS, Impossible, world_of

_drawn = lru_cache(maxsize=256)(draw)  # the members of a group play the same task; nobody changes a payload
_LIMITS = {level: Limits(max_turns=turns) for level, turns in MAX_TURNS.items()}


class Household(Environment):
    name = "household"
    version = "1"
    levels = tuple(MAX_TURNS)
    max_turns = MAX_TURNS["standard"]

    @classmethod
    def tasks(cls, split: str, level: str) -> Sequence[Task]:
        """Tasks drawn on demand; see `generate`."""

        def make(index: int) -> Task:
            payload = {} if level in HOUSES else draw(split, level, index)
            return cls.make_task(split, level, index, payload, limits=_LIMITS[level])

        return TaskList(SIZES[split], make)

    async def start(self) -> str:
        self._payload = await self._draw()
        self._world, self._goal = world_of(self._payload)
        return self._payload["prompt"]

    def offered(self) -> Sequence[str]:
        return TOOLS[self.task.level]

    @tool
    async def go(self, place: str) -> str:
        """Go to a place."""
        return self._act("go", place=place)

    @tool
    async def open(self, place: str) -> str:
        """Open a closed place."""
        return self._act("open", place=place)

    @tool
    async def shut(self, place: str) -> str:
        """Shut an open place."""
        return self._act("shut", place=place)

    @tool
    async def take(self, object: str) -> str:
        """Take an object."""
        return self._act("take", object=object)

    @tool
    async def put(self, place: str) -> str:
        """Put down what you hold."""
        return self._act("put", place=place)

    @tool
    async def heat(self, object: str) -> str:
        """Heat what you hold."""
        return self._act("heat", object=object)

    @tool
    async def cool(self, object: str) -> str:
        """Cool what you hold."""
        return self._act("cool", object=object)

    @tool
    async def clean(self, object: str) -> str:
        """Clean what you hold."""
        return self._act("clean", object=object)

    @tool
    async def slice(self, object: str) -> str:
        """Slice an object while you hold a blade."""
        return self._act("slice", object=object)

    @tool
    async def use(self, object: str) -> str:
        """Switch on a lamp."""
        return self._act("use", object=object)

    @tool
    async def examine(self, name: str) -> str:
        """Look at a place or an object."""
        return self._act("examine", name=name)

    @tool
    async def inventory(self) -> str:
        """Say what you hold."""
        return self._act("inventory")

    async def gold(self) -> list[tuple[str, dict[str, Any]]]:
        """The calls of the expert, who sees what the agent sees."""
        calls, _ = play(self.task.level, *world_of(await self._draw()))
        return [(name, dict(arguments)) for name, arguments in calls]

    async def _draw(self) -> dict[str, Any]:
        """The task's payload; in a thread where it takes milliseconds."""
        task = self.task
        return task.payload or await asyncio.to_thread(_drawn, task.split, task.level, task.index)

    def _act(self, name: str, /, **arguments: str) -> str:
        """Do an action and answer in the level's words. Raises: ToolError when it is impossible."""
        try:
            result = self._world.act(name, arguments)
        except Impossible as refusal:
            raise ToolError(refusal_text(self.task.level, str(refusal))) from None
        if self._goal.holds(self._world):
            self.reward(1.0, self._payload["instruction"])
            self.end("the goal holds")
        return reply_text(self.task.level, result)


SUITE = Suite.of(Household)
