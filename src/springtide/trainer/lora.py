"""LoRA: a frozen model, and a small trained update of each of its linear layers.

    y = W x + b + (alpha / rank) B A x       A [rank, in], uniform within 1 / sqrt(in);  B [out, rank], zero at first

Only A and B are trained. Invariants: the base weights never change; before the first step the policy is the base
model, bit for bit; others (engines, exports) see an ordinary model, the merged W + (alpha / rank) B A under W's name;
files have the names and the form that `peft` reads. The policy the run began with costs two small copies, not a
second model: with them in place the forward is the KL reference's (without a cold start they are the bare model).
Source: LoRA (arXiv 2106.09685). On all layers, with about ten times the learning rate of full training, it keeps up
with it where updates carry little information, as in RL (Schulman et al., "LoRA without regret", 2025).
Called by: the trainer rank, `springtide export`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from springtide.trainer.checkpoint import ADAPTER, ADAPTER_CONFIG, CheckpointError
from springtide.trainer.collective import Collective
from springtide.trainer.shards import fill, like, local, write_tensors
from springtide.training import Lora
from springtide.weights.files import whole
from springtide.weights.store import TensorPrint

_PREFIX = "base_model.model."  # peft wraps the model twice


class LoraLinear(nn.Linear):
    """A frozen linear layer, its parameters under their own names, and its update as `lora_A` and `lora_B`."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float, generator: torch.Generator) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias, self.scale = base.weight, base.bias, alpha / rank
        bound = 1 / math.sqrt(self.in_features)
        with torch.device("meta"):
            self.lora_A = nn.Linear(self.in_features, rank, bias=False)
            self.lora_B = nn.Linear(rank, self.out_features, bias=False)
        drawn = torch.empty(rank, self.in_features).uniform_(-bound, bound, generator=generator)
        self.lora_A.weight = nn.Parameter(drawn.to(base.weight.device))
        self.lora_B.weight = nn.Parameter(torch.zeros(self.out_features, rank, device=base.weight.device))

    def forward(self, x: Tensor) -> Tensor:  # x: [..., in] -> [..., out]
        return F.linear(x, self.weight, self.bias) + self.scale * self.lora_B(self.lora_A(x))

    def merged(self) -> Tensor:
        """W + (alpha / rank) B A, a new tensor [out, in], detached."""
        weight, b, a = local(self.weight), local(self.lora_B.weight), whole(self.lora_A.weight)
        return like(self.weight, torch.addmm(weight, b, a, alpha=self.scale).detach())


