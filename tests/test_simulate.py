"""The simulated cluster: work is conserved, tokens are accounted for, and figures are what formulas say."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from springtide.cli.main import app
from springtide.config import ConfigError
from springtide.schedule.events import event_from_json, event_to_json
from springtide.schedule.policy import Bounds, Layout
from springtide.schedule.readiness import Readiness
from springtide.schedule.registry import POLICIES, make_policy
from springtide.schedule.roofline import DEVICES, Roofline, Shape, UnknownHardware
from springtide.simulate.cluster import Cluster, Costs, Stuck, World
from springtide.simulate.engine import Engine, Turn
from springtide.simulate.run import Setup, Simulation, summarise, worth
from springtide.simulate.trainer import Step
from springtide.simulate.workload import (
    PRESETS,
    Law,
    Workload,
    WorkloadError,
    episodes,
    random_workload,
    read_trace,
    without_latency,
)

H100_7B = Roofline(DEVICES["h100"], Shape.of("qwen2.5-7b"))
SMALL = Setup(workload="webshop", groups=4, members=4, warm=1, steps=3)


# --- workloads --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_a_presets_episodes_are_within_its_limits_and_the_same_whoever_asks(name: str) -> None:
    workload = PRESETS[name]
    draw, again = episodes(workload, 3), episodes(workload, 3)
    plans = [draw(visit, member, 0) for visit in range(60) for member in range(4)]
    for plan in plans:
        assert len(plan.before) == len(plan.keep) == len(plan.sampled) == len(plan.tool_s)
        assert len(plan.before) <= workload.turns.most
        assert all(b < workload.context for b in plan.before) and plan.final <= workload.context
        assert all(0 <= k <= b for k, b in zip(plan.keep, plan.before, strict=True)) and plan.keep[0] == 0
    assert again(7, 2, 0).before == draw(7, 2, 0).before
    assert draw(7, 2, 1).before != draw(7, 2, 0).before or name == "math"
    turns = [len(p.before) for p in plans]
    assert fmean(turns) == pytest.approx(min(workload.turns.mean, workload.turns.most), rel=0.35)


def test_members_of_a_group_are_alike_and_not_the_same() -> None:
    """A rerun of a task takes another time; yet tasks differ more than their reruns."""
    draw = episodes(PRESETS["office"], 0)
    groups = [[sum(draw(visit, member, 0).sampled) for member in range(8)] for visit in range(80)]
    within = fmean(fmean((x - fmean(g)) ** 2 for x in g) for g in groups)
    between = fmean((fmean(g) - fmean(map(fmean, groups))) ** 2 for g in groups)
    assert within > 0 and between > within / 8  # more than chance alone would leave of means of eight


def test_a_sliding_window_of_images_breaks_the_prefix_where_the_oldest_is_dropped() -> None:
    plan = next(p for v in range(50) if len((p := episodes(PRESETS["osworld"], 0)(v, 0, 0)).before) > 8)
    ends = [b + s for b, s in zip(plan.before, plan.sampled, strict=True)]
    assert plan.keep[1:6] == ends[:5], "five images fit"
    assert all(k < e for k, e in zip(plan.keep[6:], ends[5:], strict=False))


def test_a_trace_is_played_as_it_was_recorded(tmp_path: Path) -> None:
    line = {
        "input_prompt_length": 100, "assistant_response_length": [10, 20], "tool_call_output_length": [5, 7],
        "tool_call_latency": [0.5, 1.5], "final_assistant_response_length": 30,
    }  # fmt: skip
    file = tmp_path / "trace.jsonl"
    file.write_text(json.dumps(line) + "\n")
    plan = read_trace(file)(0, 0, 0)
    assert (plan.before, plan.keep) == ([100, 115, 142], [0, 110, 135])
    assert (plan.sampled, plan.tool_s, plan.tokens) == ([10, 20, 30], [0.5, 1.5, 0.0], 172)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{}", "line 1: not an episode"),
        ('{"input_prompt_length": 1', "line 1: not an episode"),
        ("", "holds no episode"),
        (
            '{"input_prompt_length": 5, "assistant_response_length": [1], "tool_call_output_length": [],'
            ' "tool_call_latency": [], "final_assistant_response_length": 1}',
            "1 tool calls, 0 outputs, 0 latencies",
        ),
        (
            '{"input_prompt_length": 0, "assistant_response_length": [], "tool_call_output_length": [],'
            ' "tool_call_latency": [], "final_assistant_response_length": 1}',
            "below 1",
        ),
    ],
)
def test_a_broken_trace_is_one_line_that_says_where(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(text)
    with pytest.raises(WorkloadError, match=says):
        read_trace(file)


# --- the engine -------------------------------------------------------------------------------------------------------


def play(engine: Engine, turns: list[Turn]) -> float:
    """Start all now, and return when the last ends."""
    now = 0.0
    for turn in turns:
        engine.start(turn, now)
    while (end := engine.next_end()) is not None:
        now = end
        engine.ended(now)
    return now


def test_equal_sequences_without_a_wait_take_the_rooflines_time() -> None:
    """M/G/k without latency or KV limit: the batch decodes at the roofline's rate from its first token to its last."""
    batch, prompt, count = 64, 400, 200
    engine = Engine(H100_7B, 10**9)
    seconds = play(engine, [Turn((i, 0), prompt, count, 0, prompt, False) for i in range(batch)])
    prefill = batch * H100_7B.prefill_s(prompt, prompt * (prompt + 1) / 2)
    steps = sum(H100_7B.engine_step_s(decode=batch, context=batch * (prompt + i + 0.5)) for i in range(count))
    assert seconds == pytest.approx(prefill + steps, rel=1e-6)
    assert engine.decoded == pytest.approx(batch * count)


