"""Micro-batches: every token once, shared beginnings computed once, the same numbers as one segment at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from springtide.trace import Group
from springtide.trainer.data import DataError, Row, load_step
from springtide.trainer.model import Policy, load_policy
from springtide.trainer.packing import collate, plan
from springtide.trainer.step import Shape, compute_logprobs
from trainer_parts import VOCAB, segment, task, tiny_model, trajectory, write_groups

# Segments grow as a random tree: each continues a prefix of an earlier one, as members of a group do.
forests = st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 60), st.integers(2, 60)), min_size=1, max_size=24)


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Policy:
    return load_policy(tiny_model(tmp_path_factory.mktemp("model")))


def rows_of(forest: list[tuple[int, int, int]], seed: int = 0) -> list[Row]:
    """One row a (parent, shared, new): the first `shared` tokens of an earlier row, then `new` random ones."""
    rng = np.random.default_rng(seed)
    out: list[Row] = []
    for i, (parent, shared, new) in enumerate(forest):
        s = segment(rng, new, int(rng.integers(1, new)))
        begin = out[parent % i].ids[:shared] if i else s.ids[:0]
        ids = np.concatenate([begin, s.ids]).astype(np.int32)
        at = np.flatnonzero(rng.random(len(ids)) < 0.5)
        at = at[at > 0] if (at > 0).any() else np.array([1])
        rollout = -rng.random(len(at)).astype(np.float32)
        out.append(Row((f"t{i}", 0, 0, 0), ids, at, rollout, np.zeros(len(at), np.int64), 1.0, 1.0))
    return out


def nodes(rows: list[Row]) -> int:
    """How many different non-empty beginnings the rows have: the nodes of their prefix tree."""
    return len({r.ids[: n + 1].tobytes() for r in rows for n in range(len(r))})


@given(forests, st.integers(1, 600))
def test_every_segment_lies_in_one_micro_batch_within_the_budget(forest, budget):
    rows = [r.ids for r in rows_of(forest)]
    batches = plan(rows, budget)
    assert sorted(i for b in batches for i in b) == list(range(len(rows)))
    for b in batches:
        padded = len(b) * max(len(rows[i]) for i in b)
        assert padded <= budget or len(b) == 1


@given(forests)
def test_a_micro_batch_computes_each_shared_beginning_once(forest):
    rows = rows_of(forest)
    rows = [rows[i] for i in _sorted(rows)]
    batch = collate(rows, torch.device("cpu"))
    assert batch.ids.numel() == nodes(rows)
    gather = batch.tree.gather.view(len(rows), -1).numpy()
    ids, positions = batch.ids[0].numpy(), batch.positions[0].numpy()
    for i, r in enumerate(rows):
        np.testing.assert_array_equal(ids[gather[i, : len(r)]], r.ids)
        np.testing.assert_array_equal(positions[gather[i, : len(r)]], np.arange(len(r)))
    np.testing.assert_array_equal(gather.reshape(-1)[batch.tree.scatter.numpy()], np.arange(len(ids)))


def _sorted(rows: list[Row]) -> list[int]:
    return sorted(range(len(rows)), key=lambda i: tuple(rows[i].ids.tolist()))


@given(forests)
def test_every_action_token_keeps_its_own_prediction(forest):
    rows = rows_of(forest)
    rows = [rows[i] for i in _sorted(rows)]
    batch = collate(rows, torch.device("cpu"))
    assert len(batch.pair) == len(batch.row) == sum(len(r.at) for r in rows)
    assert len(set(zip(batch.predict.tolist(), batch.targets.tolist()))) == len(batch.predict), "pairs are distinct"
    gather = batch.tree.gather.view(len(rows), -1)
    k = 0
    for i, r in enumerate(rows):
        for at in r.at:
            assert batch.predict[batch.pair[k]] == gather[i, at - 1]
            assert batch.targets[batch.pair[k]] == r.ids[at]
            assert batch.row[k] == i
            k += 1


def test_a_group_costs_its_prompt_once_and_little_padding():
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(24):
        prompt = rng.integers(0, VOCAB, 60)
        rows += [np.concatenate([prompt, rng.integers(0, VOCAB, rng.integers(40, 80))]) for _ in range(8)]
    rows = [r.astype(np.int32) for r in rows]
    batches = plan(rows, 8192)
    computed = sum(collate([_row(rows[i]) for i in b], torch.device("cpu")).ids.numel() for b in batches)
    tokens = sum(map(len, rows))
    assert computed <= tokens - 24 * 7 * 60 + 8 * 60 * len(batches)
    assert sum(len(b) * max(len(rows[i]) for i in b) for b in batches) < 1.3 * tokens


def _row(ids: np.ndarray) -> Row:
    at = np.array([len(ids) - 1])
    return Row(("t", 0, 0, 0), ids, at, np.zeros(1, np.float32), np.zeros(1, np.int64), 1.0, 1.0)


@settings(max_examples=25, deadline=None)
@given(forests, st.integers(20, 2000), st.integers(0, 100))
def test_packed_log_probs_equal_one_by_one(policy, forest, budget, seed):
    rows = rows_of(forest, seed)
    packed = compute_logprobs(policy, _step(rows), Shape(budget, 16, 0.8))
    for row, got in zip(rows, packed, strict=True):
        with torch.no_grad():
            logits = policy.model(input_ids=torch.from_numpy(row.ids.astype(np.int64))[None]).logits[0] / 0.8
        want = torch.log_softmax(logits, -1)[row.at - 1, row.ids[row.at].astype(np.int64)].numpy()
        np.testing.assert_allclose(got, want, atol=2e-5)


def test_a_sliding_window_is_kept(tmp_path):
    """Gemma 3's local layers: a row longer than the window must not see beyond it."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8, "vocab_size": VOCAB}
    layers = ["sliding_attention", "full_attention"]
    heads = {"num_attention_heads": 4, "num_key_value_heads": 1}
    settings = Gemma3TextConfig(**sizes, **heads, sliding_window=5, layer_types=layers, initializer_range=0.3)
    Gemma3ForCausalLM(settings).save_pretrained(tmp_path)
    policy = load_policy(tmp_path)
    plain = Gemma3ForCausalLM.from_pretrained(tmp_path, attn_implementation="eager", dtype=torch.float32)
    rows = rows_of([(0, 0, 40), (0, 20, 15), (1, 8, 30)])
    for row, got in zip(rows, compute_logprobs(policy, _step(rows), Shape(1000, 100, 1.0)), strict=True):
        with torch.no_grad():
            logits = plain(input_ids=torch.from_numpy(row.ids.astype(np.int64))[None]).logits[0]
        want = torch.log_softmax(logits, -1)[row.at - 1, row.ids[row.at].astype(np.int64)].numpy()
        np.testing.assert_allclose(got, want, atol=1e-4)


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
    row = rows_of([(0, 0, 5)])[0]
    bad = Row(row.key, np.full(5, 99, np.int32), row.at, row.rollout, row.versions, 1.0, 1.0)
    with pytest.raises(ValueError, match="token id 99"):
        compute_logprobs(policy, _step([bad]), Shape(100, 100, 1.0))
