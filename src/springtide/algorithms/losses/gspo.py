"""Group sequence policy optimisation: one ratio a sequence, clipped as a whole.

    s_i  = exp(mean over t in i of (logpi_t - logpi_old_t))
    L_t  = max(-s_i A_i, -clip(s_i, 1 - low, 1 + high) A_i)        for every token t of sequence i

Under `trajectory_mean` (or `segment_mean`, which is the same where episodes have one segment) the sum over a sequence's
tokens is the paper's sequence loss; under `token_mean` long sequences count for more. A sequence here is a segment: an
episode whose template rewrote its past has several, each with a ratio of its own.
Source: GSPO (arXiv 2507.18071), which clips at 3e-4 and 4e-4: a mean over hundreds of tokens moves little.
"""

from __future__ import annotations

import torch

from springtide.algorithms.losses import MAX_LOG_RATIO, TokenLosses, Tokens, sum_by_sequence


def gspo(tokens: Tokens, *, clip_low: float, clip_high: float) -> TokenLosses:
    """Sums: ratio (the sequence's, at each of its tokens), clipped (tokens of sequences the clip removed)."""
    advantage = tokens.advantages
    total, count = sum_by_sequence(tokens.logprobs - tokens.old, tokens.sequence)
    ratio = torch.exp((total / count).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    loss = torch.maximum(-ratio * advantage, -ratio.clamp(1 - clip_low, 1 + clip_high) * advantage)
    r, a = ratio.detach(), advantage
    removed = ((a > 0) & (r > 1 + clip_high)) | ((a < 0) & (r < 1 - clip_low))
    return TokenLosses(loss, {"ratio": r.sum(), "clipped": removed.sum()})
