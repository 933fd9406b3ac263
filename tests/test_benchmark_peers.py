"""The benchmarks against peers, and against ourselves with slow tools: what makes them equal, and their verdicts."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from springtide.chat import load_chat
from springtide.env import InProcessClient, load_suite
from springtide.models.presets import resolve_model
from springtide.trace import Message

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))  # they are programs, run by path, and import what they share from beside them
latency, one_turn, wrapped = (importlib.import_module(name) for name in ("latency", "one_turn", "wrapped"))
goodput, peer_trl, vllm_learning = (importlib.import_module(n) for n in ("goodput", "peer_trl", "vllm_learning"))
SHIPPED = ("db", "kg", "household")


# --- tools that answer late -------------------------------------------------------------------------------------------


def test_the_law_of_latency_is_the_one_written_down() -> None:
    drawn = sorted(wrapped.latency_s("db/quick/train/0", i, "execute_sql", {"sql": "SELECT 1"}) for i in range(20_000))
    assert drawn[10_000] == pytest.approx(0.25, rel=0.05)
    assert drawn[19_800] == pytest.approx(4.6, rel=0.15)
    assert drawn[-1] <= wrapped.MOST_S
    assert "median 0.25 s, sigma 1.25, 99th percentile 4.6 s" in latency.law()


@given(st.text(max_size=9), st.integers(0, 9), st.text(max_size=9), st.dictionaries(st.text(max_size=3), st.text()))
def test_a_call_takes_the_same_time_in_every_mode(task: str, before: int, name: str, arguments: dict[str, str]) -> None:
    seconds = wrapped.latency_s(task, before, name, arguments)
    assert 0 < seconds <= wrapped.MOST_S
    assert seconds == wrapped.latency_s(task, before, name, dict(reversed(arguments.items())))
    assert seconds != wrapped.latency_s(task, before + 1, name, arguments)


@pytest.mark.parametrize("suite", SHIPPED)
def test_a_slow_suite_is_the_shipped_one_but_for_its_time(suite: str, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = load_suite(f"{BENCHMARKS / 'wrapped.py'}:Slow{suite.capitalize()}")
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    # Only in the loaded file: the runner's own deadlines go on.
    module = sys.modules[slow.environment.called.__module__]
    monkeypatch.setattr(module, "asyncio", type("A", (), {"sleep": sleep, "to_thread": asyncio.to_thread}))
    seen = []
    for use in (load_suite(suite), slow):
        seen.append({split: asyncio.run(_play_gold(use, split)) for split in ("train", "test")})
        assert (slept == []) == (use is not slow)
    assert seen[0] == seen[1]
    assert seen[1]["train"][-1] == 1.0
    assert slept == [
        wrapped.latency_s(f"{suite}/quick/train/0", i, name, arguments)
        for i, (name, arguments) in enumerate(c for c in seen[1]["train"][0] if c[0])
    ], "a call of the train task each, and none of the test task"


async def _play_gold(suite: Any, split: str) -> tuple[Any, ...]:
    """(gold, task, prompt, tools, answers, reward) of a suite's first task."""
    async with InProcessClient([suite]) as client:
        task = (await client.catalog(suite.name, split, None))[0]
        session = await client.open(task, 0, 0, 0, 60)
        calls = await session.author_gold()
        assert calls is not None
        answers = []
        for turn, call in enumerate(calls):
            text = "" if call.name else json.loads(call.arguments)["text"]
            answers.append(await session.act(Message("assistant", text, (call,) if call.name else ()), turn))
        outcome = await session.finish("done")
        await session.close()
        gold = [(call.name, json.loads(call.arguments)) for call in calls]
        said = [[m.text for m in a.messages] for a in answers]
        return gold, task, session.messages, session.tools, said, outcome.reward


def test_the_synchronous_cells_differ_from_the_asynchronous_in_mode_and_sleep_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(BENCHMARKS.parent)  # as the program does
    trees = [latency.make_config(mode, 0, ()).model_dump() for mode in ("asynchronous", "synchronous")]
    assert {key for key in trees[0] if trees[0][key] != trees[1][key]} == {"suites", "schedule"}
    assert trees[0]["run"]["steps"] == latency.STEPS
    cells = [latency.cell(mode, seed) for mode in ("asynchronous", "synchronous") for seed in latency.SEEDS]
    assert len({c.key for c in cells}) == len({c.name for c in cells}) == 10


