"""Published weights by version: a directory that trainers write and engines read.

Owns: the files of every kept version, their fingerprints, and which may go. Invariants: a version is visible only when
whole (its directory is renamed into place); what a reader gets has the fingerprint of what was published; a tensor
that the model ties is stored once; the newest versions and every pinned one are kept, the rest collected.
Called by: trainer ranks (`publish`), engines (`load`); the runtime pins through `weights.pins`. Whoever reads a file
otherwise than by `load` takes its lock first: in memory, a collected version's file is written over (`weights.files`).

    DIR/<version>/weights.safetensors   DIR/<version>/fingerprint.json   DIR/pins/<version>.<owner>
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

_FILE = "weights.safetensors"

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

    def publish(self, version: int, tensors: Mapping[str, Tensor], canary: Canary | None = None) -> Fingerprint:
        """Write `tensors` (by checkpoint name, any dtype) as `version`, then collect what no one needs.

        Raises: StoreError if the version exists (no tag may name two weights), OSError if there is no room.
        """
        final = self.directory / str(version)
        if final.exists():
            raise StoreError(f"version {version} is published already in {self.directory}")
        stored, aliases = _untie(tensors)
        temporary = Path(tempfile.mkdtemp(prefix=".publishing-", dir=self.directory))
        try:
            fingerprint = Fingerprint(version, self._files.write(temporary / _FILE, stored), aliases, canary)
            (temporary / "fingerprint.json").write_text(fingerprint.to_json())
            os.rename(temporary, final)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        self.collect()
        return fingerprint

    def send(self, tensors: Mapping[str, Tensor]) -> None:
        """What the other ranks do while the one that publishes sharded `tensors` gathers them, one after another."""
        self._files.send(_untie(tensors)[0])

    def load(self, version: int) -> dict[str, Tensor]:
        """The tensors of `version`, tied names included, memory-mapped and verified. They are read-only.

        While one of them lives its file is kept: copy what must stay. Raises: StoreError if it is not there,
        FingerprintMismatch if it is not what was published.
        """
        fingerprint = self.fingerprint(version)
        try:
            tensors = self._files.read(self.directory / str(version) / _FILE)
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
