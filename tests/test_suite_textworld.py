"""The suite `textworld`: what is told where the package is missing; and where it is there, that games are its own.

Most tests need `springtide[adapters]` and Java and say so where they are skipped; run this file by name there.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from springtide.env import EpisodeRunner, Message, SuiteError, Task
from springtide.suites.textworld import SUITE, TextWorld
from springtide.trace import ToolCall

HERE = bool(importlib.util.find_spec("textworld_express") and shutil.which("java"))
needs_games = pytest.mark.skipif(not HERE, reason="needs pip install 'springtide[adapters]' and a Java runtime")
SPLITS = ("train", "test", "ood")


@pytest.fixture(scope="module")
def theirs() -> Iterator[Any]:
    """The package's own runner, in a Java machine of its own."""
    from textworld_express import TextWorldExpressEnv

    env = TextWorldExpressEnv(envStepLimit=10_000)
    yield env
    env.close()


def said(command: str) -> Message:
    return Message("assistant", "", (ToolCall("c", "act", json.dumps({"command": command})),))


def sample(level: str, split: str, size: int) -> list[Task]:
    tasks = SUITE.select(split, level)
    return [tasks[i] for i in random.Random(f"{level}/{split}").sample(range(len(tasks)), size)]


def reset(theirs: Any, task: Task) -> str:
    p = task.payload
    return theirs.reset(seed=p["game_seed"], gameFold=p["fold"], gameName=p["game"], gameParams=p["parameters"])[0]


# --- without the package ---------------------------------------------------------------------------------------------


def test_what_is_missing_is_one_line_with_its_remedy(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(SuiteError) as error:
        SUITE.select("train", "twc")
    assert str(error.value) == (
        "suite textworld needs textworld-express and Java: pip install 'springtide[adapters]' and "
        "apt-get install openjdk-17-jre-headless (or another Java runtime)"
    )


def test_importing_the_suite_imports_neither_the_package_nor_its_bridge():
    code = "import sys, springtide.suites.textworld; sys.exit(bool({'textworld_express', 'py4j'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


# --- with it ---------------------------------------------------------------------------------------------------------


@needs_games
def test_splits_are_the_folds_of_the_package(theirs: Any):
    for level in SUITE.levels:
        reset(theirs, SUITE.select("train", level)[0])
        folds = {"train": theirs.getValidSeedsTrain(), "test": theirs.getValidSeedsTest()}
        folds["ood"] = theirs.getValidSeedsDev()
        for split, seeds in folds.items():
            assert [t.payload["game_seed"] for t in SUITE.select(split, level)] == seeds
        assert {t.payload["parameters"] for t in SUITE.select("train", level)}.isdisjoint(
            t.payload["parameters"] for t in SUITE.select("ood", level)
        )


@needs_games
def test_twenty_episodes_have_the_rewards_and_words_of_the_packages_own_runner(theirs: Any):
    """Five at a time in one Java machine, turn by turn, with gold, wandering and words no game knows."""

    async def play() -> None:
        async with TextWorld.shared() as shared:
            for level in SUITE.levels:
                tasks = [
                    task for split, n in (("train", 2), ("test", 2), ("ood", 1)) for task in sample(level, split, n)
                ]
                runners = [await EpisodeRunner.open(TextWorld(task, shared)) for task in tasks]
                plans = [mixed(task, await TextWorld(task, shared).gold()) for task in tasks]
                ours: list[list[Any]] = [[] for _ in tasks]
                for turn in range(max(map(len, plans))):
                    for runner, plan, log in zip(runners, plans, ours, strict=True):
                        if turn < len(plan) and not runner.ended:
                            seen = await runner.act(said(plan[turn]), turn)
                            log.append((seen.messages[0].text, seen.step_reward))
                for task, runner, plan, log in zip(tasks, runners, plans, ours, strict=True):
                    outcome = await runner.finish("done")
                    await runner.close()
                    assert reset(theirs, task) in runner.messages[-1].text
                    score, won, last = 0.0, False, 0
                    for last, command in enumerate(plan):
                        observation, reward, done, infos = theirs.step(command)
                        text, step_reward = log[last]
                        assert text.startswith(observation) and step_reward == pytest.approx(reward, abs=1e-12)
                        score, won = infos["score"], infos["tasksuccess"]
                        if done:
                            break
                    assert last == len(log) - 1, "both end at the same turn"
                    assert (outcome.status, outcome.reward, outcome.success) == ("completed", score, won)
                    episodes.append((won, score))

    def mixed(task: Task, gold: list[Any]) -> list[str]:
        """Gold with a stray command now and then; every third task only wanders."""
        rng = random.Random(task.id)
        stray = ("look around", "inventory", "move north", "move south", "open fridge", "dance", "take knife", "")
        steps = [command["command"] for _, command in gold]
        if task.index % 3 == 0:
            return [rng.choice(stray[:-1]) for _ in range(12)]
        return [c for step in steps for c in ([rng.choice(stray[:2]), "dance"] if rng.random() < 0.2 else []) + [step]]

    episodes: list[tuple[bool, float]] = []
    asyncio.run(play())
    assert len(episodes) == 20 and 5 <= sum(won for won, _ in episodes) < 20


@needs_games
def test_gold_wins_within_the_turns_and_is_the_same_each_time():
    async def play() -> None:
        async with TextWorld.shared() as shared:
            for level in SUITE.levels:
                for task in (task for split in SPLITS for task in sample(level, split, 5)):
                    gold = await TextWorld(task, shared).gold()
                    assert gold == await TextWorld(task, shared).gold()
                    runner = await EpisodeRunner.open(TextWorld(task, shared))
                    for turn, (_, arguments) in enumerate(gold):
                        await runner.act(said(arguments["command"]), turn)
                    outcome = await runner.finish("done")
                    assert outcome.success is True and outcome.reward == pytest.approx(1.0), task
                    await runner.close()

    asyncio.run(play())


@needs_games
def test_a_command_no_game_knows_is_answered_and_help_lists_what_can_be_done():
    async def play() -> list[str]:
        async with TextWorld.shared() as shared:
            runner = await EpisodeRunner.open(TextWorld(SUITE.select("train", "twc")[0], shared))
            replies = [(await runner.act(said(c), i)).messages[0].text for i, c in enumerate(("fly", "help", "help"))]
            assert not runner.ended and (await runner.finish("turn_limit")).reward == 0.0
            await runner.close()
            return replies

    unknown, listed, again = asyncio.run(play())
    assert unknown == "Unknown action: I'm not sure what you mean. The command help lists what can be done."
    assert "Here you can: " in listed and "look around" in listed and listed == again


@needs_games
def test_one_java_machine_serves_all_episodes_and_ends_with_them():
    async def play() -> tuple[int, int, int]:
        before = children()
        async with TextWorld.shared() as shared:
            runners = [await EpisodeRunner.open(TextWorld(t, shared)) for t in sample("twc-easy", "train", 10)]
            during = children()
            for runner in runners:
                await runner.close()
        return before, during, children()

    before, during, after = asyncio.run(play())
    assert (during - before, after) == (1, before)


def children() -> int:
    return sum(len(p.read_text().split()) for p in Path("/proc/self/task").glob("*/children"))
