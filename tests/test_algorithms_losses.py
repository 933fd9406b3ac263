"""Losses against hand-computed values and gradients."""

from __future__ import annotations

import math

import pytest
import torch

from springtide.algorithms.losses import Tokens, policy_loss
from springtide.algorithms.losses.kl import kl_k3
from springtide.algorithms.losses.ppo_clip import ppo_clip
from springtide.algorithms.losses.supervised import supervised
from springtide.config import Algorithm

CLIP = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}


def tokens(ratios, advantages, weights=None, rollout=None, reference=None) -> Tokens:
    """Tokens whose policy stands at `ratios` to old log-probs of -1."""
    old = torch.full((len(ratios),), -1.0)
    logprobs = (old + torch.tensor(ratios).log()).requires_grad_()
    return Tokens(
        logprobs=logprobs,
        rollout=old if rollout is None else torch.tensor(rollout),
        old=old,
        advantages=torch.tensor(advantages),
        weights=torch.ones(len(ratios)) if weights is None else torch.tensor(weights),
        sequence=torch.zeros(len(ratios), dtype=torch.int64),
        reference=None if reference is None else torch.tensor(reference),
    )


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.0, 2.0, -2.0, -2.0),  # on policy: plain policy gradient, d(-ratio A)/d logp = -ratio A
        (1.1, 2.0, -2.2, -2.2),
        (1.5, 2.0, -2.56, 0.0),  # above 1 + 0.28 with A > 0: clipped
        (0.5, 2.0, -1.0, -1.0),  # below with A > 0: not clipped
        (0.5, -2.0, 1.6, 0.0),  # below 1 - 0.2 with A < 0: clipped
        (1.5, -2.0, 3.0, 3.0),  # above with A < 0: not clipped ...
        (4.0, -2.0, 6.0, 0.0),  # ... up to the dual clip, 3 |A|
        (1.0, 0.0, 0.0, 0.0),
    ],
)
def test_ppo_clip_by_hand(ratio, advantage, loss, gradient):
    t = tokens([ratio], [advantage])
    result = ppo_clip(t, **CLIP)
    result.loss.backward()
    assert float(result.loss.detach()) == pytest.approx(loss, abs=1e-5)
    assert float(t.logprobs.grad) == pytest.approx(gradient, abs=1e-5)
    assert float(result.sums["clipped"]) == (gradient == 0 and advantage != 0)
    assert float(result.sums["ratio"]) == pytest.approx(ratio)


def test_losses_are_weighted_sums():
    t = tokens([1.0, 1.1, 0.9], [1.0, -1.0, 2.0], weights=[1.0, 0.5, 0.25])
    assert float(ppo_clip(t, **CLIP).loss.detach()) == pytest.approx(-1.0 + 0.5 * 1.1 - 0.25 * 1.8)


def test_truncated_weight_is_capped_and_has_no_gradient():
    # old log-prob -1; rollout -1.5 and -4: weights e^0.5 = 1.6487, and e^3 capped at 2
    t = tokens([1.0, 1.0], [1.0, 1.0], rollout=[-1.5, -4.0])
    result = ppo_clip(t, **CLIP, weight_cap=2.0)
    result.loss.backward()
    assert float(result.loss.detach()) == pytest.approx(-(math.exp(0.5) + 2.0), abs=1e-5)
    assert t.logprobs.grad.tolist() == pytest.approx([-math.exp(0.5), -2.0], abs=1e-5)
    assert float(result.sums["weight"]) == pytest.approx(math.exp(0.5) + 2.0, abs=1e-5)


def test_policy_loss_uses_the_weight_only_with_recomputed_log_probs():
    t = tokens([1.0], [1.0], rollout=[-4.0])
    assert float(policy_loss(t, Algorithm(old_logprobs="rollout")).loss.detach()) == pytest.approx(-1.0)
    assert float(policy_loss(t, Algorithm(old_logprobs="recompute")).loss.detach()) == pytest.approx(-2.0)


def test_an_extreme_ratio_has_a_finite_gradient():
    for advantage in (1.0, -1.0):
        t = tokens([1.0, 1.0], [advantage, advantage])
        far = Tokens(t.logprobs, t.rollout, torch.tensor([-200.0, 200.0]), t.advantages, t.weights, t.sequence)
        ppo_clip(far, **CLIP).loss.backward()
        assert torch.isfinite(t.logprobs.grad).all()


def test_kl_k3_by_hand():
    # ref - pi = 0.5: e^0.5 - 0.5 - 1 = 0.148721; derivative to logpi is 1 - e^0.5
    t = tokens([1.0, 1.0], [0.0, 0.0], reference=[-0.5, -1.0])
    result = kl_k3(t)
    result.loss.backward()
    assert float(result.loss.detach()) == pytest.approx(0.148721, abs=1e-5)
    assert t.logprobs.grad.tolist() == pytest.approx([1 - math.exp(0.5), 0.0], abs=1e-5)


def test_kl_k3_is_clamped_and_counted():
    t = tokens([1.0], [0.0], reference=[4.0])
    result = kl_k3(t)
    assert float(result.loss.detach()) == 10.0
    assert float(result.sums["kl_clamped"]) == 1


def test_kl_coefficient_adds_to_the_policy_loss():
    t = tokens([1.0], [1.0], reference=[-0.5])
    assert float(policy_loss(t, Algorithm(kl_coef=0.1)).loss.detach()) == pytest.approx(-1 + 0.0148721, abs=1e-5)


def test_kl_without_reference_names_the_remedy():
    with pytest.raises(ValueError, match="reference rank"):
        policy_loss(tokens([1.0], [1.0]), Algorithm(kl_coef=0.1))


def test_supervised_by_hand():
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    result = supervised(logprobs, torch.tensor([1.0, 0.5]))
    result.loss.backward()
    assert float(result.loss.detach()) == 2.0
    assert logprobs.grad.tolist() == [-1.0, -0.5]
    assert float(result.sums["nll"]) == 3.0


def test_behaviour_kl_is_the_k3_of_what_sampled():
    t = tokens([2.0], [0.0])
    # r = pi / rollout = 2: r - 1 - log r
    assert float(ppo_clip(t, **CLIP).sums["kl_behaviour"]) == pytest.approx(1 - math.log(2), abs=1e-5)


@pytest.mark.parametrize("name", ["rollout", "old", "advantages", "weights", "sequence", "reference"])
def test_arrays_of_unequal_length_are_refused_when_made(name):
    """xtuner#2095: an advantage list one longer than the tokens was silently shifted."""
    fields = {n: torch.zeros(3) for n in ("logprobs", "rollout", "old", "advantages", "weights", "sequence")}
    fields[name] = torch.zeros(4)
    with pytest.raises(ValueError, match=f"tokens.{name}"):
        Tokens(**fields)