def test_kv_of_the_same_weights_serves_the_next_turn_and_of_older_ones_nothing() -> None:
    engine = Engine(H100_7B, 10**6)
    key = (0, 0)
    now = play(engine, [Turn(key, 300, 50, 0, 300, False)])
    engine.start(Turn(key, 400, 10, 350, 300, False), now)
    assert engine.hits == 350 and engine.prefilled["fresh"] == 300 + 50
    end = engine.next_end()
    assert end is not None
    engine.ended(end)
    engine.publish(1, 0.3, end)
    engine.start(Turn(key, 500, 10, 410, 300, False), end)
    assert engine.hits == 350 and engine.prefilled["sync"] == 410


def test_a_groups_prompt_is_computed_once() -> None:
    engine = Engine(H100_7B, 10**6)
    play(engine, [Turn((0, member), 1000, 10, 0, 1000, False) for member in range(8)])
    assert (engine.prefilled["fresh"], engine.hits) == (1000, 7000)
    engine.done(0)
    assert engine.used == 80, "each has the KV of what it sampled"


def test_what_was_used_least_recently_is_evicted_and_counted_when_it_comes_back() -> None:
    engine = Engine(H100_7B, 1000)
    now = 0.0
    for visit in range(3):
        engine.start(Turn((visit, 0), 300, 100, 0, 300, False), now)
        end = engine.next_end()
        assert end is not None
        now = end
        engine.ended(now)
    assert engine.used <= 1000
    engine.start(Turn((0, 0), 420, 10, 400, 300, False), now)
    assert engine.prefilled["eviction"] == 100, "its own tokens went, its group's prompt stayed"