class Adapter:
    """The updates of one model. Making it freezes the model and puts them in place.

    Raises: ValueError for a target that no linear layer is called by.
    """

    def __init__(self, model: Any, config: Lora, seed: int) -> None:
        self.config = config
        layers = _targets(model, config.targets)
        model.requires_grad_(False)
        self.base = _digest(model)
        generator = torch.Generator().manual_seed(seed)
        self._layers: dict[str, LoraLinear] = {}
        for name, layer in layers.items():
            self._layers[name] = LoraLinear(layer, config.rank, config.alpha, generator)
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, self._layers[name])
        self.mark_start()

    def tensors(self) -> dict[str, Tensor]:
        """A and B of every layer, by the model's names, detached (not copied)."""
        return {
            f"{name}.{part}.weight": getattr(layer, part).weight.detach()
            for name, layer in self._layers.items()
            for part in ("lora_A", "lora_B")
        }

    @property
    def scale(self) -> float:
        return self.config.alpha / self.config.rank

    def frozen(self, model: nn.Module) -> dict[str, Tensor]:
        """The base's weights by name."""
        own = self.tensors()
        return {name: p.detach() for name, p in model.named_parameters() if name not in own}

    def merge(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The model's parameters by name, without the updates as such, each adapted weight with its update."""
        own = self.tensors()
        merged = {f"{name}.weight": layer for name, layer in self._layers.items()}
        return {n: merged[n].merged() if n in merged else p for n, p in parameters.items() if n not in own}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Overwrite A and B in place. Raises: ValueError if names or shapes disagree."""
        own = self.tensors()
        wanted, given = ({name: t.shape for name, t in of.items()} for of in (own, tensors))
        if odd := [name for name in {**wanted, **given} if wanted.get(name) != given.get(name)]:
            raise ValueError(f"the adapter was made for other layers or another rank: {odd[0]} does not fit")
        for name, tensor in own.items():
            fill(tensor, tensors[name])

    def mark_start(self, tensors: Mapping[str, Tensor] | None = None) -> None:
        """What the policy is now (or with `tensors`) is what the run begins with: the KL reference."""
        self.start = {name: tensor.clone() for name, tensor in self.tensors().items()}
        for name, tensor in (tensors or {}).items():
            fill(self.start[name], tensor)

    @contextlib.contextmanager
    def at_start(self) -> Iterator[None]:
        """Inside the block the policy is the one the run began with."""
        now = {name: tensor.clone() for name, tensor in self.tensors().items()}
        self.load(self.start)
        try:
            yield
        finally:
            self.load(now)

    def save(self, directory: Path, base: Path, world: Collective) -> None:
        """Write the two files of a peft adapter, float32, whose base model lies in `base`; its weights all together."""
        write_tensors(directory / ADAPTER, {_PREFIX + name: tensor for name, tensor in self.tensors().items()}, world)
        if world.rank:
            return
        alpha, targets = self.config.alpha, self.config.targets
        if "all" in targets:
            targets = tuple(sorted({name.rpartition(".")[2] for name in self._layers}))
        described = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": str(base.resolve()),
            "r": self.config.rank,
            "lora_alpha": int(alpha) if alpha.is_integer() else alpha,
            "target_modules": targets,
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
        }
        (directory / ADAPTER_CONFIG).write_text(json.dumps(described, indent=1))

    def restore(self, directory: Path, base: str) -> None:
        """Take A and B from an adapter's files. base: the digest of the weights it belongs to.

        Raises: CheckpointError if they belong to other weights, layers, or another rank.
        """
        if base != self.base:
            raise CheckpointError(
                f"{directory}: its adapter was trained on other base weights than those of model.path; put those back, "
                "or start a new run"
            )
        stored = load_file(directory / ADAPTER)
        try:
            self.load({name.removeprefix(_PREFIX): tensor for name, tensor in stored.items()})
        except ValueError as error:
            raise CheckpointError(f"{directory}: {error}") from None


def read_adapter(directory: Path) -> tuple[Lora, Path]:
    """The configuration of the adapter in `directory`, and where its base model lies. Raises: CheckpointError."""
    file = directory / ADAPTER_CONFIG
    try:
        data = json.loads(file.read_text())
        config = Lora(rank=data["r"], alpha=data["lora_alpha"], targets=tuple(data["target_modules"]))
        return config, Path(data["base_model_name_or_path"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file} does not describe an adapter of ours: {error!r}") from None


def _targets(model: Any, targets: tuple[str, ...]) -> dict[str, nn.Linear]:
    """Linear layers by name, the head excepted, whose name is or ends with one of `targets`, or all of them."""
    head = model.get_output_embeddings()
    linear = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head}

    def called(name: str, target: str) -> bool:
        return target == "all" or name == target or name.endswith(f".{target}")

    for target in targets:
        if not any(called(name, target) for name in linear):
            there = ", ".join(sorted({name.rpartition(".")[2] for name in linear})) or "none"
            raise ValueError(
                f'trainer.lora.targets: {type(model).__name__} has no layer called "{target}" to adapt; it has {there}'
            )
    return {name: m for name, m in linear.items() if any(called(name, target) for target in targets)}


def _digest(model: nn.Module) -> str:
    """Of every weight: its shape, sum and a sample. Tells another model, not a malicious one."""
    prints = sorted((name, repr(TensorPrint.of(p))) for name, p in model.named_parameters())
    return hashlib.sha256(json.dumps(prints).encode()).hexdigest()
