"""The KL to the reference, by the estimators k1, k2, k3; as a loss term, or per token for a reward.

    d_t = logpi_ref_t - logpi_t
    k1 = -d          unbiased, of either sign
    k2 = d^2 / 2     biased, its gradient as a loss is that of the KL
    k3 = exp(d) - d - 1   (>= 0) unbiased, of low variance

All estimate KL(pi || pi_ref) on tokens that pi sampled. As a loss, what counts is the gradient: k1's has mean zero (a
penalty that does nothing, so the configuration refuses it), k2's is the KL's own, k3's is that of KL(pi_ref || pi) to
first order (trl#4967). k3 is the default because it is what the compared systems use, and it pulls gently. In the
reward, k1 is the one whose expectation is right; the sum over an episode's action tokens is taken off its reward
before the baseline. k2 and k3 of a token are clamped to at most 10 (verl, AgentRL), k1 to +-10; one beyond it has no
gradient, and is counted.
Source: J. Schulman, "Approximating KL divergence" (2020); DeepSeekMath (arXiv 2402.03300); Tang and Munos (2506.09477).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from springtide.algorithms.losses import MAX_LOG_RATIO, TokenLosses, Tokens

MAX_KL = 10.0


def kl_loss(tokens: Tokens, estimator: Literal["k1", "k2", "k3"]) -> TokenLosses:
    """Sums: kl_reference, kl_clamped (tokens at the bound). Raises: ValueError without reference log-probs."""
    if tokens.reference is None:
        raise ValueError("kl: there are no reference log-probs; pass the reference rank's file (algorithm.kl_coef > 0)")
    raw = estimate(tokens.reference, tokens.logprobs, estimator)
    clamped = raw.clamp(max=MAX_KL)
    return TokenLosses(clamped, {"kl_reference": clamped.detach().sum(), "kl_clamped": (raw.detach() > MAX_KL).sum()})


def estimate(reference: Tensor, logprobs: Tensor, estimator: Literal["k1", "k2", "k3"]) -> Tensor:
    """The estimator of each token, float32 [T], not clamped."""
    d = (reference - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if estimator == "k1":
        return -d
    return d * d / 2 if estimator == "k2" else torch.exp(d) - d - 1
