"""Clipped importance weights: the weight is clipped, the token keeps its gradient.

    rho_t = exp(logpi_t - logpi_old_t)
    L_t   = -stop_gradient(clip(rho_t, 1 - low, 1 + high)) A logpi_t

A token that PPO's clip would silence still teaches, with a bounded weight: rare tokens that turn an episode around
are just those with a large ratio. low = 1 means no lower bound, as in the paper.
Source: CISPO, MiniMax-M1 (arXiv 2506.13585), equations 4 and 5.
"""

from __future__ import annotations

from springtide.algorithms.losses import TokenLosses, Tokens, ratio_to_old


def cispo(tokens: Tokens, *, clip_low: float, clip_high: float) -> TokenLosses:
    """Sums: ratio, clipped (tokens whose weight was clipped; they keep a gradient)."""
    ratio = ratio_to_old(tokens).detach()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = -weight * tokens.advantages * tokens.logprobs
    return TokenLosses(loss, {"ratio": ratio.sum(), "clipped": (weight != ratio).sum()})
