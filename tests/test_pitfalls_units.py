"""Reported faults that one part alone can show."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.run_support import TESTS
from tests.trainer_parts import segment, task, trajectory

from springtide.algorithms.advantages import GroupRewards, Member, advantages
from springtide.chat import load_chat
from springtide.config import Algorithm
from springtide.engine.protocol import EngineError, EngineStats, Generation
from springtide.env.inprocess import InProcessClient
from springtide.observe.metrics import Metrics
from springtide.rollout.episode import EpisodeSpec, play, summarise
from springtide.rollout.evaluate import evaluate, pass_at_k, wilson
from springtide.rollout.feeder import Counts
from springtide.schedule.events import Admitted, Ready, StepEnded, StepStarted
from springtide.schedule.policy import Bounds
from springtide.schedule.readiness import Readiness
from springtide.schedule.registry import make_policy
from springtide.trace import Group
from springtide.trainer.data import load_step
from springtide.wire import ConnectionLost, DeadlineExceeded


def test_a_member_that_sampled_nothing_is_in_no_baseline() -> None:
    """OpenRLHF#1239, verl#6452: siblings that cannot be trained still shifted the others' advantages."""
    two = (Member(0, "completed", 1.0, True, 3), Member(1, "completed", 0.0, False, 3))
    empty = Member(2, "context_limit", None, False, 0)
    algorithm = Algorithm(task_norm="none", divide_by_std=False)
    (alone,) = advantages([GroupRewards("t", 0, "s", two)], algorithm)
    (beside,) = advantages([GroupRewards("t", 0, "s", (*two, empty))], algorithm)
    assert beside.values == alone.values == {0: 0.5, 1: -0.5}
    assert beside.unscored == (2,)


def test_every_segment_of_a_trajectory_is_trained_at_its_advantage(tmp_path: Path) -> None:
    """SkyRL#1507: with the last step's mask copied to all, (N-1)/N of the steps were trained at zero."""
    rng = np.random.default_rng(0)
    one = trajectory([segment(rng, 20, 7), segment(rng, 30, 2), segment(rng, 9, 4)], task(0), 0)
    Group(task(0), 0, (one,)).save(tmp_path / "g")
    data = load_step(({"path": str(tmp_path / "g"), "member": 0, "advantage": 0.7},), "token_mean")
    assert [row.advantage for row in data.sequences] == [0.7] * 3
    assert [len(row.at) for row in data.sequences] == [7, 2, 4]
    assert data.denominator == 13


def test_after_a_step_the_pipeline_fills_up_again_at_once() -> None:
    """prime-rl#1372: after the barrier one group was refilled, and throughput fell from 15k to 500 tokens/s."""
    bounds = Bounds(groups=4, concurrency=8, bound=1)
    policy, state, visits = make_policy("fixed_split", bounds), Readiness({"s": 1.0}), iter(range(100))

    def fill() -> int:
        admitted = 0
        while policy.decide(state):
            state.apply(Admitted(0.0, next(visits), "s", state.step))
            admitted += 1
        return admitted

    assert fill() == 8
    for visit in range(8):
        state.apply(Ready(1.0, visit))
    assert fill() == 0, "the staleness gate is shut"
    state.apply(StepStarted(2.0, (0, 1, 2, 3)))
    state.apply(StepEnded(3.0, 1))
    assert fill() == 4


class Broken:
    """An engine that fails in its second turn."""

    def __init__(self, error: Exception) -> None:
        self._error, self.released = error, 0

    async def generate(self, session: str, ids: np.ndarray, sampling: Any, **_: Any) -> Generation:
        if sampling.turn == 1:
            raise self._error
        return Generation(np.full(5, 40, np.int32), np.full(5, -1.0, np.float32), version=0, finish="length")

    async def release(self, session: str) -> None:
        self.released += 1


