"""Published weights are whole, verified, kept while needed and collected after."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from engine_models import tiny
from springtide.models.decoder import Decoder, DecoderConfig, sequence_logprobs
from springtide.weights import fingerprint as prints
from springtide.weights.files import in_memory
from springtide.weights.pins import Pins
from springtide.weights.store import Canary, FingerprintMismatch, StoreError, WeightStore


def _weights(scale: float = 1.0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {"a.weight": scale * torch.randn(7, 5, generator=generator), "b.bias": torch.ones(3)}


@pytest.fixture
def memory() -> Iterator[Path]:
    """A directory in memory, where files are written over."""
    shared = Path("/dev/shm")
    if not (shared.is_dir() and in_memory(shared)):
        pytest.skip("no file system in memory")
    with tempfile.TemporaryDirectory(prefix="springtide-test-", dir=shared) as directory:
        yield Path(directory)


def test_what_is_loaded_is_what_was_published(tmp_path) -> None:
    store = WeightStore(tmp_path)
    for version, dtype in ((1, torch.float32), (2, torch.bfloat16)):
        published = {k: v.to(dtype) for k, v in _weights().items()}
        fingerprint = store.publish(version, published, Canary((1, 2), (-0.5,)))
        loaded = store.load(version)
        assert loaded.keys() == published.keys()
        assert all(torch.equal(loaded[k], published[k]) and loaded[k].dtype == dtype for k in loaded)
        assert store.fingerprint(version) == fingerprint


def test_tied_weights_are_stored_once_and_come_back_twice(tmp_path) -> None:
    tensors = tiny("qwen3").tensors()
    assert "lm_head.weight" in tensors
    store = WeightStore(tmp_path)
    fingerprint = store.publish(1, tensors)
    assert fingerprint.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    assert "lm_head.weight" not in load_file(tmp_path / "1" / "weights.safetensors")
    assert torch.equal(store.load(1)["lm_head.weight"], tensors["lm_head.weight"])


@pytest.mark.parametrize("fault", ["scaled", "swapped", "missing"])
def test_weights_that_changed_on_the_way_are_refused_by_name(tmp_path, fault: str) -> None:
    """verl#7495: weights that never reached the engine looked like staleness for two months."""
    store = WeightStore(tmp_path)
    store.publish(1, _weights())
    path = tmp_path / "1" / "weights.safetensors"
    tensors = load_file(path)
    if fault == "scaled":
        tensors["a.weight"] = tensors["a.weight"] * 1.0001
    elif fault == "swapped":
        tensors["a.weight"] = tensors["a.weight"].flip(0).contiguous()  # the sum stays, up to rounding
    else:
        del tensors["a.weight"]
    save_file(tensors, path)
    with pytest.raises(FingerprintMismatch, match=r"a\.weight"):
        store.load(1)


def test_the_newest_and_the_pinned_are_kept(tmp_path) -> None:
    store, pins = WeightStore(tmp_path), Pins(tmp_path)
    store.publish(1, _weights())
    pins.add(1, "stale")
    pins.add(1, "eval")
    for version in range(2, 6):
        store.publish(version, _weights(version))
    assert store.versions() == (1, 4, 5)
    pins.remove(1, "eval")
    store.collect()
    assert store.versions() == (1, 4, 5)
    pins.remove(1, "stale")
    assert store.collect() == (1,)
    with pytest.raises(StoreError, match=r"version 1 .*\[4, 5\]"):
        store.load(1)
    assert pins.versions() == frozenset()


def test_a_version_names_one_set_of_weights(tmp_path) -> None:
    store = WeightStore(tmp_path)
    store.publish(1, _weights())
    with pytest.raises(StoreError, match="published already"):
        store.publish(1, _weights(2.0))
    assert torch.equal(store.load(1)["a.weight"], _weights()["a.weight"])


def test_a_failed_publication_leaves_nothing(tmp_path) -> None:
    store = WeightStore(tmp_path)
    sparse = torch.eye(3).to_sparse()
    with pytest.raises(Exception):  # noqa: B017  (whatever the writer raises)
        store.publish(1, {"a": sparse})
    assert store.versions() == ()
    assert [p.name for p in tmp_path.iterdir()] == ["pins"]


