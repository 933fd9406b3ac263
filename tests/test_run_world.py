"""Whole runs with several trainer ranks: they learn, resume with another number of them, and end together."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from tests.run_support import alive, descendants, program, records, run_config, start_run, wait_for

import springtide
from springtide.config import Config


def test_a_run_of_two_trainer_ranks_learns_and_adds_up(tiny_model: Path, tmp_path: Path) -> None:
    config = run_config(
        tiny_model, tmp_path, run={"steps": 40}, rollout={"group": {"n": 8}, "concurrency": 16},
        trainer={"groups": 8, "ranks": 2, "cold_start": {"steps": 1}},
    )  # fmt: skip
    summary = springtide.train(config)
    steps = records(config)
    rewards = [r["reward"]["letters"] for r in steps if r["reward"]]
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.15, rewards
    assert summary.ledger["drawn"] == summary.ledger["trained"] + sum(summary.ledger["dropped"].values())
    assert summary.ledger["trained"] == sum(r["trajectories"] for r in steps)
    assert summary.logprob_gap_mean < 1e-4
    assert all(r["trainer"]["micro_batches"] >= 2 for r in steps), "both had some of each step"
    assert (config.run_dir / "logs" / "trainer-1.log").exists()


@pytest.mark.parametrize("victim", ["trainer-0", "trainer-1"])
def test_a_killed_trainer_rank_ends_the_run_with_its_cause_in_seconds(
    tiny_model: Path, tmp_path: Path, victim: str
) -> None:
    """Its peers wait for it in a collective, or will."""
    config = run_config(tiny_model, tmp_path, run={"steps": 1000}, trainer={"groups": 4, "ranks": 2})
    run = start_run(config)
    metrics = config.run_dir / "metrics.jsonl"
    wait_for("a step", lambda: metrics.exists() and '"step"' in metrics.read_text())
    children = descendants(run.pid)
    os.kill(next(p for p in children if program(p) == victim), signal.SIGKILL)
    started = time.monotonic()
    assert run.wait(30) == 1
    assert time.monotonic() - started < 15
    assert run.stdout is not None
    assert f"{victim} ended with status -9" in run.stdout.read()
    assert not alive(children)


def test_a_sharded_run_learns_and_goes_on_with_another_number_of_ranks(tiny_model: Path, tmp_path: Path) -> None:
    def config(steps: int, ranks: int, sharding: str) -> Config:
        return run_config(
            tiny_model, tmp_path, run={"steps": steps}, rollout={"group": {"n": 8}, "concurrency": 16},
            trainer={"groups": 8, "ranks": ranks, "sharding": sharding},
            weights={"dir": str(tmp_path / "weights")},
        )  # fmt: skip

    springtide.train(config(15, 2, "fsdp"))
    summary = springtide.train(config(25, 1, "replicate"), resume=True)
    steps = records(config(25, 1, "replicate"))
    assert [r["step"] for r in steps] == list(range(1, 26))
    assert [r["trainer"]["steps"] for r in steps] == list(range(1, 26)), "the optimiser goes on"
    rewards = [r["reward"]["letters"] for r in steps if r["reward"]]
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.1, rewards
    assert summary.logprob_gap_mean < 1e-4 and summary.ledger["open"] == 0
