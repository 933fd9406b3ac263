"""One optimiser step's forward and backward work: gradient sums and metric sums over micro-batches.

Owns: the walk over a step's micro-batches for the policy loss, the supervised loss and plain log-probs. Invariants:
gradients are sums, unscaled; metrics are sums with their counts, divided once at the end (trl#7047); the order of the
work is fixed by the data, so equal inputs give equal bits. `accumulate` leaves gradients for `Optimizer.apply`: with
several trainer ranks the one reduction goes between the two.
Called by: the trainer and reference ranks, in their work thread.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from springtide.algorithms.losses import LossSums, Tokens, policy_loss
from springtide.algorithms.losses.supervised import supervised
from springtide.config import Algorithm
from springtide.pace import Pace
from springtide.trace import version_step
from springtide.trainer.data import Row, StepData
from springtide.trainer.model import Policy
from springtide.trainer.packing import MicroBatch, collate, plan
from springtide.trainer.parts import Parts

_Forward = tuple[int, list[Row], MicroBatch, Tensor, Tensor | None]


@dataclass(slots=True)
class Sums:
    """What a step adds up. `totals` are sums over action tokens (lag, gap and gap_tokens: see `_measure`)."""

    loss: float = 0.0
    micro_batches: int = 0
    computed_tokens: int = 0
    padded_tokens: int = 0
    totals: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    maxima: dict[str, float] = field(default_factory=dict)
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, sums: dict[str, Tensor]) -> None:
        for name, value in sums.items():
            self.totals[name] += float(value)

    def most(self, name: str, value: float) -> None:
        self.maxima[name] = max(self.maxima.get(name, value), value)

    def to_wire(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _COUNTS} | {"totals": {**self.totals}, "maxima": self.maxima}


_COUNTS = ("loss", "micro_batches", "computed_tokens", "padded_tokens")


def merge(sums: Sums, parts: Sequence[dict[str, Any]]) -> None:
    """Make `sums` those of all ranks, each given by `to_wire`, in their order. Its seconds stay this rank's."""
    for name in _COUNTS:
        setattr(sums, name, sum(part[name] for part in parts))
    sums.totals.clear()
    for part in parts:
        for name, value in part["totals"].items():
            sums.totals[name] += value
        for name, value in part["maxima"].items():
            sums.most(name, value)


@dataclass(frozen=True, slots=True)
class Shape:
    """How the work is cut, what the logits are divided by, and the device it is held to, if any."""

    micro_tokens: int
    logit_chunk: int
    temperature: float
    pace: Pace | None = None

    def hold(self, kind: Literal["logprobs", "forward", "backward"], rows: list[Row], batch: MicroBatch) -> None:
        """Under a pace, wait until its device would have done this work."""
        if self.pace is not None:
            self.pace.micro_batch(kind, batch.ids.numel(), [len(row) for row in rows])


def accumulate_policy(
    policy: Policy, data: StepData, algorithm: Algorithm, shape: Shape, version: int, parts: Parts | None = None
) -> Sums:
    """Add the gradient sum of the policy loss over all sequences to `.grad`. version: the present weights' tag.

    parts: frozen log-probs that come by micro-batch; the forward passes of `parts.inflight` at most run ahead of them
    (of one where the ranks wait for each other in every pass). Losses and backward passes keep one order.
    """
    sums = Sums()
    held: deque[_Forward] = deque()  # forward passes whose loss is to come
    most = 1 if parts is None or policy.lockstep else parts.inflight

    def settle() -> None:
        number, rows, batch, logprobs, entropy = held.popleft()
        if parts is not None:
            rows = parts.fill(number, rows)
        ended = parts.span("backward", number) if parts is not None else None
        with timed(sums, "forward_s"):
            tokens = _tokens(logprobs, entropy, rows, batch, number, algorithm)
            result = policy_loss(tokens, algorithm)
        _backward(sums, result, shape, rows, batch)
        _measure(sums, tokens, rows, version)
        if ended is not None:
            ended()

    for number, (rows, batch) in enumerate(_micro_batches(policy, data, shape, sums)):
        ended = parts.span("forward", number) if parts is not None else None
        with timed(sums, "forward_s"):
            judged = policy.judge(batch, shape.temperature, shape.logit_chunk, entropy=algorithm.entropy_coef > 0)
            shape.hold("forward", rows, batch)
        if ended is not None:
            ended()
        held.append((number, rows, batch, *judged))
        while held and (len(held) >= most or parts is None or parts.ready(held[0][0])):
            settle()
    while held:
        settle()
    if parts is not None:
        sums.seconds["reference_wait_s"] += parts.waited_s
    return sums


def accumulate_supervised(policy: Policy, data: StepData, shape: Shape) -> Sums:
    """Add the gradient sum of the supervised loss over all sequences to `.grad`."""
    sums = Sums()
    for rows, batch in _micro_batches(policy, data, shape, sums):
        with timed(sums, "forward_s"):
            logprobs = policy.logprobs(batch, shape.temperature, shape.logit_chunk)
            result = supervised(logprobs, _gather([np.full(len(r.at), r.weight) for r in rows], policy.device))
            shape.hold("forward", rows, batch)
        _backward(sums, result, shape, rows, batch)
    return sums


