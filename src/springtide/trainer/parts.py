"""Log-probs that come by micro-batch, and a reference that a trainer loads (RA2P: streaming; aggregate, resident).

Owns: the files of a step's parts, one a micro-batch and trainer rank, which a frozen rank writes while trainer ranks
train, and their wait for each; the reference's weights in a trainer. Invariants: both sides cut the step by the same
rule from the same files, so part n of rank r holds exactly the rows of its micro-batch n; a part is whole or not there;
a wait has a deadline and names the part.
Source: TideRL (2608.10402; tiderl_async 1.4): the loss needs the reference at the start of the backward pass only, so
the forward pass does not wait. Called by: the trainer and reference ranks, in their work thread.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np

from springtide.trainer.data import DataError, Row, read_logprobs
from springtide.trainer.model import Policy, load_policy

Field = Literal["reference", "old"]  # of `Row`
Span = tuple[str, int, int, float, float]  # what, trainer rank, micro-batch, from and to (seconds since the epoch)

_PART_S = 600.0  # without a further part, until the step is given up
_LOOK_S = 0.001


def part_file(directory: Path, rank: int, number: int) -> Path:
    return directory / f"{rank}-{number:05d}.msgpack"


@dataclass(slots=True)
class Parts:
    """What a trainer rank waits for. directories: of each frozen rank's parts, by the field of `Row` that they fill.

    inflight: micro-batches whose forward pass may be done while their parts are missing. waited_s: how long it waited.
    """

    directories: Mapping[Field, Path]
    rank: int
    inflight: int
    waited_s: float = 0.0
    spans: list[Span] = field(default_factory=list)

    def ready(self, number: int) -> bool:
        """Whether the parts of micro-batch `number` are there."""
        return all(part_file(d, self.rank, number).exists() for d in self.directories.values())

    def fill(self, number: int, rows: Sequence[Row]) -> list[Row]:
        """The rows with what their parts say, once these are there. Raises: DataError."""
        begun = time.perf_counter()
        while not self.ready(number):
            if time.perf_counter() - begun > _PART_S:
                missing = [name for name, d in self.directories.items() if not part_file(d, self.rank, number).exists()]
                raise DataError(f"no {' and '.join(missing)} log-probs of micro-batch {number} within {_PART_S:g} s")
            time.sleep(_LOOK_S)
        self.waited_s += time.perf_counter() - begun
        filled = list(rows)
        for name, directory in self.directories.items():
            table = read_logprobs(part_file(directory, self.rank, number))
            arrays = [_of(table, row, name) for row in filled]
            if name == "reference":
                filled = [replace(row, reference=array) for row, array in zip(filled, arrays, strict=True)]
            else:
                filled = [replace(row, old=array) for row, array in zip(filled, arrays, strict=True)]
        return filled

    def span(self, what: str, number: int) -> Callable[[], None]:
        """Begin one; call what is returned at its end."""
        begun = time.time()
        return lambda: self.spans.append((what, self.rank, number, begun, time.time()))


class Loaded:
    """The KL reference in a trainer rank, whole on each. swap_s: spent on loading it and giving it up, so far."""

    def __init__(self, path: Path | None) -> None:
        self.path, self.swap_s = path, 0.0
        self._kept: Policy | None = None

    @contextlib.contextmanager
    def held(self, device: str, *, keep: bool) -> Iterator[Policy]:
        """Its policy, in the block; keep: and from then on."""
        assert self.path is not None
        begun = time.perf_counter()
        policy = self._kept or load_policy(self.path, device)
        policy.model.requires_grad_(False)
        self._kept = policy if keep else None
        self.swap_s += time.perf_counter() - begun
        try:
            yield policy
        finally:
            begun = time.perf_counter()
            if not keep:
                for tensor in (*policy.model.parameters(), *policy.model.buffers()):
                    tensor.data = tensor.data.new_empty(0)  # free now, whenever the modules are collected
            self.swap_s += time.perf_counter() - begun


def _of(table: dict[tuple[str, int, int, int], np.ndarray], row: Row, name: str) -> np.ndarray:
    array = table.get(row.key)
    if array is None or array.shape != row.at.shape:
        raise DataError(f"the {name} log-probs of {row.key} are not those of its micro-batch")
    return array
