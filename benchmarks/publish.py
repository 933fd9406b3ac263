"""Publication of 1 GB of weights through the weight store, fingerprint included, against copies of the same bytes.

    python benchmarks/publish.py [--quick] [--json]

The weights of a model of 28 layers are published again and again, as a run does: one process writes version after
version (the trainer's side), another pulls and verifies each (an engine's side), both on one thread. A publication's
time is `publish` plus `load`, one after the other; both fingerprints (a float64 sum and a sample of each tensor) are in
it. Its baseline is one copy of all those tensors to memory that was written before (`torch.Tensor.copy_`, one thread),
measured before each publication in the writing process. Judged is the median ratio from the seventh version on, when
files are written over through mappings that both sides have. The versions before, for which the system has yet to find
pages (three) or to map them (three), are a row of their own: once a run.

The store lies in /dev/shm, as a run's does. It needs 5 GB of memory for as long as it takes, about a minute on two
quiet cores. `--quick`: 64 MB.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from common import Json, Load, Row, arguments, emit, ratio_interval, report

from springtide.weights.store import WeightStore

TARGET = 3.5
FRESH = 6  # three files (the newest, the one before it, the one being written), each written anew, then first mapped
ROUNDS = 16
LAYERS, VOCABULARY = 28, 32000
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Round:
    """Seconds of one version: a copy of its tensors, writing it, pulling it."""

    copy: float
    publish: float
    load: float

    @property
    def whole(self) -> float:
        return self.publish + self.load


def main() -> None:
    options = arguments(__doc__).parse_args()
    torch.set_num_threads(1)
    size = 64_000_000 if options.quick else 1_000_000_000
    rows: list[Row] = []
    parts: Json = {}
    with Load() as load:
        for name, dtype in DTYPES.items():
            rounds = measure(make_weights(size, dtype), ROUNDS)
            rows += make_rows(name, size, rounds)
            parts[name] = [{"copy": r.copy, "publish": r.publish, "load": r.load} for r in rounds]
    emit(report("publish", rows, load, quick=options.quick, rounds=parts), as_json=options.json)


def make_rows(name: str, size: int, rounds: list[Round]) -> list[Row]:
    """The rows of one type of weights: what is required, and the versions before."""

    def row(target: str, chosen: list[Round], required: float | None) -> Row:
        times, copies = [r.whole for r in chosen], [r.copy for r in chosen]
        ratio = statistics.median(r.whole / r.copy for r in chosen)
        low, high = ratio_interval(times, copies)
        extra = {"publish_s": statistics.median(r.publish for r in chosen)}
        extra["load_s"] = statistics.median(r.load for r in chosen)
        copy = statistics.median(copies)
        judged: Json = {"required": required, "at_most": True, "judged": "ratio", "ci_low": low, "ci_high": high}
        return Row(target, ratio * copy, "s", "one copy", copy, extra=extra, **judged)

    what = f"{size / 1e9:g} GB of {name}"
    return [
        row(f"publish and pull {what}", rounds[FRESH:], TARGET),
        row(f"the first {FRESH} versions of {what}", rounds[:FRESH], None),
    ]


def make_weights(size: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """A decoder's tensors by name and about in a decoder's proportions, `size` bytes in all but for a row."""
    generator = torch.Generator().manual_seed(0)
    count = size // dtype.itemsize
    hidden = int((count / (12 * LAYERS + 80)) ** 0.5)  # 12 hidden^2 a layer
    tensors: dict[str, torch.Tensor] = {}

    def add(name: str, *shape: int) -> None:
        tensors[name] = torch.empty(shape, dtype=dtype).normal_(0, 0.02, generator=generator)

    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
            add(f"{prefix}self_attn.{part}.weight", hidden, hidden)
        for part in ("gate_proj", "up_proj"):
            add(f"{prefix}mlp.{part}.weight", hidden * 8 // 3, hidden)
        add(f"{prefix}mlp.down_proj.weight", hidden, hidden * 8 // 3)
        for part in ("input_layernorm", "post_attention_layernorm"):
            add(f"{prefix}{part}.weight", hidden)
    left = count - sum(t.numel() for t in tensors.values())
    add("model.embed_tokens.weight", left // hidden, hidden)
    return tensors


def measure(tensors: dict[str, torch.Tensor], rounds: int) -> list[Round]:
    """Publish `rounds` versions to a process that pulls each."""
    target = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    found = []
    with tempfile.TemporaryDirectory(prefix="springtide-bench-", dir=shared_memory()) as directory:
        store = WeightStore(Path(directory))
        command = [sys.executable, __file__, "--reader", directory]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
            assert reader.stdin is not None and reader.stdout is not None
            for version in range(rounds):
                tensors["model.embed_tokens.weight"][0, 0] = version  # each is another model
                started = time.perf_counter()
                for name, tensor in tensors.items():
                    target[name].copy_(tensor)
                copied = time.perf_counter()
                store.publish(version, tensors)
                published = time.perf_counter()
                print(version, file=reader.stdin, flush=True)
                load_s = float(reader.stdout.readline())  # raises where the reader refused the version
                found.append(Round(copied - started, published - copied, load_s))
            reader.stdin.close()
    return found


def shared_memory() -> str | None:
    """Where a run's store lies unless it is told otherwise; None: the system's temporary directory."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def read(directory: Path) -> None:
    """Pull each version whose number comes on standard input, and answer with the seconds it took."""
    torch.set_num_threads(1)
    store = WeightStore(directory)
    for line in sys.stdin:
        started = time.perf_counter()
        store.load(int(line))
        print(time.perf_counter() - started, flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--reader"]:
        read(Path(sys.argv[2]))
    else:
        main()
