"""From the log-probs of a micro-batch's action tokens to a loss SUM and metric sums. Torch; called by trainer ranks.

    L = sum over t of  weight_t * u_t * L_t  +  kl_coef * weight_t * KL_t  -  entropy_coef * weight_t * H_t

L_t: a loss of the shelf, one file each (`ppo_clip`, `gspo`, `cispo`). u_t: the correction for what sampled
(`correction`), where old log-probs are recomputed. KL_t: `kl`. H_t: the policy's exact entropy at its temperature.

Invariants: every loss is a sum over tokens of weight * value, so micro-batches add; nothing here divides by a count
(the step divides once, by the named aggregation's count over all micro-batches). All arrays of one batch have one
length T, checked when it is made (a list one longer shifts silently: xtuner#2095).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from springtide.config import Algorithm

__all__ = ["LossSums", "Tokens", "policy_loss"]

# |log rho| beyond this is already clipped in every branch that has a gradient (e^-20 is 2e-9); the bound keeps exp
# finite, for inf * 0 in the backward pass of a clipped token would be NaN.
MAX_LOG_RATIO = 20.0
# How far below and above 1 a loss clips its ratio where the configuration leaves it open.
_CLIPS = {"ppo_clip": (0.2, 0.28), "gspo": (3e-4, 4e-4), "cispo": (1.0, 4.0)}


@dataclass(frozen=True, slots=True)
class Tokens:
    """The action tokens of one micro-batch; all float32 [T] but `sequence`, int64 [T].

    logprobs: the trained policy's, with gradient. rollout: the policy's that sampled. old: the ratio's denominator
    (`rollout` itself, or recomputed). reference: the KL reference's, or None. weights: what each token counts in the
    named aggregation. sequence: which segment of the step it belongs to (a segment is never split over micro-batches).
    entropy: of the trained policy where each token was chosen, in nats, with gradient, or None.
    """

    logprobs: Tensor
    rollout: Tensor
    old: Tensor
    advantages: Tensor
    weights: Tensor
    sequence: Tensor
    reference: Tensor | None = None
    entropy: Tensor | None = None

    def __post_init__(self) -> None:
        shape = self.logprobs.shape
        for name in ("rollout", "old", "advantages", "weights", "sequence", "reference", "entropy"):
            array = getattr(self, name)
            if array is not None and (array.shape != shape or array.ndim != 1):
                raise ValueError(f"tokens.{name} has shape {tuple(array.shape)}; logprobs has {tuple(shape)}")


@dataclass(frozen=True, slots=True)
class TokenLosses:
    """loss: float32 [T], with gradient, unweighted. sums: unweighted sums over T tokens, detached scalars."""

    loss: Tensor
    sums: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class LossSums:
    """loss: scalar, the weighted sum to go backward from. sums: unweighted sums over T tokens, detached scalars."""

    loss: Tensor
    sums: dict[str, Tensor]


def policy_loss(tokens: Tokens, algorithm: Algorithm) -> LossSums:
    """The configured policy loss with its correction, and KL and entropy terms where their coefficients ask for them.

    Raises: ValueError where a term lacks what it is made from.
    """
    from springtide.algorithms.losses.cispo import cispo
    from springtide.algorithms.losses.correction import correction
    from springtide.algorithms.losses.gspo import gspo
    from springtide.algorithms.losses.kl import kl_loss
    from springtide.algorithms.losses.ppo_clip import ppo_clip

    low, high = _CLIPS[algorithm.loss]
    low, high = algorithm.clip_low or low, algorithm.clip_high or high
    if algorithm.loss == "gspo":
        result = gspo(tokens, clip_low=low, clip_high=high)
    elif algorithm.loss == "cispo":
        result = cispo(tokens, clip_low=low, clip_high=high)
    else:
        result = ppo_clip(tokens, clip_low=low, clip_high=high, dual_clip=algorithm.dual_clip)
    sums = {**result.sums, **behaviour_sums(tokens.logprobs, tokens.rollout)}
    weights = tokens.weights
    if algorithm.old_logprobs == "recompute" and algorithm.correction != "none":
        u, found = correction(tokens, algorithm)
        weights = weights * u
        sums |= found
    loss = (weights * result.loss).sum()
    if algorithm.kl_coef > 0 and algorithm.kl_in == "loss":
        kl = kl_loss(tokens, algorithm.kl_estimator)
        loss = loss + algorithm.kl_coef * (tokens.weights * kl.loss).sum()
        sums |= kl.sums
    if algorithm.entropy_coef > 0:
        if tokens.entropy is None:
            raise ValueError("entropy: it was not computed with the log-probs (algorithm.entropy_coef > 0)")
        loss = loss - algorithm.entropy_coef * (tokens.weights * tokens.entropy).sum()
        sums["entropy_exact"] = tokens.entropy.detach().sum()
    return LossSums(loss, sums)


def ratio_to_old(tokens: Tokens) -> Tensor:
    """rho_t = exp(logpi_t - logpi_old_t), float32 [T], with gradient."""
    return torch.exp((tokens.logprobs - tokens.old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))


def sum_by_sequence(values: Tensor, sequence: Tensor) -> tuple[Tensor, Tensor]:
    """Each token's segment total of `values` (float32 [T]), and its segment's number of action tokens, both [T]."""
    _, place = torch.unique(sequence, return_inverse=True)
    n = int(place.max()) + 1 if len(place) else 0
    totals = torch.zeros(n, dtype=values.dtype, device=values.device).index_add(0, place, values)
    counts = torch.bincount(place, minlength=n).to(values.dtype)
    return totals[place], counts[place]


def behaviour_sums(logprobs: Tensor, rollout: Tensor) -> dict[str, Tensor]:
    """How far the trained policy stands from the one that sampled, as sums over T tokens (detached).

    kl_behaviour: k3 estimate of KL(rollout || policy). entropy: -log-prob of what was sampled, an unbiased estimate of
    the sampling policy's entropy at its temperature.
    """
    d = (logprobs.detach() - rollout).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return {"kl_behaviour": (torch.expm1(d) - d).sum(), "entropy": -rollout.sum()}
