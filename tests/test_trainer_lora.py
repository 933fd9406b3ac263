"""LoRA: the base is frozen, others see the merged model, a checkpoint goes on exactly, peft reads the adapter."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.conftest import make_tiny_model
from tests.learning import letters, speaking_model
from tests.run_support import records, run_config
from typer.testing import CliRunner

import springtide
from springtide.cli.main import app
from springtide.config import Algorithm, ConfigError
from springtide.models.presets import ModelNotFound
from springtide.trainer.checkpoint import CheckpointError
from springtide.trainer.data import load_step, read_logprobs
from springtide.trainer.lora import LoraLinear
from springtide.trainer.model import ModelError, Policy, load_policy
from springtide.trainer.rank import Rank
from springtide.trainer.step import Shape, accumulate_policy
from springtide.training import Lora
from trainer_parts import config, tiny_model, write_groups

SHAPES = [[[(30, 12)], [(24, 9)], [(40, 20)]], [[(16, 5)], [(33, 15)], [(20, 8)]]]
IDS = np.arange(1, 30, dtype=np.int32)


def make_rank(
    model: Path, tmp_path: Path, checkpoint: Path | None = None, algorithm: dict | None = None, **trainer
) -> Rank:
    rank = Rank()
    (tmp_path / "store").mkdir(exist_ok=True)
    tables = config(trainer={"lr": 1e-2, "lora": {"rank": 4}, **trainer}, algorithm=algorithm or {})
    at = str(checkpoint) if checkpoint else None
    rank.init(tables.model_dump(mode="json"), str(model), at, store=str(tmp_path / "store"))
    return rank


def policy_of(rank: Rank) -> Policy:
    assert rank._policy is not None
    return rank._policy


def groups(tmp_path: Path, seed: int = 0) -> tuple[dict, ...]:
    return tuple(write_groups(tmp_path / "groups", SHAPES, seed))


def content(directory: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in directory.iterdir()}


def assert_same(a: Policy, b: Policy) -> None:
    assert a.tensors().keys() == b.tensors().keys()
    assert all(torch.equal(t, b.tensors()[n]) for n, t in a.tensors().items())


def test_the_adapters_forward_by_hand():
    base = torch.nn.Linear(2, 2)
    with torch.no_grad():
        base.weight.copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        base.bias.copy_(torch.tensor([0.5, -0.5]))
    base.requires_grad_(False)
    layer = LoraLinear(base, 1, 3.0, torch.Generator().manual_seed(0))
    x = torch.tensor([[1.0, -1.0]])
    assert torch.equal(layer(x), base(x)), "B is zero at first"
    assert layer.lora_A.weight.abs().max() <= 1 / math.sqrt(2)
    with torch.no_grad():
        layer.lora_A.weight.copy_(torch.tensor([[2.0, 1.0]]))
        layer.lora_B.weight.copy_(torch.tensor([[1.0], [-1.0]]))
    # W x + b = (-0.5, -1.5); A x = 1; alpha / rank = 3: (+3, -3)
    y = layer(x)
    assert y.tolist() == [[2.5, -4.5]]
    assert layer.merged().tolist() == [[7.0, 5.0], [-3.0, 1.0]]  # W + 3 (1, -1)^T (2, 1)
    y.sum().backward()
    assert layer.lora_B.weight.grad.tolist() == [[3.0], [3.0]]  # 3 * A x, for each output
    assert layer.lora_A.weight.grad.tolist() == [[0.0, 0.0]]  # 3 * (1 - 1) * x
    assert layer.weight.grad is None and layer.bias.grad is None


def test_only_the_adapter_is_trained_and_the_merged_model_is_published(tmp_path):
    model = tiny_model(tmp_path / "model")
    files = content(model)
    base = load_policy(model)
    rank = make_rank(model, tmp_path)
    policy = policy_of(rank)
    np.testing.assert_array_equal(policy.score(IDS), base.score(IDS))  # before the first step, bit for bit
    assert set(policy.trained()) == {f"{n[:-7]}.lora_{p}.weight" for n in base.tensors() if "_proj" in n for p in "AB"}
    for seed in range(3):
        rank.train(groups(tmp_path, seed), 0)
    for name, p in policy.model.named_parameters():  # the base as it was, byte for byte, without a gradient
        if ".lora_" not in name:
            assert torch.equal(p, base.tensors()[name]) and p.grad is None
    changed = {name for name, t in policy.tensors().items() if not torch.equal(t, base.tensors()[name])}
    assert changed == {name for name in base.tensors() if "_proj" in name}

    rank.publish(1)
    rank.publish(2)
    published = rank._weights().load(2)  # verified by its fingerprint
    files_of = {p.name: {f.name: f.stat().st_size for f in p.iterdir()} for p in rank._weights().directory.iterdir()}
    (base_file,) = (files["weights.safetensors"] for name, files in files_of.items() if name.startswith("base-"))
    assert files_of["2"]["weights.safetensors"] < base_file / 2, "a version holds the adapter alone"
    whole = load_policy(model)
    whole.load_tensors({n: t for n, t in published.items() if n in base.tensors()})
    assert_same(whole, policy)
    np.testing.assert_allclose(whole.score(IDS), policy.score(IDS), atol=1e-5)
    assert np.abs(whole.score(IDS) - base.score(IDS)).max() > 1e-2
    rank.export(str(tmp_path / "export"))
    np.testing.assert_array_equal(load_policy(tmp_path / "export").score(IDS), whole.score(IDS))
    assert content(model) == files


def test_gradients_are_those_of_whole_training_seen_through_the_factors(tmp_path):
    """dL/dB = s dL/dW A^T, dL/dA = s B^T dL/dW: the gradient of the merged weight, by the chain rule."""
    model = tiny_model(tmp_path / "model")
    policy, whole = load_policy(model), load_policy(model)
    adapter = policy.adapt(Lora(rank=2, alpha=6.0), 0)
    generator = torch.Generator().manual_seed(1)
    adapter.load({n: torch.randn(t.shape, generator=generator) * 0.05 for n, t in adapter.tensors().items()})
    whole.load_tensors(policy.tensors())
    data = load_step(groups(tmp_path), "token_mean")
    for each in (policy, whole):
        accumulate_policy(each, data, Algorithm(), Shape(8192, 4096, 1.0), 0)
    name = "model.layers.1.mlp.up_proj"
    a, b = policy.trained()[f"{name}.lora_A.weight"], policy.trained()[f"{name}.lora_B.weight"]
    gradient = whole.trained()[f"{name}.weight"].grad
    torch.testing.assert_close(b.grad, 3.0 * gradient @ a.detach().T, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(a.grad, 3.0 * b.detach().T @ gradient, rtol=1e-3, atol=1e-4)


def test_targets_name_layers_by_the_end_of_their_names(tmp_path):
    model = tiny_model(tmp_path / "model")
    policy = load_policy(model)
    policy.adapt(Lora(rank=2, targets=("q_proj", "mlp.up_proj", "model.layers.1.mlp.down_proj")), 0)
    adapted = {name.removeprefix("model.layers.").partition(".lora_")[0] for name in policy.trained()}
    assert adapted == {"0.self_attn.q_proj", "1.self_attn.q_proj", "0.mlp.up_proj", "1.mlp.up_proj", "1.mlp.down_proj"}
    for name in ("lm_head", "embed_tokens", "p_proj"):
        with pytest.raises(ModelError, match=rf'trainer\.lora\.targets: .*"{name}".* down_proj, gate_proj'):
            load_policy(model).adapt(Lora(rank=2, targets=(name,)), 0)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_resumed_trainer_continues_bit_for_bit_from_a_checkpoint_of_the_adapter_alone(tmp_path, optimizer):
    model = tiny_model(tmp_path / "model")
    whole = make_rank(model, tmp_path, optimizer=optimizer, warmup=3)
    whole.train(groups(tmp_path), 0)
    saved = Path(whole.save(str(tmp_path / "checkpoint"), {"step": 1})["path"])
    assert "model.safetensors" not in content(saved)
    kept = [t.shape for t in load_file(saved / "moments.safetensors").values() if t.ndim == 2]
    assert kept and all(4 in shape for shape in kept), "the optimiser's state is the adapter's"
    resumed = make_rank(model, tmp_path, saved, optimizer=optimizer, warmup=3)
    for rank in (whole, resumed):
        for seed in (1, 2):
            rank.train(groups(tmp_path, seed), 0)
    assert_same(policy_of(whole), policy_of(resumed))


def test_an_adapter_is_not_put_on_another_model_or_taken_for_one(tmp_path):
    model = tiny_model(tmp_path / "model")
    rank = make_rank(model, tmp_path)
    rank.train(groups(tmp_path), 0)
    saved = Path(rank.save(str(tmp_path / "checkpoint"))["path"])
    with pytest.raises(CheckpointError, match=r"other base weights than those of model\.path"):
        make_rank(tiny_model(tmp_path / "other", seed=1), tmp_path, saved)
    with pytest.raises(CheckpointError, match="other layers or another rank"):
        make_rank(model, tmp_path, saved, lora={"rank": 8})
    with pytest.raises(CheckpointError, match=r"holds an adapter; trainer\.lora\.rank"):
        make_rank(model, tmp_path, saved, lora={"rank": 0})
    whole = Path(make_rank(model, tmp_path, lora={"rank": 0}).save(str(tmp_path / "whole"))["path"])
    with pytest.raises(CheckpointError, match="holds whole weights"):
        make_rank(model, tmp_path, whole)


def test_the_reference_is_the_policy_the_run_began_with_also_after_a_cold_start_and_a_resume(tmp_path):
    model = tiny_model(tmp_path / "model")
    items = groups(tmp_path)
    rank = make_rank(model, tmp_path, algorithm={"kl_coef": 0.1})

    def logprobs(of: Rank, **which: bool) -> dict:
        of.logprobs(items, str(tmp_path / "out"), **which)
        return read_logprobs(tmp_path / "out")

    base = logprobs(make_rank(model, tmp_path, lora={"rank": 0}))
    rank.train(items, 0, ref_logprobs=str(tmp_path / "out"))
    reference = logprobs(rank, reference=True)
    assert all((reference[key] == base[key]).all() for key in base), "without a cold start: the base model's"
    assert any((logprobs(rank)[key] != base[key]).any() for key in base), "and the policy is back in place"

    rank.cold_start(tuple({i["path"] for i in items}), 3, 4, 1e-2)
    start = logprobs(rank)
    assert any((start[key] != base[key]).any() for key in base)
    figures = rank.train(items, 0, ref_logprobs=str(tmp_path / "out"))
    assert figures["kl_reference"] == pytest.approx(0, abs=1e-6)
    resumed = make_rank(model, tmp_path, Path(rank.save(str(tmp_path / "checkpoint"))["path"]))
    for of in (rank, resumed):
        again = logprobs(of, reference=True)
        assert all((again[key] == start[key]).all() for key in start)
    assert rank.kl(items) == resumed.kl(items)


def test_the_exported_adapter_is_described_as_peft_wants_it(tmp_path):
    model = tiny_model(tmp_path / "model")
    rank = make_rank(model, tmp_path, lora={"rank": 2, "alpha": 5})
    rank.train(groups(tmp_path), 0)
    saved = Path(rank.save(str(tmp_path / "checkpoint"))["path"])
    result = CliRunner().invoke(app, ["export", str(saved), str(tmp_path / "adapter"), "--adapter"])
    assert result.exit_code == 0, result.output
    assert set(content(tmp_path / "adapter")) == {
        "adapter_model.safetensors", "adapter_config.json", "tokenizer.json", "generation_config.json", "manifest.json",
    }  # fmt: skip
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    name = "base_model.model.model.layers.0.self_attn.k_proj.lora_A.weight"
    assert tensors[name].shape == (2, 32) and len(tensors) == 2 * 2 * 7
    described = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert described["target_modules"] == [f"{n}_proj" for n in ("down", "gate", "k", "o", "q", "up", "v")]
    assert (described["peft_type"], described["r"], described["lora_alpha"]) == ("LORA", 2, 5)
    assert described["base_model_name_or_path"] == str(model.resolve())


def test_peft_loads_the_exported_adapter_and_computes_the_same(tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install peft")
    from transformers import AutoModelForCausalLM

    model = tiny_model(tmp_path / "model")
    rank = make_rank(model, tmp_path, lora={"rank": 4, "targets": ["q_proj", "mlp.down_proj"]})
    for seed in range(2):
        rank.train(groups(tmp_path, seed), 0)
    saved = Path(rank.save(str(tmp_path / "checkpoint"))["path"])
    result = CliRunner().invoke(app, ["export", str(saved), str(tmp_path / "adapter"), "--adapter"])
    assert result.exit_code == 0, result.output
    theirs = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(model, local_files_only=True), tmp_path / "adapter"
    )
    ids = torch.from_numpy(IDS.astype(np.int64))[None]
    ours = policy_of(rank)
    for each in (theirs, theirs.merge_and_unload()):
        with torch.no_grad():
            logits = torch.log_softmax(each(input_ids=ids).logits[0, :-1].float(), -1)
        theirs_said = logits.gather(1, ids[0, 1:, None])[:, 0].numpy()
        np.testing.assert_allclose(ours.score(IDS), theirs_said, atol=1e-5)
    assert np.abs(load_policy(model).score(IDS) - ours.score(IDS)).max() > 1e-2


def test_an_exported_merged_model_is_the_policy_wherever_the_base_lies_now(tmp_path):
    model = tiny_model(tmp_path / "model")
    rank = make_rank(model, tmp_path)
    rank.train(groups(tmp_path), 0)
    saved = str(rank.save(str(tmp_path / "checkpoint"))["path"])
    runner = CliRunner()
    assert runner.invoke(app, ["export", saved, str(tmp_path / "merged")]).exit_code == 0
    merged = load_policy(tmp_path / "merged")
    assert_same(merged, policy_of(rank))
    (tmp_path / "file").touch()
    result = runner.invoke(app, ["export", saved, str(tmp_path / "file" / "merged")])
    assert isinstance(result.exception, ConfigError) and str(result.exception).startswith("cannot write")
    moved = shutil.move(model, tmp_path / "moved")
    result = runner.invoke(app, ["export", saved, str(tmp_path / "none")])
    assert isinstance(result.exception, ConfigError) and "--base says where" in str(result.exception)
    assert not (tmp_path / "none").exists()
    assert runner.invoke(app, ["export", saved, str(tmp_path / "again"), "--base", str(moved)]).exit_code == 0
    assert_same(load_policy(tmp_path / "again"), merged)
    whole = str(make_rank(Path(moved), tmp_path, lora={"rank": 0}).save(str(tmp_path / "whole"))["path"])
    result = runner.invoke(app, ["export", whole, str(tmp_path / "no"), "--adapter"])
    assert result.exit_code != 0 and "holds whole weights" in str(result.exception)


def test_a_run_with_an_adapter_learns_and_is_evaluated_and_engines_sample_what_is_trained(tmp_path):
    model = speaking_model(tmp_path / "model")
    run = run_config(
        model, tmp_path, run={"steps": 12}, rollout={"group": {"n": 8}, "concurrency": 16}, algorithm={"kl_coef": 1e-3},
        trainer={"groups": 8, "lr": 1e-2, "lora": {"rank": 8}},
    )  # fmt: skip
    summary = springtide.train(run)
    assert summary.logprob_gap_mean < 1e-4
    assert records(run)[-1]["trainer"]["kl_reference"] > 1e-4 and not (run.run_dir / "start").exists()
    rewards = [r["reward"]["letters"] for r in records(run) if r["reward"]]
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.2, rewards
    saved = run.run_dir / "checkpoints" / "step-000012"
    assert (saved / "adapter_model.safetensors").exists() and not (saved / "model.safetensors").exists()
    again = springtide.evaluate(run.run_dir, run.suites[0].use, tasks=20).suites["letters"]
    assert again.reward > np.mean(rewards[:3]) + 0.2
    with pytest.raises(ModelNotFound, match="is an adapter"):
        springtide.evaluate(saved, run.suites[0].use)


def test_the_kl_of_an_adapters_run_needs_no_reference_rank_and_lasts_over_a_resume(tmp_path):
    model = speaking_model(tmp_path / "model")
    for steps in (2, 3):
        run = run_config(
            model, tmp_path, run={"steps": steps}, algorithm={"kl_coef": 0.05, "kl_in": "reward", "kl_estimator": "k2"},
            trainer={"lr": 2e-2, "lora": {"rank": 4}}, schedule={"policy": "synchronous"},
        )  # fmt: skip
        springtide.train(run, resume=steps == 3)
    first, *later = [r["trainer"]["kl_penalty"] for r in records(run)]
    assert first == pytest.approx(0, abs=1e-6) and len(later) == 2 and min(later) > 1e-6, (first, later)
    assert not (run.run_dir / "start").exists() and not list((run.run_dir / "logs").glob("reference*"))


def test_a_frozen_head_bounds_what_an_adapter_can_say(tmp_path):
    """Why a randomly initialised model does not learn so: no hidden state whatever makes its head say letters often."""
    best = {}
    for name, make in (("small", make_tiny_model), ("large", speaking_model)):
        policy = load_policy(make(tmp_path / name))
        right = torch.tensor(sorted(letters(tmp_path / name)))
        head, gain = policy.head.weight.detach(), policy.model.model.norm.weight.detach()
        hidden = torch.randn(len(gain), generator=torch.Generator().manual_seed(0)).requires_grad_()
        optimizer = torch.optim.Adam([hidden], 0.1)
        for _ in range(200):
            share = torch.softmax(head @ (hidden / hidden.square().mean().sqrt() * gain), 0)[right].sum()
            optimizer.zero_grad()
            (-share.log()).backward()
            optimizer.step()
        best[name] = float(share.detach())
    assert best["small"] < 0.25 and best["large"] > 0.9, best
