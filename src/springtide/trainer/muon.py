"""Muon: momentum, orthogonalised, for hidden weight matrices.

    M  <- beta M + (1 - beta) G
    O  = NewtonSchulz((1 - beta) G + beta M)   the nearest semi-orthogonal matrix, about: singular values in [0.7, 1.2]
    W  <- (1 - lr * wd) W - lr * c * O

c, by `adjust`, named as in torch.optim.Muon:
    match_rms_adamw: 0.2 * sqrt(max(rows, columns)): updates of AdamW's usual size (root mean square 0.2), so that one
        learning rate serves both (Moonlight, arXiv 2502.16982).
    original: sqrt(max(1, rows / columns)) (K. Jordan et al., "Muon", 2024; the quintic's coefficients too).
Several ranks share the iterations: each takes some matrices and sends what they became to the others.
Called by: `trainer.optim`, and the builder of springtide-nano.

Why not torch.optim.Muon: it iterates in bfloat16, which a CPU without bfloat16 products emulates; for 35 matrices of
about 160 x 400 that took 1.3 s against 0.09 s in float32, as much as a third of a whole training step. And it takes one
matrix at a time; here those of one shape, lying or standing, go together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from springtide.trainer.collective import Collective
from springtide.trainer.shards import like, local, own_rows
from springtide.weights.files import whole

_A, _B, _C = 3.4445, -4.7750, 2.0315
_STEPS = 5
_AT_ONCE = 1 << 24  # elements of matrices that are whole at once


class Muon(torch.optim.Optimizer):
    """For matrices only; embeddings, norms and the output head belong to AdamW. One parameter group a shape.

    Raises: ValueError for what is no matrix.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        adjust: Literal["match_rms_adamw", "original"] = "match_rms_adamw",
        world: Collective = Collective(),  # noqa: B008  (alone; it cannot change)
    ) -> None:
        self._world = world
        shapes: dict[tuple[int, ...], list[Tensor]] = {}
        for p in params:
            shapes.setdefault(tuple(sorted(p.shape)), []).append(p)
        if bad := [shape for shape in shapes if len(shape) != 2]:
            raise ValueError(f"Muon steps matrices, not shapes {bad}")
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "adjust": adjust}
        super().__init__([{"params": group} for group in shapes.values()], defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            for some in _windows(params, self._world.size):
                self._step(some, group)

    def _step(self, params: list[Tensor], group: dict[str, Any]) -> None:
        wholes = []
        for p in params:
            assert p.grad is not None
            state, gradient = self.state[p], local(p.grad)
            if not state:
                state["momentum"] = torch.zeros_like(p)
            momentum = local(state["momentum"])
            momentum.lerp_(gradient, 1 - group["momentum"])
            wholes.append(whole(like(p, gradient.lerp(momentum, group["momentum"]))))
        updates = self._orthogonalise([_lying(w) for w in wholes])
        for p, update in zip(params, updates, strict=True):
            rows, columns = p.shape
            original = group["adjust"] == "original"
            factor = math.sqrt(max(1.0, rows / columns)) if original else 0.2 * math.sqrt(max(rows, columns))
            local(p).mul_(1 - group["lr"] * group["weight_decay"])
            local(p).add_(own_rows(p, update.mT if rows > columns else update), alpha=-group["lr"] * factor)

    def _orthogonalise(self, matrices: list[Tensor]) -> list[Tensor]:
        """Of matrices of one shape, the same on every rank; each rank iterates on every size-th."""
        rank, size = self._world.rank, self._world.size
        found = list(matrices)
        if own := matrices[rank::size]:
            found[rank::size] = orthogonalise(torch.stack(own))
        for owner in range(min(size, len(matrices)) if size > 1 else 0):
            found[owner::size] = self._world.broadcast(torch.stack(found[owner::size]), owner)
        return found


def _windows(params: list[Tensor], size: int) -> Iterator[list[Tensor]]:
    """Parts of a group that are whole at once: all of small matrices, at least one a rank."""
    count = max(size, _AT_ONCE // params[0].numel()) if params else 1
    for first in range(0, len(params), count):
        yield params[first : first + count]


def orthogonalise(matrices: Tensor) -> Tensor:
    """The quintic Newton-Schulz iteration on [N, R, C], R <= C: same singular vectors, singular values near 1."""
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp_min(1e-7)
    for _ in range(_STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return x.to(matrices.dtype)


def _lying(matrix: Tensor) -> Tensor:
    return matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mT
