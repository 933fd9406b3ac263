"""Losses against hand-computed values and gradients."""

from __future__ import annotations

import math

import pytest
import torch

from springtide.algorithms.losses import Tokens, policy_loss
from springtide.algorithms.losses.cispo import cispo
from springtide.algorithms.losses.correction import correction
from springtide.algorithms.losses.gspo import gspo
from springtide.algorithms.losses.kl import estimate, kl_loss
from springtide.algorithms.losses.ppo_clip import ppo_clip
from springtide.algorithms.losses.supervised import supervised
from springtide.config import Algorithm

CLIP = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}


def tokens(ratios, advantages, weights=None, rollout=None, reference=None, sequence=None, entropy=None) -> Tokens:
    """Tokens whose policy stands at `ratios` to old log-probs of -1."""
    old = torch.full((len(ratios),), -1.0)
    logprobs = (old + torch.tensor(ratios).log()).requires_grad_()
    return Tokens(
        logprobs=logprobs,
        rollout=old if rollout is None else torch.tensor(rollout),
        old=old,
        advantages=torch.tensor(advantages),
        weights=torch.ones(len(ratios)) if weights is None else torch.tensor(weights),
        sequence=torch.tensor(sequence or [0] * len(ratios)),
        reference=None if reference is None else torch.tensor(reference),
        entropy=None if entropy is None else torch.tensor(entropy, requires_grad=True),
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
    result.loss.sum().backward()
    assert float(result.loss.detach()) == pytest.approx(loss, abs=1e-5)
    assert float(t.logprobs.grad) == pytest.approx(gradient, abs=1e-5)
    assert float(result.sums["clipped"]) == (gradient == 0 and advantage != 0)
    assert float(result.sums["ratio"]) == pytest.approx(ratio)


def test_losses_are_weighted_sums():
    t = tokens([1.0, 1.1, 0.9], [1.0, -1.0, 2.0], weights=[1.0, 0.5, 0.25])
    assert float(policy_loss(t, Algorithm()).loss.detach()) == pytest.approx(-1.0 + 0.5 * 1.1 - 0.25 * 1.8)


def test_truncated_weight_is_capped_and_has_no_gradient():
    # old log-prob -1; rollout -1.5 and -4: weights e^0.5 = 1.6487, and e^3 capped at 2
    t = tokens([1.0, 1.0], [1.0, 1.0], rollout=[-1.5, -4.0])
    result = policy_loss(t, Algorithm(old_logprobs="recompute", weight_cap=2.0))
    result.loss.backward()
    assert float(result.loss.detach()) == pytest.approx(-(math.exp(0.5) + 2.0), abs=1e-5)
    assert t.logprobs.grad.tolist() == pytest.approx([-math.exp(0.5), -2.0], abs=1e-5)
    assert float(result.sums["weight"]) == pytest.approx(math.exp(0.5) + 2.0, abs=1e-5)
    assert float(result.sums["weight_bounded"]) == 1


@pytest.mark.parametrize(
    ("level", "mode", "weights"),
    [
        # segment 0: gaps ln 2, ln 4; segment 1: gap -ln 4. cap 2.5, floor 0.4
        ("token", "truncate", [2.0, 2.5, 0.25]),
        ("token", "mask", [2.0, 0.0, 0.0]),
        ("sequence", "truncate", [2.5, 2.5, 0.25]),
        ("sequence", "mask", [0.0, 0.0, 0.0]),
        ("geometric", "truncate", [2.5, 2.5, 0.25]),  # sqrt(8) = 2.83
        ("geometric", "mask", [0.0, 0.0, 0.0]),
    ],
)
def test_corrections_by_hand(level, mode, weights):
    gaps = [math.log(2), math.log(4), -math.log(4)]
    t = tokens([1.0] * 3, [1.0] * 3, rollout=[-1.0 - g for g in gaps], sequence=[5, 5, 9])
    algorithm = Algorithm(
        old_logprobs="recompute", correction=mode, correction_level=level, weight_cap=2.5,
        weight_floor=0.4 if mode == "mask" else None,
    )  # fmt: skip
    u, sums = correction(t, algorithm)
    assert u.tolist() == pytest.approx(weights, abs=1e-5)
    assert float(sums["weight"]) == pytest.approx(sum(weights), abs=1e-5)
    assert float(sums["weight_bounded"]) == sum(w in (0.0, 2.5) for w in weights)
    loss = policy_loss(t, algorithm).loss
    assert float(loss.detach()) == pytest.approx(-sum(weights), abs=1e-5)


def test_a_mask_keeps_the_weight_of_what_it_keeps_and_its_floor_is_the_caps_inverse():
    t = tokens([1.0] * 3, [1.0] * 3, rollout=[-1.0 - math.log(x) for x in (1.9, 0.51, 0.49)], sequence=[0, 1, 2])
    u, _ = correction(t, Algorithm(old_logprobs="recompute", correction="mask"))
    assert u.tolist() == pytest.approx([1.9, 0.51, 0.0], abs=1e-5)


def test_the_geometric_mean_does_not_grow_with_length():
    for n in (1, 50):
        t = tokens([1.0] * n, [1.0] * n, rollout=[-1.1] * n)
        of_level = {
            level: correction(t, Algorithm(old_logprobs="recompute", correction_level=level, weight_cap=1e6))[0][0]
            for level in ("sequence", "geometric")
        }
        assert float(of_level["geometric"]) == pytest.approx(math.exp(0.1), rel=1e-4)
        assert float(of_level["sequence"]) == pytest.approx(math.exp(0.1 * n), rel=1e-3)


def test_no_correction_leaves_the_recomputed_ratio_alone():
    t = tokens([1.0], [1.0], rollout=[-4.0])
    result = policy_loss(t, Algorithm(old_logprobs="recompute", correction="none"))
    assert float(result.loss.detach()) == pytest.approx(-1.0) and "weight" not in result.sums


def test_gspo_by_hand():
    # segment 3: ratios 1.2 and 0.8333 -> geometric mean 1; segment 7: 1.21 and 1 -> 1.1
    t = tokens([1.2, 1 / 1.2, 1.21, 1.0], [1.0, 1.0, -2.0, -2.0], sequence=[3, 3, 7, 7])
    result = gspo(t, clip_low=0.2, clip_high=0.28)
    result.loss.sum().backward()
    assert result.loss.tolist() == pytest.approx([-1.0, -1.0, 2.2, 2.2], abs=1e-5)
    # d(sum of a segment's 2 equal losses)/d logp_t = 2 * (-s A) / 2
    assert t.logprobs.grad.tolist() == pytest.approx([-1.0, -1.0, 2.2, 2.2], abs=1e-5)
    assert float(result.sums["ratio"]) == pytest.approx(4.2, abs=1e-5)
    assert float(result.sums["clipped"]) == 0


def test_gspo_clips_a_sequence_as_a_whole_and_at_its_own_defaults():
    t = tokens([1.3, 1.0, 1.0], [1.0, 1.0, 1.0], sequence=[0, 0, 1], weights=[0.5, 0.5, 1.0])
    result = policy_loss(t, Algorithm(loss="gspo"))
    result.loss.backward()
    # segment 0: sqrt(1.3) > 1 + 4e-4, no gradient for either token; segment 1 at 1
    assert t.logprobs.grad.tolist() == pytest.approx([0.0, 0.0, -1.0])
    assert float(result.sums["clipped"]) == 2
    assert float(result.loss.detach()) == pytest.approx(-(1 + 4e-4) - 1, abs=1e-5)


def test_gspo_with_trajectory_weights_is_the_mean_of_sequence_losses():
    t = tokens([1.0] * 5, [2.0] * 2 + [-1.0] * 3, sequence=[0] * 2 + [1] * 3, weights=[1 / 2] * 2 + [1 / 3] * 3)
    assert float(policy_loss(t, Algorithm(loss="gspo")).loss.detach()) == pytest.approx(-2.0 + 1.0, abs=1e-5)


@pytest.mark.parametrize(
    ("ratio", "advantage", "gradient"),
    [
        (1.0, 2.0, -2.0),
        (1.5, 2.0, -3.0),  # inside the default cap of 5: the ratio itself
        (9.0, 2.0, -10.0),  # beyond: the weight is 5, the gradient stays
        (0.1, -2.0, 0.2),  # no lower bound
    ],
)
def test_cispo_by_hand(ratio, advantage, gradient):
    t = tokens([ratio], [advantage])
    result = policy_loss(t, Algorithm(loss="cispo"))
    result.loss.backward()
    assert float(t.logprobs.grad) == pytest.approx(gradient, abs=1e-5)
    assert float(result.sums["clipped"]) == (ratio > 5)


def test_cispo_has_a_lower_bound_where_one_is_given():
    t = tokens([0.1], [1.0])
    cispo(t, clip_low=0.2, clip_high=0.2).loss.sum().backward()
    assert float(t.logprobs.grad) == pytest.approx(-0.8, abs=1e-5)


def test_policy_loss_uses_the_weight_only_with_recomputed_log_probs():
    t = tokens([1.0], [1.0], rollout=[-4.0])
    assert float(policy_loss(t, Algorithm(old_logprobs="rollout")).loss.detach()) == pytest.approx(-1.0)
    assert float(policy_loss(t, Algorithm(old_logprobs="recompute")).loss.detach()) == pytest.approx(-2.0)


@pytest.mark.parametrize("loss", ["ppo_clip", "gspo", "cispo"])
def test_an_extreme_ratio_has_a_finite_gradient(loss):
    for advantage in (1.0, -1.0):
        t = tokens([1.0, 1.0], [advantage, advantage], sequence=[0, 1])
        far = Tokens(t.logprobs, t.rollout, torch.tensor([-200.0, 200.0]), t.advantages, t.weights, t.sequence)
        policy_loss(far, Algorithm(loss=loss)).loss.backward()
        assert torch.isfinite(t.logprobs.grad).all()


@pytest.mark.parametrize(
    ("estimator", "value", "gradient"),
    [
        ("k2", 0.125, -0.5),  # d = ref - pi = 0.5; d^2 / 2, and -d
        ("k3", 0.148721, 1 - math.exp(0.5)),  # e^0.5 - 0.5 - 1; derivative to logpi is 1 - e^d
    ],
)
def test_kl_by_hand(estimator, value, gradient):
    t = tokens([1.0, 1.0], [0.0, 0.0], reference=[-0.5, -1.0])
    result = kl_loss(t, estimator)
    result.loss.sum().backward()
    assert float(result.loss.sum().detach()) == pytest.approx(value, abs=1e-5)
    assert t.logprobs.grad.tolist() == pytest.approx([gradient, 0.0], abs=1e-5)


def test_k1_is_the_difference_of_log_probs():
    assert estimate(torch.tensor([-0.5]), torch.tensor([-1.0]), "k1").tolist() == [-0.5]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_estimators_agree_with_the_exact_kl_of_near_policies(estimator):
    """Each, averaged over what pi samples (here over all tokens by their probability), against KL(pi || ref)."""
    logits = torch.tensor([0.3, -0.2, 0.1, 0.4], dtype=torch.float64)
    pi = torch.log_softmax(logits, 0)
    ref = torch.log_softmax(logits + torch.tensor([0.02, -0.01, 0.03, 0.0], dtype=torch.float64), 0)
    exact = float((pi.exp() * (pi - ref)).sum())
    assert float((pi.exp() * estimate(ref, pi, estimator)).sum()) == pytest.approx(exact, rel=0.03)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_kl_is_clamped_and_counted(estimator):
    t = tokens([1.0], [0.0], reference=[4.0])
    result = kl_loss(t, estimator)
    assert float(result.loss.detach()) == 10.0
    assert float(result.sums["kl_clamped"]) == 1


def test_kl_coefficient_adds_to_the_policy_loss():
    t = tokens([1.0], [1.0], reference=[-0.5])
    assert float(policy_loss(t, Algorithm(kl_coef=0.1)).loss.detach()) == pytest.approx(-1 + 0.0148721, abs=1e-5)


def test_kl_without_reference_names_the_remedy():
    with pytest.raises(ValueError, match="reference rank"):
        policy_loss(tokens([1.0], [1.0]), Algorithm(kl_coef=0.1))


def test_kl_paid_for_in_the_reward_is_not_in_the_loss():
    t = tokens([1.0], [1.0])
    algorithm = Algorithm(kl_coef=0.1, kl_in="reward", kl_estimator="k1")
    assert float(policy_loss(t, algorithm).loss.detach()) == pytest.approx(-1.0)


def test_the_entropy_bonus_lowers_the_loss_by_the_weighted_entropy():
    t = tokens([1.0, 1.0], [0.0, 0.0], weights=[1.0, 0.5], entropy=[0.6, 1.0])
    result = policy_loss(t, Algorithm(entropy_coef=0.1))
    result.loss.backward()
    assert float(result.loss.detach()) == pytest.approx(-0.1 * (0.6 + 0.5), abs=1e-6)
    assert t.entropy.grad.tolist() == pytest.approx([-0.1, -0.05])
    assert float(result.sums["entropy_exact"]) == pytest.approx(1.6)
    with pytest.raises(ValueError, match="entropy_coef"):
        policy_loss(tokens([1.0], [1.0]), Algorithm(entropy_coef=0.1))


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
    assert float(policy_loss(t, Algorithm()).sums["kl_behaviour"]) == pytest.approx(1 - math.log(2), abs=1e-5)


@pytest.mark.parametrize("name", ["rollout", "old", "advantages", "weights", "sequence", "reference", "entropy"])
def test_arrays_of_unequal_length_are_refused_when_made(name):
    """xtuner#2095: an advantage list one longer than the tokens was silently shifted."""
    fields = {n: torch.zeros(3) for n in ("logprobs", "rollout", "old", "advantages", "weights", "sequence")}
    fields[name] = torch.zeros(4)
    with pytest.raises(ValueError, match=f"tokens.{name}"):
        Tokens(**fields)