@pytest.mark.parametrize(
    ("error", "cause", "killed"),
    [
        (DeadlineExceeded("late"), "infrastructure", False),
        (EngineError("engine lost: a refusal's words decide nothing"), "infrastructure", False),
        (ConnectionLost("gone"), "worker_lost", True),
    ],
)
def test_a_failed_generation_costs_one_attempt_and_not_the_run(
    tiny_model: Path, error: Exception, cause: str, killed: bool
) -> None:
    """slime#1562: one rollout's time-out ended the run; TRL PR#7176: one failed generation killed the worker."""

    async def run() -> None:
        suite = f"{TESTS / 'talk.py'}:NoSleepers"
        async with InProcessClient((suite,)) as env:
            ref = (await env.catalog(suite, "train", "quick"))[0]
            engine = Broken(error)
            spec = EpisodeSpec(ref, 0, 0, 0, "train", 0, 1.0, 5, 256)
            outcome = await play(spec, env, engine, load_chat(tiny_model))  # type: ignore[arg-type]
            assert (outcome.outcome.status, outcome.outcome.cause) == ("environment_error", cause)
            assert outcome.outcome.reward is None
            assert summarise(outcome, generated=5).killed == killed, "a killed engine uses up no retry"
            assert engine.released > 0

    asyncio.run(run())


def test_a_stale_turn_whose_version_is_gone_is_not_called_stale(tiny_model: Path) -> None:
    """The engine goes on with the newest weights then; the record must say what was sampled (slime#1440)."""

    class Newest(Broken):
        async def generate(self, session: str, ids: np.ndarray, sampling: Any, **_: Any) -> Generation:
            version = 4 if sampling.turn == 0 else 9  # refreshed between two turns of one episode
            return Generation(np.full(5, 40, np.int32), np.full(5, -1.0, np.float32), version, finish="length")

    async def run() -> None:
        suite = f"{TESTS / 'talk.py'}:NoSleepers"
        async with InProcessClient((suite,)) as env:
            ref = (await env.catalog(suite, "train", "quick"))[0]
            spec = EpisodeSpec(ref, 0, 0, 0, "train", 0, 1.0, 5, 256, stale_version=4, stale_probability=1.0)
            t = await play(spec, env, Newest(EngineError("")), load_chat(tiny_model))  # type: ignore[arg-type]
            assert [turn.policy for turn in t.turns] == ["stale", "current", "current"]
            assert summarise(t).stale_steps == (4,)
            assert t.oldest_version() == 9

    asyncio.run(run())


def test_an_evaluation_may_draw_its_turns_from_two_pinned_policies(tiny_model: Path) -> None:
    """Each turn is held to the version it was asked of, not to the first of the two."""

    class Holds(Broken):
        versions: frozenset[int]

        async def generate(self, session: str, ids: np.ndarray, sampling: Any, **options: Any) -> Generation:
            version = options["version"] if options["version"] in self.versions else max(self.versions)
            return Generation(np.full(5, 40, np.int32), np.full(5, -1.0, np.float32), version, finish="length")

    async def run() -> None:
        suite = f"{TESTS / 'talk.py'}:NoSleepers"
        async with InProcessClient((suite,)) as env:
            ref = (await env.catalog(suite, "train", "quick"))[0]
            engine, drawn = Holds(EngineError("")), set[int]()
            engine.versions = frozenset({1, 2})
            for member in range(12):
                spec = EpisodeSpec(
                    ref, 0, member, 0, "eval", 0, 1.0, 5, 256, version=2, stale_version=1, stale_probability=0.5
                )
                t = await play(spec, env, engine, load_chat(tiny_model))  # type: ignore[arg-type]
                assert t.outcome.cause is None
                assert [turn.policy for turn in t.turns] == [
                    "stale" if t.segments[turn.segment].versions[turn.start] == 1 else "current" for turn in t.turns
                ]
                drawn |= {int(t.segments[turn.segment].versions[turn.start]) for turn in t.turns}
            assert drawn == {1, 2}
            for lost in (1, 2):
                engine.versions = frozenset({3 - lost})
                spec = EpisodeSpec(
                    ref, 0, 0, 0, "eval", 0, 1.0, 5, 256, version=2, stale_version=1, stale_probability=2.0 - lost
                )
                t = await play(spec, env, engine, load_chat(tiny_model))  # type: ignore[arg-type]
                assert (t.outcome.cause, t.outcome.detail) == (
                    "infrastructure", f"the engine no longer holds version {lost}",
                )  # fmt: skip

    asyncio.run(run())


