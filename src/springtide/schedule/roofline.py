"""How long a GPU would take for a piece of work, and what fits into its memory: pure arithmetic, no clock, no torch.

Owns: the devices and models known by name, the shape of a model read from its `config.json`, and one function a kind of
work. Invariants: times never fall as work grows; a time is a lower bound of its formula, never of a real GPU (see
docs/pace.md for what is left out); the same functions serve `springtide.pace`, which holds real processes to these
times, and a simulator, which adds them up.
Formulas: the roofline model (Williams et al. 2009) with constant efficiencies; a decode step reads the weights once and
every sequence's KV once, prefill and training are products at a share of the peak.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_BF16 = 2  # bytes of a weight and of a KV value

# Shares of the peak that kernels reach, and the host's time for a step. Prefill at 0.5 of the peak gives 32k tokens/s
# of Qwen2.5-7B on an H100, training at 0.35 the upper end of published RL steps (prime-rl: 0.14 at 16k tokens a GPU,
# 0.35 at 65k), a forward pass alone 0.45. Decoding's products are larger than its reads only beyond some 150 sequences.
PREFILL, DECODE, TRAIN, FORWARD = 0.5, 0.5, 0.35, 0.45
ROUTED = 0.7  # of those shares where experts are routed: 50k prefilled tokens/s of Qwen3-30B-A3B on an H100
STEP_S = 4e-3  # a step's launches, scheduling and sampling: 3 to 5 ms

USABLE = 0.9  # of the memory, as serving engines take by default
WORKSPACE = 4e9  # bytes of a device for activations and graphs
_TRAINED = 16  # bytes a trained parameter: bfloat16 weight and gradient, float32 weight and two moments


class UnknownHardware(Exception):
    """A device or model the roofline cannot compute. One line: what it is, and what would do."""


@dataclass(frozen=True, slots=True)
class Device:
    """flops: dense bfloat16 operations a second; bandwidth: bytes a second; memory: bytes."""

    flops: float
    bandwidth: float
    memory: float


# Peaks as the vendor's data sheets give them: NVIDIA H100 SXM5 80 GB, H200 SXM5 141 GB, A100 SXM4 80 GB, H20 96 GB.
DEVICES = {
    "h100": Device(989e12, 3.35e12, 80e9),
    "h200": Device(989e12, 4.8e12, 141e9),
    "a100": Device(312e12, 2.039e12, 80e9),
    "h20": Device(148e12, 4.0e12, 96e9),
}


def _qwen(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, **more: int) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "vocab_size": 151936,
        **more,
    }


# What the models' `config.json` say.
MODELS: dict[str, dict[str, int]] = {
    "qwen2.5-7b": _qwen(3584, 18944, 28, 28, 4, vocab_size=152064),
    "qwen3-4b": {**_qwen(2560, 9728, 36, 32, 8), "tie_word_embeddings": 1},
    "qwen3-8b": _qwen(4096, 12288, 36, 32, 8),
    "qwen2.5-14b": _qwen(5120, 13824, 48, 40, 8, vocab_size=152064),
    "qwen3-14b": _qwen(5120, 17408, 40, 40, 8),
    "qwen3-32b": _qwen(5120, 25600, 64, 64, 8),
    "qwen3-30b-a3b": _qwen(
        2048, 6144, 48, 32, 4, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Shape:
    """What of a model decides its cost. `experts`: parameters of routed experts, `routed` of which a token meets."""

    parameters: float
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: float = 0.0
    routed: float = 1.0

    @property
    def active(self) -> float:
        """Parameters a token meets."""
        return self.parameters - self.experts * (1 - self.routed)

    def met(self, tokens: float) -> float:
        """Parameters that `tokens` tokens meet together, each routed by itself."""
        return self.parameters - self.experts * (1 - self.routed) ** tokens

    @classmethod
    def of(cls, name: str) -> Shape:
        """A model by name, or by its directory. Raises: UnknownHardware."""
        if name in MODELS:
            return cls.parse(MODELS[name], name)
        path = Path(name) / "config.json"
        try:
            data = json.loads(path.read_text())
        except OSError:
            known = f"neither a known model ({', '.join(MODELS)}) nor a directory with a config.json"
            raise UnknownHardware(f"{name!r} is {known}") from None
        except ValueError as error:
            raise UnknownHardware(f"{path} is not JSON: {error}") from None
        return cls.parse(data, str(path))

    @classmethod
    def parse(cls, config: Mapping[str, Any], where: str = "config.json") -> Shape:
        """Of a decoder's `config.json`, grouped-query attention and routed experts included; norms and biases are not
        counted. Raises: UnknownHardware."""
        text = config.get("text_config") or config
        # Attention over a compressed KV; experts that are shared, or not in all layers; no attention in some.
        for key in ("kv_lora_rank", "n_routed_experts", "linear_num_key_heads"):
            if text.get(key):
                raise UnknownHardware(f"{where}: a model with {key} is not in the cost model")
        try:
            hidden, layers, heads = (text[k] for k in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
            vocab, inner = text["vocab_size"], text["intermediate_size"]
            experts = text.get("num_experts") or text.get("num_local_experts") or 0
            routed = text["num_experts_per_tok"] / experts if experts else 1.0
        except KeyError as error:
            raise UnknownHardware(f"{where} does not describe a decoder: {error} is missing") from None
        size = text.get("head_dim") or hidden // heads
        kv_heads = text.get("num_key_value_heads") or heads
        width = (text.get("moe_intermediate_size") or inner) if experts else inner
        attention = 2 * hidden * size * (heads + kv_heads)
        mlps = 3 * hidden * width * max(1, experts) * layers
        embeddings = vocab * hidden * (1 if text.get("tie_word_embeddings") else 2)
        total = embeddings + layers * (attention + hidden * experts) + mlps
        return cls(float(total), layers, heads, kv_heads, size, float(mlps) if experts else 0.0, routed)


@dataclass(frozen=True, slots=True)
class Roofline:
    """`devices` equal GPUs that share one model's work: their peaks add up, what they tell each other costs nothing."""

    device: Device
    shape: Shape
    devices: int = 1

    @property
    def _flops(self) -> float:
        return self.device.flops * self.devices * (ROUTED if self.shape.experts else 1.0)

    @property
    def _bandwidth(self) -> float:
        return self.device.bandwidth * self.devices

    @property
    def kv_bytes(self) -> float:
        """Bytes of one token's keys and values, over all devices: each holds at least one head."""
        shape = self.shape
        return 2 * _BF16 * shape.layers * max(shape.kv_heads, self.devices) * shape.head_dim

    def _attention(self, pairs: float) -> float:
        """Operations of `pairs` (query token, key token) pairs in all layers, scores and values."""
        return 4 * self.shape.layers * self.shape.heads * self.shape.head_dim * pairs

    def engine_step_s(self, *, prefill: float = 0, pairs: float = 0, decode: float = 0, context: float = 0) -> float:
        """One engine step. prefill: prompt tokens computed, which attend over `pairs` keys in all; decode: sequences
        that get a token; context: the keys they read, in all. Weights are read once, while products are computed."""
        products = 2 * self.shape.active * (prefill / PREFILL + decode / DECODE) / self._flops
        weights = _BF16 * self.shape.met(prefill + decode) / self._bandwidth
        attention = self._attention(pairs) / (self._flops * PREFILL)
        return max(products, weights) + attention + self.kv_bytes * context / self._bandwidth + STEP_S

    def prefill_s(self, tokens: float, pairs: float) -> float:
        """What a prompt's tokens add to steps that read the weights anyway."""
        return (2 * self.shape.active * tokens + self._attention(pairs)) / (self._flops * PREFILL)

    def logprobs_s(self, tokens: float, pairs: float) -> float:
        """A forward pass alone, of a reference or a proximal policy."""
        return (2 * self.shape.active * tokens + self._attention(pairs)) / (self._flops * FORWARD)

    def forward_s(self, tokens: float, pairs: float) -> float:
        """The forward pass of a training step: a third of 6N."""
        return (2 * self.shape.active * tokens + self._attention(pairs)) / (self._flops * TRAIN)

    def backward_s(self, tokens: float, pairs: float, *, recompute: bool, adapter: bool = False) -> float:
        """The backward pass: two thirds of 6N, and under `recompute` the forward pass again (8N in all). An adapter's
        leaves out the frozen weights' gradients."""
        forwards = (1 if adapter else 2) + recompute
        attention = (2 + recompute) * self._attention(pairs)
        return (2 * forwards * self.shape.active * tokens + attention) / (self._flops * TRAIN)

    def kv_capacity(self) -> int:
        """Tokens of KV that fit beside one set of weights; negative where not even those do."""
        free = self.devices * (USABLE * self.device.memory - WORKSPACE) - _BF16 * self.shape.parameters
        return int(free // self.kv_bytes)

    def trains(self, *, adapter: bool = False) -> bool:
        """Whether weights, gradients and optimiser state, sharded over the devices, fit."""
        needed = (_BF16 if adapter else _TRAINED) * self.shape.parameters
        return needed <= self.devices * (USABLE * self.device.memory - WORKSPACE)


def causal_pairs(tokens: float, before: float = 0) -> float:
    """(query, key) pairs of `tokens` new tokens behind `before` older ones."""
    return tokens * before + tokens * (tokens + 1) / 2
