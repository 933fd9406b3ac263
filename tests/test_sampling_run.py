"""Samplers in a run: made from its configuration and its ledger, told by the feeder, shown in the report."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import make_tiny_model
from tests.run_support import run_config
from tests.test_rollout_feeder import Told, finished

import springtide
from springtide.config import Config, ConfigError
from springtide.ledger import Ledger, Outcome
from springtide.rollout.draws import make_samplers, read_pass_rates
from springtide.rollout.episode import EpisodeSpec, EpisodeSummary
from springtide.rollout.feeder import Feeder, Versions
from springtide.schedule.events import Dropped, RankJoined, Ready
from springtide.schedule.policy import Bounds
from springtide.schedule.readiness import Readiness
from springtide.schedule.registry import make_policy
from springtide.trace import TaskRef

TASKS = tuple(TaskRef(f"t{i}", "s", "1", "train", "quick", i, i) for i in range(40))


def config_of(tmp_path: Path, **sampling: Any) -> Config:
    return run_config(
        tmp_path, tmp_path, rollout={"group": {"n": 4}, "concurrency": 4, "sampling": sampling}, trainer={"groups": 4}
    )


def samplers_of(tmp_path: Path, ledger: Ledger, **sampling: Any) -> Any:
    return make_samplers(config_of(tmp_path, **sampling), {"s": TASKS}, {"s": 1.0}, ledger)["s"]


# --- options ----------------------------------------------------------------------------------------------------------


def drawn(tmp_path: Path, name: str, **sampling: Any) -> list[str]:
    """Two hundred draws of a policy that wins task i with i/39, a group ending before the next is drawn."""
    sampler = samplers_of(tmp_path, Ledger(tmp_path / f"{name}.sqlite"), **sampling)
    out = []
    for draw in range(200):
        out.append(sampler.task(draw).id)
        sampler.ended(draw, round(4 * int(out[-1][1:]) / 39), 4)
    return out


def test_every_option_of_sampling_changes_what_is_drawn(tmp_path: Path) -> None:
    rates = tmp_path / "rates.json"
    rates.write_text(json.dumps({f"t{i}": i / 39 for i in range(40)}))
    base = {kind: drawn(tmp_path, kind, kind=kind) for kind in ("uniform", "frontier", "difficulty", "thompson")}
    assert len({tuple(d) for d in base.values()}) == 4
    changes: dict[str, Any] = {"ema": 0.9, "centre": 0.2, "width": 0.05, "candidates": 1, "explore": 0.8, "cooldown": 9}
    for number, (name, value) in enumerate((*changes.items(), ("retire_after", 1), ("pass_rates", str(rates)))):
        assert drawn(tmp_path, str(number), kind="frontier", **{name: value}) != base["frontier"], name
    kept = set(drawn(tmp_path, "r", pass_rates=str(rates)))
    assert kept == {f"t{i}" for i in range(4, 36)}
    assert set(drawn(tmp_path, "l", pass_rates=str(rates), pass_low=0.5)) == {f"t{i}" for i in range(20, 36)}
    assert set(drawn(tmp_path, "h", pass_rates=str(rates), pass_high=0.5)) == {f"t{i}" for i in range(4, 20)}


@pytest.mark.parametrize(
    ("sampling", "says"),
    [
        ({"width": 0.1}, r"width is read with kind = 'frontier' only, not 'uniform'"),
        ({"kind": "difficulty", "centre": 0.3}, r"centre is read with kind = 'frontier' or 'thompson' only"),
        ({"pass_low": 0.2}, "pass_low bounds the rates of pass_rates, which names no file"),
        ({"pass_rates": "f", "pass_low": 0.95}, r"pass_low 0\.95 is above pass_high 0\.9"),
    ],
)
def test_options_that_contradict_each_other_are_one_line(tmp_path: Path, sampling: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        config_of(tmp_path, **sampling)


def test_a_pool_smaller_than_what_plays_at_once_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"suite s has 3 tasks for 4 groups in flight; set rollout\.concurrency"):
        make_samplers(
            config_of(tmp_path, kind="frontier"), {"s": TASKS[:3]}, {"s": 1.0}, Ledger(tmp_path / "l.sqlite")
        )  # fmt: skip


def test_a_steps_worth_of_draws_is_shared_out_to_suites_by_their_share(tmp_path: Path) -> None:
    """The frontier of a suite with a quarter of the mixture holds 3 x 1 tasks."""
    tasks = {s: tuple(TaskRef(f"{s}{i}", s, "1", "train", "quick", i, i) for i in range(40)) for s in ("a", "b")}
    config = config_of(tmp_path, kind="frontier", explore=0.0)
    sampler = make_samplers(config, tasks, {"a": 1.0, "b": 3.0}, Ledger(tmp_path / "l.sqlite"))
    assert (sampler["a"]._rules.batch, sampler["b"]._rules.batch) == (1, 3)


# --- measured pass rates ----------------------------------------------------------------------------------------------


def test_an_evaluations_episodes_are_pass_rates_without_those_whose_environment_failed(tmp_path: Path) -> None:
    file = tmp_path / "start.jsonl"
    episodes = [("a", True), ("a", False), ("a", None), ("b", False), ("c", None)]
    file.write_text("".join(json.dumps({"task": t, "success": s}) + "\n" for t, s in episodes))
    assert read_pass_rates(file) == {"a": 0.5, "b": 0.0}


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("r.json", "[1]", "is no pass rates"),
        ("r.json", '{"a": "often"}', "is no pass rates"),
        ("r.json", '{"a": 1.5}', r"the rate of a is 1\.5, not between 0 and 1"),
        ("r.json", '{"a": NaN}', "the rate of a is nan, not between 0 and 1"),
        ("r.jsonl", '{"task": "a", "success": true}\n{"task": "b"}\n', "line 2 is no pass rates"),
        ("r.json", None, "cannot be read"),
    ],
)
def test_a_bad_file_of_pass_rates_is_one_line(tmp_path: Path, name: str, text: str | None, says: str) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=says) as error:
        read_pass_rates(tmp_path / name)
    assert "\n" not in str(error.value)


def test_rates_of_another_suite_are_refused(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text('{"other": 0.5}')
    with pytest.raises(ConfigError, match=r"of the 40 tasks of suite s, .*r\.json has 0, none between 0\.1 and 0\.9"):
        samplers_of(tmp_path, Ledger(tmp_path / "l.sqlite"), pass_rates=str(tmp_path / "r.json"))


# --- through the feeder -----------------------------------------------------------------------------------------------


def feed(tmp_path: Path, ledger: Ledger, pool: Told, groups: int, **sampling: Any) -> list[str]:
    """Play until so many groups ended. Returns the tasks drawn, oldest first."""
    config, ends = config_of(tmp_path, **sampling), []

    def record(event: Any) -> None:
        ends.extend([event] if isinstance(event, (Ready, Dropped)) else [])

    feeder = Feeder(
        config, ledger=ledger, state=Readiness({"s": 1.0}), policy=make_policy("fixed_split", Bounds(4, 4, 99)),
        samplers={"s": samplers_of(tmp_path, ledger, **sampling)}, pool=pool, versions=Versions(0),  # type: ignore[arg-type]
        directory=tmp_path, note=lambda text: None, record=record,
    )  # fmt: skip

    async def run() -> None:
        feeder.apply(RankJoined(time.time(), "engine-0", "rollout", 65536))
        async with asyncio.TaskGroup() as group:
            running = group.create_task(feeder.run())
            while len(ends) < groups:
                await asyncio.sleep(0.005)
            running.cancel()

    asyncio.run(run())
    return [row.task.id for row in ledger.visits("open", "ready", "trained", "dropped")]


def test_the_feeder_tells_outcomes_and_plays_no_task_twice_at_once(tmp_path: Path) -> None:
    """Task 0 fails always, 1 wins always (dropped: no signal), the others are mixed; capability is of success."""
    live: set[tuple[str, int]] = set()  # (task, visit)
    most = 0

    async def episode(spec: EpisodeSpec) -> EpisodeSummary:
        nonlocal most
        live.add((spec.task.id, spec.visit))
        most = max(most, *Counter(task for task, _ in live).values())
        await asyncio.sleep(0.001 * (spec.visit % 3 + (spec.member == 3)))  # the last member ends the visit
        if spec.member == 3:
            live.discard((spec.task.id, spec.visit))
        won = spec.task.index == 1 or (spec.task.index > 1 and spec.member < 2)
        return finished(spec, success=won, reward=float(won) - 0.2)

    ledger = Ledger(tmp_path / "ledger.sqlite")
    feed(tmp_path, ledger, Told(episode), 60, kind="frontier", ema=0.5)
    outcomes = ledger.outcomes()
    assert len(outcomes) >= 60 and most == 1
    by_task = {o.task: o for o in outcomes}  # the newest of each
    for outcome in outcomes:
        index = int(outcome.task[1:])
        assert (outcome.wins, outcome.played) == ((0, 4, 2)[min(index, 2)], 4)
    assert {o.p for t, o in by_task.items() if t not in ("t0", "t1")} == {0.5}
    visits = Counter(o.task for o in outcomes)
    if "t0" in by_task:
        assert by_task["t0"].p == pytest.approx(0.5 ** (1 + visits["t0"]))


def test_members_lost_to_their_environment_are_in_no_capability(tmp_path: Path) -> None:
    async def episode(spec: EpisodeSpec) -> EpisodeSummary:
        if spec.retry == 0 and spec.member == 0:
            return EpisodeSummary.lost(spec, "down", cause="tool")
        return finished(spec, success=spec.member < 1, reward=float(spec.member))

    ledger = Ledger(tmp_path / "ledger.sqlite")
    feed(tmp_path, ledger, Told(episode), 6)
    assert {(o.wins, o.played) for o in ledger.outcomes()} == {(1, 4)}


def test_a_resumed_run_knows_what_it_had_learned_and_learns_from_no_visit_twice(tmp_path: Path) -> None:
    async def episode(spec: EpisodeSpec) -> EpisodeSummary:
        return finished(spec)

    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.draw(0, TASKS[7], 0, 4, 0)
    ledger.learned(Outcome(0, "s", "t7", 4, 4, 0.6))  # killed before the group was ready: the visit is open again
    sampler = samplers_of(tmp_path, ledger, kind="frontier")
    assert sampler.capability("t7") == pytest.approx(0.6)
    feed(tmp_path, ledger, Told(episode), 30, kind="frontier")
    assert [o.visit for o in ledger.outcomes()].count(0) == 1
    again = samplers_of(tmp_path, ledger, kind="frontier")
    newest = {o.task: o.p for o in ledger.outcomes()}
    assert {task: again.capability(task) for task in newest} == pytest.approx(newest)


def test_a_run_samples_its_frontier_and_its_report_shows_capability(tmp_path: Path) -> None:
    """Live, with processes: the ledger's capabilities are those of its attempts, and the report names them."""
    model = make_tiny_model(tmp_path / "model")
    config = run_config(model, tmp_path, rollout={"sampling": {"kind": "frontier"}}, observe={"report": True})
    springtide.train(config)
    ledger = Ledger(config.run_dir / "ledger.sqlite", read_only=True)
    outcomes = ledger.outcomes()
    ledger.close()
    assert len(outcomes) >= 12
    page = (config.run_dir / "report.html").read_text()
    hardest = min({o.task: o for o in outcomes}.values(), key=lambda o: (o.p, o.task))
    assert "Sampler: frontier" in page and hardest.task in page
