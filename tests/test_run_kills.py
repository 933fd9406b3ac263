"""Twenty kills and stops of every process of a run, at random moments: nothing lost, nothing twice, nothing left.

Slow (a quarter of an hour): a stopped process is only replaced after a minute of silence.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from tests.run_support import alive, descendants, program, records, run_config, start_run, wait_for

from springtide.config import Config
from springtide.ledger import Ledger

VICTIMS = ("driver", "engine", "rollout", "env", "trainer")
EVENTS = 20
STOPPED_S = 20.0  # a stopped driver goes on after this


def disturbed_config(model: Path, runs: Path, name: str, steps: int, seed: int) -> Config:
    return run_config(
        model, runs, name, run={"steps": steps, "seed": seed}, algorithm={"equal_rewards": "keep"},
        rollout={"group": {"n": 4, "retries": 0}, "concurrency": 8}, trainer={"checkpoint_every": 2},
        eval={"at_ends": True, "tasks": 40},
    )  # fmt: skip


def trained(config: Config) -> int:
    path = config.run_dir / "metrics.jsonl"
    return max((r["step"] for r in records(config)), default=0) if path.exists() else 0


def success(config: Config) -> float:
    return json.loads((config.run_dir / "summary.json").read_text())["success_end"]


def strike(run: Any, victim: str, number: signal.Signals) -> set[int]:
    """Send the signal to the victim; the run's processes as they were."""
    below = descendants(run.pid)
    pid = run.pid if victim == "driver" else next((p for p in sorted(below) if program(p).startswith(victim)), None)
    if pid is not None:  # it may be just on its way back from the last blow
        os.kill(pid, number)
    return {run.pid, *below}


@pytest.mark.slow
def test_twenty_kills_and_stops_lose_nothing(tiny_model: Path, tmp_path: Path) -> None:
    rng = random.Random(11)
    blows = [(v, s) for v in VICTIMS for s in (signal.SIGKILL, signal.SIGSTOP)] * (EVENTS // 10)
    rng.shuffle(blows)
    assert len(blows) == EVENTS
    config = disturbed_config(tiny_model, tmp_path, "disturbed", 100_000, seed=0)
    run = None
    for victim, number in blows:
        if run is None or run.poll() is not None:
            run = start_run(config, resume=(config.run_dir / "checkpoints").exists())
        before = trained(config)
        wait_for(f"a step before {victim}", lambda b=before, r=run: trained(config) > b or r.poll() is not None, 180)
        if run.poll() is not None:
            assert run.stdout is not None
            raise AssertionError(f"the run ended by itself before {victim}: {run.stdout.read()}")
        time.sleep(rng.random())
        processes = strike(run, victim, number)
        if victim == "driver" and number == signal.SIGSTOP:
            time.sleep(STOPPED_S)
            os.kill(run.pid, signal.SIGCONT)
        elif victim in ("driver", "trainer"):  # ends the run, a stopped trainer after a minute
            assert run.wait(150) != 0
            wait_for("the end of its processes", lambda p=processes: not alive(p), 10)
    if run is not None and run.poll() is None:
        os.kill(run.pid, signal.SIGKILL)
        run.wait(10)
    steps = trained(config) + 10
    last = disturbed_config(tiny_model, tmp_path, "disturbed", steps, seed=0)
    final = start_run(last, resume=True)
    assert final.wait(300) == 0, final.stdout.read() if final.stdout else ""
    audit = Ledger(last.run_dir / "ledger.sqlite").audit()
    assert audit["open"] == audit["ready"] == 0
    assert audit["drawn"] == audit["trained"] + sum(audit["dropped"].values())
    assert set(audit["dropped"]) <= {"run_ended"}  # equal_rewards = keep, and a killed process uses up no retry
    visits = [row.visit for row in Ledger(last.run_dir / "ledger.sqlite").visits("trained")]
    assert len(set(visits)) == len(visits)
    undisturbed = []
    for seed in range(1, 6):
        calm = disturbed_config(tiny_model, tmp_path, f"calm-{seed}", steps, seed=seed)
        assert start_run(calm).wait(600) == 0
        undisturbed.append(success(calm))
    assert min(undisturbed) <= success(last) <= max(undisturbed), (success(last), undisturbed)
