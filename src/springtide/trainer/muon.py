"""Muon: momentum, orthogonalised, for hidden weight matrices.

    M  <- beta M + G
    O  = NewtonSchulz(G + beta M)     the nearest semi-orthogonal matrix, about: singular values in [0.7, 1.2]
    W  <- (1 - lr * wd) W - lr * 0.2 * sqrt(max(rows, columns)) * O

The factor gives updates of AdamW's usual size (root mean square 0.2), so one learning rate serves both. Sources:
K. Jordan et al., "Muon" (2024), the quintic's coefficients; Moonlight (arXiv 2502.16982), the factor.
Called by: `trainer.optim`.

Why not torch.optim.Muon: it iterates in bfloat16, which a CPU without bfloat16 products emulates; for 35 matrices of
about 160 x 400 that took 1.3 s against 0.09 s in float32, as much as a third of a whole training step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_A, _B, _C = 3.4445, -4.7750, 2.0315
_STEPS = 5


class Muon(torch.optim.Optimizer):
    """For matrices only; embeddings, norms and the output head belong to AdamW. Raises: ValueError otherwise."""

    def __init__(self, params: Sequence[Tensor], lr: float, weight_decay: float = 0.0, momentum: float = 0.95) -> None:
        if bad := [tuple(p.shape) for p in params if p.ndim != 2]:
            raise ValueError(f"Muon steps matrices, not shapes {bad}")
        super().__init__(list(params), {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                momentum.mul_(group["momentum"]).add_(p.grad)
                update = orthogonalise(p.grad.add(momentum, alpha=group["momentum"]))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update, alpha=-group["lr"] * 0.2 * math.sqrt(max(p.shape)))


def orthogonalise(matrix: Tensor) -> Tensor:
    """The quintic Newton-Schulz iteration on a matrix [m, n]: same singular vectors, singular values near 1."""
    wide = matrix.shape[0] <= matrix.shape[1]
    x = matrix if wide else matrix.mT
    if matrix.is_cuda:
        x = x.bfloat16()
    x = x / x.norm().clamp_min(1e-7)
    for _ in range(_STEPS):
        square = x @ x.mT
        x = _A * x + (_B * square + _C * (square @ square)) @ x
    return (x if wide else x.mT).to(matrix.dtype)
