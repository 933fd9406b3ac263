"""Sharded weights: FSDP2 (`fully_shard`) for a policy, and files of whole tensors that each rank writes its rows of.

Owns: how a policy is sharded and its activations are recomputed, and the few questions the rest of the trainer asks of
a tensor that may be sharded: this rank's rows, the whole, filled from a whole one. Invariants: every parameter is
sharded by rows; outside a forward and backward pass a rank holds its rows only, in float32, and the same of gradients
and moments; gradients are sums over ranks; every rank makes the same number of passes; a file does not show how many
ranks wrote it, so any number of them can read it.
Called by: the trainer rank, its optimiser and its adapter.

The weights of a decoder layer are gathered for its forward and again for its backward; embedding, last norm and output
head once a micro-batch, for both, and with them the log-probs of all its chunks.
"""

from __future__ import annotations

import functools
import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from springtide.trainer.collective import Collective
from springtide.training import Trainer

if TYPE_CHECKING:
    from springtide.trainer.model import Policy

_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}


def shard(policy: Policy, config: Trainer, world: Collective) -> None:
    """Leave this rank its rows of every weight. What the policy computes becomes a call of all ranks at once."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    model: Any = policy.model
    mesh = init_device_mesh(torch.device(world.device).type, (world.size,))
    dtypes = MixedPrecisionPolicy(
        param_dtype=getattr(torch, config.param_dtype), reduce_dtype=getattr(torch, config.reduce_dtype)
    )
    for layer in _layers(model):
        fully_shard(layer, mesh=mesh, mp_policy=dtypes)
    fully_shard(model, mesh=mesh, mp_policy=dtypes)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo knows sums only
            module.set_gradient_divide_factor(1.0)
    # What the policy does with the body and the head is the model's forward, as FSDP sees it.
    model.springtide_pass = lambda compute, *args: compute(*args)
    register_fsdp_forward_method(model, "springtide_pass")

    def at_hand(compute: Callable[..., Any], *args: Any) -> Any:
        result = model.springtide_pass(compute, *args)
        if not torch.is_grad_enabled():
            model.reshard()  # no backward pass will
        return result

    policy.at_hand, policy.lockstep = at_hand, True
    policy.rounds = lambda own: max(world.exchange(own))


def recompute_activations(model: torch.nn.Module) -> None:
    """Keep each decoder layer's input only, and compute the rest of its activations again in the backward pass."""
    for layer in _layers(model):
        layer.forward = functools.partial(  # type: ignore[method-assign]
            checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False
        )


def _layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


# --- a tensor that may be sharded -------------------------------------------------------------------------------------


def is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "full_tensor")


def local(tensor: Tensor) -> Tensor:
    """This rank's rows, the same memory; all of a tensor that is not sharded."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined,no-any-return]


def like(tensor: Tensor, rows: Tensor) -> Tensor:
    """`rows` as this rank's part of a tensor that is sharded as `tensor` is."""
    if not is_sharded(tensor):
        return rows
    from torch.distributed.tensor import DTensor

    mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
    return DTensor.from_local(
        rows, mesh, placements, run_check=False, shape=tensor.shape, stride=tuple(tensor.stride())
    )


def fill(tensor: Tensor, values: Tensor) -> None:
    """Overwrite `tensor` with `values`, which are whole, or sharded alike."""
    with torch.no_grad():
        local(tensor).copy_(local(values) if is_sharded(values) else own_rows(tensor, values))


def own_rows(tensor: Tensor, values: Tensor) -> Tensor:
    """Of the whole `values`, the rows that this rank holds of `tensor`."""
    return values[_first_row(tensor) :][: local(tensor).shape[0]] if is_sharded(tensor) else values


def _first_row(tensor: Tensor) -> int:
    """Of this rank's: FSDP cuts rows as torch.chunk does."""
    mesh: Any = tensor.device_mesh  # type: ignore[attr-defined]
    return min(mesh.get_local_rank() * -(-tensor.shape[0] // mesh.size()), tensor.shape[0])


# --- files of whole tensors -------------------------------------------------------------------------------------------


def write_tensors(path: Path, tensors: Mapping[str, Tensor], world: Collective) -> None:
    """Write a new safetensors file together: every rank the rows it has, rank 0 what is not sharded. All ranks give
    the same names in the same order. Raises: OSError."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begins, end = {}, 0
    for name, tensor in tensors.items():
        begins[name] = end
        end += tensor.nbytes
        entries[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begins[name], end],
        }
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    if world.rank == 0:
        with open(path, "wb") as file:
            file.write(struct.pack("<Q", len(header)) + header)
            file.truncate(8 + len(header) + end)
    world.exchange(None)  # it is there
    with open(path, "r+b") as file:
        for name, tensor in tensors.items():
            rows = local(tensor.detach())
            if (world.rank and not is_sharded(tensor)) or not rows.numel():
                continue
            skipped = _first_row(tensor) * (tensor.nbytes // tensor.shape[0]) if is_sharded(tensor) else 0
            file.seek(8 + len(header) + begins[name] + skipped)
            file.write(rows.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    world.exchange(None)  # all have written


class TensorFile:
    """A safetensors file of whole tensors, of which each rank reads its rows."""

    def __init__(self, path: Path) -> None:
        self._file = safe_open(path, framework="pt")
        self.names = tuple(self._file.keys())

    def like(self, name: str, tensor: Tensor) -> Tensor:
        """The stored tensor, sharded and placed as `tensor` is. Raises: ValueError if it has another shape."""
        part = self._file.get_slice(name)
        if list(part.get_shape()) != list(tensor.shape):
            raise ValueError(f"{name} is {part.get_shape()}, not {list(tensor.shape)}")
        if not is_sharded(tensor):
            return self._file.get_tensor(name).to(tensor.device)
        own, first = local(tensor.detach()), _first_row(tensor)
        rows = part[first : first + len(own)] if len(own) else own  # no slice may begin at a tensor's end
        return like(tensor, rows.to(own.device))

    def whole(self, name: str) -> Tensor:
        return self._file.get_tensor(name)
