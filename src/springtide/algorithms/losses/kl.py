"""KL to the reference as a loss term, by the k3 estimator.

    d_t = logpi_ref_t - logpi_t
    k3_t = exp(d_t) - d_t - 1   (>= 0), clamped to at most 10
    L = sum over t of weight_t * k3_t

k3 is an unbiased, low-variance estimate of the VALUE KL(pi || pi_ref) on tokens that pi sampled. As a loss its
GRADIENT is not that of the KL (it is that of KL(pi_ref || pi) to first order; trl#4967): it is the default because it
is what the compared systems use, it needs no change to the reward, and it pulls gently. The clamp (verl, AgentRL)
bounds what one token can do; a token beyond it (d > 2.6 or d < -11) has no gradient, and is counted.
Source: J. Schulman, "Approximating KL divergence" (2020); DeepSeekMath (arXiv 2402.03300).
"""

from __future__ import annotations

import torch

from springtide.algorithms.losses import LossSums, Tokens

MAX_KL = 10.0


def kl_k3(tokens: Tokens) -> LossSums:
    """Sums: kl_reference, kl_clamped (tokens at the bound). Raises: ValueError without reference log-probs."""
    if tokens.reference is None:
        raise ValueError("kl: there are no reference log-probs; pass the reference rank's file (algorithm.kl_coef > 0)")
    d = (tokens.reference - tokens.logprobs).clamp(-20.0, 20.0)
    k3 = torch.exp(d) - d - 1
    clamped = k3.clamp(max=MAX_KL)
    sums = {"kl_reference": clamped.detach().sum(), "kl_clamped": (k3.detach() > MAX_KL).sum()}
    return LossSums((tokens.weights * clamped).sum(), sums)