@settings(deadline=None, max_examples=60)
@given(
    st.integers(2000, 20_000),
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 3), st.integers(1, 900), st.integers(1, 400), st.floats(0, 3)),
        min_size=1,
        max_size=60,
    ),
)
def test_kv_never_exceeds_its_capacity_and_all_that_is_sampled_was_decoded(
    capacity: int, turns: list[tuple[int, int, int, int, float]]
) -> None:
    engine, now, busy, sampled = Engine(H100_7B, capacity), 0.0, set[tuple[int, int]](), 0

    def until(t: float) -> None:
        nonlocal now
        while (end := engine.next_end()) is not None and end <= t:
            now = max(now, end)
            busy.discard(engine.ended(now).key)
        now = max(now, t)

    for visit, member, context, count, wait in turns:
        until(now + wait)
        if (visit, member) in busy:
            continue
        busy.add((visit, member))
        prompt = 100
        engine.start(Turn((visit, member), prompt + context, count, 0, prompt, False), now)
        sampled += count
        assert engine.used <= capacity
    until(1e9)
    assert not busy and engine.running == engine.waiting == 0
    assert engine.decoded == pytest.approx(sampled, rel=1e-6)
    assert engine.used <= capacity


def test_a_turn_that_is_given_up_leaves_no_trace_in_the_rates() -> None:
    alone, both = Engine(H100_7B, 10**6), Engine(H100_7B, 10**6)
    both.start(Turn((1, 0), 100, 500, 0, 100, False), 0.0)
    both.start(Turn((2, 0), 100, 900, 0, 100, False), 0.0)
    both.abort((2, 0), 1.0)
    both.done(2)
    alone.start(Turn((1, 0), 100, 500, 0, 100, False), 0.0)
    a, b = alone.next_end(), both.next_end()
    assert a is not None and b is not None
    assert b == pytest.approx(a, rel=0.02) and both.used == 600


# --- the trainer ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pipeline", "references", "seconds"),
    [
        ("none", 0, 6.0),  # 4 groups of 3 s on 2 ranks
        ("resident", 0, 8.0),  # and 1 s each of the reference
        ("aggregate", 0, 0.5 + 2.0 + 0.5 + 6.0),  # loads, 4 s on two ranks, unloads
        # The reference's j-th is ready at j + 1. Forward takes 1 s, backward 2 s from the later of both: the second
        # rank begins its first backward pass at 2, its second piece at 4, and that one's backward pass at 5.
        ("streaming", 1, 7.0),
    ],
)
def test_a_step_takes_what_its_pipeline_says(pipeline: Any, references: int, seconds: float) -> None:
    step = Step(pipeline, [0.0, 0.0], [0.0] * references, 0.5)
    for _ in range(4):
        step.feed(0.0, 1.0, 3.0, 1)
    assert step.end(0.0, 1) == pytest.approx(seconds)


# --- the cluster ------------------------------------------------------------------------------------------------------


def small(policy: str, seed: int, **more: Any) -> tuple[Cluster, list[str]]:
    """A run of a policy on eight ranks, and its record."""
    simulation = Simulation(replace(SMALL, **more))
    lines: list[str] = []
    row = simulation.run(policy, seed, record=lambda event: lines.append(json.dumps(event_to_json(event))))
    assert row.goodput_tokens_per_s > 0
    return row, lines  # type: ignore[return-value]


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_plays_and_the_same_seed_gives_the_same_events_to_the_byte(policy: str) -> None:
    (row, lines), (again, same) = small(policy, 1), small(policy, 1)
    assert lines == same and row == again
    assert small(policy, 2)[1] != lines


@pytest.mark.parametrize("policy", ["fixed_split", "tiderl", "springtide"])
def test_a_simulated_record_replays_to_the_same_actions(policy: str) -> None:
    simulation, lines = Simulation(SMALL), small(policy, 0)[1]
    chosen = make_policy(policy, simulation.bounds, simulation.layout(policy))
    state = Readiness({"tasks": 1.0})
    state.follow(chosen)  # type: ignore[arg-type]
    due: list[dict[str, Any]] = []
    acted = 0
    for line in lines:
        data = json.loads(line)
        try:
            event = event_from_json(data)
        except KeyError:
            if not due:
                due = [json.loads(json.dumps(event_to_json(a))) for a in chosen.decide(state)]
            assert due.pop(0) == data
            acted += 1
        else:
            state.apply(event)
    assert acted > 50


