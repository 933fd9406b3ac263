"""Attention over a prefix tree: the compiled kernels and PyTorch's are one function with the same gradients."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from springtide import compiled
from springtide.trainer import attention
from springtide.trainer.attention import padded_attention, tree_attention
from springtide.trainer.data import Row
from springtide.trainer.packing import MicroBatch, collate


def _batch(strings: list[list[int]]) -> MicroBatch:
    rows = []
    for i, ids in enumerate(sorted(strings)):
        at, zeros = np.arange(1, len(ids)), np.zeros(len(ids) - 1, np.float32)
        rows.append(Row(("t", 0, i, 0), np.array(ids, np.int32), at, zeros, zeros.astype(np.int64), 0.0, 1.0))
    return collate(rows, torch.device("cpu"))


def _run(attend, batch: MicroBatch, shape: tuple[int, int, int], window: int | None, seed: int) -> list[torch.Tensor]:
    """Output and gradients of queries, keys and values, all random."""
    heads, kv_heads, dim = shape
    module = torch.nn.Module()
    module.num_key_value_groups = heads // kv_heads  # type: ignore[assignment]
    noise, n = torch.Generator().manual_seed(seed), batch.ids.shape[1]
    q, k, v = (
        torch.randn(1, h, n, dim, generator=noise).requires_grad_(True) for h in (heads, kv_heads, kv_heads)
    )  # fmt: skip
    out, _ = attend(module, q, k, v, None, tree=batch.tree, sliding_window=window)
    out.backward(torch.randn(out.shape, generator=noise))
    return [out.detach(), *(x.grad for x in (q, k, v))]


@settings(max_examples=60)
@given(
    strings=st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=60), min_size=1, max_size=8),
    shape=st.sampled_from([(4, 2, 32), (2, 2, 16), (8, 1, 64), (6, 2, 24), (4, 4, 8), (2, 1, 256)]),
    window=st.one_of(st.none(), st.integers(1, 40)),
    seed=st.integers(0, 1000),
)
def test_the_kernels_equal_pytorchs_attention_and_its_gradients(
    strings: list[list[int]], shape: tuple[int, int, int], window: int | None, seed: int
) -> None:
    assert attention.library() is not None, "the tests need a C compiler"
    batch = _batch(strings)
    ours, theirs = (_run(f, batch, shape, window, seed) for f in (tree_attention, padded_attention))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=2e-5)


def test_a_path_is_its_rows_nodes_in_order() -> None:
    batch = _batch([[1, 1, 2, 3], [1, 1, 2, 3, 3], [1, 1, 4], [1, 1, 4, 5], [2, 2]])
    tree, width = batch.tree, batch.tree.longest
    ids, gather = batch.ids[0], batch.tree.gather.view(-1, width)
    known = {tuple(ids[row[:n]].tolist()): row[:n].tolist() for row in gather for n in range(1, width + 1)}
    assert tree.runs[:, 1].sum() == ids.numel(), "each node is new in one run"
    for (first, count, at), (_, _, end) in zip(tree.runs.tolist(), tree.runs.tolist()[1:], strict=False):
        nodes = [n for start, length in tree.paths[at:end].tolist() for n in range(start, start + length)]
        assert nodes[-count:] == list(range(first, first + count))
        assert nodes == known[tuple(ids[nodes].tolist())]


def test_one_segments_nan_stays_its_own() -> None:
    batch = _batch([[1, 1, 2, 2, 2], [3, 3, 3]])
    q = torch.randn(1, 2, 8, 32)
    poisoned = q.clone()
    poisoned[:, :, 1] = float("nan")
    out, _ = tree_attention(torch.nn.Module(), q, poisoned, poisoned, None, tree=batch.tree)
    assert out[0, 4].isnan().all() and out[0, 5:].isfinite().all()


def test_without_a_compiler_the_trainer_says_so_once_and_computes_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    batch, shape = _batch([[1, 1, 2, 2], [1, 1, 3]]), (4, 2, 32)
    compiled_out = _run(tree_attention, batch, shape, None, 0)
    monkeypatch.setattr(compiled.shutil, "which", lambda _: None)
    monkeypatch.delenv("CC", raising=False)
    attention.library.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            plain = [_run(tree_attention, batch, shape, None, 0) for _ in range(2)]
    finally:
        attention.library.cache_clear()
    assert [r.message for r in caplog.records] == [
        "no C compiler (cc, gcc or clang): the trainer's attention uses its PyTorch kernels, about half as fast"
    ]
    for a, b in zip(compiled_out, plain[0], strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=2e-5)


def test_a_header_that_changed_is_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "s.c").write_text('#include "vectors.h"\nint answer(void) { return ANSWER; }\n')
    monkeypatch.setattr(compiled, "_HEADER", tmp_path / "vectors.h")
    found = []
    for number in (1, 2, 2):
        (tmp_path / "vectors.h").write_text(f"#define ANSWER {number}\n")
        library = compiled.load(tmp_path / "s.c", {"answer": ()}, "the test")
        assert library is not None
        found.append(library.answer())
    assert found == [1, 2, 2] and len(list((tmp_path / "cache" / "springtide").glob("*.so"))) == 2


def test_a_source_that_does_not_compile_is_one_line_with_the_compilers_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "broken.c").write_text("int f( {")
    with caplog.at_level(logging.WARNING):
        assert compiled.load(tmp_path / "broken.c", {}, "the test") is None
    assert "the test uses its PyTorch kernels" in caplog.text and "broken.c" in caplog.text and "error" in caplog.text
