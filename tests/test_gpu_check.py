"""Every part of benchmarks/gpu_check.py runs, on the processor: what is left untested is the device."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from springtide.weights.fingerprint import Fingerprint, TensorPrint

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
gpu_check = importlib.import_module("gpu_check")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return gpu_check.make_model(tmp_path_factory.mktemp("gpu") / "model", "tiny")


def test_without_a_gpu_it_says_so_and_ends_well(capsys: Any) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    gpu_check.main([])
    assert "torch sees no GPU here" in capsys.readouterr().out


def test_a_matrix_product_has_a_rate_that_a_machine_can_have() -> None:
    assert 1e7 < gpu_check.product_flops("cpu", 256, torch.float32) < 1e14


def test_every_way_of_publication_arrives_verified(model: Path, tmp_path: Path) -> None:
    tensors = gpu_check.weights_of(model)
    assert gpu_check.same_sums(tensors)
    rows = gpu_check.publication(tensors, tmp_path)
    assert [r.target.partition(" by ")[2] for r in rows] == ["the store", "a shared handle", "a broadcast"]
    assert all(0 < r.value < 60 for r in rows)


def test_what_arrives_changed_is_told(model: Path) -> None:
    tensors = gpu_check.weights_of(model)
    text = Fingerprint(0, {name: TensorPrint.of(t) for name, t in tensors.items()}).to_json()
    assert gpu_check._verified(tensors, text) == ""
    name = sorted(tensors)[0]
    tensors[name] = tensors[name] * 1.001
    assert name in gpu_check._verified(tensors, text)


def _run(model: Path, directory: Path, arm: str, vllm: Path | None = None) -> list[Any]:
    tables = gpu_check.arms("cpu", vllm)[arm]
    config = gpu_check.make_run(model, directory, arm, "cpu", tables, quick=True)
    figures = gpu_check.run(config)
    assert figures["steps"] == config.run.steps and figures["grad_norm"] > 0
    assert figures["gap"] < 0.05
    rows: list[Any] = gpu_check.run_rows(arm, figures, 10**6, 1e12)
    assert len(rows) == 5 and all(r.value is not None and r.value > 0 for r in rows)
    return rows


def test_a_run_of_bfloat16_over_float32_learns_and_its_canary_is_believed(model: Path, tmp_path: Path) -> None:
    """The publisher computes its canary in bfloat16, the engine in float32: further apart than float32 may be."""
    _run(model, tmp_path, "FSDP2 bfloat16, 1 ranks")


@pytest.mark.slow
def test_a_run_on_the_local_engine_gives_every_figure(model: Path, tmp_path: Path) -> None:
    _run(model, tmp_path, "local engine")


@pytest.mark.slow
def test_a_run_on_vllm_gives_every_figure(model: Path, tmp_path: Path) -> None:
    python = os.environ.get("SPRINGTIDE_VLLM_PYTHON")
    if python is None:
        pytest.skip("SPRINGTIDE_VLLM_PYTHON names no interpreter with vLLM")
    _run(model, tmp_path, "vLLM", Path(python))


def test_arms_that_cannot_run_are_said_and_those_that_can_are_sound(model: Path, tmp_path: Path) -> None:
    assert gpu_check.arms("cpu", None)["vLLM"] is None
    for arm, tables in gpu_check.arms("cpu", Path("python")).items():
        config = gpu_check.make_run(model, tmp_path, arm, "cuda", tables, quick=False)
        assert config.engine.device == config.trainer.device == "cuda"
    assert config.engine.kind == "vllm"
