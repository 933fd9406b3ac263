"""Low-rank updates of frozen weights.

    W' = W + (alpha / rank) B A        A [rank, in] uniform, B [out, rank] zero at the start

Only A and B are trained. Invariants: before the first step the policy is the base model, bit for bit; what is
published, exported and saved as the model are the merged W', so engines and other programs see an ordinary model.
Composed in the forward pass (a parametrisation), so every module that reads `weight` sees W'.
Source: LoRA (arXiv 2106.09685). On all layers, with about ten times the learning rate of full training, it keeps up
with it where updates carry little information, as in RL (Schulman et al., "LoRA without regret", 2025).
Called by: the trainer rank.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from springtide.config import Lora


class LowRank(nn.Module):
    """The update of one weight [out, in]."""

    def __init__(self, weight: Tensor, rank: int, alpha: float) -> None:
        super().__init__()
        out, inner = weight.shape
        bound = 1 / math.sqrt(inner)
        self.scale = alpha / rank
        self.a = nn.Parameter(torch.empty(rank, inner, device=weight.device).uniform_(-bound, bound))
        self.b = nn.Parameter(torch.zeros(out, rank, device=weight.device))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.scale * (self.b @ self.a)


def add_lora(model: Any, config: Lora) -> None:
    """Freeze the model and give its linear layers, the head excepted, a trained update each. Raises: ValueError."""
    head = model.get_output_embeddings()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    layers = [
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head and (config.layers == "all" or "attn" in name)
    ]
    if not layers:
        raise ValueError(f'trainer.lora.layers: {type(model).__name__} has no linear layers in "{config.layers}"')
    for layer in layers:
        parametrize.register_parametrization(layer, "weight", LowRank(layer.weight, config.rank, config.alpha))


def merged(model: nn.Module) -> dict[str, Tensor]:
    """The weights by the names they have without updates, each with its update, detached; tied ones once."""
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        layer, updated, rest = name.partition(".parametrizations.")
        if not updated:
            found[name] = parameter.detach()
        elif rest.endswith(".original"):
            weight = rest.removesuffix(".original")
            found[f"{layer}.{weight}"] = getattr(model.get_submodule(layer), weight).detach()
    return found
