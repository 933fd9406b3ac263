"""From the log-probs of a micro-batch's action tokens to a loss SUM and metric sums. Torch; called by trainer ranks.

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


@dataclass(frozen=True, slots=True)
class Tokens:
    """The action tokens of one micro-batch; all float32 [T] but `sequence`, int64 [T].

    logprobs: the trained policy's, with gradient. rollout: the policy's that sampled. old: the ratio's denominator
    (`rollout` itself, or recomputed). reference: the KL reference's, or None. weights: what each token counts in the
    named aggregation. sequence: which segment of the step it belongs to (a segment is never split over micro-batches).
    """

    logprobs: Tensor
    rollout: Tensor
    old: Tensor
    advantages: Tensor
    weights: Tensor
    sequence: Tensor
    reference: Tensor | None = None

    def __post_init__(self) -> None:
        shape = self.logprobs.shape
        for name in ("rollout", "old", "advantages", "weights", "sequence", "reference"):
            array = getattr(self, name)
            if array is not None and (array.shape != shape or array.ndim != 1):
                raise ValueError(f"tokens.{name} has shape {tuple(array.shape)}; logprobs has {tuple(shape)}")


@dataclass(frozen=True, slots=True)
class LossSums:
    """loss: scalar, the weighted sum to go backward from. sums: unweighted sums over T tokens, detached scalars."""

    loss: Tensor
    sums: dict[str, Tensor]


def policy_loss(tokens: Tokens, algorithm: Algorithm) -> LossSums:
    """The configured policy loss, plus `kl_coef` times the KL to the reference where that is above 0."""
    from springtide.algorithms.losses.kl import kl_k3
    from springtide.algorithms.losses.ppo_clip import ppo_clip

    cap = (algorithm.weight_cap or 2.0) if algorithm.old_logprobs == "recompute" else None
    result = ppo_clip(
        tokens,
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        dual_clip=algorithm.dual_clip,
        weight_cap=cap,
    )
    if algorithm.kl_coef == 0:
        return result
    kl = kl_k3(tokens)
    return LossSums(result.loss + algorithm.kl_coef * kl.loss, {**result.sums, **kl.sums})


def behaviour_sums(logprobs: Tensor, rollout: Tensor) -> dict[str, Tensor]:
    """How far the trained policy stands from the one that sampled, as sums over T tokens (detached).

    kl_behaviour: k3 estimate of KL(rollout || policy). entropy: -log-prob of what was sampled, an unbiased estimate of
    the sampling policy's entropy at its temperature.
    """
    d = (logprobs.detach() - rollout).clamp(-20.0, 20.0)
    return {"kl_behaviour": (torch.expm1(d) - d).sum(), "entropy": -rollout.sum()}