@settings(deadline=None, max_examples=12)
@given(
    seed=st.integers(0, 10**6),
    policy=st.sampled_from(sorted(POLICIES)),
    bound=st.integers(0, 2),
    members=st.integers(1, 4),
    deaths=st.sampled_from([0.0, 60.0]),
    evaluate=st.sampled_from([0, 4]),
    budget=st.integers(9_000, 40_000),
)
def test_tokens_and_seconds_are_accounted_for_whatever_happens(
    seed: int, policy: str, bound: int, members: int, deaths: float, evaluate: int, budget: int
) -> None:
    rng = random.Random(seed)
    workload = replace(random_workload(rng), context=8000, turns=Law(4, 0.5, 8), prompt=Law(500, 0.2))
    bounds = Bounds(3, 3 * (bound + 1), bound, members=members)
    simulation = Simulation(replace(SMALL, bound=bound))
    at = simulation.layout(policy)
    world = World(
        {"tasks": (1.0, episodes(workload, seed), lambda visit, n: [i % 2 == 0 for i in range(n)])},
        H100_7B, H100_7B, budget, Costs(2.0, 0.3, 3.0, 0.4),
        evaluate_every=1 if evaluate else 0, evaluate=evaluate, deaths_s=deaths,
    )  # fmt: skip
    cluster = Cluster(world, make_policy(policy, bounds, at), bounds, at, seed=seed)
    cluster.run(3, most_s=3e5)
    assert cluster.state.step == 3
    assert max(cluster.staleness) <= bound
    assert cluster.sampled == cluster.trained["sampled"] + sum(cluster.discarded.values()) + cluster.held
    for rank in cluster.ranks.values():
        assert sum(rank.seconds.values()) == pytest.approx(cluster.now)
        assert rank.engine.used <= max(budget, 8000)
        assert set(rank.seconds) <= {"", "decode", "wait", "train", "reference", "idle", "switch", "dead"}


def test_without_latency_and_kv_limits_goodput_is_the_rooflines() -> None:
    """Generation bound, one long turn each: ranks never wait, and decode what the roofline says of their batch."""
    workload = Workload(Law(1), Law(200), Law(2000), Law(0), ((1.0, Law(0.0)),), context=4000)
    bounds = Bounds(8, 256, 31)
    at = Layout(2, 0, 6)
    world = World(
        {"tasks": (1.0, episodes(workload, 0), lambda visit, n: [True] * n)},
        H100_7B, H100_7B, 10**8, Costs(0.0, 0.0, 0.0, 0.0), reference=False,
    )  # fmt: skip
    cluster = Cluster(world, make_policy("fixed_split", bounds, at), bounds, at)
    cluster.run(200)
    first, last = cluster.steps[100], cluster.steps[-1]
    rate = (last[2] - first[2]) / (last[0] - first[0])
    each = 256 / 2  # episodes of a rank: the trainer is much faster, so all that may be pending play
    predicted = 2 * each / H100_7B.engine_step_s(decode=each, context=each * 1200)
    assert rate == pytest.approx(predicted, rel=0.1)


def test_staleness_and_speed_follow_what_was_published_of_them() -> None:
    """A slower environment costs the synchronous policy more than the asynchronous one (RollArt: the gain grows with
    the variance of environments), and a group that is stale teaches less."""
    quick = Simulation(replace(SMALL, workload=without_latency(PRESETS["webshop"])))
    slow = Simulation(replace(SMALL, workload=replace(PRESETS["webshop"], tool_s=((1.0, Law(5.0, 1.0)),))))
    gains = []
    for simulation in (quick, slow):
        pair = [simulation.run(p, 0).goodput_tokens_per_s for p in ("fixed_split", "synchronous")]
        gains.append(pair[0] / pair[1])
    assert gains[1] > gains[0]
    assert [worth(s) for s in (0, 16)] == [1.0, 0.5] and worth(4) > 0.9


