"""Figures and records: a mean that cannot end a run, and lines of metrics.jsonl that are none."""

from __future__ import annotations

import math
from pathlib import Path

from springtide.observe.metrics import _mean
from springtide.observe.sinks import read_lines


def test_no_figure_is_too_large_to_be_averaged() -> None:
    assert math.isclose(_mean([1e308, 1e308, 1e308]), 1e308)
    assert math.isnan(_mean([math.inf, -math.inf]))
    assert (_mean([1, 0]), _mean([])) == (0.5, 0.0)


def test_what_is_no_record_is_skipped_and_counted_but_for_a_line_being_written(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert read_lines(path) == ([], 0)
    deep = b"[" * 100_000
    others = (b"3", b'{"a": 1}', b"\xff", b"[1]", b'{"kind": "step"}', b'{"kind": "step", "step": "2"}', deep)
    good = b'{"kind": "step", "step": 1}\n'
    path.write_bytes(good + b"\n".join(others) + b"\n\n" + good.replace(b"1", b"2") + b'{"kind": "st')
    records, skipped = read_lines(path)
    assert [r["step"] for r in records] == [1, 2] and skipped == len(others)
