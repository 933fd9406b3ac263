"""Every part of the shelf learns a small task on the real engine, store and trainer, from samples two updates old."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from tests.learning import LAG, learn, speaking_model

STEPS = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return speaking_model(tmp_path_factory.mktemp("speaking"))


def run(model: Path, tmp_path: Path, options: dict[str, Any], steps: int = STEPS) -> tuple[float, float, list[dict]]:
    """Share of letters before the first update, at the end, and the trainer's figures."""
    algorithm = {name: value for name, value in options.items() if name != "trainer"}
    trainer = {"lr": 1e-2, **options.get("trainer", {})}
    shares, figures = learn(tmp_path, model, steps, algorithm=algorithm, trainer=trainer)
    return fmean(shares[: LAG + 1]), fmean(shares[-3:]), figures


DECOUPLED = {"old_logprobs": "recompute"}
OPTIONS: dict[str, dict[str, Any]] = {
    "ppo": {},
    "leave-one-out": {"advantage": "leave_one_out"},
    "without-std": {"divide_by_std": False},
    "running": {"task_norm": "running"},
    "no-task-norm": {"task_norm": "none"},
    "keep-equal": {"equal_rewards": "keep"},
    "gspo": {"loss": "gspo", "clip_low": 0.1, "clip_high": 0.15, "aggregation": "trajectory_mean"},
    "cispo": {"loss": "cispo"},
    "decoupled": {**DECOUPLED, "correction": "none"},
    **{
        f"{mode}-{level}": {**DECOUPLED, "correction": mode, "correction_level": level}
        for mode in ("truncate", "mask")
        for level in ("token", "sequence", "geometric")
    },
    **{f"kl-{k}": {"kl_coef": 0.01, "kl_estimator": k} for k in ("k2", "k3")},
    **{f"kl-{k}-in-reward": {"kl_coef": 0.01, "kl_estimator": k, "kl_in": "reward"} for k in ("k1", "k2", "k3")},
    "entropy": {"entropy_coef": 0.005},
    "lora": {"trainer": {"lora": {"rank": 8}}},
    "lora-mlp-kl": {
        "kl_coef": 0.01,
        "trainer": {"lr": 2e-2, "lora": {"rank": 8, "targets": ["up_proj", "down_proj"]}},
    },
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_what_is_rewarded_is_said_more_often(model: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    before, after, figures = run(model, tmp_path, options)
    assert after > before + 0.2
    assert all(f["refused"] is None for f in figures)
    assert figures[0]["gap_max"] < 1e-4 and [f["lag_max"] for f in figures[: LAG + 2]] == [0, 1, 2, 2]


SLOW = {"trainer": {"lr": 3e-3}}  # a penalty on what was sampled acts as late as the samples are old
STRONG: dict[str, dict[str, Any]] = {
    "entropy": {"entropy_coef": 5.0},
    "k2": {"kl_coef": 20.0, "kl_estimator": "k2"},
    "k3": {"kl_coef": 20.0},
    "k1-in-reward": {"kl_coef": 1000.0, "kl_estimator": "k1", "kl_in": "reward"},
}


@pytest.fixture(scope="module")
def free(model: Path, tmp_path_factory: pytest.TempPathFactory) -> float:
    """Where the policy ends with neither."""
    return run(model, tmp_path_factory.mktemp("free"), SLOW, 16)[1]


@pytest.mark.parametrize("options", STRONG.values(), ids=STRONG)
def test_a_strong_entropy_bonus_or_kl_holds_the_policy_back(
    model: Path, tmp_path: Path, free: float, options: dict[str, Any]
) -> None:
    assert run(model, tmp_path, {**options, **SLOW}, 16)[1] < free - 0.3
