"""Importance weights between the policy that sampled and the proximal one, truncated or masked.

    g_t = logpi_old_t - logpi_rollout_t
    w   = exp(g_t)                       level "token"
    w   = exp(sum over the segment)      level "sequence"    unbiased, of high variance
    w   = exp(mean over the segment)     level "geometric"   the same for short and long segments
    u_t = min(w, cap)                    "truncate"
    u_t = w if floor <= w <= cap else 0  "mask"

No gradient flows through u. The two policies differ by the engine's numerics and by staleness.
Source: truncated token weights: TIS (Yao et al., 2025), decoupled PPO (arXiv 2110.00641); sequence weights: Liu et al.,
"When speed kills stability" (2025); masking on both sides: IcePop (2025), GLM-5 (2602.15763).
"""

from __future__ import annotations

import torch
from torch import Tensor

from springtide.algorithms.losses import MAX_LOG_RATIO, Tokens, sum_by_sequence
from springtide.config import Algorithm


@torch.no_grad()
def correction(tokens: Tokens, algorithm: Algorithm) -> tuple[Tensor, dict[str, Tensor]]:
    """u, float32 [T]. Sums: weight, weight_bounded (tokens that were truncated or masked)."""
    gap = tokens.old - tokens.rollout
    if algorithm.correction_level != "token":
        total, count = sum_by_sequence(gap, tokens.sequence)
        gap = total if algorithm.correction_level == "sequence" else total / count
    weight = torch.exp(gap.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    high = algorithm.weight_cap or 2.0
    low = algorithm.weight_floor or 1 / high
    if algorithm.correction == "truncate":
        u, bounded = weight.clamp(max=high), weight > high
    else:
        bounded = (weight < low) | (weight > high)
        u = weight.masked_fill(bounded, 0.0)
    return u, {"weight": u.sum(), "weight_bounded": bounded.sum()}