class Keeps:
    """A sink and a display that keep what they get."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def write(self, record: dict[str, Any]) -> None:
        self.records.append(record)

    def step(self, record: dict[str, Any]) -> None: ...

    def evaluation(self, record: dict[str, Any]) -> None: ...

    def waiting(self, reason: str, admission: str) -> None: ...

    def note(self, text: str) -> None: ...

    def close(self) -> None: ...


def test_a_blocked_loop_shows_in_its_metric() -> None:
    """prime-rl#2608, prime-rl#1713: an orchestrator's loop lagged by 700 s, unmeasured."""

    async def run() -> float:
        sink = Keeps()
        metrics = Metrics([sink], sink)
        watcher = asyncio.create_task(metrics.watch_loop())
        await asyncio.sleep(0.1)
        time.sleep(0.3)
        await asyncio.sleep(0.1)
        watcher.cancel()
        metrics.step(
            step=1, summaries=[], learned={}, counts=Counts(), spent={}, elapsed=1.0,  # type: ignore[arg-type]
            engines=[EngineStats()], state=Readiness({"s": 1.0}), restarts={},
        )  # fmt: skip
        return float(sink.records[0]["driver_lag_p99_s"])

    assert asyncio.run(run()) >= 0.2


def test_pass_at_k_and_rates_leave_out_what_the_environment_lost() -> None:
    """SkyRL#311: pass@k vanished; rllm#586: time-outs filed under error. An error is in no rate, and is counted."""
    assert pass_at_k([True, False, False, False], 2) == pytest.approx(0.5)
    assert pass_at_k([True], 2) is None
    refs = [task(i) for i in range(4)]

    async def play_one(spec: EpisodeSpec) -> Any:
        from springtide.rollout.episode import EpisodeSummary

        lost = EpisodeSummary.lost(spec, "down", cause="tool")
        if spec.task.index == 3:
            return lost
        values = {name: getattr(lost, name) for name in EpisodeSummary.__dataclass_fields__}
        status = "time_limit" if spec.task.index == 2 else "completed"
        return EpisodeSummary(
            **{
                **values,
                "status": status,
                "cause": None,
                "reward": 1.0,
                "success": spec.task.index == 0,
                "generated": 7,
            }
        )

    def spec(ref: Any, visit: int, member: int, retry: int) -> EpisodeSpec:
        return EpisodeSpec(ref, visit, member, retry, "eval", 0, 1.0, 5, 64)

    result = asyncio.run(evaluate({"s": refs}, play_one, spec, samples=2, concurrency=3)).suites["s"]
    assert (result.episodes, result.env_errors, result.generated) == (6, 2, 42)
    assert result.success == pytest.approx(1 / 3)
    assert result.status == pytest.approx({"completed": 2 / 3, "time_limit": 1 / 3})
    assert result.pass_at == pytest.approx({1: 1 / 3, 2: 1 / 3})


def test_the_table_of_faults_names_tests_that_exist() -> None:
    missing, found = [], 0
    for line in (TESTS.parent / "docs" / "faults.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) != 5 or not cells[3] or cells[1] in ("Threads", "---"):
            continue
        for part in cells[3].split(";"):
            area, _, names = part.strip().partition(":")
            written = (TESTS / f"test_{area}.py").read_text()
            for name in (n.strip().split(" ")[0] for n in names.split(",")):
                found += 1
                if not any(name in text.split("(")[0] for text in written.split("def test_")[1:]):
                    missing.append(f"{area}: {name}")
    assert found > 60
    assert missing == []


def test_an_interval_holds_its_own_mean() -> None:
    """0 of 11 had an interval that began at 1e-17, and the run's picture could not be drawn."""
    for n in range(1, 200):
        for wins in (0, 1, n - 1, n):
            low, high = wilson(wins, n)
            assert low <= wins / n <= high
