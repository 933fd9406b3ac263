"""Checkpoint directories: written whole or not at all, and refused if a byte of them changed. No torch here.

A checkpoint is a Hugging Face model directory (weights, configuration, tokenizer files) plus `moments.safetensors` (the
optimiser's tensors, whole, by parameter: any number of ranks writes and reads them), `optimizer.pt` (the rest of it),
`state.json` (the rank's), `extra.json` (its caller's) and `manifest.json`, the sha256 and size of every other file.
Where LoRA is trained it holds the adapter instead of the model, as `peft` reads it (`lora`).
Invariants: a directory appears under its name only once all its files and the manifest are on disk; `verify` reads
every byte before anything is used, once for all ranks of a world.
Called by: the trainer rank (save, load), the driver (verify, read_state before it resumes).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from springtide.trace import atomic_write

MANIFEST, STATE, EXTRA = "manifest.json", "state.json", "extra.json"
OPTIMIZER, MOMENTS = "optimizer.pt", "moments.safetensors"
ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
# What makes a model directory usable beside its weights; copied where present.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)


class CheckpointError(Exception):
    """A checkpoint that must not be used: torn, changed, or of another kind. The text names file and remedy."""


class NotFinite(Exception):
    """Weights with an infinity or a NaN: neither published nor saved. The text names the tensor and the remedy."""


@contextlib.contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """A scratch directory beside `path` that takes its name when the block ends well, with a manifest, durably.

    An older directory of that name is replaced. Nothing is left behind when the block raises (a full disk, say).
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    try:
        yield scratch
        files = sorted(p for p in scratch.iterdir() if p.is_file())
        manifest = {p.name: {"sha256": _sha256(p), "bytes": p.stat().st_size} for p in files}
        mode = scratch.stat().st_mode & 0o666  # as the umask has it; safetensors' own writer keeps it to the owner
        for p in files:
            p.chmod(mode)
            _sync(p)
        atomic_write(scratch / MANIFEST, json.dumps(manifest, indent=1).encode())
        _sync(scratch)
        aside = path.with_name(f".{path.name}.{os.getpid()}.old")
        if path.exists():
            os.replace(path, aside)
        os.replace(scratch, path)
        _sync(path.parent)
        shutil.rmtree(aside, ignore_errors=True)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def copy_tokenizer(source: Path, target: Path) -> None:
    for name in TOKENIZER_FILES:
        if (source / name).is_file() and not (target / name).exists():
            shutil.copyfile(source / name, target / name)


def verify(path: Path) -> None:
    """Read every file of a checkpoint against its manifest. Raises: CheckpointError."""
    remedy = "resume from the checkpoint before it"
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        written = {name: (entry["bytes"], entry["sha256"]) for name, entry in manifest.items()}
    except OSError:
        raise CheckpointError(f"{path} has no {MANIFEST}: not a checkpoint, or a torn one; {remedy}") from None
    except (ValueError, TypeError, KeyError, AttributeError):
        raise CheckpointError(f"{path / MANIFEST} is not a manifest: the checkpoint is torn; {remedy}") from None
    for name in (STATE, EXTRA, OPTIMIZER, MOMENTS):
        if name not in written:
            raise CheckpointError(f"{path} has no {name}: an exported model, or a torn checkpoint; {remedy}")
    for name, (size, digest) in written.items():
        file = path / name
        try:
            same = file.stat().st_size == size and _sha256(file) == digest
        except OSError:  # also a disk that cannot read it any more
            same = False
        if not same:
            raise CheckpointError(f"{file} is missing or not what was written; {remedy}")


def read_state(path: Path, *, verified: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    """The verified checkpoint's rank state `{steps, version}` and what the caller of `save` gave as extra.

    verified: another rank of the world reads every byte, and ends the world if one changed. Raises: CheckpointError.
    """
    if not verified:
        verify(path)
    try:
        return json.loads((path / STATE).read_text()), json.loads((path / EXTRA).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: {error}; this is an exported model, not a checkpoint") from None


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
