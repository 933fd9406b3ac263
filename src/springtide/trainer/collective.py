"""The trainer ranks of a run among themselves: where they meet, which segments each takes, what they add up.

Owns: the process group, the split of a step's segments, the exchange of figures and the sum of gradients. Invariants:
every rank reads the same items and splits them alike, so nobody hands out work; what is exchanged is packed as on any
wire, never pickled; every rank calls the same collectives in the same order; a rank that waits sleeps.
Called by: the trainer rank, in its work thread.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from springtide.trainer.data import StepData
from springtide.trainer.packing import prefix_order
from springtide.wire import pack, unpack

_WAIT = timedelta(hours=1)  # for a peer that is alive: a step may take as long; one that died is noticed at once
_BUCKET = 1 << 24  # elements of gradient that one reduction sends
_READ_AGAIN = 0.2  # the cost of a token that the segment before has already, against one of its own: attention's share


@dataclass(frozen=True, slots=True)
class Collective:
    """This rank and its peers. Alone (`size` 1) nothing is sent."""

    rank: int = 0
    size: int = 1
    device: torch.device | str = "cpu"

    @classmethod
    def join(cls, rank: int, size: int, meet: str, device: str, loopback: bool = True) -> Collective:
        """Wait until all `size` ranks have come to `meet`, and return this one's place among them.

        meet: "file:///path" (a path that is new and that all see), or "tcp://host:port", where rank 0 listens.
        loopback: all are on this machine, and listen to it only.
        """
        if loopback:
            interface = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
            os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = interface
        place = torch.device(device)
        if size > 1 and place.index is not None:
            raise ValueError(f'trainer.device: {size} ranks cannot share {device}; write "{place.type}": one each')
        if place.type == "cuda":
            place = torch.device("cuda", place.index if place.index is not None else rank % torch.cuda.device_count())
            torch.cuda.set_device(place)
        if dist.is_initialized():
            dist.destroy_process_group()
        backend = "nccl" if place.type == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=meet, rank=rank, world_size=size, timeout=_WAIT)
        return cls(rank, size, place)

    def exchange(self, value: Any) -> list[Any]:
        """What every rank gave, by rank: small values of our wire format; sequences come back as tuples."""
        if self.size == 1:
            return [value]
        mine = torch.frombuffer(bytearray(pack(value)), dtype=torch.uint8).to(self.device)
        sizes = [int(n) for n in self._gather(torch.tensor([len(mine)], device=self.device))]
        parts = self._gather(F.pad(mine, (0, max(sizes) - len(mine))))
        return [unpack(part[:size].cpu().numpy().tobytes()) for part, size in zip(parts, sizes, strict=True)]

    def _gather(self, tensor: Tensor) -> list[Tensor]:
        """Of every rank, which all give the same shape and dtype."""
        every = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(every, tensor)
        return every

    def sum_gradients(self, parameters: Sequence[Tensor]) -> None:
        """`.grad` of every parameter becomes the sum over all ranks, the same bits on each. None is a zero, unless it
        is None everywhere: then it stays None."""
        if self.size == 1:
            return
        used = [any(given) for given in zip(*self.exchange([p.grad is not None for p in parameters]), strict=True)]
        for bucket in _buckets([p for p, some in zip(parameters, used, strict=True) if some]):
            gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in bucket]
            flat = torch.cat([g.reshape(-1) for g in gradients])
            dist.all_reduce(flat)
            for p, g, part in zip(bucket, gradients, flat.split([g.numel() for g in gradients]), strict=True):
                p.grad = g.copy_(part.view_as(g))

    def broadcast(self, tensor: Tensor, owner: int) -> Tensor:
        """The rank `owner`'s tensor on every rank; the others give one of its shape to write to."""
        dist.broadcast(tensor, owner)
        return tensor

    def own_part(self, data: StepData) -> StepData:
        """The segments of a step that are this rank's; its counts stay those of the whole step."""
        return part_of(data, self.rank, self.size)

    def in_order(self, data: StepData, own: StepData, values: Sequence[Any]) -> list[Any]:
        """One value a segment of the whole step, from what every rank has for its own part."""
        if self.size == 1:
            return list(values)
        known = {
            key: value for part in self.exchange(list(zip(_keys(own), values, strict=True))) for key, value in part
        }
        return [known[key] for key in _keys(data)]


def part_of(data: StepData, rank: int, size: int) -> StepData:
    """The segments of a step that trainer rank `rank` of `size` works on; the counts stay those of the whole step."""
    if size == 1:
        return data
    chosen = sorted(balance([r.ids for r in data.sequences], size)[rank])
    return replace(data, sequences=tuple(data.sequences[i] for i in chosen))


def _keys(data: StepData) -> list[tuple[str, int, int, int]]:
    return [row.key for row in data.sequences]


def _buckets(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    for p in parameters:
        bucket.append(p)
        if sum(q.numel() for q in bucket) >= _BUCKET:
            yield bucket
            bucket = []
    if bucket:
        yield bucket


def balance(rows: Sequence[Any], parts: int) -> list[list[int]]:
    """Partition the token strings `rows` (int32 [T] each) into `parts` of indices of about equal predicted cost.

    Neighbours in sorted order, which begin alike and share that beginning's work, stay together: the parts are ranges
    of it, and the largest is as small as ranges can make it. Parts are empty where there are fewer rows.
    """
    order, shared = prefix_order(rows)
    whole = [len(rows[i]) * (1 + _READ_AGAIN) for i in order]
    after = [cost - known for cost, known in zip(whole, shared, strict=False)]  # behind a neighbour of the same part

    def cut(most: float) -> list[list[int]]:
        """Ranges, each as long as costs at most `most`."""
        ranges: list[list[int]] = []
        cost = float("inf")
        for place, i in enumerate(order):
            if cost + after[place] > most:
                ranges.append([])
                cost = whole[place]
            else:
                cost += after[place]
            ranges[-1].append(i)
        return ranges

    low, high = max(whole, default=0.0), sum(whole)
    while high - low > 0.5:
        middle = (low + high) / 2
        low, high = (low, middle) if len(cut(middle)) <= parts else (middle, high)
    ranges = cut(high)
    return ranges + [[] for _ in range(parts - len(ranges))]
