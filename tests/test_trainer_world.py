"""Several trainer ranks are as one: the same steps, figures and files, however a step's segments fall to them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tests.world_parts import Processes, processes

from springtide.trace import common_start
from springtide.trainer.collective import balance
from springtide.trainer.data import read_logprobs
from springtide.trainer.rank import Rank
from trainer_parts import config, tiny_model, write_groups

SHAPES = [[[(30, 12)], [(24, 9)], [(40, 20)]], [[(16, 5), (12, 4)], [(33, 15)], [(20, 8)]]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    with processes(2, tmp_path_factory.mktemp("logs")) as started:
        yield started


def tree(**tables) -> dict:
    return config(**tables).model_dump(mode="json")


lengths = st.integers(2, 60)
segments = st.lists(lengths.flatmap(lambda t: st.tuples(st.just(t), st.integers(1, t - 1))), min_size=1, max_size=2)
steps = st.lists(st.lists(segments, min_size=1, max_size=3), min_size=1, max_size=4)


@settings(
    max_examples=6, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.explicit, Phase.generate]
)
@given(shapes=steps, micro=st.sampled_from([64, 200, 4096]))
def test_two_ranks_take_the_steps_of_one(ranks, tmp_path_factory, shapes, micro) -> None:
    """Uneven steps, and steps of one segment, which leave a rank without work."""
    tmp = tmp_path_factory.mktemp("step")
    model = tiny_model(tmp / "model")
    settings = tree(trainer={"lr": 1e-3, "micro_tokens": micro}, algorithm={"entropy_coef": 0.01})
    items = tuple(write_groups(tmp / "groups", shapes))
    alone, world = Rank(), ranks.world(2, model, settings, store=str(tmp / "store"))
    alone.init(settings, str(model))
    for version in range(2):
        ours, theirs = world("train", items=items, version=version), alone.train(items, version)
        assert ours["refused"] is theirs["refused"] is None
        for name, value in theirs.items():
            if name not in ("seconds", "micro_batches", "computed_tokens", "padded_tokens"):
                assert ours[name] == (value if value is None else pytest.approx(value, abs=1e-5, rel=1e-5)), name
    world("publish", version=1)
    published = load_file(tmp / "store" / "1" / "weights.safetensors")
    for name, tensor in alone._policy.tensors().items():
        assert float((published[name] - tensor).abs().max()) < 1e-5, name


@given(
    rows=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=30), max_size=8),
    parts=st.integers(1, 4),
)
def test_segments_fall_to_ranks_whole_and_once_in_ranges_of_like_cost(rows, parts) -> None:
    arrays = [np.array(row, dtype=np.int32) for row in rows]
    found = balance(arrays, parts)
    assert len(found) == parts and sorted(i for part in found for i in part) == list(range(len(rows)))
    flat = [rows[i] for part in found for i in part]
    assert flat == sorted(flat), "neighbours that begin alike stay together"

    def cost(part: list[list[int]]) -> float:
        known = sum(common_start(np.array(a), np.array(b)) for a, b in itertools.pairwise(part))
        return 1.2 * sum(map(len, part)) - known

    def largest(cuts: tuple[int, ...]) -> float:
        return max(cost(flat[a:b]) for a, b in itertools.pairwise((0, *cuts, len(flat))))

    best = min(map(largest, itertools.combinations_with_replacement(range(len(flat) + 1), parts - 1)))
    assert max(cost([rows[i] for i in part]) for part in found) <= best + 0.5


def test_segments_of_one_length_are_shared_out_evenly() -> None:
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 1 << 20, 100).astype(np.int32) for _ in range(48)]
    assert [len(part) for part in balance(rows, 4)] == [12, 12, 12, 12]


def test_log_probs_and_kl_are_those_of_one_rank(ranks, tmp_path: Path) -> None:
    model, settings = tiny_model(tmp_path / "model"), tree()
    items = tuple(write_groups(tmp_path / "groups", SHAPES))
    alone, world = Rank(), ranks.world(2, model, settings)
    alone.init(settings, str(model))
    named = tuple({k: i[k] for k in ("path", "member")} for i in items)
    assert world("logprobs", items=named, out=str(tmp_path / "two"))["loss_tokens"] == 73
    alone.logprobs(named, str(tmp_path / "one"))
    one, two = read_logprobs(tmp_path / "one"), read_logprobs(tmp_path / "two")
    assert list(one) == list(two)
    for key, values in one.items():
        np.testing.assert_allclose(two[key], values, atol=1e-5)
    (ours, theirs) = world("kl", items=named)["kl"], alone.kl(named)["kl"]
    assert [k[:2] for k in ours] == [k[:2] for k in theirs]
    np.testing.assert_allclose([k[2] for k in ours], [k[2] for k in theirs], rtol=1e-4, atol=1e-4)


def test_a_checkpoint_of_two_ranks_is_resumed_by_one_and_by_two(ranks, tmp_path: Path) -> None:
    model, settings = tiny_model(tmp_path / "model"), tree(trainer={"optimizer": "muon", "lr": 1e-2})
    items = tuple(write_groups(tmp_path / "groups", SHAPES))
    world = ranks.world(2, model, settings)
    world("train", items=items, version=0)
    world("save", path=str(tmp_path / "c"), extra={"step": 1})
    follows = world("train", items=items, version=1)
    world("forget", paths=(str(tmp_path / "none"),))
    alone = Rank()
    assert alone.init(settings, str(model), checkpoint=str(tmp_path / "c"))["extra"] == {"step": 1}
    again = ranks.world(2, model, settings, checkpoint=str(tmp_path / "c"))
    assert [reply["steps"] for reply in again.started] == [1, 1]
    for figures in (again("train", items=items, version=1), alone.train(items, 1)):
        assert figures["loss"] == pytest.approx(follows["loss"], abs=1e-6)
        assert figures["grad_norm"] == pytest.approx(follows["grad_norm"], rel=1e-5)
