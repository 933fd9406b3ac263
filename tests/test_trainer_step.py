"""Gradients do not depend on micro-batching, order or packing, for every aggregation; refused steps change nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from springtide.trace import Group
from springtide.trainer.data import load_step
from springtide.trainer.model import Policy, load_policy
from springtide.trainer.muon import Muon, orthogonalise
from springtide.trainer.optim import Optimizer
from springtide.trainer.step import Shape, accumulate_policy, accumulate_supervised
from trainer_parts import config, tiny_model, write_groups

AGGREGATIONS = ("token_mean", "trajectory_mean", "segment_mean")
# Members of one and of several segments, short and long, few and many action tokens.
SHAPES = [
    [[(40, 9), (12, 3)], [(20, 1)], [(9, 8)]],
    [[(33, 20)], [(60, 2), (7, 1), (25, 11)]],
    [[(14, 5)], [(15, 5)], [(80, 40)], [(11, 2)]],
]


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Policy:
    return load_policy(tiny_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module", params=["apart", "alike"])
def items(request, tmp_path_factory) -> list[dict]:
    """Random segments, and the same with the beginnings of each group's members made equal."""
    items = write_groups(tmp_path_factory.mktemp("groups"), SHAPES)
    for path in {i["path"] for i in items if request.param == "alike"}:
        group = Group.load(Path(path))
        first = group.trajectories[0].segments[0].ids
        made = []
        for t in group.trajectories:
            alike = []
            for s in t.segments:
                n = min(len(s.ids), len(first)) * 3 // 4
                alike.append(replace(s, ids=np.concatenate([first[:n], s.ids[n:]])))
            made.append(replace(t, segments=tuple(alike)))
        replace(group, trajectories=tuple(made)).save(Path(path))
    return items


def gradients(policy: Policy, items, aggregation: str, micro_tokens: int, logit_chunk: int = 4096, **algorithm):
    """The divided gradients of one policy step, flat, and its loss."""
    settings = config(algorithm={"aggregation": aggregation, **algorithm})
    data = load_step(items, aggregation)
    sums = accumulate_policy(policy, data, settings.algorithm, Shape(micro_tokens, logit_chunk, 0.8), version=0)
    flat = torch.cat([p.grad.flatten() for p in policy.parameters()]) / data.denominator
    for p in policy.parameters():
        p.grad = None
    return flat, sums.loss / data.denominator


def reference_gradients(policy: Policy, items, aggregation: str):
    """The same loss written naively: one segment at a time, whole logits, means taken as their names say."""
    per_trajectory = []
    for item in items:
        t = next(t for t in Group.load(Path(item["path"])).trajectories if t.member == item["member"])
        per_trajectory.append([])
        for s in t.segments:
            logits = policy.model(input_ids=torch.from_numpy(s.ids.astype(np.int64))[None]).logits[0] / 0.8
            logp = torch.log_softmax(logits, -1)[:-1].gather(1, torch.from_numpy(s.ids[1:].astype(np.int64))[:, None])
            logp = logp[:, 0][torch.from_numpy(s.loss_mask[1:])]
            old = torch.from_numpy(s.logprobs[1:][s.loss_mask[1:]])
            ratio, a = (logp - old).exp(), item["advantage"]
            loss = -torch.minimum(ratio * a, ratio.clamp(0.8, 1.28) * a)
            if a < 0:
                loss = torch.minimum(loss, torch.tensor(-3.0 * a))
            per_trajectory[-1].append(loss)
    segments = [s for t in per_trajectory for s in t]
    loss = {
        "token_mean": lambda: torch.cat(segments).mean(),
        "trajectory_mean": lambda: torch.stack([torch.cat(t).mean() for t in per_trajectory]).mean(),
        "segment_mean": lambda: torch.stack([s.mean() for s in segments]).mean(),
    }[aggregation]()
    flat = torch.cat([g.flatten() for g in torch.autograd.grad(loss, policy.parameters())])
    return flat, float(loss.detach())


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_the_gradient_is_the_naive_one(policy, items, aggregation):
    want, loss = reference_gradients(policy, items, aggregation)
    got, got_loss = gradients(policy, items, aggregation, 8192)
    assert want.abs().max() > 1e-3
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-3)
    assert got_loss == pytest.approx(loss, abs=1e-5)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_the_gradient_does_not_depend_on_micro_batching(policy, items, aggregation):
    """trl#6024, ms-swift#10117, verl#3741: scaled by the number of micro-batches, divided twice, mean of means."""
    whole, loss = gradients(policy, items, aggregation, 8192)
    for micro_tokens in (1, 50, 200):
        cut, cut_loss = gradients(policy, items, aggregation, micro_tokens, logit_chunk=7)
        torch.testing.assert_close(cut, whole, atol=1e-5, rtol=1e-3)
        assert cut_loss == pytest.approx(loss, abs=1e-5)