def test_a_workload_without_any_signal_ends_and_says_so() -> None:
    hopeless = replace(PRESETS["webshop"], turns=Law(1), solves=(1e-9, 1.0))
    with pytest.raises(Stuck, match="all members of the last 80 groups earned the same"):
        Simulation(replace(SMALL, workload=hopeless)).run("fixed_split", 0)


def test_a_row_has_intervals_over_seeds() -> None:
    found = summarise([Simulation(SMALL).run("fixed_split", seed) for seed in range(3)])
    assert found["goodput_tokens_per_s_low"] < found["goodput_tokens_per_s"] < found["goodput_tokens_per_s_high"]
    assert 0 < found["kv_hit_rate"] < 1 and 0 <= found["train_wait_share"] <= 1


# --- the commands -----------------------------------------------------------------------------------------------------


def test_the_command_prints_rows_and_json() -> None:
    options = ["simulate", "webshop", "--policy", "fixed_split,synchronous", "--seeds", "2", "--groups", "4"]
    options += ["--members", "4", "--steps", "2"]
    shown = CliRunner().invoke(app, options)
    assert shown.exit_code == 0 and "fixed_split" in shown.output and "synchronous" in shown.output
    data = json.loads(CliRunner().invoke(app, [*options, "--json"]).output)
    assert [row["policy"] for row in data["rows"]] == ["fixed_split", "synchronous"]
    for name in ("goodput_tokens_per_s", "step_s", "time_to_equal_learning_s", "kv_hit_rate", "rollout_wait_share"):
        assert data["rows"][0][name] >= 0


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["nowhere"], "there is no workload 'nowhere'"),
        (["webshop", "--policy", "best"], "there is no 'best'"),
        (["webshop", "--device", "v100"], "there is no device 'v100'"),
        (["webshop", "--model", "gpt-9"], "'gpt-9' is neither"),
        (["webshop", "--gpus", "8", "--tensor", "3"], "no whole number of ranks"),
        (["webshop", "--model", "qwen3-32b"], "leaves none of 8 to play"),
        (["missing.jsonl"], "cannot read missing.jsonl"),
    ],
)
def test_what_cannot_be_simulated_is_one_line(more: list[str], says: str) -> None:
    result = CliRunner().invoke(app, ["simulate", *more])
    assert result.exit_code != 0 and says in str(result.exception)


def test_a_picture_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    options = ["simulate", "webshop", "--policy", "fixed_split", "--seeds", "1", "--groups", "2", "--members", "2"]
    result = CliRunner().invoke(app, [*options, "--steps", "1", "--plot", str(tmp_path / "no" / "out.png")])
    assert isinstance(result.exception, ConfigError) and "--plot" in str(result.exception)


def test_a_setup_without_room_for_one_context_is_refused() -> None:
    with pytest.raises(UnknownHardware, match="fewer than one context"):
        Simulation(Setup(workload="swe", model="qwen3-32b", gpus=64))


@pytest.mark.slow
def test_advice_names_a_split_a_bound_and_a_policy(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('suites = [{use = "db"}]\n[trainer]\ngroups = 4\n[rollout.group]\nn = 2\n')
    result = CliRunner().invoke(app, ["advise", str(file), "--model", "qwen2.5-7b", "--gpus", "4", "--json"])
    assert result.exit_code == 0, result.output
    trials = json.loads(result.output)["trials"]
    assert trials[0]["time_to_equal_learning_s"] <= trials[-1]["time_to_equal_learning_s"]
    assert {trial["policy"] for trial in trials} == set(POLICIES)
    assert {trial["policy"] for trial in trials if trial["live"]} == {"synchronous", "fixed_split"}
