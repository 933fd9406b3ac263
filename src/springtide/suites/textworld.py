"""`textworld`: games of the package `textworld-express` (TextWorldCommonsense and CookingWorld), written by others.

Owns: nothing of the games. Worlds, replies, scores, success, seeds and gold paths are the package's; this gives them
Springtide's form. Splits are the package's folds, which share no seeds and no assignment of objects: `train`, `test`,
and for `ood` its `dev` fold with larger games than train and test have.
One Java machine a worker process, started by the first episode that needs it and shared by all (each has a game object
of its own in it); it ends with the worker. Invariants: importing this imports neither the package nor Java; a command
the game does not know is answered, and costs its turn.
Called by: `springtide.env` through the suite `textworld`. Needs `springtide[adapters]` and a Java runtime.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from springtide.env import Check, Environment, Limits, Outcome, Requires, Suite, SuiteError, Task, TaskList, tool

_FOLDS = {"train": ("train", 0), "test": ("test", 20_000), "ood": ("dev", 10_000)}  # the package's, with first seeds
_SEEDS = 1000  # of each fold
_TWC = "numLocations={0},numItemsToPutAway={1},includeDoors={2},limitInventorySize={2}"
_COOKING = "numLocations={0},numIngredients={1},numDistractorItems={2},includeDoors={3},limitInventorySize={3}"
# level -> game, its parameters in train and test (of the levels without "easy" the package's defaults), those of ood
_GAMES = {
    "twc-easy": ("twc", _TWC.format(1, 1, 0), _TWC.format(2, 2, 0)),
    "twc": ("twc", _TWC.format(3, 4, 0), _TWC.format(3, 4, 1)),
    "cookingworld-easy": ("cookingworld", _COOKING.format(3, 1, 3, 0), _COOKING.format(5, 2, 5, 0)),
    "cookingworld": ("cookingworld", _COOKING.format(11, 3, 10, 1), _COOKING.format(11, 5, 10, 1)),
}
_TURNS = {"twc-easy": 20, "twc": 50, "cookingworld-easy": 50, "cookingworld": 160}
_WALKS = 50  # that the package's own search makes, too, before it gives up
_STOP_S = 10  # until a Java machine that was told to end has ended
_HOW = """\
{task}
Play by calling act with one command a turn, such as: look around, inventory, move north, open fridge, take key, \
put key in drawer. The command help lists what can be done where you are.

{observation}"""


def _require() -> None:
    """Raises: SuiteError where the package or Java is missing."""
    missing = [] if importlib.util.find_spec("textworld_express") else ["pip install 'springtide[adapters]'"]
    missing += [] if shutil.which("java") else ["apt-get install openjdk-17-jre-headless (or another Java runtime)"]
    if missing:
        raise SuiteError(f"suite textworld needs textworld-express and Java: {' and '.join(missing)}")


class TextWorld(Environment):
    """One game: put things where they belong (twc), or cook a meal by its recipe (cookingworld)."""

    name = "textworld"
    version = "1"
    levels = tuple(_GAMES)
    max_turns = max(_TURNS.values())
    requires = Requires(memory_mb=1)  # and 100 to 450 MB a worker for Java, whatever the number of episodes

    @classmethod
    def tasks(cls, split: str, level: str) -> Sequence[Task]:
        """Every seed of a fold, in order. Raises: SuiteError where the package or Java is missing."""
        _require()
        fold, first = _FOLDS[split]
        game, usual, larger = _GAMES[level]
        payload = {"game": game, "fold": fold, "parameters": larger if split == "ood" else usual}

        def make(index: int) -> Task:
            limits = Limits(max_turns=_TURNS[level])
            return cls.make_task(split, level, index, {**payload, "game_seed": first + index}, limits=limits)

        return TaskList(_SEEDS, make)

    if not TYPE_CHECKING:

        @classmethod
        @asynccontextmanager
        async def shared(cls) -> AsyncIterator[Any]:
            _require()
            from textworld_express import TextWorldExpressEnv

            host = await asyncio.to_thread(TextWorldExpressEnv)
            java = host._gateway.java_process
            try:
                yield host._gateway.jvm
            finally:
                await asyncio.to_thread(host.close)
                await asyncio.to_thread(java.wait, _STOP_S)

    def _new_game(self, with_gold: bool) -> tuple[Any, dict[str, Any]]:
        """A game of this task and its first state."""
        payload = self.task.payload
        game = self.shared.textworldexpress.runtime.PythonInterface()
        problem = game.load(payload["game"], payload["parameters"])
        if problem:
            raise ValueError(problem)
        return game, json.loads(game.generateNewGameJSON(payload["game_seed"], payload["fold"], with_gold))

    async def start(self) -> str:
        self._game, self._state = await asyncio.to_thread(self._new_game, False)
        return _HOW.format(task=self._game.getTaskDescription(), observation=self._state["observation"])

    @tool
    def act(self, command: str) -> str:
        """Play one command in the game.

        command: for example: open fridge; or: help, which lists what can be done here
        """
        if command.strip() == "help":
            return f"{self._game.getTaskDescription()}\nHere you can: {', '.join(sorted(self._state['validActions']))}"
        before = self._state["score"]
        self._state = json.loads(self._game.stepJSON(command))
        if self._state["score"] != before:
            self.reward(self._state["score"] - before, command)
        if self._state["tasksuccess"] or self._state["taskfailure"]:
            self.end("the game is won" if self._state["tasksuccess"] else "the game is lost")
        said = self._state["observation"]
        return f"{said} The command help lists what can be done." if said.startswith("Unknown action") else said

    async def score(self) -> Outcome:
        won, score = bool(self._state["tasksuccess"]), float(self._state["score"])
        return Outcome("completed", reward=score, success=won, checks=(Check("the game's score", score),))

    async def gold(self) -> list[tuple[str, dict[str, Any]]]:
        """The package's gold path, up to the win: it goes on after that."""
        return await asyncio.to_thread(self._gold)

    def _gold(self) -> list[tuple[str, dict[str, Any]]]:
        drawn = self.task.payload["game"] == "twc"
        game, state = self._new_game(not drawn)
        calls: list[tuple[str, dict[str, Any]]] = []
        for command in self._drawn_path(game) if drawn else game.getGoldActionSequence():
            if state["tasksuccess"]:
                break
            state = json.loads(game.stepJSON(command))
            calls.append(("act", {"command": command}))
        return calls

    def _drawn_path(self, game: Any) -> list[str]:
        """A path of the package's agent for twc. It walks at random, seeded by the clock unless it is given a seed."""
        seed, fold = self.task.payload["game_seed"], self.task.payload["fold"]
        for attempt in range(_WALKS):
            agent = self.shared.textworldexpress.goldagent.TWCGoldAgent(game.gameGenerator().mkGame(seed, fold))
            found = agent.mkGoldPath(self.shared.scala.util.Random(seed + attempt * _SEEDS))
            if found._1:
                return list(found._2)
        raise RuntimeError(f"{self.task.id}: the package finds no gold path in {_WALKS} walks")


SUITE = Suite.of(TextWorld)
