"""`springtide doctor cluster`: what a run needs is computed as it is; what would fail is one line before it starts."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from run_support import run_config
from springtide.cli import cluster_checks, footprint
from springtide.cli.cluster_checks import ClusterChecker
from springtide.cli.doctor import app
from springtide.cli.footprint import ModelSize
from springtide.config import Config
from springtide.engine.local.engine import EngineSettings, make_core
from springtide.models.decoder import Decoder, DecoderConfig, read_checkpoint
from springtide.models.presets import resolve_model
from springtide.runtime.local import Runtime
from springtide.trainer.model import load_policy
from springtide.trainer.optim import Optimizer
from springtide.trainer.packing import collate


def doctor(config: Config, *sets: str) -> tuple[Result, dict[str, dict[str, str]]]:
    file = Path(config.run.dir).with_suffix(".toml")
    file.write_text(config.to_toml())
    result = CliRunner().invoke(app, ["cluster", str(file), "--json", *(p for s in sets for p in ("--set", s))])
    return result, {v["check"]: v for v in json.loads(result.stdout)}


def check(config: Config, name: str) -> tuple[str, str]:
    """One check alone, after what it needs of the model's files was read."""
    checker = ClusterChecker(config)
    checker._directory = resolve_model(config.model.path)
    checker._model = ModelSize.read(checker._directory)
    verdict = asyncio.run(checker.run(name))
    return verdict.verdict, verdict.detail


# --- the whole ----------------------------------------------------------------------------------------------------


def test_a_sound_configuration_passes_and_nothing_of_the_trial_is_left(tiny_model, tmp_path) -> None:
    shared = Path("/dev/shm")
    config = run_config(tiny_model, tmp_path / "runs", algorithm={"kl_coef": 0.1})
    result, found = doctor(config)
    assert result.exit_code == 0, found
    assert {v["verdict"] for v in found.values()} <= {"ok", "warning"} and len(found) == 10
    assert all(
        name in found["processes"]["detail"] for name in ("trainer", "reference", "engine-0", "rollout-0", "env-0")
    )
    assert "fingerprint and log-probs of a canary confirmed by 1 engine" in found["publication"]["detail"]
    assert "the same seed repeats" in found["canary"]["detail"]
    assert list((tmp_path / "runs").iterdir()) == []
    assert not [p for p in shared.glob("springtide-.doctor-*") if p.exists()]


