"""The weights' files: safetensors, mapped into memory, and written over when nobody reads them any more.

Owns: the bytes of `weights.safetensors`, and who may touch them when. Invariants: what a reader maps does not change
while one of its tensors lives, as they hold a shared lock of the file (`flock`, which ends with the process too); a
file is written over only with that lock refused to nobody; only files in memory (tmpfs) are, so that a full file system
is an error at the first writing and never a broken mapping.
Why: new pages of shared memory cost five to thirteen times what copying into old ones does, and mapping them anew as
much as a copy (measured: benchmarks/publish.py, first publication). So files and mappings are kept and used again.
Called by: `weights.store`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import mmap
import os
import struct
import warnings
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from springtide.mounts import file_system
from springtide.weights.fingerprint import TensorPrint

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_POPULATE = getattr(mmap, "MAP_POPULATE", 0)  # all pages at once: a third of what one fault each costs
_LENGTH = struct.Struct("<Q")  # of the header

with warnings.catch_warnings():  # torch says once in a process that it knows no read-only tensors: here, unheard
    warnings.simplefilter("ignore")
    torch.frombuffer(b"0", dtype=torch.uint8)


class Files:
    """One process's mappings of a store's files. What it reads is read-only: writing to such a tensor is a fault."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._spare = directory, directory / ".spare"
        self._reuse = in_memory(directory)
        self._maps: dict[tuple[int, int, bool], mmap.mmap] = {}

    def write(self, path: Path, tensors: Mapping[str, Tensor]) -> dict[str, TensorPrint]:
        """Write `tensors` to the new file `path`; returns what they were. Raises: OSError if there is no room."""
        header, offsets, size = _layout(tensors)
        again = self._take_spare(path, size)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if not again:
                _write_all(fd, memoryview(header), 0)
                return {name: _write_tensor(fd, whole(tensors[name]), offset) for name, offset in offsets.items()}
            memory = self._map(fd, writable=True)
        finally:
            os.close(fd)
        memory[: len(header)] = header
        return {
            name: TensorPrint.of(whole(tensors[name]), _view(memory, tensors[name].dtype, tensors[name].shape, offset))
            for name, offset in offsets.items()
        }

    @staticmethod
    def send(tensors: Mapping[str, Tensor]) -> None:
        """Give this rank's rows of sharded tensors to the rank that writes them."""
        for name in _layout(tensors)[1]:
            whole(tensors[name])

    def read(self, path: Path) -> dict[str, Tensor]:
        """The tensors of a file, which is not written over while one of them lives. Raises: FileNotFoundError."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if self._reuse:
                fcntl.flock(fd, fcntl.LOCK_SH)
                if not os.path.samestat(os.stat(path), os.fstat(fd)):  # it was collected meanwhile
                    raise FileNotFoundError(path)
            shared = memoryview(self._map(fd, writable=False))
        except BaseException:
            os.close(fd)
            raise
        if self._reuse:
            weakref.finalize(shared, _unlock, fd)  # when the last tensor is gone
        else:
            os.close(fd)
        (length,) = _LENGTH.unpack_from(shared)
        entries: dict[str, Any] = json.loads(bytes(shared[8 : 8 + length]))
        entries.pop("__metadata__", None)
        return {
            name: _view(shared, _DTYPES[e["dtype"]], e["shape"], 8 + length + e["data_offsets"][0])
            for name, e in entries.items()
        }

    def retire(self, path: Path) -> None:
        """Remove a file that is no version's any more, or keep it to be written over."""
        try:
            if not self._reuse or self._spare.exists():
                return
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:  # it is still read; its memory is free when its last reader is done
                return
            finally:
                os.close(fd)
            os.rename(path, self._spare)
        finally:
            path.unlink(missing_ok=True)
            self._forget()

    def _take_spare(self, path: Path, size: int) -> bool:
        with contextlib.suppress(FileNotFoundError):
            if self._spare.stat().st_size == size:
                os.rename(self._spare, path)
                return True
            self._spare.unlink()
        return False

    def _map(self, fd: int, *, writable: bool) -> mmap.mmap:
        self._forget()
        key = (os.fstat(fd).st_ino, os.fstat(fd).st_size, writable)
        if (memory := self._maps.get(key)) is None:
            prot = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
            memory = mmap.mmap(fd, 0, flags=mmap.MAP_SHARED | _POPULATE, prot=prot)
            if self._reuse:
                self._maps[key] = memory
        return memory

    def _forget(self) -> None:
        """A mapping would keep the memory of a file that was removed."""
        there = set()
        for path in (self._spare, *self._directory.glob("*/*.safetensors")):
            with contextlib.suppress(FileNotFoundError):
                there.add(path.stat().st_ino)
        self._maps = {key: memory for key, memory in self._maps.items() if key[0] in there}


def in_memory(directory: Path) -> bool:
    """Is this a file system in memory? False where that cannot be found out."""
    return file_system(directory) == "tmpfs"


def _layout(tensors: Mapping[str, Tensor]) -> tuple[bytes, dict[str, int], int]:
    """The file's header, each tensor's offset in the file, and the file's size. Wide types first: all are aligned."""
    entries, begins, end = {}, {}, 0
    for name in sorted(tensors, key=lambda n: (-tensors[n].element_size(), n)):
        tensor, begin = tensors[name], end
        end += tensor.nbytes
        begins[name] = begin
        entries[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    header = _LENGTH.pack(len(text) + -len(text) % 8) + text + b" " * (-len(text) % 8)
    return header, {name: len(header) + begin for name, begin in begins.items()}, len(header) + end


def whole(tensor: Tensor) -> Tensor:
    """All rows, of which a sharded tensor's (a DTensor's) are copied: a call of all its ranks at once."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # type: ignore[no-any-return]


def _view(buffer: Any, dtype: torch.dtype, shape: Sequence[int], offset: int) -> Tensor:
    count = math.prod(shape)
    if not count:
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.frombuffer(buffer, dtype=dtype, count=count, offset=offset).view(tuple(shape))


def _write_tensor(fd: int, tensor: Tensor, offset: int) -> TensorPrint:
    values = tensor.detach().cpu().contiguous().reshape(-1)
    _write_all(fd, values.view(torch.uint8).numpy().data, offset)
    return TensorPrint.of(tensor)


def _write_all(fd: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written


def _unlock(fd: int) -> None:
    fcntl.flock(fd, fcntl.LOCK_UN)  # said: the mapping holds a duplicate of it, and is kept
    os.close(fd)
