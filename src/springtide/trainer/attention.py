"""Causal attention over a prefix tree's nodes, registered with transformers under `ATTENTION`.

Owns: the two ways to compute it. On a CPU in float32, `attention.c`: each node's query once, no padding. Elsewhere, and
where it cannot be built, PyTorch's attention over one right-padded row a segment, gathered from the nodes; queries of
shared nodes are then computed once a row. Invariants: both are the same function, and its gradients, within float32's
rounding; without a tree it is plain causal attention. What a layer sees of the past it says in one of two ways, both of
which are heard: by handing a window to the attention, or by the mask that transformers makes for it (`Seen`).
Called by: transformers' decoder layers, in models that `trainer.model` loads.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from springtide import compiled
from springtide.compiled import FLOAT, LONG, POINTER
from springtide.trainer.packing import Tree

ATTENTION = "springtide_tree"
_SHAPE = [POINTER] * 4 + [LONG, POINTER] + [LONG] * 5 + [FLOAT]
_SIGNATURES = {"st_tree_forward": _SHAPE + [POINTER] * 2, "st_tree_backward": _SHAPE + [POINTER] * 6}


@dataclass(frozen=True, slots=True)
class Seen:
    """In place of a mask: the last `window` tokens, itself included, or those of its own `chunk`, as Llama 4 has it."""

    window: int | None = None
    chunk: int | None = None


def mask(*, config: Any, local_size: int | None = None, **options: Any) -> Seen | None:
    """transformers' mask of a layer, for `tree_attention`; None: all of the past."""
    if local_size is None:
        return None
    chunked = local_size == getattr(config, "attention_chunk_size", None)
    return Seen(chunk=local_size) if chunked else Seen(window=local_size)


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None where they cannot be built."""
    return compiled.load(Path(__file__).with_suffix(".c"), _SIGNATURES, "the trainer's attention")


def tree_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | Seen | None,
    *,
    tree: Tree | None = None,
    sliding_window: int | None = None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Causal attention over a prefix tree's nodes; without a tree, over the batch as it stands.

    query: [1, heads, N, D]; key, value: [1, kv heads, N, D]. Returns [1, N, heads, D], as transformers wants it.
    """
    for name in ("softcap", "s_aux"):  # PyTorch's refuses the one, and ignores the other: sinks, as GPT-OSS has them
        if options.get(name) is not None:
            raise ValueError(f"the trainer's attention has no {name}")
    chunk = None
    if isinstance(attention_mask, Seen):
        sliding_window, chunk, attention_mask = attention_mask.window, attention_mask.chunk, None
    dim, plain = query.shape[3], options.get("position_bias") is None and not options.get("dropout")
    plain = plain and tree is not None and (chunk or tree.longest) >= tree.longest
    if (
        plain and tree is not None and query.device.type == "cpu" and dim % 8 == 0 and value.shape[3] == dim
        and query.dtype == key.dtype == value.dtype == torch.float32 and library() is not None
    ):  # fmt: skip
        q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
        scale = dim**-0.5 if scaling is None else scaling
        return _TreeAttention.apply(q, k, v, tree, sliding_window or 0, scale)[None], None
    return padded_attention(
        module, query, key, value, attention_mask,
        tree=tree, sliding_window=sliding_window, chunk=chunk, scaling=scaling, **options,
    )  # fmt: skip


def padded_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    tree: Tree | None = None,
    sliding_window: int | None = None,
    chunk: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The same through PyTorch's attention, on any device and in any dtype."""
    if tree is not None:
        query, key, value = (
            x[0].transpose(0, 1).index_select(0, tree.gather).unflatten(0, (tree.rows, -1)).transpose(1, 2)
            for x in (query, key, value)
        )
    width = query.shape[2]
    if width > min(sliding_window or width, chunk or width):
        at = torch.arange(width, device=query.device)
        ago = at[:, None] - at
        seen = (ago >= 0) & (ago < (sliding_window or width))
        attention_mask = (seen if chunk is None else seen & (ago <= at[:, None] % chunk))[None, None]
    out, _ = sdpa_attention_forward(
        module, query, key, value, attention_mask, is_causal=attention_mask is None, **options
    )
    return (out if tree is None else out.flatten(0, 1).index_select(0, tree.scatter)[None]), None


class _TreeAttention(torch.autograd.Function):
    """q [N, heads, D]; k, v [N, kv heads, D]; all float32 on the CPU. Returns [N, heads, D]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, tree: Tree, window: int, scale: float) -> Tensor:
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:2])
        _call("st_tree_forward", q, k, v, tree, window, scale, out, lse)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.rest = tree, window, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        found = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        _call("st_tree_backward", q, k, v, *ctx.rest, out, lse, grads[0].contiguous(), *found)
        return *found, None, None, None


def _call(function: str, q: Tensor, k: Tensor, v: Tensor, tree: Tree, window: int, scale: float, *more: Tensor) -> None:
    loaded, (_, heads, dim) = library(), q.shape
    assert loaded is not None
    failed = getattr(loaded, function)(
        *(x.data_ptr() for x in (q, k, v, tree.runs)), len(tree.runs) - 1, tree.paths.data_ptr(), tree.longest,
        heads, k.shape[1], dim, window, scale, *(x.data_ptr() for x in more),
    )  # fmt: skip
    if failed:
        raise MemoryError(f"no memory for attention over {tree.longest} tokens")


AttentionInterface.register(ATTENTION, tree_attention)
AttentionMaskInterface.register(ATTENTION, mask)
