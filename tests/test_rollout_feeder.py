"""Groups between their draw and their readiness, over a pool that answers as told."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.run_support import run_config

from springtide.config import Config
from springtide.ledger import Ledger
from springtide.rollout import feeder as feeding
from springtide.rollout.episode import EpisodeSpec, EpisodeSummary
from springtide.rollout.evaluate import evaluate
from springtide.rollout.feeder import BrokenRun, Feeder, Versions
from springtide.rollout.playtime import PlayTime
from springtide.schedule.events import Dropped, Evaluation, RankJoined, Ready
from springtide.schedule.policy import Bounds
from springtide.schedule.readiness import Readiness
from springtide.schedule.registry import make_policy
from springtide.schedule.sampling import UniformSampler
from springtide.trace import TaskRef
from springtide.wire import DeadlineExceeded

TASK = TaskRef("t", "s", "1", "train", "quick", 0, 0)


def finished(spec: EpisodeSpec, **changes: Any) -> EpisodeSummary:
    """A member that won if its number is odd."""
    values: dict[str, Any] = {
        "visit": spec.visit, "member": spec.member, "retry": spec.retry, "status": "completed",
        "reward": float(spec.member % 2), "success": spec.member % 2 == 1, "cause": None, "detail": "",
        "loss_tokens": 5, "generated": 5, "tokens": 9, "turns": 1, "cut_turns": 0, "stale_steps": (), "birth": 0,
        "queue_s": 0.0, "decode_s": 0.0, "env_s": 0.0,
    }  # fmt: skip
    return EpisodeSummary(**{**values, **changes})


class Told:
    """A pool of one worker: `episode` says how an episode goes, `calls` what else was asked of it."""

    live = 0

    def __init__(self, episode: Callable[[EpisodeSpec], Awaitable[EpisodeSummary]]) -> None:
        self._episode = episode
        self.calls: list[tuple[str, dict[str, Any]]] = []

    async def acquire(self) -> Told:
        return self

    async def call(self, method: str, *, deadline_s: float, **payload: Any) -> Any:
        if method == "episode":
            return await self._episode(payload["spec"]), ()
        self.calls.append((method, payload))
        return 0


def one_group(tmp_path: Path, pool: Told, events: list[Any], **group: Any) -> tuple[Config, Feeder]:
    config = run_config(
        tmp_path, tmp_path, rollout={"group": {"n": 2, **group}, "concurrency": 1}, staleness={"bound": 0},
        trainer={"groups": 1},
    )  # fmt: skip
    feeder = Feeder(
        config, ledger=Ledger(tmp_path / "ledger.sqlite"), state=Readiness({"s": 1.0}),
        policy=make_policy("fixed_split", Bounds(1, 1, 0)), samplers={"s": UniformSampler("s", [TASK], 0)}, pool=pool,
        versions=Versions(0), directory=tmp_path, note=events.append, record=events.append,
    )  # fmt: skip
    feeder.apply(RankJoined(time.time(), "engine-0", "rollout", 65536))
    return config, feeder


@pytest.mark.parametrize(("evaluated_s", "ends"), [(0.5, Ready), (0.0, Dropped)])
def test_an_evaluation_beside_training_brings_no_group_closer_to_its_deadline(
    tmp_path: Path, evaluated_s: float, ends: type
) -> None:
    """Groups that an evaluation starved of the engine were dropped, their tokens with them."""

    async def episode(spec: EpisodeSpec) -> EpisodeSummary:
        await asyncio.sleep(0.6)
        return finished(spec)

    events: list[Any] = []
    _, feeder = one_group(tmp_path, Told(episode), events, deadline_s=0.3)

    async def run() -> None:
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(feeder.run())
            await asyncio.sleep(0.05)
            if evaluated_s:
                feeder.apply(Evaluation(time.time(), True))
                await asyncio.sleep(evaluated_s)
                feeder.apply(Evaluation(time.time(), False))
            while not any(isinstance(event, (Ready, Dropped)) for event in events):
                await asyncio.sleep(0.01)
            running.cancel()

    asyncio.run(run())
    assert isinstance(next(e for e in events if isinstance(e, (Ready, Dropped))), ends)


@pytest.mark.alone
def test_play_time_goes_on_where_it_stood_and_ends_waits_by_its_own_count() -> None:
    async def run() -> list[float]:
        clock = PlayTime()
        begun = clock.now()
        clock.stand_still(True)
        clock.stand_still(True)
        await asyncio.sleep(0.1)
        stood = clock.now() - begun
        started = time.monotonic()
        asyncio.get_running_loop().call_later(0.1, clock.stand_still, False)
        with pytest.raises(TimeoutError):
            async with clock.timeout_at(clock.now() + 0.1):
                await asyncio.sleep(5)
        return [stood, time.monotonic() - started, clock.now() - begun]

    stood, waited, played = asyncio.run(run())
    assert stood == pytest.approx(0.0, abs=0.01)
    assert waited == pytest.approx(0.2, abs=0.05)
    assert played == pytest.approx(0.1, abs=0.05)


def test_a_member_that_finished_after_the_deadline_is_not_in_the_group(tmp_path: Path) -> None:
    """What the driver counted is what is written: else the late member's tokens had no end in any figure."""

    async def episode(spec: EpisodeSpec) -> EpisodeSummary:
        await asyncio.sleep(5 if spec.member == 2 else 0)
        return finished(spec)

    events: list[Any] = []
    pool = Told(episode)
    _, feeder = one_group(tmp_path, pool, events, n=3, min_members=2, deadline_s=0.2)

    async def run() -> None:
        async with asyncio.timeout(0.5):
            await feeder.run()

    with pytest.raises(TimeoutError):
        asyncio.run(run())
    sealed, discarded = pool.calls[:2]
    assert (sealed[0], sorted(sealed[1]["members"])) == ("seal", [0, 1])
    assert (discarded[0], sorted(discarded[1]["known"])) == ("discard", [0, 1])
    assert any(isinstance(event, Ready) for event in events)


