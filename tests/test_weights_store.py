"""Published weights are whole, verified, kept while needed and collected after."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine_models import tiny
from springtide.weights.pins import Pins
from springtide.weights.store import Canary, FingerprintMismatch, StoreError, WeightStore


def _weights(scale: float = 1.0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {"a.weight": scale * torch.randn(7, 5, generator=generator), "b.bias": torch.ones(3)}


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


def test_readers_never_see_half_a_version(tmp_path) -> None:
    store = WeightStore(tmp_path)
    store.publish(0, {"w": torch.zeros(100_000)})
    stop, seen, faults = threading.Event(), set(), []

    def read() -> None:
        reader = WeightStore(tmp_path)
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
