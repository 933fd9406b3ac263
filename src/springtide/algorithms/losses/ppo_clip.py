"""Clipped policy gradient: asymmetric clip, dual clip, optional truncated importance weight.

    rho_t  = exp(logpi_t - logpi_old_t)
    L_t    = max(-rho_t A, -clip(rho_t, 1 - low, 1 + high) A)
    L_t    = min(L_t, -c A)                    where A < 0 (dual clip)
    L      = sum over t of weight_t * u_t * L_t
    u_t    = min(exp(logpi_old_t - logpi_rollout_t), cap), no gradient; 1 where no cap is given

Source: PPO (arXiv 1707.06347); high above low: DAPO (2503.14476); dual clip: Ye et al. (1912.09729), c = 3 as in
AgentRL; the truncated weight separates the sampling policy from the proximal one: decoupled PPO (2110.00641), TIS.
"""

from __future__ import annotations

import torch

from springtide.algorithms.losses import LossSums, Tokens, behaviour_sums

# |log rho| beyond this is already clipped in every branch that has a gradient (e^-20 is 2e-9); the bound keeps exp
# finite, for inf * 0 in the backward pass of a clipped token would be NaN.
_MAX_LOG_RATIO = 20.0


def ppo_clip(
    tokens: Tokens, *, clip_low: float, clip_high: float, dual_clip: float, weight_cap: float | None = None
) -> LossSums:
    """Sums: ratio, clipped (tokens whose gradient the clip removed), weight (only with a cap), and behaviour sums."""
    advantage = tokens.advantages
    ratio = torch.exp((tokens.logprobs - tokens.old).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO))
    clipped_ratio = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(-ratio * advantage, -clipped_ratio * advantage)
    loss = torch.where(advantage < 0, torch.minimum(loss, -dual_clip * advantage), loss)
    with torch.no_grad():
        r, a = ratio.detach(), advantage
        removed = ((a > 0) & (r > 1 + clip_high)) | ((a < 0) & ((r < 1 - clip_low) | (r > dual_clip)))
        sums = {"ratio": r.sum(), "clipped": removed.sum(), **behaviour_sums(tokens.logprobs, tokens.rollout)}
        weights = tokens.weights
        if weight_cap is not None:
            gap = (tokens.old - tokens.rollout).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
            truncated = torch.exp(gap).clamp(max=weight_cap)
            sums["weight"] = truncated.sum()
            weights = weights * truncated
    return LossSums((weights * loss).sum(), sums)
