"""Clipped policy gradient with an asymmetric clip and a dual clip.

    rho_t  = exp(logpi_t - logpi_old_t)
    L_t    = max(-rho_t A, -clip(rho_t, 1 - low, 1 + high) A)
    L_t    = min(L_t, -c A)                    where A < 0 (dual clip)

Source: PPO (arXiv 1707.06347); high above low: DAPO (2503.14476); dual clip: Ye et al. (1912.09729), c = 3 as in
AgentRL. With recomputed old log-probs and a correction (`correction`) it is decoupled PPO (2110.00641; AReaL,
2505.24298): pi_old is the proximal policy that the clip holds on to, pi_rollout the one that sampled.
"""

from __future__ import annotations

import torch

from springtide.algorithms.losses import TokenLosses, Tokens, ratio_to_old


def ppo_clip(tokens: Tokens, *, clip_low: float, clip_high: float, dual_clip: float) -> TokenLosses:
    """Sums: ratio, clipped (tokens whose gradient the clip removed)."""
    advantage = tokens.advantages
    ratio = ratio_to_old(tokens)
    clipped_ratio = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(-ratio * advantage, -clipped_ratio * advantage)
    loss = torch.where(advantage < 0, torch.minimum(loss, -dual_clip * advantage), loss)
    r, a = ratio.detach(), advantage
    removed = ((a > 0) & (r > 1 + clip_high)) | ((a < 0) & ((r < 1 - clip_low) | (r > dual_clip)))
    return TokenLosses(loss, {"ratio": r.sum(), "clipped": removed.sum()})