def _result(end: float) -> dict[str, Any]:
    return {"steps": 30, "start": {"db": {"sampled": 0.2}}, "end": {"db": {"sampled": end}}}


def test_equal_success_means_a_difference_within_its_own_interval() -> None:
    theirs = [_result(x) for x in (0.40, 0.42, 0.41, 0.39, 0.43)]
    ours = [_result(x) for x in (0.41, 0.40, 0.42, 0.40, 0.41)]
    verdict, difference, seen, *gains = latency.success_rows(ours, theirs)
    assert verdict.met(quick=False)
    assert difference.ci_low < 0 < difference.ci_high
    assert seen.value == pytest.approx((difference.ci_high - difference.ci_low) / 2)
    assert [g.value for g in gains] == pytest.approx([20.8, 21.0])
    worse = [_result(r["end"]["db"]["sampled"] - 0.1 - i / 1000) for i, r in enumerate(theirs)]
    assert latency.success_rows(worse, theirs)[0].met(quick=False) is False
    assert latency.success_rows(ours[:1], theirs[:1])[0].met(quick=False) is False, "one seed proves nothing"


def test_asynchronous_is_held_against_both_ways_of_being_synchronous() -> None:
    def speed(loss: float) -> Any:
        return goodput.Figures(loss, 2 * loss, loss, 1.0, 5, {"groups": 0.1}, {"nothing in flight": 0.1}, 0.0, 0.0, 1.0)

    rounds = {"asynchronous": [speed(140)], "synchronous": [speed(50)], "step barrier": [speed(110)]}
    judged = [row for row in latency.speed_rows(rounds) if row.required is not None]
    assert [row.met(quick=False) for row in judged] == [True, False]
    assert len({row.target for row in latency.speed_rows(rounds)}) == len(latency.speed_rows(rounds))


# --- the same run on vLLM ---------------------------------------------------------------------------------------------


def test_the_arm_on_vllm_differs_in_its_engine_alone() -> None:
    trees = [vllm_learning.make_config(kind, 0, (), "python").model_dump() for kind in ("local", "vllm")]
    assert {key for key in trees[0] if trees[0][key] != trees[1][key]} == {"engine"}
    assert trees[0]["run"]["steps"] == vllm_learning.STEPS


def test_vllm_learned_the_same_when_its_paired_difference_is_within_its_interval() -> None:
    def result(solved: int) -> dict[str, Any]:
        """Of 40 tasks, the first `solved`."""
        scores = {"db/sampled": {f"t{i}": float(i < solved) for i in range(40)}}
        share = {"start": {"db": {"sampled": 0.1}}, "end": {"db": {"sampled": solved / 40}}}
        return {"scores": scores, "gap": 1e-6, "train_s": 9.0, **share}

    local = [result(20), result(22)]
    verdict, difference, *rest = vllm_learning.make_rows(local, [result(21), result(21)])
    assert verdict.met(quick=False) and difference.value == pytest.approx(0)
    assert {row.target.rpartition(": ")[2]: row.value for row in rest if "gain" in row.target} == pytest.approx(
        {"gain, local": 42.5, "gain, vLLM": 42.5}
    )
    assert vllm_learning.make_rows(local, [result(6), result(8)])[0].met(quick=False) is False


# --- TRL --------------------------------------------------------------------------------------------------------------


def test_one_turn_prompts_are_the_shipped_ones_token_for_token_and_end_with_the_turn(tmp_path: Path) -> None:
    one_turn.make_model(tmp_path / "endless")
    ours, shipped = load_chat(tmp_path / "endless", "plain"), load_chat(resolve_model(one_turn.MODEL))

    async def check(suite: str) -> None:
        single = load_suite(f"{BENCHMARKS / 'wrapped.py'}:OneTurn{suite.capitalize()}")
        async with InProcessClient([suite]) as there, InProcessClient([single]) as here:
            for task in (await here.catalog(suite, "train", None))[:3]:
                original = await there.open(task, 0, 0, 0, 60)
                session = await here.open(task, 0, 0, 0, 60)
                prompt = ours.start(session.messages, session.tools).ids
                assert prompt.tolist() == shipped.start(original.messages, original.tools).ids.tolist()
                gold = await session.environment.gold_text()
                text = f"<tool_call>{gold}</tool_call><|im_end|>\n{gold}"
                observed = await session.act(Message("assistant", text), 0)
                assert observed.ended
                outcome = await session.finish("done")
                # TRL decodes without special tokens; what it is given is worth the same.
                plain = f"{gold}\n{gold}"
                assert outcome.status == "completed"
                assert peer_trl.reward([plain, text, ""], [gold] * 3) == [
                    outcome.reward,
                    wrapped.reward(plain, gold),
                    wrapped.reward("", gold),
                ]
                assert outcome.reward > wrapped.reward("", gold)
                await session.close()
                await original.close()

    for suite in SHIPPED:
        asyncio.run(check(suite))


