"""Published weights by version: a directory that trainers write and engines read.

Owns: the files of every kept version, their fingerprints, and which may go. Invariants: a version is visible only when
whole (its directory is renamed into place); what a reader gets has the fingerprint of what was published; a tensor
that the model ties is stored once; the newest versions and every pinned one are kept, the rest collected. An adapter's
version holds its updates only, and readers merge them into a base that is stored once.
Called by: trainer ranks (`publish`), engines (`load`); the runtime pins through `weights.pins`. Whoever reads a file
otherwise than by `load` takes its lock first: in memory, a collected version's file is written over (`weights.files`).

    DIR/<version>/weights.safetensors   DIR/<version>/fingerprint.json   DIR/pins/<version>.<owner>
    DIR/base-<name>/ (the same two)
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from springtide.weights.files import Files
from springtide.weights.fingerprint import Canary, Fingerprint, FingerprintMismatch, TensorPrint
from springtide.weights.pins import Pins

__all__ = ["Canary", "Fingerprint", "FingerprintMismatch", "StoreError", "TensorPrint", "WeightStore"]

_FILE, _PRINT = "weights.safetensors", "fingerprint.json"

# The newest and the one before it: a reader that was told of the newest can still open it when the next arrives.
_KEEP = 2


class StoreError(Exception):
    """A version that is not there, or published twice. The text names the versions that are."""


class WeightStore:
    """The store in one directory. Any number of readers; one publisher at a time."""

    def __init__(self, directory: Path) -> None:
        self.directory = Path(directory)
        self._pins = Pins(self.directory)
        self._files = Files(self.directory)
        self._bases: dict[str, dict[str, Tensor]] = {}  # that were read and verified

    def publish(
        self,
        version: int,
        tensors: Mapping[str, Tensor],
        canary: Canary | None = None,
        *,
        base: str | None = None,
        scale: float = 1.0,
    ) -> Fingerprint:
        """Write `tensors` (by checkpoint name, any dtype) as `version`, then collect what no one needs.

        base: they are LAYER.lora_A.weight and LAYER.lora_B.weight, of which `scale` B A is added to LAYER.weight of
        that base. Raises: StoreError if the version exists (no tag may name two weights), OSError if there is no room.
        """
        final = self.directory / str(version)
        if final.exists():
            raise StoreError(f"version {version} is published already in {self.directory}")
        fingerprint = self._put(final, version, tensors, canary, base, scale)
        self.collect()
        return fingerprint

    def publish_base(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Write what versions that are adapters are updates of; it stays. Raises: OSError if there is no room."""
        self._put(self._base_directory(name), 0, tensors)

    def has_base(self, name: str) -> bool:
        return self._base_directory(name).exists()

    def _base_directory(self, name: str) -> Path:
        return self.directory / f"base-{name}"

    def _put(
        self,
        final: Path,
        version: int,
        tensors: Mapping[str, Tensor],
        canary: Canary | None = None,
        base: str | None = None,
        scale: float = 1.0,
    ) -> Fingerprint:
        stored, aliases = _untie(tensors)
        temporary = Path(tempfile.mkdtemp(prefix=".publishing-", dir=self.directory))
        try:
            prints = self._files.write(temporary / _FILE, stored)
            fingerprint = Fingerprint(version, prints, aliases, canary, base, scale)
            (temporary / _PRINT).write_text(fingerprint.to_json())
            os.rename(temporary, final)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        return fingerprint

    def send(self, tensors: Mapping[str, Tensor]) -> None:
        """What the other ranks do while the one that publishes sharded `tensors` gathers them, one after another."""
        self._files.send(_untie(tensors)[0])

    def load(self, version: int) -> dict[str, Tensor]:
        """The tensors of `version`, tied names included, memory-mapped and verified. They are read-only.

        While one of them lives its file is kept: copy what must stay. Raises: StoreError if it is not there,
        FingerprintMismatch if it is not what was published.
        """
        try:
            fingerprint, tensors = self._get(self.directory / str(version))
        except FileNotFoundError:
            raise self._gone(version) from None
        if fingerprint.base is None:
            return tensors
        if fingerprint.base not in self._bases:
            self._bases[fingerprint.base] = self._get(self._base_directory(fingerprint.base))[1]
        whole = dict(self._bases[fingerprint.base])
        for name, a in tensors.items():
            layer, _, part = name.rpartition(".lora_")
            if part == "A.weight":
                b = tensors[f"{layer}.lora_B.weight"]
                whole[f"{layer}.weight"] = torch.addmm(whole[f"{layer}.weight"], b, a, alpha=fingerprint.scale)
        return whole

    def _get(self, directory: Path) -> tuple[Fingerprint, dict[str, Tensor]]:
        fingerprint = Fingerprint.from_json((directory / _PRINT).read_text())
        tensors = self._files.read(directory / _FILE)
        fingerprint.check(tensors)
        return fingerprint, {**tensors, **{alias: tensors[name] for alias, name in fingerprint.aliases.items()}}

    def fingerprint(self, version: int) -> Fingerprint:
        """Raises: StoreError if the version is not there."""
        try:
            return Fingerprint.from_json((self.directory / str(version) / _PRINT).read_text())
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
                self._files.retire(grave / _FILE)
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
        tensor = tensors[name].detach()
        key = (tensor.data_ptr(), tuple(tensor.shape), tensor.dtype)
        if tensor.numel() and key in first and key[0]:  # a sharded tensor has no place of its own, and is not tied
            aliases[name] = first[key]
        else:
            first[key] = name
            stored[name] = tensor
    return stored, aliases
