"""Micro-batches: every token once, little padding, and the same numbers as one segment at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trainer_parts import segment, task, tiny_model, trajectory, write_groups

from springtide.trace import Group
from springtide.trainer.data import DataError, Row, load_step
from springtide.trainer.model import Policy, load_policy
from springtide.trainer.packing import collate, plan
from springtide.trainer.step import Shape, compute_logprobs

lengths = st.lists(st.integers(2, 200), min_size=1, max_size=40)


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Policy:
    return load_policy(tiny_model(tmp_path_factory.mktemp("model")))


def rows_of(sizes: list[int], seed: int = 0) -> list[Row]:
    rng = np.random.default_rng(seed)
    out = []
    for i, size in enumerate(sizes):
        s = segment(rng, size, int(rng.integers(1, size)))
        at = np.flatnonzero(s.loss_mask)
        out.append(Row(("t", 0, i, 0), s.ids, at, s.logprobs[at], s.versions[at], 1.0, 1.0))
    return out


@given(lengths, st.integers(1, 600))
def test_every_segment_lies_in_one_micro_batch_within_the_budget(sizes, budget):
    batches = plan(sizes, budget)
    assert sorted(i for b in batches for i in b) == list(range(len(sizes)))
    for b in batches:
        padded = len(b) * max(sizes[i] for i in b)
        assert padded <= budget or len(b) == 1


@given(lengths)
def test_every_action_token_is_collated_once_with_its_own_prediction(sizes):
    rows = rows_of(sizes)
    batch = collate(rows, torch.device("cpu"))
    width = batch.ids.shape[1]
    assert len(batch.targets) == sum(len(r.at) for r in rows)
    assert len(set(batch.predict.tolist())) == len(batch.predict)
    for place, target, row in zip(batch.predict.tolist(), batch.targets.tolist(), batch.row.tolist()):
        assert place // width == row
        assert rows[row].ids[place % width + 1] == target
    assert int((batch.ids != 0).sum()) == sum(int((r.ids != 0).sum()) for r in rows)


def test_mixed_lengths_leave_little_padding():
    rng = np.random.default_rng(0)
    sizes = np.concatenate([rng.integers(30, 150, 180), rng.integers(400, 2000, 12)]).tolist()
    batches = plan(sizes, 8192)
    padded = sum(len(b) * max(sizes[i] for i in b) for b in batches)
    assert padded / sum(sizes) < 1.05


@settings(max_examples=15, deadline=None)
@given(lengths, st.integers(20, 1000), st.integers(0, 100))
def test_packed_log_probs_equal_one_by_one(policy, sizes, budget, seed):
    rows = rows_of(sizes, seed)
    data = _step(rows)
    packed = compute_logprobs(policy, data, Shape(budget, 16, 0.8))
    for row, got in zip(rows, packed, strict=True):
        with torch.no_grad():
            logits = policy.model(input_ids=torch.from_numpy(row.ids.astype(np.int64))[None]).logits[0] / 0.8
        want = torch.log_softmax(logits, -1)[row.at - 1, row.ids[row.at].astype(np.int64)].numpy()
        np.testing.assert_allclose(got, want, atol=1e-5)


def _step(rows: list[Row]):
    from springtide.trainer.data import StepData

    return StepData(tuple(rows), 1, len(rows), sum(len(r.at) for r in rows), sum(map(len, rows)))


def test_a_fully_masked_segment_counts_in_nothing(tmp_path):
    """trl#6439: tokens left out above the division but counted below it."""
    rng = np.random.default_rng(0)
    with_empty = trajectory([segment(rng, 9, 4), segment(rng, 7, 0)], task(0), 0)
    empty = trajectory([segment(rng, 8, 0)], task(0), 1)
    Group(task(0), 0, (with_empty, empty)).save(tmp_path / "g")
    items = [{"path": str(tmp_path / "g"), "member": m, "advantage": 1.0} for m in (0, 1)]
    assert [load_step(items, a).denominator for a in ("token_mean", "trajectory_mean", "segment_mean")] == [4, 1, 1]


def test_members_are_found_by_number_not_position(tmp_path):
    """slime#2230: a lost member shifts the positions of the others."""
    rng = np.random.default_rng(0)
    members = [trajectory([segment(rng, 9, n)], task(0), m) for m, n in ((1, 3), (4, 5))]
    Group(task(0), 0, tuple(members)).save(tmp_path / "g")
    assert load_step([{"path": str(tmp_path / "g"), "member": 4}], "token_mean").loss_tokens == 5
    with pytest.raises(DataError, match=r"no member 0; it has \[1, 4\]"):
        load_step([{"path": str(tmp_path / "g"), "member": 0}], "token_mean")


def test_a_member_named_twice_is_refused(tmp_path):
    items = write_groups(tmp_path, [[[(9, 4)], [(8, 3)]]])
    with pytest.raises(DataError, match="named twice"):
        load_step([*items, items[0]], "token_mean")


def test_an_advantage_that_is_not_finite_is_refused(tmp_path):
    items = write_groups(tmp_path, [[[(9, 4)]]])
    with pytest.raises(DataError, match="advantage nan"):
        load_step([{**items[0], "advantage": float("nan")}], "token_mean")


def test_a_token_outside_the_vocabulary_is_named(policy):
    row = rows_of([5])[0]
    bad = Row(row.key, np.full(5, 99, np.int32), row.at, row.rollout, row.versions, 1.0, 1.0)
    with pytest.raises(ValueError, match="token id 99"):
        compute_logprobs(policy, _step([bad]), Shape(100, 100, 1.0))
