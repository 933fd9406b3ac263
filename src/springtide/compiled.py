"""C sources of the package, compiled on first use, once a machine.

Owns: which compiler, which flags, and where the result is kept. Invariants: two sources, headers, compilers or
processors never share a result; where there is no compiler, or it fails, there is one logged line and no library, and
whoever asked uses PyTorch instead.
Called by: `engine.local.native`, `trainer.attention`, `weights.fingerprint`.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

POINTER, LONG, FLOAT = ctypes.c_void_p, ctypes.c_long, ctypes.c_float
# No -ffast-math: it reorders sums at the compiler's will and, linked in, changes denormals for the whole process.
_FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC", "-std=gnu11")

_HEADER = Path(__file__).with_name("vectors.h")  # which any source may include


def load(source: Path, signatures: Mapping[str, Sequence[Any]], user: str) -> ctypes.CDLL | None:
    """The compiled `source` with the argument types of its functions, or None where it cannot be built.

    user: who goes on without it, for the line that says so.
    """
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        log.warning("no C compiler (cc, gcc or clang): %s uses its PyTorch kernels, about half as fast", user)
        return None
    texts = (source.read_bytes(), _HEADER.read_bytes())
    identity = repr((texts, compiler, _FLAGS, platform.machine(), _cpu_flags()))
    try:
        directory = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "springtide"
        target = directory / f"{source.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.so"
        if not target.exists():
            directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=directory) as temporary:
                built = Path(temporary) / "built.so"
                command = [*compiler.split(), *_FLAGS, f"-I{_HEADER.parent}", str(source), "-o", str(built), "-lm"]
                subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
                os.replace(built, target)
        loaded = ctypes.CDLL(str(target))  # fails where programs may not be loaded from the cache's file system
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # RuntimeError: this user has no home
        detail = getattr(error, "stderr", None) or str(error)
        log.warning("%s uses its PyTorch kernels: %s could not build %s: %s", user, compiler, source.name, detail)
        return None
    for name, types in signatures.items():
        getattr(loaded, name).argtypes = types
    return loaded


@functools.cache
def _cpu_flags() -> str:
    """What -march=native depends on: a home directory may be shared by different machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