def test_no_completion_of_the_comparison_ends_early(tmp_path: Path) -> None:
    one_turn.make_model(tmp_path / "endless")
    chat = load_chat(tmp_path / "endless", "plain")
    end = load_chat(resolve_model(one_turn.MODEL)).stop_ids
    assert chat.stop_ids
    assert not set(chat.stop_ids) & set(end)
    assert (tmp_path / "endless" / "model.safetensors").read_bytes() == (
        resolve_model(one_turn.MODEL) / "model.safetensors"
    ).read_bytes()


def _run(step_s: float, completion: float = 64.0, steps: int = 3) -> dict[str, Any]:
    batch = one_turn.GROUPS * one_turn.MEMBERS
    per_step = [
        {"t": 100 + step_s * i, "loss_tokens": completion * batch, "tokens": 90.0 * batch} for i in range(steps)
    ]
    return {"steps": per_step}  # fmt: skip


def test_a_peers_speed_is_that_of_its_steps_but_the_first() -> None:
    speed = one_turn.speed_of(_run(2.0), one_turn.GROUPS)
    assert speed == one_turn.Speed(64 * 128 / 2.0, 90 * 128 / 2.0, 2.0, 64.0)
    assert one_turn.steps_within(90, {"result": _run(4.0)}, 1) == 24
    assert one_turn.steps_within(90, {"result": _run(4.0)}, 2) == 25, "whole generations"
    assert one_turn.steps_within(1, {"result": _run(4.0)}, 1) == 3


def test_trl_is_measured_at_its_best_setting_and_only_when_all_were_tried(tmp_path: Path) -> None:
    installed = {"trl": "1.16.0"}
    fastest = one_turn.GRID[4]
    for setting in one_turn.GRID:
        assert one_turn.stored(installed, tmp_path) == {}
        result = _run(1.0 if setting == fastest else 2.0)
        one_turn.trial_cell(setting, installed).run(lambda result=result: result, missing=True, directory=tmp_path)
    further = one_turn.Setting(fastest.threads, fastest.processes, fastest.per_device, ahead=2)
    assert one_turn.stored(installed, tmp_path) == {}
    one_turn.trial_cell(further, installed).run(lambda: _run(1.5), missing=True, directory=tmp_path)
    cells = one_turn.stored(installed, tmp_path)
    assert len(cells) == len(one_turn.GRID) + 1
    assert one_turn.best(cells) == fastest
    assert one_turn.stored({"trl": "1.17.0"}, tmp_path) == {}, "another version is another peer"
    assert {(s.threads, s.processes) for s in one_turn.GRID} == {(1, 1), (2, 1), (1, 2)}


def test_a_peer_that_is_not_installed_is_a_row_that_is_not_met() -> None:
    rows = one_turn.make_rows((), (), None)
    assert [row.met(quick=False) for row in rows] == [False, False]
    assert all(row.baseline == "TRL: not installed" for row in rows)
    speed = one_turn.speed_of(_run(1.0), one_turn.GROUPS)
    half = one_turn.speed_of(_run(2.0), one_turn.GROUPS)
    rows = one_turn.make_rows([speed, speed], [half, half], one_turn.GRID[0])
    assert [row.met(quick=False) for row in rows] == [True, True]
    short = one_turn.speed_of(_run(2.0, completion=40.0), one_turn.GROUPS)
    with pytest.raises(SystemExit, match="no equal work"):
        one_turn.make_rows([speed], [short], one_turn.GRID[0])


@pytest.mark.skipif(importlib.util.find_spec("trl") is not None, reason="trl is installed here")
def test_an_interpreter_without_trl_is_one_line() -> None:
    with pytest.raises(SystemExit, match="needs trl"):
        one_turn.versions(Path(sys.executable))


# --- vLLM -------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vllm is installed here")
def test_an_interpreter_without_vllm_ends_the_benchmark_with_its_log(tmp_path: Path) -> None:
    engine = importlib.import_module("engine")
    with pytest.raises(SystemExit, match="No module named 'vllm'"), engine.Vllm.start(Path(sys.executable), tmp_path):
        pass
