"""Supervised loss on given actions (cold start): L = - sum over t of weight_t * logpi_t, logits at temperature 1."""

from __future__ import annotations

from torch import Tensor

from springtide.algorithms.losses import LossSums


def supervised(logprobs: Tensor, weights: Tensor) -> LossSums:
    """logprobs, weights: float32 [T]. Sums: nll, the unweighted negative log-likelihood."""
    if logprobs.shape != weights.shape or logprobs.ndim != 1:
        raise ValueError(f"supervised: {tuple(weights.shape)} weights for {tuple(logprobs.shape)} log-probs")
    return LossSums(-(weights * logprobs).sum(), {"nll": -logprobs.detach().sum()})