@pytest.mark.parametrize(
    "options",
    [{"loss": "gspo", "clip_low": 0.3, "clip_high": 0.5}, {"loss": "cispo"}, {"entropy_coef": 0.1}],
    ids=["gspo", "cispo", "entropy"],
)
def test_no_loss_depends_on_micro_batching(policy, items, options):
    whole, loss = gradients(policy, items, "trajectory_mean", 8192, **options)
    assert whole.abs().max() > 1e-4
    for micro_tokens in (1, 200):
        cut, cut_loss = gradients(policy, items, "trajectory_mean", micro_tokens, logit_chunk=7, **options)
        torch.testing.assert_close(cut, whole, atol=1e-5, rtol=1e-3)
        assert cut_loss == pytest.approx(loss, abs=1e-5)


def test_the_entropy_bonus_is_the_gradient_of_the_exact_entropy(policy, items):
    """Against whole logits, one segment at a time: d(-H)/d(weights), H at the rollout's temperature."""
    with_bonus, _ = gradients(policy, items, "token_mean", 8192, entropy_coef=0.5)
    without, _ = gradients(policy, items, "token_mean", 8192)
    terms = []
    for item in items:
        t = next(t for t in Group.load(Path(item["path"])).trajectories if t.member == item["member"])
        for s in t.segments:
            logits = policy.model(input_ids=torch.from_numpy(s.ids.astype(np.int64))[None]).logits[0] / 0.8
            logp = torch.log_softmax(logits, -1)[:-1][torch.from_numpy(s.loss_mask[1:])]
            terms.append(-(logp.exp() * logp).sum(-1))
    flat = torch.cat([g.flatten() for g in torch.autograd.grad(-0.5 * torch.cat(terms).mean(), policy.parameters())])
    torch.testing.assert_close(with_bonus - without, flat, atol=1e-5, rtol=1e-3)


def test_the_gradient_does_not_depend_on_the_order_of_items_by_a_bit(policy, items):
    forward, _ = gradients(policy, items, "token_mean", 100)
    shuffled = [items[i] for i in np.random.default_rng(0).permutation(len(items))]
    backward, _ = gradients(policy, shuffled, "token_mean", 100)
    assert torch.equal(forward, backward)


def test_equal_inputs_give_equal_bits(policy, items):
    assert torch.equal(gradients(policy, items, "token_mean", 100)[0], gradients(policy, items, "token_mean", 100)[0])


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_the_supervised_gradient_does_not_depend_on_micro_batching(policy, items, aggregation):
    flat = []
    for micro_tokens in (40, 8192):
        data = load_step(items, aggregation)
        accumulate_supervised(policy, data, Shape(micro_tokens, 64, 1.0))
        flat.append(torch.cat([p.grad.flatten() for p in policy.parameters()]) / data.denominator)
        for p in policy.parameters():
            p.grad = None
    torch.testing.assert_close(*flat, atol=1e-5, rtol=1e-3)


def test_the_gap_counts_only_tokens_of_the_very_weights(policy, items):
    data = load_step(items, "token_mean")
    settings = config()
    same = accumulate_policy(policy, data, settings.algorithm, Shape(8192, 64, 0.8), version=0)
    other = accumulate_policy(policy, data, settings.algorithm, Shape(8192, 64, 0.8), version=3)
    assert same.totals["gap_tokens"] == data.loss_tokens and same.totals["lag"] == 0
    assert other.totals["gap_tokens"] == 0 and other.totals["lag"] == 3 * data.loss_tokens
    assert "gap_max" not in other.maxima
    # A resumed run's tags are other weights although the steps are close: no gap, and no negative lag.
    resumed = accumulate_policy(policy, data, settings.algorithm, Shape(8192, 64, 0.8), version=1 << 32)
    assert resumed.totals["gap_tokens"] == 0 and resumed.totals["lag"] == 0
    for p in policy.parameters():
        p.grad = None


