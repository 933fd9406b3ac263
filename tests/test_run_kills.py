"""Twenty kills and stops of every process of a run, at random moments: nothing lost, nothing twice, nothing left.

Slow (ten minutes on two cores): three blows of the same siege are in `test_run_faults.py`.
"""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import pytest
from tests.run_support import run_config, start_run
from tests.siege import KILL, STOP, VICTIMS, Blow, Siege, audit

from springtide.config import Config

STEPS = 300  # the letters are learned by 200


def siege_config(model: Path, runs: Path, name: str, seed: int) -> Config:
    return run_config(
        model, runs, name, run={"steps": STEPS, "seed": seed}, algorithm={"equal_rewards": "keep"},
        rollout={"group": {"n": 4, "retries": 0}}, trainer={"checkpoint_every": 5},
        runtime={"silent_s": 5, "rollout_workers": 2, "env_workers": 2},
        eval={"at_ends": True, "tasks": 20, "samples": 4},
    )  # fmt: skip


def success(config: Config, when: str) -> float:
    return json.loads((config.run_dir / "summary.json").read_text())[f"success_{when}"]


@pytest.mark.slow
def test_twenty_kills_and_stops_lose_nothing(tiny_model: Path, tmp_path: Path) -> None:
    rng = random.Random(11)
    kinds = [(victim, number) for victim in VICTIMS for number in (KILL, STOP)] * 2
    rng.shuffle(kinds)
    steps = sorted(rng.sample(range(5, STEPS - 20), len(kinds)))
    # A driver is killed once while it trains and once while it comes up.
    starting = max(i for i, kind in enumerate(kinds) if kind == ("driver", KILL))
    blows = [Blow(*kind, 0 if i == starting else step) for i, (kind, step) in enumerate(zip(kinds, steps, strict=True))]
    assert len(blows) == 20
    siege = Siege(siege_config(tiny_model, tmp_path, "besieged", 0), seed=12)
    siege.endure(blows)
    found = audit(siege.config)
    print(json.dumps(found))
    assert found["attempts_killed"] > 0
    siege.check_nothing_is_left()
    undisturbed = []
    for seed in range(1, 6):
        calm = siege_config(tiny_model, tmp_path, f"calm-{seed}", seed)
        began = time.monotonic()
        assert start_run(calm, output=tmp_path / f"calm-{seed}.out").wait(600) == 0
        undisturbed.append(success(calm, "end"))
        print(f"calm, seed {seed}: success {undisturbed[-1]:.3f} in {time.monotonic() - began:.0f} s", flush=True)
        assert success(calm, "start") < 0.1
    disturbed = success(siege.config, "end")
    print(f"besieged: success {disturbed:.3f}, undisturbed {undisturbed}")
    assert min(undisturbed) <= disturbed <= max(undisturbed)