@pytest.mark.parametrize("directory", ["tmp_path", "memory"])  # in memory, files are written over
def test_readers_never_see_half_a_version(directory, request) -> None:
    path = request.getfixturevalue(directory)
    store = WeightStore(path)
    store.publish(0, {"w": torch.zeros(100_000)})
    stop, seen, faults = threading.Event(), set(), []

    def read() -> None:
        reader = WeightStore(path)
        while not stop.is_set():
            version = reader.versions()[-1]
            try:
                value = reader.load(version)["w"]
            except StoreError:
                continue  # collected meanwhile; a newer one is there
            except Exception as error:
                faults.append(error)
                return
            seen.add(version)
            if not bool((value == float(version)).all()):
                faults.append(version)

    thread = threading.Thread(target=read)
    thread.start()
    for version in range(1, 30):
        store.publish(version, {"w": torch.full((100_000,), float(version))})
    stop.set()
    thread.join()
    assert not faults
    assert len(seen) >= 2


def test_the_fingerprint_covers_integers_and_empty_tensors(tmp_path) -> None:
    store = WeightStore(tmp_path)
    store.publish(1, {"i": torch.arange(5), "e": torch.zeros(0, 3), "s": torch.tensor(2.5)})
    loaded = store.load(1)
    assert loaded["e"].shape == (0, 3)
    np.testing.assert_array_equal(loaded["i"].numpy(), np.arange(5))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_broken_weights_are_what_was_published_and_are_named(tmp_path, value: float) -> None:
    store = WeightStore(tmp_path)
    tensors = {**_weights(), "z.bias": torch.tensor([0.0, value, -value])}
    assert store.publish(1, tensors).not_finite() == "z.bias"
    assert store.fingerprint(1).not_finite() == "z.bias"
    assert torch.equal(store.load(1)["z.bias"].isfinite(), tensors["z.bias"].isfinite())
    assert store.publish(2, _weights()).not_finite() is None


def test_a_value_that_became_nan_on_the_way_is_refused(tmp_path) -> None:
    store = WeightStore(tmp_path)
    store.publish(1, _weights())
    tensors = load_file(tmp_path / "1" / "weights.safetensors")
    tensors["a.weight"][-1, -1] = float("nan")
    save_file(tensors, tmp_path / "1" / "weights.safetensors")
    with pytest.raises(FingerprintMismatch, match=r"a\.weight differs.* sum nan"):
        store.load(1)


# --- the sum ------------------------------------------------------------------------------------------------------


def _defined_sum(values: np.ndarray, lanes: int = 32, block: int = 8192) -> float:
    total = 0.0
    for start in range(0, len(values), block):
        sums = np.zeros(lanes)
        for i in range(start, min(start + block, len(values)), lanes):
            row = values[i : min(i + lanes, start + block)].astype(np.float64)
            sums[: len(row)] += row
        while len(sums) > 1:
            sums = sums[: len(sums) // 2] + sums[len(sums) // 2 :]
        total += float(sums[0])
    return total


@given(
    count=st.integers(0, 100) | st.integers(8000, 8400) | st.integers(16000, 40_000), seed=st.integers(0, 99),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]), native=st.booleans(), copied=st.booleans(),
)  # fmt: skip
def test_the_sum_has_one_order_whatever_computes_it(count, seed, dtype, native, copied) -> None:
    """torch's own sum of a large tensor depends on the number of threads: two processes would not agree."""
    generator = torch.Generator().manual_seed(seed)
    scales = 10.0 ** torch.randint(-9, 9, (count,), generator=generator)
    values = (torch.randn(count, generator=generator) * scales).to(dtype)
    copy = torch.zeros_like(values) if copied else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prints, "_AT_ONCE", 2)
        if native:
            assert prints._library() is not None, "the tests need a C compiler"
        else:
            patch.setattr(prints, "_library", lambda: None)
        found = prints.float64_sum(values, copy)
    assert repr(found) == repr(_defined_sum(values.float().numpy()))
    assert copy is None or torch.equal(copy, values)


