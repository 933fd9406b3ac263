"""The optimisers: AdamW, and Muon for hidden matrices with AdamW for the rest.

Owns: which parameter goes where, the linear warm-up, and the one place where accumulated gradient sums (of all ranks,
by then) become a step: divide by the count, clip, step. Invariants: the division happens once, over everything
accumulated, so the step does not depend on micro-batching (trl#6024, ms-swift#10117); a gradient that is not finite
changes nothing, neither weights nor moments nor the step count.
Called by: the trainer rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from springtide.config import Trainer
from springtide.trainer.model import Policy
from springtide.trainer.muon import Muon


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

    def __init__(self, policy: Policy, config: Trainer) -> None:
        self._config, self.parameters, self.steps = config, policy.parameters(), 0
        self._names = list(policy.trained())
        common: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
        rest = self.parameters
        self._parts: list[torch.optim.Optimizer] = []
        if config.optimizer == "muon":
            outside = {id(p) for m in (policy.model.get_input_embeddings(), policy.head) for p in m.parameters()}
            hidden = [p for p in self.parameters if p.ndim == 2 and id(p) not in outside]
            rest = [p for p in self.parameters if not any(p is h for h in hidden)]
            self._parts.append(Muon(hidden, **common))
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
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        try:
            if not torch.isfinite(torch.tensor(loss_sum)):
                return StepResult(float("nan"), lr, "loss", self._first_not_finite())
            torch._foreach_div_(gradients, float(denominator))
            norm = torch.nn.utils.get_total_norm(gradients)
            if not torch.isfinite(norm):
                return StepResult(float(norm), lr, "gradient", self._first_not_finite())
            torch.nn.utils.clip_grads_with_norm_(self.parameters, self._config.grad_clip, norm)
            for part in self._parts:
                for group in part.param_groups:
                    group["lr"] = lr
                part.step()
            self.steps += 1
            return StepResult(float(norm), lr)
        finally:
            for p in self.parameters:
                p.grad = None

    def _first_not_finite(self) -> str | None:
        """None too where every entry is finite and only their sum overflowed."""
        for name, p in zip(self._names, self.parameters, strict=True):
            if p.grad is not None and not torch.isfinite(p.grad).all():
                return name
        return None

    def state(self) -> dict[str, Any]:
        return {"steps": self.steps, "parts": [part.state_dict() for part in self._parts]}

    def load_state(self, state: dict[str, Any]) -> None:
        """Raises: ValueError if the state was saved for another optimizer."""
        if len(state["parts"]) != len(self._parts):
            raise ValueError(f"the saved optimiser state is not for trainer.optimizer = {self._config.optimizer!r}")
        for part, saved in zip(self._parts, state["parts"], strict=True):
            part.load_state_dict(saved)
        self.steps = state["steps"]
