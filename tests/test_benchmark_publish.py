"""benchmarks/publish.py: what it publishes is of the size it says, both sides are in its time, a refusal ends it."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
publish = importlib.import_module("publish")


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_the_weights_have_the_size_that_is_said(name: str) -> None:
    tensors = publish.make_weights(8_000_000, publish.DTYPES[name])
    assert sum(t.nbytes for t in tensors.values()) == pytest.approx(8_000_000, rel=0.01)
    assert all(t.dtype == publish.DTYPES[name] for t in tensors.values())


def test_both_sides_are_measured_and_files_are_written_over_from_the_judged_versions_on() -> None:
    torch.set_num_threads(1)
    tensors = publish.make_weights(2_000_000, torch.float32)
    rounds = publish.measure(tensors, publish.FRESH + 3)
    assert all(r.copy > 0 and r.publish > 0 and r.load > 0 for r in rounds)
    judged, first = publish.make_rows("float32", 2_000_000, rounds)
    assert judged.required == 3.5 and judged.at_most and judged.judged == "ratio" and first.required is None
    assert judged.ratio == pytest.approx(sorted(r.whole / r.copy for r in rounds[publish.FRESH :])[1])


def test_a_reader_that_refuses_a_version_ends_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = publish.WeightStore.publish

    def corrupt(self, version, tensors):
        fingerprint = honest(self, version, tensors)
        file = self.directory / str(version) / "weights.safetensors"
        data = bytearray(file.read_bytes())
        data[-3] ^= 0x10
        file.write_bytes(data)
        return fingerprint

    monkeypatch.setattr(publish.WeightStore, "publish", corrupt)
    with pytest.raises(ValueError):
        publish.measure(publish.make_weights(2_000_000, torch.float32), 2)
