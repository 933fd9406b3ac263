"""Whole runs that learn: reward rises, a synchronous run repeats bit for bit, every option of the loop takes effect."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.run_support import records, run_config

import springtide
from springtide.config import ConfigError
from springtide.trace import Group


def test_reward_rises_and_the_record_adds_up(tiny_model: Path, tmp_path: Path) -> None:
    config = run_config(
        tiny_model, tmp_path, run={"steps": 30}, rollout={"group": {"n": 8}, "concurrency": 16}, trainer={"groups": 8},
        eval={"at_ends": True, "tasks": 20, "every": 10},
    )  # fmt: skip
    summary = springtide.train(config)
    steps = records(config)
    rewards = [r["reward"]["letters"] for r in steps if r["reward"]]  # none where no episode ended in between
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.15, rewards
    evaluations = {r["label"]: r["suites"]["letters"]["reward"] for r in records(config, "eval")}
    assert set(evaluations) == {"start", "step 10", "step 20", "end"}
    assert evaluations["end"] > evaluations["start"] + 0.15
    audit = summary.ledger
    assert audit["open"] == audit["ready"] == 0
    assert audit["drawn"] == audit["trained"] + sum(audit["dropped"].values())
    assert audit["trained"] == sum(r["trajectories"] for r in steps)
    assert summary.staleness_max <= config.staleness.bound
    assert summary.logprob_gap_mean < 1e-4
    assert [r["step"] for r in steps] == list(range(1, 31))


def test_a_trained_group_holds_exactly_what_was_sampled(tiny_model: Path, tmp_path: Path) -> None:
    config = run_config(tiny_model, tmp_path)
    springtide.train(config)
    groups = [Group.load(p) for p in sorted((config.run_dir / "trajectories").glob("0*.msgpack"))]
    assert groups
    seeds = set()
    for group in groups:
        assert len(group.trajectories) == 4
        for t in group.trajectories:
            (segment,), (turn,) = t.segments, t.turns
            assert segment.loss_mask.nonzero()[0].tolist() == list(range(turn.start, turn.end))
            assert (segment.logprobs[turn.start : turn.end] < 0).all()
            seeds.add(t.header["seed"])
    assert len(seeds) == 4 * len(groups)


def test_a_synchronous_run_repeats_bit_for_bit_and_is_on_policy(tiny_model: Path, tmp_path: Path) -> None:
    digests = []
    for name in ("first", "second"):
        config = run_config(
            tiny_model,
            tmp_path,
            name,
            run={"steps": 3},
            schedule={"policy": "synchronous"},
            eval={"every": 2, "tasks": 8},
        )
        assert springtide.train(config).staleness_max == 0
        weights = config.run_dir / "checkpoints" / "step-000003" / "model.safetensors"
        digests.append(hashlib.sha256(weights.read_bytes()).hexdigest())
    assert digests[0] == digests[1]


@pytest.mark.parametrize(
    ("tables", "shows"),
    [
        ({"algorithm": {"kl_coef": 0.05}}, lambda r: r["trainer"]["kl_reference"] >= 0),
        ({"algorithm": {"old_logprobs": "recompute"}}, lambda r: "weight" in r["trainer"]),
        (
            {"algorithm": {"kl_coef": 0.05, "kl_in": "reward", "kl_estimator": "k1"}, "trainer": {"lr": 3e-3}},
            lambda r: "kl_penalty" in r["trainer"] and "kl_reference" not in r["trainer"],
        ),
        ({"algorithm": {"entropy_coef": 0.01, "loss": "gspo"}}, lambda r: r["trainer"]["entropy_exact"] > 0),
        ({"algorithm": {"loss": "cispo"}}, lambda r: r["trainer"]["ratio"] > 0),
        (
            {"rollout": {"stale_probability": 0.5, "stale_refresh": 2}, "run": {"steps": 4}},
            lambda r: r["staleness"]["stale_pool_lag"] >= 0,
        ),
        ({"algorithm": {"equal_rewards": "keep"}}, lambda r: r["dropped"] == {}),
        (
            {"trainer": {"lr": 3e-3, "lr_decay": 1.0}},
            lambda r: r["trainer"]["lr"] == pytest.approx(3e-3 * (1 - (r["step"] - 1) / 3)),
        ),
        ({"trainer": {"cold_start": {"steps": 3, "tasks": 8, "batch": 4}}}, lambda r: True),
        ({"engine": {"ranks": 2}, "runtime": {"rollout_workers": 2, "env_workers": 2}}, lambda r: True),
    ],
    ids=[
        "kl", "recompute", "kl-in-reward", "entropy-gspo", "cispo", "stale-pool", "keep-equal", "lr-decay",
        "cold-start", "two-of-each",
    ],
)  # fmt: skip
def test_options_of_the_loop_take_effect(tiny_model: Path, tmp_path: Path, tables: dict[str, Any], shows: Any) -> None:
    config = run_config(tiny_model, tmp_path, **tables)
    springtide.train(config)
    assert all(shows(r) for r in records(config))
    assert len(records(config)) == config.run.steps
    if "engine" in tables:
        assert {f"{name}.log" for name in ("engine-1", "rollout-1", "env-w1")} <= {
            p.name for p in (config.run_dir / "logs").iterdir()
        }
    if "cold_start" in tables.get("trainer", {}):
        gold = sorted((config.run_dir / "trajectories").glob("gold-*.msgpack"))
        assert len(gold) == 8
        assert re.fullmatch(r"the loss of the cold start went .* in 3 steps", records(config, "note")[0]["text"])
        assert Group.load(gold[0]).trajectories[0].outcome.success
    if tables.get("rollout", {}).get("stale_probability"):
        turns = [
            turn.policy
            for path in (config.run_dir / "trajectories").glob("0*.msgpack")
            for t in Group.load(path).trajectories
            for turn in t.turns
        ]
        assert set(turns) == {"current", "stale"}


def test_what_cannot_run_is_refused_before_anything_starts(tiny_model: Path, tmp_path: Path) -> None:
    config = run_config(tiny_model, tmp_path, suites=[{"use": "no-such-suite"}])
    with pytest.raises(Exception, match="no-such-suite"):
        springtide.train(config)
    assert not config.run_dir.exists()
    springtide.train(run_config(tiny_model, tmp_path, run={"steps": 1}))
    with pytest.raises(ConfigError, match="holds a run; choose another"):
        springtide.train(run_config(tiny_model, tmp_path))


def test_evaluation_of_a_run_and_export(tiny_model: Path, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM
    from typer.testing import CliRunner

    from springtide.cli.main import app

    config = run_config(tiny_model, tmp_path, run={"steps": 2}, eval={"at_ends": True, "tasks": 10})
    springtide.train(config)
    result = springtide.evaluate(config.run_dir, config.suites[0].use, tasks=10, samples=4)
    figures = result.suites["letters"]
    assert figures.episodes == 40
    assert set(figures.pass_at) == {1, 2, 4}
    assert sum(figures.status.values()) == pytest.approx(1.0)
    both = [str(config.run_dir)] * 2
    compared = CliRunner().invoke(app, ["compare", *both, "--label-a", "start", "--json"])
    assert compared.exit_code == 0, compared.output
    row = json.loads(compared.output)["rows"][0]
    at_ends = {r["label"]: r["suites"]["letters"]["success"] for r in records(config, "eval")}
    assert row["how"] == "sampled" and (row["a"], row["b"]) == pytest.approx((at_ends["start"], at_ends["end"]))
    done = CliRunner().invoke(app, ["export", str(config.run_dir), str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert not (tmp_path / "out" / "optimizer.pt").exists()
    ids = torch.arange(20)[None]
    ours = AutoModelForCausalLM.from_pretrained(config.run_dir / "checkpoints" / "step-000002")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(ours(ids).logits, exported(ids).logits)
    events = [json.loads(line) for line in (config.run_dir / "events.jsonl").read_text().splitlines()]
    assert {"Admit", "Admitted", "Ready", "StepStarted", "StepEnded"} <= {e["kind"] for e in events}