# --- files in memory ----------------------------------------------------------------------------------------------


def _file(store: WeightStore, version: int) -> Path:
    return store.directory / str(version) / "weights.safetensors"


def test_a_file_that_nobody_reads_is_written_over_and_read_right(memory) -> None:
    store, reader = WeightStore(memory), WeightStore(memory)
    files = []
    for version in range(8):
        published = _weights(version + 1.0)
        store.publish(version, published)
        loaded = reader.load(version)
        assert all(torch.equal(loaded[k], published[k]) for k in published)
        assert load_file(_file(store, version)).keys() == published.keys()  # as safetensors reads it
        del loaded
        files.append(_file(store, version).stat().st_ino)
    assert len(set(files)) == 3
    store.publish(8, {**_weights(), "more": torch.ones(2)})  # of another size
    assert store.load(8)["more"].tolist() == [1.0, 1.0]


def test_where_files_are_not_written_over_none_is_locked_or_left_open(tmp_path, monkeypatch) -> None:
    """Some clusters' file systems know no locks."""
    if in_memory(tmp_path):
        pytest.skip("temporary files lie in memory here")

    def no_locks(fd: int, operation: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    store = WeightStore(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    for version in range(4):
        store.publish(version, _weights(version))
        assert torch.equal(store.load(version)["a.weight"], _weights(version)["a.weight"])
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_that_is_read_is_left_alone_however_many_versions_follow(memory) -> None:
    store, reader = WeightStore(memory), WeightStore(memory)
    store.publish(0, _weights(1.0))
    held = reader.load(0)["a.weight"]
    copy = held.clone()
    for version in range(1, 6):
        store.publish(version, _weights(version + 1.0))
        assert torch.equal(reader.load(version)["a.weight"], _weights(version + 1.0)["a.weight"])
    assert torch.equal(held, copy)
    with pytest.raises(StoreError):
        reader.load(0)


def test_the_lock_of_a_reader_that_was_killed_ends_with_it(memory) -> None:
    store = WeightStore(memory)
    store.publish(0, _weights())
    first = _file(store, 0).stat().st_ino
    code = (
        "import sys, time; from pathlib import Path; from springtide.weights.store import WeightStore\n"
        "held = WeightStore(Path(sys.argv[1])).load(0); print('reads', flush=True); time.sleep(60)"
    )
    reader = subprocess.Popen([sys.executable, "-c", code, str(memory)], stdout=subprocess.PIPE, text=True)
    assert reader.stdout is not None and reader.stdout.readline() == "reads\n"
    reader.kill()
    reader.wait()
    reader.stdout.close()
    for version in range(1, 4):
        store.publish(version, _weights(version))
    assert _file(store, 3).stat().st_ino == first


def test_an_engines_model_keeps_no_file(memory) -> None:
    """Its embeddings mapped the whole file: every version that an engine held stayed in memory twice."""
    model = tiny("qwen3")
    store = WeightStore(memory)
    tensors = {name: tensor for name, tensor in model.tensors().items() if name != "lm_head.weight"}
    store.publish(0, tensors)
    decoder = Decoder(DecoderConfig.read(model.path), store.load(0))
    ids = torch.arange(1, 9)
    before = sequence_logprobs(decoder, ids)
    first = _file(store, 0).stat().st_ino
    for version in range(1, 4):
        store.publish(version, {k: torch.zeros_like(v) for k, v in tensors.items()})
    assert _file(store, 3).stat().st_ino == first
    assert torch.equal(sequence_logprobs(decoder, ids), before)


def test_memory_that_is_not_there_is_an_error_and_leaves_nothing(memory, monkeypatch) -> None:
    store = WeightStore(memory)
    store.publish(0, _weights())

    def full(fd: int, data: memoryview, offset: int) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        store.publish(1, _weights())
    assert store.versions() == (0,)
    assert sorted(p.name for p in memory.iterdir()) == ["0", "pins"]