def test_groups_that_all_miss_their_deadline_are_said_and_end_the_run_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A deadline that nobody can keep: groups were drawn and dropped for ever, and no line named it."""

    async def episode(spec: EpisodeSpec) -> EpisodeSummary:
        await asyncio.sleep(60)
        return finished(spec)

    monkeypatch.setattr(feeding, "_LATE_S", 0.3)
    events: list[Any] = []
    _, feeder = one_group(tmp_path, Told(episode), events, deadline_s=0.02)

    async def run() -> None:
        async with asyncio.timeout(10):
            await feeder.run()

    begun = time.monotonic()
    says = r"the last \d+ groups missed rollout\.group\.deadline_s = 0\.02 with fewer than 2 members: .*; raise it"
    with pytest.raises(BrokenRun, match=says):
        asyncio.run(run())
    assert time.monotonic() - begun > 0.3
    notes = [event for event in events if isinstance(event, str)]
    assert notes == ["the last 1 groups missed rollout.group.deadline_s = 0.02 and were dropped"]


def test_late_groups_end_no_run_in_which_others_are_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def episode(spec: EpisodeSpec) -> EpisodeSummary:
        await asyncio.sleep(60 if spec.visit % 4 else 0)
        return finished(spec, reward=1.0)

    monkeypatch.setattr(feeding, "_LATE_S", 0.0)
    events: list[Any] = []
    _, feeder = one_group(tmp_path, Told(episode), events, deadline_s=0.02)

    async def run() -> None:
        async with asyncio.timeout(0.8):
            await feeder.run()

    with pytest.raises(TimeoutError):
        asyncio.run(run())
    assert sum(isinstance(e, Dropped) and e.cause == "deadline" for e in events) > feeding._LATE_WAVES


def test_an_episode_of_an_evaluation_that_a_killed_process_took_uses_up_no_retry() -> None:
    """Three kills during one evaluation left its episodes unscored."""

    def attempts(cause: str, ends_at: int) -> tuple[list[int], int]:
        asked: list[int] = []

        async def play(spec: EpisodeSpec) -> EpisodeSummary:
            asked.append(spec.retry)
            lost = {"cause": cause, "status": "environment_error", "reward": None, "success": None}
            return finished(spec, **({} if spec.retry == ends_at else lost))

        def spec(task: TaskRef, visit: int, member: int, retry: int) -> EpisodeSpec:
            return EpisodeSpec(task, visit, member, retry, "eval", 0, 1.0, 5, 64)

        result = asyncio.run(evaluate({"s": [TASK]}, play, spec, samples=1, concurrency=1))
        return asked, result.suites["s"].env_errors

    assert attempts("worker_lost", ends_at=7) == (list(range(8)), 0)
    assert attempts("tool", ends_at=7) == ([0, 1, 2], 1)
    asked, errors = attempts("worker_lost", ends_at=-1)  # an environment that ends its worker each time
    assert len(asked) == 12 and errors == 1


def test_a_fault_in_an_evaluation_is_said_by_itself() -> None:
    """Outside the loop nothing unwrapped the group of exceptions: a traceback instead of a line."""

    async def play(spec: EpisodeSpec) -> EpisodeSummary:
        raise DeadlineExceeded("rollout-0 did not answer episode within 1 s")

    def spec(task: TaskRef, visit: int, member: int, retry: int) -> EpisodeSpec:
        return EpisodeSpec(task, visit, member, retry, "eval", 0, 1.0, 5, 64)

    with pytest.raises(DeadlineExceeded, match="did not answer"):
        asyncio.run(evaluate({"s": [TASK]}, play, spec, samples=2, concurrency=2))
