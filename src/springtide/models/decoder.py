"""Qwen3-, Qwen2-, Llama- and Gemma3-style decoders read from a Hugging Face directory, without transformers.

Owns: the architecture (`DecoderConfig`, from `config.json`), the weights by checkpoint name with the products fused for
speed (`Decoder`), and the plain PyTorch kernels. Invariants: log-probs equal transformers' forward within 1e-4 in
float32; attention is a parameter (`Kernels`), so the engine's paged KV and a plain causal forward run the same layers.
Called by: `engine.local` (with its own kernels), tests and tools (with `DenseKernels`). Inference only: no gradients.
Source of the layers: transformers' modeling_qwen3.py, modeling_qwen2.py, modeling_llama.py, modeling_gemma3.py,
modeling_rope_utils.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from springtide.models.presets import ARCHITECTURES, VLLM

ROPE_TYPES = ("default", "linear", "llama3")
ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
# What a Gemma 3 config.json may leave out, as transformers fills it in.
_GEMMA: dict[str, Any] = {
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "query_pre_attn_scalar": 256,
    "rope_local_base_freq": 10000.0,
    "rope_theta": 1000000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}


class UnsupportedModel(Exception):
    """A checkpoint this decoder cannot run. One line: what it is, and what is known."""


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding: base, and the scaling of its frequencies (`modeling_rope_utils.py`)."""

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 8192

    def inverse_frequencies(self, head_dim: int) -> Tensor:
        """float32 [head_dim / 2]."""
        inverse = 1.0 / (self.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
        if self.kind == "linear":
            return inverse / self.factor
        if self.kind == "default":
            return inverse
        wavelength = 2 * math.pi / inverse
        low = self.original_positions / self.low_freq_factor
        high = self.original_positions / self.high_freq_factor
        smooth = (self.original_positions / wavelength - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        between = (1 - smooth) * inverse / self.factor + smooth * inverse
        scaled = torch.where(wavelength > low, inverse / self.factor, inverse)
        return torch.where((wavelength >= high) & (wavelength <= low), between, scaled)


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """What of a Hugging Face `config.json` decides the computation.

    windows: the keys a token of each layer sees, itself included; 0: all. Layers with a window rotate by `local_rope`.
    query_scale: what scores are multiplied with. gemma: norms of what attention and MLP add, too, and gains of 1 + w.
    """

    architecture: str
    vocab_size: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    max_positions: int
    tied: bool
    qk_norm: bool
    rope: Rope
    local_rope: Rope
    windows: tuple[int, ...]
    query_scale: float
    embed_scale: float
    activation: str
    gemma: bool

    @classmethod
    def read(cls, model_dir: Path) -> DecoderConfig:
        """Read `model_dir/config.json`. Raises: UnsupportedModel, with one line."""
        path = Path(model_dir) / "config.json"
        try:
            data = json.loads(path.read_text())
        except OSError as error:
            raise UnsupportedModel(f"{path}: {error.strerror}; a model is a Hugging Face directory") from None
        except ValueError as error:
            raise UnsupportedModel(f"{path} is not JSON: {error}") from None
        return cls.parse(data, str(path))

    @classmethod
    def parse(cls, data: Mapping[str, Any], where: str = "config.json") -> DecoderConfig:
        names = data.get("architectures") or [data.get("model_type", "none")]
        name = names[0]
        if name not in ARCHITECTURES:
            raise UnsupportedModel(
                f"{where}: architecture {name} is unknown; known: {', '.join(ARCHITECTURES)}; {VLLM}"
            )
        gemma = name == "Gemma3ForCausalLM"
        if not gemma and data.get("sliding_window", 0) is None:  # no window; an absent key means the default one
            data = {**data, "sliding_window": 0}
        data = (_GEMMA if gemma else {}) | {key: value for key, value in data.items() if value is not None}
        activation = data.get("hidden_activation" if gemma else "hidden_act", "silu")
        if activation not in ACTIVATIONS:
            raise UnsupportedModel(
                f"{where}: activation {activation} is unknown; known: {', '.join(ACTIVATIONS)}; {VLLM}"
            )
        for key in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
            if data.get(key):
                raise UnsupportedModel(f"{where}: {key} is not supported; {VLLM}")
        heads = data["num_attention_heads"]
        head_dim = data.get("head_dim") or data["hidden_size"] // heads
        rope, local_rope = _ropes(data, where)
        return cls(
            architecture=name,
            vocab_size=data["vocab_size"],
            hidden=data["hidden_size"],
            intermediate=data["intermediate_size"],
            layers=data["num_hidden_layers"],
            heads=heads,
            kv_heads=data.get("num_key_value_heads") or heads,
            head_dim=head_dim,
            eps=data.get("rms_norm_eps", 1e-6),
            max_positions=data.get("max_position_embeddings", 2048),
            tied=bool(data.get("tie_word_embeddings", False)),
            qk_norm=name == "Qwen3ForCausalLM" or gemma,
            rope=rope,
            local_rope=local_rope,
            windows=_windows(data, name, where),
            query_scale=float(data["query_pre_attn_scalar"] if gemma else head_dim) ** -0.5,
            embed_scale=float(data["hidden_size"]) ** 0.5 if gemma else 1.0,
            activation=activation,
            gemma=gemma,
        )

    def rope_of(self, layer: int) -> Rope:
        return self.local_rope if self.windows[layer] else self.rope

    @property
    def kv_floats_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim

    @property
    def product_params(self) -> int:
        """Weights that a token is multiplied with: all matrices, the output head once."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate) + self.vocab_size * self.hidden


def _windows(data: Mapping[str, Any], name: str, where: str) -> tuple[int, ...]:
    layers, kinds = range(data["num_hidden_layers"]), data.get("layer_types")
    if name == "Gemma3ForCausalLM":
        # google's first releases wrote sliding_window_pattern; transformers writes it with an underscore
        every = data.get("sliding_window_pattern") or data.get("_sliding_window_pattern") or 6
        kinds = kinds or ["sliding_attention" if (i + 1) % every else "full_attention" for i in layers]
    elif name == "LlamaForCausalLM" or not data.get("use_sliding_window"):
        return tuple(0 for _ in layers)
    else:
        first = data.get("max_window_layers", 28)
        kinds = kinds or ["sliding_attention" if i >= first else "full_attention" for i in layers]
    if len(kinds) != len(layers):
        raise UnsupportedModel(f"{where}: {len(layers)} layers, but {len(kinds)} layer_types")
    if odd := sorted(set(kinds) - {"sliding_attention", "full_attention"}):
        raise UnsupportedModel(
            f"{where}: layer type {odd[0]} is unknown; known: sliding_attention, full_attention; {VLLM}"
        )
    return tuple(data.get("sliding_window", 4096) if kind == "sliding_attention" else 0 for kind in kinds)


def _ropes(data: Mapping[str, Any], where: str) -> tuple[Rope, Rope]:
    """Of layers that see everything, and of those with a window."""
    # transformers 5 writes rope_parameters, Gemma's by the type of layer; earlier ones rope_theta beside rope_scaling
    scaling = data.get("rope_parameters") or data.get("rope_scaling") or {}
    theta = data.get("rope_theta", 10000.0)
    local_theta = data.get("rope_local_base_freq")
    if local_theta is None:
        return (_rope(scaling, theta, where),) * 2
    by_type = "full_attention" in scaling or "sliding_attention" in scaling
    whole, local = (scaling.get("full_attention"), scaling.get("sliding_attention")) if by_type else (scaling, None)
    return _rope(whole or {}, theta, where), _rope(local or {}, local_theta, where)


def _rope(scaling: Mapping[str, Any], theta: float, where: str) -> Rope:
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise UnsupportedModel(f"{where}: rope type {kind} is unknown; known: {', '.join(ROPE_TYPES)}; {VLLM}")
    return Rope(
        theta=float(scaling.get("rope_theta", theta)),
        kind=kind,
        factor=float(scaling.get("factor", 1.0)),
        low_freq_factor=float(scaling.get("low_freq_factor", 1.0)),
        high_freq_factor=float(scaling.get("high_freq_factor", 4.0)),
        original_positions=int(scaling.get("original_max_position_embeddings", 8192)),
    )


def read_checkpoint(model_dir: Path) -> dict[str, Tensor]:
    """All tensors of a Hugging Face directory by checkpoint name, memory-mapped; sharded or not.

    Raises: UnsupportedModel if there is no safetensors file or a shard is missing.
    """
    from safetensors import safe_open

    directory = Path(model_dir)
    index = directory / "model.safetensors.index.json"
    if index.exists():
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        files = ["model.safetensors"]
    tensors: dict[str, Tensor] = {}
    for name in files:
        if not (directory / name).exists():
            raise UnsupportedModel(f"{directory / name} is missing; weights are read from safetensors files")
        with safe_open(directory / name, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118  (not a dict)
                tensors[key] = file.get_tensor(key)
    return tensors


@dataclass(frozen=True, slots=True)
class Layer:
    """One block's weights. Products are stored transposed ([in, out]) as `torch.addmm` takes them."""

    attention_norm: Tensor
    qkv: Tensor  # [hidden, (heads + 2 kv_heads) * head_dim]
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Tensor  # [heads * head_dim, hidden]
    output_bias: Tensor | None
    output_norm: Tensor | None  # of what attention adds
    mlp_norm: Tensor
    gate_up: Tensor  # [hidden, 2 * intermediate]
    gate_up_bias: Tensor | None
    down: Tensor  # [intermediate, hidden]
    down_bias: Tensor | None
    down_norm: Tensor | None  # of what the MLP adds


class Kernels(Protocol):
    """What a forward pass is made of beside matrix products. N = tokens of the pass, in any order."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def gate(self, gate_up: Tensor) -> Tensor:
        """[N, 2 I] -> activation of the first half * second half [N, I]."""
        ...

    def attention(self, index: int, layer: Layer, qkv: Tensor) -> Tensor:
        """Queries, keys and values [N, (H + 2 K) D] before norm and rotation -> attended values [N, H D]."""
        ...


class Decoder:
    """A model ready to run: `forward` gives final hidden states, `logits` their scores over the vocabulary."""

    def __init__(
        self,
        config: DecoderConfig,
        tensors: Mapping[str, Tensor],
        *,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> None:
        """`tensors` by checkpoint name, any float dtype; none is kept: a published version's file is to be free again.

        Raises: UnsupportedModel for a missing or misshapen one.
        """
        self.config, self.dtype, self.device = config, dtype, torch.device(device)
        c = config

        def get(name: str, *shape: int, copy: bool = True) -> Tensor:
            if name not in tensors:
                raise UnsupportedModel(f"the weights lack {name}, which {c.architecture} needs")
            tensor = tensors[name]
            if tuple(tensor.shape) != shape:
                raise UnsupportedModel(f"{name} is {list(tensor.shape)}; {c.architecture}'s config says {list(shape)}")
            return tensor.detach().to(device=self.device, dtype=dtype, copy=copy)

        def maybe(name: str, *shape: int) -> Tensor | None:
            return get(name, *shape, copy=False) if name in tensors else None

        def norm(name: str, size: int) -> Tensor:
            if not c.gemma:
                return get(name, size)
            get(name, size)  # named if it is not there
            # In float32 whatever the model's type, as transformers multiplies: 1 + w in bfloat16 would lose most of w.
            return 1.0 + tensors[name].detach().to(device=self.device, dtype=torch.float32)

        def fuse(prefix: str, names: tuple[str, ...], rows: tuple[int, ...], columns: int) -> tuple[Tensor, Any]:
            weights = [get(f"{prefix}{n}.weight", r, columns, copy=False) for n, r in zip(names, rows)]
            biases = [maybe(f"{prefix}{n}.bias", r) for n, r in zip(names, rows)]
            # A transposed view of [out, in]: MKL runs both layouts equally fast, and nothing is stored twice.
            fused = torch.cat(weights).t()
            present = [b for b in biases if b is not None]
            return fused, torch.cat(present) if len(present) == len(names) else None

        q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
        self.embed = get("model.embed_tokens.weight", c.vocab_size, c.hidden)
        self._embed_scale = torch.tensor(c.embed_scale, dtype=dtype).item()  # rounded as transformers rounds it
        self.layers: list[Layer] = []
        before_mlp = "pre_feedforward" if c.gemma else "post_attention"
        for i in range(c.layers):
            p = f"model.layers.{i}."
            qkv, qkv_bias = fuse(f"{p}self_attn.", ("q_proj", "k_proj", "v_proj"), (q, kv, kv), c.hidden)
            output, output_bias = fuse(f"{p}self_attn.", ("o_proj",), (c.hidden,), q)
            gate_up, gate_up_bias = fuse(
                f"{p}mlp.", ("gate_proj", "up_proj"), (c.intermediate, c.intermediate), c.hidden
            )
            down, down_bias = fuse(f"{p}mlp.", ("down_proj",), (c.hidden,), c.intermediate)
            self.layers.append(
                Layer(
                    attention_norm=norm(f"{p}input_layernorm.weight", c.hidden),
                    qkv=qkv,
                    qkv_bias=qkv_bias,
                    q_norm=norm(f"{p}self_attn.q_norm.weight", c.head_dim) if c.qk_norm else None,
                    k_norm=norm(f"{p}self_attn.k_norm.weight", c.head_dim) if c.qk_norm else None,
                    output=output,
                    output_bias=output_bias,
                    output_norm=norm(f"{p}post_attention_layernorm.weight", c.hidden) if c.gemma else None,
                    mlp_norm=norm(f"{p}{before_mlp}_layernorm.weight", c.hidden),
                    gate_up=gate_up,
                    gate_up_bias=gate_up_bias,
                    down=down,
                    down_bias=down_bias,
                    down_norm=norm(f"{p}post_feedforward_layernorm.weight", c.hidden) if c.gemma else None,
                )
            )
        self.final_norm = norm("model.norm.weight", c.hidden)
        # Some checkpoints say "tied" and still carry the head; the config decides, as in transformers.
        self.head = (self.embed if c.tied else get("lm_head.weight", c.vocab_size, c.hidden)).t()

    def forward(self, ids: Tensor, kernels: Kernels, rows: Tensor | None = None) -> Tensor:
        """ids: int [N]. Returns final hidden states, normed: [N, hidden], or [R, hidden] for `rows` int [R].

        What only other tokens would need of the last layer is not computed: of a prompt, its keys and values are.
        """
        eps = self.config.eps

        def add(x: Tensor, h: Tensor, weight: Tensor, bias: Tensor | None, norm: Tensor | None) -> Tensor:
            """x + h @ weight (+ bias), normed where the model says so; x is this pass's own, and written."""
            if norm is not None:
                x += kernels.rms_norm(_product(h, weight, bias), norm, eps)
                return x
            if bias is not None:
                x += bias
            return torch.addmm(x, h, weight, out=x)

        x = functional.embedding(ids, self.embed)
        if self._embed_scale != 1.0:
            x *= self._embed_scale
        for index, layer in enumerate(self.layers):
            h = kernels.rms_norm(x, layer.attention_norm, eps)
            attended = kernels.attention(index, layer, _product(h, layer.qkv, layer.qkv_bias))
            if rows is not None and index == len(self.layers) - 1:
                x, attended = x.index_select(0, rows), attended.index_select(0, rows)
            x = add(x, attended, layer.output, layer.output_bias, layer.output_norm)
            h = kernels.rms_norm(x, layer.mlp_norm, eps)
            h = kernels.gate(_product(h, layer.gate_up, layer.gate_up_bias))
            x = add(x, h, layer.down, layer.down_bias, layer.down_norm)
        return kernels.rms_norm(x, self.final_norm, eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden] -> float32 [R, vocabulary]."""
        return torch.mm(hidden, self.head).float()


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)


class RotaryTable:
    """cos and sin, float32 [positions, head_dim / 2], for positions below a limit."""

    def __init__(self, rope: Rope, head_dim: int, positions: int, device: torch.device | str = "cpu") -> None:
        angles = torch.outer(torch.arange(positions, dtype=torch.float32), rope.inverse_frequencies(head_dim))
        self.cos, self.sin = angles.cos().to(device).contiguous(), angles.sin().to(device).contiguous()

    @classmethod
    def by_layer(
        cls, config: DecoderConfig, positions: int, device: torch.device | str = "cpu"
    ) -> tuple[RotaryTable, ...]:
        """Each layer's table; layers of one rotary embedding share one."""
        ropes = [config.rope_of(i) for i in range(config.layers)]
        made = {rope: cls(rope, config.head_dim, positions, device) for rope in set(ropes)}
        return tuple(made[rope] for rope in ropes)


class TorchKernels:
    """Norms, activation and rotation in plain PyTorch; attention is a subclass's. `positions`: a limit to them."""

    def __init__(self, config: DecoderConfig, positions: int, device: torch.device | str) -> None:
        self.config, self.rotary = config, RotaryTable.by_layer(config, positions, device)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        # Gemma keeps its gains wide and rounds once, Llama and its kin round first (transformers#29402).
        return (wide * weight).to(x.dtype) if self.config.gemma else weight * wide.to(x.dtype)

    def gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        if self.config.activation == "silu":
            return functional.silu(gate) * up
        return functional.gelu(gate, approximate="tanh") * up

    def heads(self, index: int, layer: Layer, qkv: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split, norm and rotate: q [N, H, D], k [N, K, D], v [N, K, D]."""
        c = self.config
        q, k, v = qkv.view(qkv.shape[0], -1, c.head_dim).split((c.heads, c.kv_heads, c.kv_heads), dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self.rms_norm(q, layer.q_norm, c.eps), self.rms_norm(k, layer.k_norm, c.eps)
        cos = self.rotary[index].cos[positions].unsqueeze(1).to(q.dtype)
        sin = self.rotary[index].sin[positions].unsqueeze(1).to(q.dtype)
        return _rotate(q, cos, sin), _rotate(k, cos, sin), v


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def visible(query: Tensor, keys: int, window: int) -> Tensor:
    """Which of the first `keys` positions tokens at positions `query` int [...] see: bool [..., keys]."""
    ago = query[..., None] - torch.arange(keys, device=query.device)
    return (ago >= 0) & (ago < window) if window else ago >= 0


class DenseKernels(TorchKernels):
    """Plain causal attention over one sequence: what `Decoder.forward` needs where no KV is kept."""

    def __init__(self, config: DecoderConfig, length: int, device: torch.device | str = "cpu") -> None:
        super().__init__(config, length, device)
        self._positions = torch.arange(length, device=device)

    def attention(self, index: int, layer: Layer, qkv: Tensor) -> Tensor:
        window, length = self.config.windows[index], len(self._positions)
        mask = visible(self._positions, length, window) if 0 < window < length else None
        q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in self.heads(index, layer, qkv, self._positions))
        out = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True, scale=self.config.query_scale
        )
        return out.squeeze(0).transpose(0, 1).reshape(qkv.shape[0], -1)


@torch.inference_mode()
def sequence_logprobs(decoder: Decoder, ids: Tensor, chunk: int = 1 << 22) -> Tensor:
    """Log-probs of `ids[1:]` given what precedes each: int [T] -> float32 [T - 1].

    `chunk` bounds the scores that exist at once (tokens x vocabulary), so a large vocabulary costs no large memory.
    """
    ids = ids.to(decoder.device).long()
    hidden = decoder.forward(ids[:-1], DenseKernels(decoder.config, len(ids) - 1, decoder.device))
    rows = max(1, chunk // decoder.config.vocab_size)
    parts = []
    for start in range(0, len(hidden), rows):
        logits = decoder.logits(hidden[start : start + rows])
        target = ids[1 + start : 1 + start + len(logits)]
        parts.append(logits.gather(1, target[:, None]).squeeze(1) - logits.logsumexp(-1))
    return torch.cat(parts)
