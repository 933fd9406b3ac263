"""The optimisers: AdamW, and Muon for hidden matrices with AdamW for the rest.

Owns: which parameter goes where, the linear warm-up, and the one place where accumulated gradient sums (of all ranks,
by then) become a step: divide by the count, clip, step. Invariants: the division happens once, over everything
accumulated, so the step does not depend on micro-batching (trl#6024, ms-swift#10117); a gradient that is not finite
changes nothing, neither weights nor moments nor the step count.
Called by: the trainer rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from springtide.trainer.collective import Collective
from springtide.trainer.model import Policy
from springtide.trainer.muon import Muon
from springtide.trainer.shards import TensorFile, local
from springtide.training import Trainer

_MOMENTS = {"AdamW": ("step", "exp_avg", "exp_avg_sq"), "Muon": ("momentum",)}


@dataclass(frozen=True, slots=True)
class StepResult:
    """grad_norm is before clipping. refused: why the step was not taken, or None; refused_tensor: the first whose
    gradient is not finite, in checkpoint order."""

    grad_norm: float
    lr: float
    refused: Literal["loss", "gradient"] | None = None
    refused_tensor: str | None = None


class Optimizer:
    """Steps a policy. `steps` counts the steps taken and drives the warm-up."""

    def __init__(self, policy: Policy, config: Trainer, world: Collective = Collective()) -> None:  # noqa: B008
        self._world, self._sharded = world, config.sharding == "fsdp"
        self._config, self.parameters, self.steps = config, policy.parameters(), 0
        self._names = list(policy.trained())
        common: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
        rest = self.parameters
        self._parts: list[torch.optim.Optimizer] = []
        if config.optimizer == "muon":
            outside = {id(p) for m in (policy.model.get_input_embeddings(), policy.head) for p in m.parameters()}
            hidden = {id(p): p for p in self.parameters if p.ndim == 2 and id(p) not in outside}
            rest = [p for p in self.parameters if id(p) not in hidden]
            self._parts.append(Muon(hidden.values(), **common, world=world))
        # Norms and biases are not decayed: decay pulls a gain of 1 towards 0.
        groups: list[dict[str, Any]] = [
            {"params": [p for p in rest if p.ndim >= 2]},
            {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
        ]
        if groups := [g for g in groups if g["params"]]:  # none where Muon has all, as those of an adapter
            self._parts.append(torch.optim.AdamW(groups, betas=config.betas, foreach=True, **common))

    def apply(self, loss_sum: float, denominator: int, lr: float | None = None) -> StepResult:
        """Take one step from the gradient sums in `.grad`, divided by `denominator`; then clear them.

        lr: instead of the configured one; the warm-up applies to either.
        """
        warmup = min(1.0, (self.steps + 1) / (self._config.warmup + 1))
        lr = (self._config.lr if lr is None else lr) * warmup
        gradients = [local(p.grad) for p in self.parameters if p.grad is not None]
        try:
            if not math.isfinite(loss_sum):
                return StepResult(float("nan"), lr, "loss", self._first_not_finite())
            torch._foreach_div_(gradients, float(denominator))
            norm = self._norm(gradients)
            if not math.isfinite(norm):
                return StepResult(norm, lr, "gradient", self._first_not_finite())
            torch._foreach_mul_(gradients, min(1.0, self._config.grad_clip / (norm + 1e-6)))
            for part in self._parts:
                for group in part.param_groups:
                    group["lr"] = lr
                part.step()
            self.steps += 1
            return StepResult(norm, lr)
        finally:
            for p in self.parameters:
                p.grad = None

    def _norm(self, gradients: list[Tensor]) -> float:
        """Of the whole gradient, the same on every rank."""
        norm = float(torch.nn.utils.get_total_norm(gradients))
        if not self._sharded:
            return norm
        return math.hypot(*self._world.exchange(norm))

    def _first_not_finite(self) -> str | None:
        """None too where every entry is finite and only their sum overflowed."""
        grads = enumerate(p.grad for p in self.parameters)
        bad = [i for i, g in grads if g is not None and not torch.isfinite(local(g)).all()]
        if self._sharded:
            bad = [i for part in self._world.exchange(bad[:1]) for i in part]
        return self._names[min(bad)] if bad else None

    def state(self) -> dict[str, Any]:
        """What is not a tensor."""
        return {"steps": self.steps, "kinds": [type(part).__name__ for part in self._parts]}

    def moments(self) -> dict[str, Tensor]:
        """The tensors, as `<parameter>.<kind>`; sharded as parameters are."""
        return {f"{name}.{kind}": t for part, p, name in self._of() for kind, t in part.state[p].items()}

    def load(self, state: dict[str, Any], moments: TensorFile) -> None:
        """Go on from another's state and moments. Raises: ValueError if they are not for this optimiser."""
        if state["kinds"] != self.state()["kinds"]:
            raise ValueError(f"the saved optimiser state is not for trainer.optimizer = {self._config.optimizer!r}")
        stored = set(moments.names)
        for part, p, name in self._of():
            for kind in _MOMENTS[type(part).__name__]:
                if (key := f"{name}.{kind}") in stored:
                    part.state[p][kind] = moments.whole(key) if kind == "step" else moments.like(key, p)
        self.steps = state["steps"]

    def _of(self) -> Iterator[tuple[torch.optim.Optimizer, Tensor, str]]:
        names = {id(p): name for p, name in zip(self.parameters, self._names, strict=True)}
        for part in self._parts:
            for group in part.param_groups:
                for p in group["params"]:
                    yield part, p, names[id(p)]
