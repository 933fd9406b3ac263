"""Published weights by version: a directory that trainers write and engines read.

Owns: the files of every kept version, their fingerprints, and which may go. Invariants: a version is visible only when
whole (its directory is renamed into place); what a reader gets has the fingerprint of what was published; a tensor
that the model ties is stored once; the newest versions and every pinned one are kept, the rest collected.
Called by: trainer ranks (`publish`), engines (`load`); the runtime pins through `weights.pins`.

    DIR/<version>/weights.safetensors   DIR/<version>/fingerprint.json   DIR/pins/<version>.<owner>
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from springtide.weights.pins import Pins

_SAMPLE = 16  # values a tensor: enough to notice a permuted, shifted or scaled copy whose sum happens to agree
# The newest and the one before it: a reader that was told of the newest can still open it when the next arrives.
_KEEP = 2


class StoreError(Exception):
    """A version that is not there, or published twice. The text names the versions that are."""


class FingerprintMismatch(Exception):
    """What was read is not what was published. The text names the tensor and both values."""


@dataclass(frozen=True, slots=True)
class TensorPrint:
    """A tensor's shape and dtype, its float64 sum, and every stride-th value."""

    shape: tuple[int, ...]
    dtype: str
    sum: float
    sample: tuple[float, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> TensorPrint:
        flat = tensor.detach().reshape(-1)
        stride = max(1, flat.numel() // _SAMPLE)
        return cls(
            tuple(tensor.shape),
            str(tensor.dtype).removeprefix("torch."),
            float(flat.sum(dtype=torch.float64)),
            tuple(flat[::stride][:_SAMPLE].double().tolist()),
        )


@dataclass(frozen=True, slots=True)
class Canary:
    """A prompt and the publisher's log-probs of its tokens after the first: ids [T], logprobs [T - 1]."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    tolerance: float = 1e-3


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Of one version: every tensor by checkpoint name; `aliases` maps a tied name to the stored one."""

    version: int
    tensors: dict[str, TensorPrint]
    aliases: dict[str, str] = field(default_factory=dict)
    canary: Canary | None = None

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Raises: FingerprintMismatch, naming the first tensor that differs."""
        if missing := self.tensors.keys() ^ tensors.keys():
            raise FingerprintMismatch(f"version {self.version}: {sorted(missing)[0]} is on one side only")
        for name, expected in self.tensors.items():
            found = TensorPrint.of(tensors[name])
            if repr(found) != repr(expected):  # every digit, and a NaN is what was published if a NaN was published
                raise FingerprintMismatch(
                    f"version {self.version}: {name} differs from what was published: read {_short(found)}, "
                    f"published {_short(expected)}"
                )

    def not_finite(self) -> str | None:
        """The first tensor that holds a NaN or an infinite value; None: all is finite."""
        return next((name for name, p in self.tensors.items() if not math.isfinite(p.sum)), None)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Fingerprint:
        data = json.loads(text)
        prints = {
            name: TensorPrint(tuple(p["shape"]), p["dtype"], p["sum"], tuple(p["sample"]))
            for name, p in data["tensors"].items()
        }
        canary = data["canary"] and Canary(
            tuple(data["canary"]["ids"]), tuple(data["canary"]["logprobs"]), data["canary"]["tolerance"]
        )
        return cls(data["version"], prints, data["aliases"], canary)


def _short(p: TensorPrint) -> str:
    return f"{p.dtype}{list(p.shape)} sum {p.sum:.9g}"


class WeightStore:
    """The store in one directory. Any number of readers; one publisher at a time."""

    def __init__(self, directory: Path) -> None:
        self.directory = Path(directory)
        self._pins = Pins(self.directory)

    def publish(self, version: int, tensors: Mapping[str, Tensor], canary: Canary | None = None) -> Fingerprint:
        """Write `tensors` (by checkpoint name, any dtype) as `version`, then collect what no one needs.

        Raises: StoreError if the version exists (no tag may name two weights), OSError if there is no room.
        """
        from safetensors.torch import save_file

        final = self.directory / str(version)
        if final.exists():
            raise StoreError(f"version {version} is published already in {self.directory}")
        stored, aliases = _untie(tensors)
        fingerprint = Fingerprint(version, {n: TensorPrint.of(t) for n, t in stored.items()}, aliases, canary)
        temporary = Path(tempfile.mkdtemp(prefix=".publishing-", dir=self.directory))
        try:
            save_file(stored, temporary / "weights.safetensors")
            (temporary / "fingerprint.json").write_text(fingerprint.to_json())
            os.rename(temporary, final)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        self.collect()
        return fingerprint

    def load(self, version: int) -> dict[str, Tensor]:
        """The tensors of `version`, tied names included, memory-mapped and verified.

        Raises: StoreError if it is not there, FingerprintMismatch if it is not what was published.
        """
        from safetensors import safe_open

        fingerprint = self.fingerprint(version)
        try:
            with safe_open(self.directory / str(version) / "weights.safetensors", framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a dict)
        except FileNotFoundError:
            raise self._gone(version) from None
        fingerprint.check(tensors)
        return {**tensors, **{alias: tensors[name] for alias, name in fingerprint.aliases.items()}}

    def fingerprint(self, version: int) -> Fingerprint:
        """Raises: StoreError if the version is not there."""
        try:
            return Fingerprint.from_json((self.directory / str(version) / "fingerprint.json").read_text())
        except FileNotFoundError:
            raise self._gone(version) from None

    def versions(self) -> tuple[int, ...]:
        """Kept versions, oldest first."""
        return tuple(sorted(int(p.name) for p in self.directory.iterdir() if p.name.isdigit()))

    def collect(self) -> tuple[int, ...]:
        """Remove every version that is neither pinned nor among the newest; returns what was removed."""
        keep = self._pins.versions() | frozenset(self.versions()[-_KEEP:])
        removed = tuple(v for v in self.versions() if v not in keep)
        for version in removed:
            # Renamed first, so that no reader opens a half-removed version; one that has it mapped keeps it.
            grave = self.directory / f".collected-{version}"
            with contextlib.suppress(FileNotFoundError):
                os.rename(self.directory / str(version), grave)
                shutil.rmtree(grave)
        return removed

    def _gone(self, version: int) -> StoreError:
        return StoreError(f"version {version} is not in {self.directory}; there: {list(self.versions())}")


def _untie(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Names whose tensors are one memory are stored under the first name; the others become aliases."""
    stored: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[tuple[int, tuple[int, ...], torch.dtype], str] = {}
    for name in sorted(
        tensors, key=lambda n: (n == "lm_head.weight", n)
    ):  # the head is the alias, as transformers does
        tensor = tensors[name].detach().cpu()
        key = (tensors[name].data_ptr(), tuple(tensor.shape), tensor.dtype)
        if tensor.numel() and key in first:
            aliases[name] = first[key]
        else:
            first[key] = name
            stored[name] = tensor.contiguous()
    return stored, aliases
