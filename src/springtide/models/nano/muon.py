"""Muon (Jordan et al. 2024) in float32, matrices of one shape orthogonalised together.

torch.optim.Muon works in bfloat16 one matrix at a time, which on a CPU without bfloat16 products costs more than the
model's own forward and backward. Called by: the builder.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

_QUINTIC = (3.4445, -4.7750, 2.0315)  # Newton-Schulz coefficients of the reference implementation
_STEPS = 5


class Muon:
    """Momentum, then the update's nearest orthogonal matrix. For two-dimensional hidden weights only."""

    def __init__(self, params: Iterable[Tensor], lr: float, momentum: float = 0.95) -> None:
        shapes: dict[tuple[int, ...], list[Tensor]] = {}
        for p in params:
            shapes.setdefault(tuple(sorted(p.shape)), []).append(p)
        self.groups = list(shapes.values())
        self.lr, self.momentum = lr, momentum
        self.buffers = [[torch.zeros_like(p) for p in group] for group in self.groups]

    @torch.no_grad()
    def step(self) -> None:
        for params, buffers in zip(self.groups, self.buffers):
            updates = []
            for p, buffer in zip(params, buffers):
                assert p.grad is not None
                buffer.lerp_(p.grad, 1 - self.momentum)
                update = p.grad.lerp(buffer, self.momentum)
                updates.append(update if p.shape[0] <= p.shape[1] else update.T)
            for p, x in zip(params, orthogonal(torch.stack(updates))):
                tall = p.shape[0] > p.shape[1]
                p.add_(x.T if tall else x, alpha=-self.lr * max(1.0, p.shape[0] / p.shape[1]) ** 0.5)

    def state_dict(self) -> dict[str, Any]:
        return {"buffers": self.buffers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for mine, given in zip(self.buffers, state["buffers"]):
            for buffer, value in zip(mine, given):
                buffer.copy_(value)


def orthogonal(x: Tensor) -> Tensor:
    """About the nearest orthogonal matrices of x float32 [N, R, C], R <= C: all singular values near 1."""
    a, b, c = _QUINTIC
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(_STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x