def snapshot(policy: Policy) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in policy.parameters()])


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_gradient_that_is_not_finite_is_refused_and_changes_nothing(tmp_path, kind):
    policy = load_policy(tiny_model(tmp_path))
    optimizer = Optimizer(policy, config(trainer={"optimizer": kind}).trainer)
    before = snapshot(policy)
    for bad_loss, bad_gradient in ((float("nan"), 1.0), (1.0, float("inf"))):
        for p in policy.parameters():
            p.grad = torch.full_like(p, bad_gradient)
        result = optimizer.apply(bad_loss, 4)
        first = "model.embed_tokens.weight"
        assert (result.refused, result.refused_tensor) == (("loss", None) if bad_loss != 1.0 else ("gradient", first))
        assert torch.equal(snapshot(policy), before)
        assert optimizer.steps == 0
    for p in policy.parameters():
        p.grad = torch.ones_like(p)
    result = optimizer.apply(1.0, 4)
    assert result.refused is None and optimizer.steps == 1
    assert result.grad_norm == pytest.approx(len(before) ** 0.5 / 4)
    assert not torch.equal(snapshot(policy), before) and torch.isfinite(snapshot(policy)).all()


def test_warm_up_is_linear(tmp_path):
    policy = load_policy(tiny_model(tmp_path))
    optimizer = Optimizer(policy, config(trainer={"lr": 0.1, "warmup": 3}).trainer)
    rates = []
    for _ in range(5):
        for p in policy.parameters():
            p.grad = torch.ones_like(p)
        rates.append(optimizer.apply(1.0, 1).lr)
    assert rates == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1])


@pytest.mark.parametrize("shape", [(3, 16, 40), (1, 24, 24)])
def test_muon_turns_gradients_into_nearly_orthogonal_updates(shape):
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalise(torch.randn(shape) * 1e-3))
    assert values.min() > 0.3 and values.max() < 1.3


@pytest.mark.parametrize(
    ("adjust", "factors"), [("match_rms_adamw", (0.2 * 40**0.5, 0.2 * 40**0.5)), ("original", (1.0, 2.5**0.5))]
)
def test_muon_steps_lying_and_standing_matrices_as_its_equations_say(adjust, factors):
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in ((16, 40), (40, 16), (16, 40))]
    idle = params.pop()
    optimizer = Muon([*params, idle], lr=0.01, weight_decay=0.5, momentum=0.9, adjust=adjust)
    expected, momenta = [p.detach().clone() for p in params], [torch.zeros_like(p) for p in params]
    idle_before = idle.detach().clone()
    for _ in range(3):
        for i, p in enumerate(params):
            p.grad = torch.randn_like(p)
            momenta[i] = 0.9 * momenta[i] + 0.1 * p.grad
            update = 0.1 * p.grad + 0.9 * momenta[i]
            lying = orthogonalise((update if i == 0 else update.mT)[None])[0]
            expected[i] = expected[i] * (1 - 0.01 * 0.5) - 0.01 * factors[i] * (lying if i == 0 else lying.mT)
        optimizer.step()
    for p, value in zip(params, expected, strict=True):
        assert torch.allclose(p, value, atol=1e-5)
    assert torch.equal(idle, idle_before), "without a gradient nothing moves, and nothing decays"


def test_muon_leaves_embeddings_norms_and_head_to_adamw(tmp_path):
    policy = load_policy(tiny_model(tmp_path))
    optimizer = Optimizer(policy, config(trainer={"optimizer": "muon"}).trainer)
    names = {id(p): n for n, p in policy.model.named_parameters()}
    muon, adamw = ({names[id(p)] for g in part.param_groups for p in g["params"]} for part in optimizer._parts)
    assert all("_proj" in n for n in muon) and len(muon) == 14
    assert "model.embed_tokens.weight" in adamw and "model.norm.weight" in adamw
    assert not muon & adamw and len(muon | adamw) == len(names)