def compute_logprobs(policy: Policy, data: StepData, shape: Shape) -> list[np.ndarray]:
    """Log-probs of every sequence's action tokens, float32 [A] each, in the order of `data.sequences`."""
    place = {row.key: i for i, row in enumerate(data.sequences)}
    out: list[np.ndarray] = [np.empty(0, np.float32)] * len(place)
    for rows, arrays in stream_logprobs(policy, data, shape):
        for row, array in zip(rows, arrays, strict=True):
            out[place[row.key]] = array
    return out


@torch.no_grad()  # of the whole loop: a rank's empty rounds have no backward pass either
def stream_logprobs(
    policy: Policy, data: StepData, shape: Shape, *, lockstep: bool = False
) -> Iterator[tuple[list[Row], list[np.ndarray]]]:
    """Micro-batch by micro-batch, its rows and the log-probs of their action tokens, float32 [A] each.

    lockstep: in the order of a trainer rank whose ranks wait for each other in every pass.
    """
    for rows, batch in _micro_batches(policy, data, shape, Sums(), lockstep=lockstep):
        values = policy.logprobs(batch, shape.temperature, shape.logit_chunk).cpu().numpy()
        shape.hold("logprobs", rows, batch)
        yield rows, np.split(values, np.cumsum([len(r.at) for r in rows])[:-1])


def _micro_batches(
    policy: Policy, data: StepData, shape: Shape, sums: Sums, *, lockstep: bool = False
) -> Iterator[tuple[list[Row], MicroBatch]]:
    if shape.pace is not None:
        shape.pace.begin()
    start = time.perf_counter()
    largest = max((int(r.ids.max()) for r in data.sequences), default=0)
    if largest >= policy.vocab_size:
        raise ValueError(f"token id {largest} is outside the model's vocabulary of {policy.vocab_size}")
    batches = plan([r.ids for r in data.sequences], shape.micro_tokens)
    sizes = [sum(len(data.sequences[i]) for i in b) for b in batches]
    if policy.lockstep or lockstep:  # the ranks wait for each other in every pass: large ones beside large ones
        batches = [batches[i] for i in sorted(range(len(batches)), key=lambda i: -sizes[i])]
    elif batches:  # whoever waits for the last one waits least (tiderl_async 1.4)
        batches.append(batches.pop(sizes.index(min(sizes))))
    sums.seconds["pack_s"] += time.perf_counter() - start
    idle = policy.rounds(len(batches)) - len(batches)
    for indices in batches:
        rows = [data.sequences[i] for i in indices]
        with timed(sums, "pack_s"):
            batch = collate(rows, policy.device)
        sums.micro_batches += 1
        sums.computed_tokens += batch.ids.numel()
        sums.padded_tokens += batch.tree.gather.numel()
        yield rows, batch
    for _ in range(idle):
        policy.idle()


def _tokens(
    logprobs: Tensor, entropy: Tensor | None, rows: list[Row], batch: MicroBatch, number: int, algorithm: Algorithm
) -> Tokens:
    device = logprobs.device
    rollout = _gather([r.rollout for r in rows], device)
    old = rollout
    if algorithm.old_logprobs == "recompute":
        old = _gather([_present(r.old, "old_logprobs", r) for r in rows], device)
    reference = None
    if algorithm.kl_coef > 0 and algorithm.kl_in == "loss":
        reference = _gather([_present(r.reference, "reference_logprobs", r) for r in rows], device)
    return Tokens(
        logprobs=logprobs,
        rollout=rollout,
        old=old,
        advantages=_gather([np.full(len(r.at), r.advantage) for r in rows], device),
        weights=_gather([np.full(len(r.at), r.weight) for r in rows], device),
        sequence=batch.row + (number << 32),
        reference=reference,
        entropy=entropy,
    )


def _present(array: np.ndarray | None, name: str, row: Row) -> np.ndarray:
    if array is None:
        raise ValueError(f"the configuration needs {name}, and none were given for {row.key}; pass the rank's file")
    return array


def _backward(sums: Sums, result: LossSums, shape: Shape, rows: list[Row], batch: MicroBatch) -> None:
    with timed(sums, "backward_s"):
        result.loss.backward()
        sums.loss += float(result.loss.detach())
        sums.add(result.sums)
        shape.hold("backward", rows, batch)


def _measure(sums: Sums, tokens: Tokens, rows: list[Row], version: int) -> None:
    """The gap between engine and trainer where both used the same weights, and how far the rest lags."""
    versions = np.concatenate([r.versions for r in rows])
    lag = np.maximum(version_step(version) - (versions & 0xFFFFFFFF), 0)
    difference = (tokens.logprobs.detach() - tokens.rollout).cpu().numpy()
    same = versions == version
    sums.totals["lag"] += float(lag.sum())
    sums.totals["gap_tokens"] += int(same.sum())
    sums.totals["gap"] += float(np.abs(difference[same], dtype=np.float64).sum())
    if len(lag):
        sums.most("lag_max", float(lag.max()))
        sums.most("ratio_max", float(torch.exp((tokens.logprobs.detach() - tokens.old).max().clamp(-20, 20))))
    if same.any():
        sums.most("gap_max", float(np.abs(difference[same]).max()))


def _gather(arrays: list[np.ndarray], device: torch.device) -> Tensor:
    return torch.from_numpy(np.concatenate(arrays).astype(np.float32, copy=False)).to(device)


class timed:
    """Adds the block's seconds to `sums.seconds[name]`."""

    def __init__(self, sums: Sums, name: str) -> None:
        self._sums, self._name = sums, name

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._sums.seconds[self._name] += time.perf_counter() - self._start
