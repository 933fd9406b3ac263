"""LoRA: the base is frozen, the merged model is what others see, a checkpoint goes on exactly, and it learns."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.run_support import records, run_config

import springtide
from springtide.config import Lora
from springtide.trainer.lora import add_lora
from springtide.trainer.model import load_policy
from springtide.trainer.rank import Rank
from trainer_parts import config, tiny_model, write_groups

SHAPES = [[[(30, 12)], [(24, 9)], [(40, 20)]], [[(16, 5)], [(33, 15)], [(20, 8)]]]
IDS = np.arange(1, 30, dtype=np.int32)


def settings(**trainer) -> dict:
    return config(trainer={"lr": 1e-2, "lora": {"rank": 4}, **trainer}).model_dump(mode="json")


def make_rank(model: Path, tmp_path: Path, checkpoint: str | None = None, **trainer) -> Rank:
    rank = Rank()
    (tmp_path / "store").mkdir(exist_ok=True)
    rank.init(settings(**trainer), str(model), checkpoint, store=str(tmp_path / "store"))
    return rank


def test_only_the_low_rank_updates_are_trained_and_the_merged_model_is_published(tmp_path):
    model = tiny_model(tmp_path / "model")
    items = tuple(write_groups(tmp_path / "groups", SHAPES))
    base = load_policy(model)
    rank = make_rank(model, tmp_path)
    policy = rank._policy
    assert set(policy.tensors()) == set(base.tensors())
    np.testing.assert_array_equal(policy.score(IDS), base.score(IDS))  # B is zero
    assert sum(p.numel() for p in policy.parameters()) < sum(p.numel() for p in base.parameters()) / 2
    for _ in range(3):
        rank.train(items, 0)
    changed = {name for name, t in policy.tensors().items() if not torch.equal(t, base.tensors()[name])}
    assert changed == {name for name in base.tensors() if "_proj" in name}
    for name, p in policy.model.named_parameters():
        if name.endswith(".original"):
            assert torch.equal(p, base.tensors()[name.replace(".parametrizations.weight.original", ".weight")])
    rank.publish(1)
    published = rank._store.load(1)
    assert all(torch.equal(published[name], t) for name, t in policy.tensors().items())
    rank.export(str(tmp_path / "export"))
    np.testing.assert_allclose(load_policy(tmp_path / "export").score(IDS), policy.score(IDS), atol=1e-6)


def test_an_update_is_scaled_by_alpha_over_rank(tmp_path):
    base = load_policy(tiny_model(tmp_path / "model"))
    policy = load_policy(tmp_path / "model")
    add_lora(policy.model, Lora(rank=2, alpha=8.0, layers="attention"))
    layer = policy.model.model.layers[0].self_attn.q_proj
    update = layer.parametrizations.weight[0]
    with torch.no_grad():
        update.b.fill_(1.0)
    name = "model.layers.0.self_attn.q_proj.weight"
    want = base.tensors()[name] + 4.0 * update.a.sum(0).detach()
    torch.testing.assert_close(policy.tensors()[name], want.expand_as(policy.tensors()[name]))
    assert not any("mlp" in name for name in policy.trained())
    assert any("mlp" in name for name in base.trained())


def test_a_run_that_is_resumed_from_a_checkpoint_takes_the_same_steps(tmp_path):
    model = tiny_model(tmp_path / "model")
    items = tuple(write_groups(tmp_path / "groups", SHAPES))
    whole = make_rank(model, tmp_path)
    whole.train(items, 0)
    whole.save(str(tmp_path / "checkpoint"))
    resumed = make_rank(model, tmp_path, str(tmp_path / "checkpoint"))
    for rank in (whole, resumed):
        rank.train(items, 0)
    for name, t in whole._policy.tensors().items():
        assert torch.equal(t, resumed._policy.tensors()[name]), name
    merged = load_policy(tmp_path / "checkpoint")
    assert set(merged.tensors()) == set(whole._policy.tensors())


def test_a_short_run_learns_with_lora(tiny_model: Path, tmp_path: Path) -> None:
    run = run_config(
        tiny_model, tmp_path, run={"steps": 30}, rollout={"group": {"n": 8}, "concurrency": 16},
        trainer={"groups": 8, "lr": 2e-2, "lora": {"rank": 8}},
    )  # fmt: skip
    summary = springtide.train(run)
    rewards = [r["reward"]["letters"] for r in records(run) if r["reward"]]
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.1, rewards
    assert summary.logprob_gap_mean < 1e-4  # engines sample with the merged weights


def test_a_model_without_such_layers_is_refused(tmp_path):
    policy = load_policy(tiny_model(tmp_path / "model"))
    bare = torch.nn.Sequential(torch.nn.Linear(4, 4))
    bare.get_output_embeddings = policy.model.get_output_embeddings  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"trainer\.lora\.layers"):
        add_lora(bare, Lora(rank=2, layers="attention"))