def test_weights_that_are_not_finite_are_a_line_and_nothing_is_published(tiny_model, tmp_path) -> None:
    model = shutil.copytree(tiny_model, tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    result, found = doctor(run_config(model, tmp_path / "runs"))
    assert result.exit_code == 1
    assert [found[n]["verdict"] for n in ("processes", "publication", "canary")] == ["ok", "failed", "skipped"]
    assert "not finite" in found["publication"]["detail"]


def test_weights_that_change_on_the_way_fail_at_the_publication(tiny_model, tmp_path, monkeypatch) -> None:
    honest = Runtime.load

    async def load(self: Runtime, version: int) -> None:
        file = self.weights / str(version) / "weights.safetensors"
        data = bytearray(file.read_bytes())
        data[-3] ^= 0x10
        file.write_bytes(data)
        await honest(self, version)

    monkeypatch.setattr(Runtime, "load", load)
    result, found = doctor(run_config(tiny_model, tmp_path / "runs"))
    assert result.exit_code == 1
    assert [found[n]["verdict"] for n in ("processes", "publication", "canary")] == ["ok", "failed", "skipped"]
    assert "differs from what was published" in found["publication"]["detail"]


def test_nothing_is_started_where_the_memory_would_not_do(tiny_model, tmp_path) -> None:
    result, found = doctor(run_config(tiny_model, tmp_path / "runs", engine={"kv_tokens": 10**8, "ranks": 64}))
    assert result.exit_code == 1
    assert found["memory"]["verdict"] == "failed" and "engine.kv_tokens" in found["memory"]["detail"]
    assert found["devices"]["verdict"] == "warning" and "take turns" in found["devices"]["detail"]
    assert [found[n]["verdict"] for n in ("processes", "publication", "canary")] == ["skipped"] * 3
    assert "nothing was started: memory failed" in found["processes"]["detail"]


def test_every_fault_of_the_configuration_is_one_line_and_exit_1(tiny_model, tmp_path) -> None:
    config = run_config(tiny_model, tmp_path / "runs")
    result, found = doctor(config, "model.context=100000", "engine.kv_tokens=200000")
    assert result.exit_code == 1
    assert "model.context: 100000 is more than the model's" in found["configuration"]["detail"]
    assert found["processes"]["verdict"] == "skipped"
    if not torch.cuda.is_available():
        result, found = doctor(config, "engine.device=cuda")
        assert found["configuration"]["verdict"] == "failed" and "engine.device" in found["configuration"]["detail"]
        assert found["devices"]["verdict"] == "failed" and "torch sees no GPU" in found["devices"]["detail"]
    assert all("\n" not in v["detail"] for v in found.values())


@pytest.mark.slow
def test_a_configuration_on_vllm_passes(tmp_path) -> None:
    python = os.environ.get("SPRINGTIDE_VLLM_PYTHON")
    if python is None:
        pytest.skip("SPRINGTIDE_VLLM_PYTHON names no interpreter with vLLM")
    engine = {"kind": "vllm", "vllm": {"python": python, "args": ["--enforce-eager"]}}
    result, found = doctor(run_config(resolve_model("springtide-nano"), tmp_path / "runs", engine=engine))
    assert result.exit_code == 0, found
    assert "confirmed by 1 engine" in found["publication"]["detail"] and "tokens/s" in found["canary"]["detail"]


@pytest.mark.slow
def test_a_configuration_on_ray_passes(tiny_model, tmp_path) -> None:
    pytest.importorskip("ray")
    result, found = doctor(run_config(tiny_model, tmp_path / "runs", runtime={"kind": "ray"}))
    assert result.exit_code == 0, found
    assert "ray 2." in found["versions"]["detail"] and "confirmed by 1 engine" in found["publication"]["detail"]


# --- single checks ------------------------------------------------------------------------------------------------


def test_a_package_that_is_missing_or_too_old_is_named(tiny_model, tmp_path, monkeypatch) -> None:
    config = run_config(tiny_model, tmp_path / "runs")
    kind, text = check(config, "versions")
    assert kind == "ok" and torch.__version__ in text
    honest = cluster_checks.importlib.metadata.version
    monkeypatch.setattr(
        cluster_checks.importlib.metadata, "version", lambda name: "4.9" if name == "transformers" else honest(name)
    )
    kind, text = check(config, "versions")
    assert kind == "failed" and "transformers is 4.9, needed is" in text


def test_servers_and_ports_that_are_not_there_are_named(tiny_model, tmp_path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]  # bound, and nobody listens
        vllm = {"kind": "vllm", "vllm": {"urls": [f"http://127.0.0.1:{port}"]}}
        kind, text = check(run_config(tiny_model, tmp_path / "runs", engine=vllm), "ports")
        assert kind == "failed" and f"nobody answers at http://127.0.0.1:{port}" in text
        ray: dict[str, Any] = {"kind": "ray", "ray": {"ports": [port, port]}}
        kind, text = check(run_config(tiny_model, tmp_path / "runs", runtime=ray), "ports")
        assert kind == "failed" and f"taken: {port}; widen runtime.ray.ports" in text
    kind, _ = check(
        run_config(tiny_model, tmp_path / "runs", runtime={**ray, "ray": {"ports": [20000, 20100]}}), "ports"
    )
    assert kind == "ok"


def test_a_run_directory_that_cannot_be_written_or_lies_in_memory_is_said(tiny_model, tmp_path) -> None:
    (tmp_path / "file").write_text("")
    kind, text = check(run_config(tiny_model, tmp_path / "file" / "runs"), "run directory")
    assert kind == "failed" and "file" in text
    kind, text = check(run_config(tiny_model, Path("/dev/shm")), "run directory")
    assert kind == "warning" and "in memory: a run there is gone with the machine" in text
    place = tmp_path / "runs" / "run"
    place.mkdir(parents=True)
    (place / "ledger.sqlite").write_text("")
    kind, text = check(run_config(tiny_model, tmp_path / "runs"), "run directory")
    assert kind == "warning" and "continue it with --resume" in text


def test_what_a_gpu_holds_is_compared_with_it(tiny_model, tmp_path, monkeypatch) -> None:
    config = run_config(
        tiny_model, tmp_path / "runs", engine={"device": "cuda"}, trainer={"device": "cuda", "ranks": 2}
    )
    for free, verdict in ((80 << 30, "ok"), (1 << 20, "failed")):
        gpus = [{"name": "a GPU", "free": free, "total": 80 << 30}] * 2
        monkeypatch.setattr(cluster_checks, "visible_gpus", lambda gpus=gpus: gpus)
        assert check(config, "memory")[0] == verdict
        assert check(config, "devices")[0] == "ok"
    monkeypatch.setattr(cluster_checks, "visible_gpus", lambda: gpus[:1])
    assert check(config, "devices") == (
        "failed",
        "trainer.ranks = 2, but 1 GPUs are visible: a GPU, 1 MiB of 80.0 GiB free",
    )


@pytest.mark.parametrize("version", [1, 2])
def test_the_limit_of_a_container_or_job_counts_and_its_cached_files_do_not(tmp_path: Path, version: int) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "groups"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 100 kB\nMemAvailable:   2048 kB\n")
    named, root, limit, used, kept = {
        1: ("5:memory:", groups / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        2: ("0::", groups, "memory.max", "memory.current", "inactive_file"),
    }[version]
    (proc / "self" / "cgroup").write_text(f"9:cpu:/elsewhere\n{named}/job/step\n")
    assert footprint.available_memory(proc, groups) == 2048 * 1024  # no group is there
    (root / "job" / "step").mkdir(parents=True)
    for place, most in (
        (root / "job", "1048576"),
        (root / "job" / "step", "9223372036854771712" if version == 1 else "max"),
    ):
        (place / limit).write_text(f"{most}\n")
        (place / used).write_text("800000\n")
        (place / "memory.stat").write_text(f"anon 500000\n{kept} 300000\n")
    assert footprint.available_memory(proc, groups) == 1048576 - 800000 + 300000


# --- the arithmetic against the real thing ------------------------------------------------------------------------


def test_what_is_computed_is_what_the_processes_hold(tiny_model, tmp_path) -> None:
    torch.set_num_threads(1)
    config = run_config(tiny_model, tmp_path / "runs", engine={"kv_tokens": 4096, "weight_slots": 2})
    size = ModelSize.read(tiny_model)
    policy = load_policy(tiny_model)
    assert size.parameters == sum(p.numel() for p in policy.parameters())
    rows = [_row(seed, 60) for seed in range(4)]
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    weights = {p.untyped_storage().data_ptr() for p in policy.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        batch = collate(rows, policy.device)
        loss = policy.logprobs(batch, 1.0, 1 << 20).sum()
    saved = sum(count for place, count in kept.items() if place not in weights)
    loss.backward()
    optimizer = Optimizer(policy, config.trainer)
    optimizer.apply(float(loss.detach()), 1.0, None)
    state = footprint.trainer_state(config, size)
    assert state["weights"] == sum(p.nbytes for p in policy.parameters()) == state["gradients"]
    moments = [t for part in optimizer._parts for s in part.state.values() for t in s.values() if t.numel() > 1]
    assert state["moments"] == sum(t.nbytes for t in moments)
    tokens = batch.ids.numel()
    table = config.trainer.model_copy(update={"micro_tokens": tokens, "logit_chunk": len(batch.targets)})
    computed = footprint.activations(config.model_copy(update={"trainer": table}), size)
    assert 0.5 * saved < computed < 2.5 * saved, (saved, computed)

    decoder_config = DecoderConfig.read(tiny_model)
    core = make_core(decoder_config, EngineSettings.of(str(tiny_model), "", config.engine.model_dump()))
    decoder = Decoder(decoder_config, read_checkpoint(tiny_model))
    tensors = {t.data_ptr(): t.nbytes for t in _tensors(decoder)}
    cache = sum(t.nbytes for t in (core.kernels._k, core.kernels._v))
    assert footprint.engine_bytes(config, size) == 2 * sum(tensors.values()) + cache


def _row(seed: int, length: int) -> Any:
    import numpy as np

    from springtide.trainer.data import Row

    rng = np.random.default_rng(seed)
    ids = rng.integers(1, 200, length).astype(np.int32)
    at = np.arange(1, length)
    zeros = np.zeros(len(at), np.float32)
    return Row(("test", seed, 0, 0), ids, at, zeros, np.zeros(len(at), np.int64), 1.0, 1.0)


def _tensors(decoder: Decoder) -> list[torch.Tensor]:
    import dataclasses

    found = [decoder.embed, decoder.final_norm, decoder.head]
    for layer in decoder.layers:
        found += [v for f in dataclasses.fields(layer) if isinstance(v := getattr(layer, f.name), torch.Tensor)]
    return found


def test_sharding_adapters_and_options_change_what_is_computed(tiny_model, tmp_path) -> None:
    size = ModelSize.read(tiny_model)

    def total(**tables: Any) -> int:
        needs = footprint.needs(run_config(tiny_model, tmp_path / "runs", **tables), size)
        return sum(n.on_device + n.in_memory for n in needs.values())

    plain = total()
    assert total(algorithm={"kl_coef": 0.1}) > plain
    assert total(algorithm={"kl_coef": 0.1}, trainer={"lora": {"rank": 4}}) < total(algorithm={"kl_coef": 0.1})
    assert total(trainer={"activation_checkpointing": True}) < plain < total(trainer={"micro_tokens": 16384})
    one = footprint.trainer_state(run_config(tiny_model, tmp_path / "runs"), size)
    half = footprint.trainer_state(
        run_config(tiny_model, tmp_path / "runs", trainer={"ranks": 2, "sharding": "fsdp"}), size
    )
    assert sum(half.values()) == pytest.approx(sum(one.values()) / 2, abs=8)
    adapter = run_config(tiny_model, tmp_path / "runs", trainer={"lora": {"rank": 1}})
    stored = footprint.stored_bytes(adapter, size)  # the base once
    assert 4 * size.parameters < stored < 2 * 4 * size.parameters
    gpu = run_config(tiny_model, tmp_path / "runs", trainer={"device": "cuda", "ranks": 2, "sharding": "fsdp"})
    rank = footprint.needs(gpu, size)["trainer-1"]
    assert rank.in_memory == footprint.TORCH_BYTES + 4 * size.parameters  # each reads it whole, before it is sharded
