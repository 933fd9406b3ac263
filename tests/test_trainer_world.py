"""Several trainer ranks are as one: the same steps, figures and files, however a step's segments fall to them."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tests.world_parts import Processes, processes

from springtide.trace import Group, common_start
from springtide.trainer.collective import Collective, balance
from springtide.trainer.data import read_logprobs
from springtide.trainer.rank import Rank
from springtide.weights.store import WeightStore
from springtide.wire import RemoteError
from trainer_parts import config, tiny_model, write_groups

SHAPES = [[[(30, 12)], [(24, 9)], [(40, 20)]], [[(16, 5), (12, 4)], [(33, 15)], [(20, 8)]]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    with processes(4, tmp_path_factory.mktemp("logs")) as started:
        yield started


def tree(**tables) -> dict:
    return config(**tables).model_dump(mode="json")


lengths = st.integers(2, 60)
segments = st.lists(lengths.flatmap(lambda t: st.tuples(st.just(t), st.integers(1, t - 1))), min_size=1, max_size=2)
rest = st.fixed_dictionaries(
    {"optimizer": st.sampled_from(["adamw", "muon"]), "logit_chunk": st.sampled_from([5, 4096])}
)
steps = st.lists(st.lists(segments, min_size=1, max_size=3), min_size=1, max_size=4)


@settings(
    max_examples=6, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.explicit, Phase.generate]
)
@given(shapes=steps, micro=st.sampled_from([64, 200, 4096]), rest=rest)
@pytest.mark.parametrize("sharding", ["replicate", "fsdp"])
def test_two_ranks_take_the_steps_of_one(ranks, tmp_path_factory, sharding, shapes, micro, rest) -> None:
    """Uneven steps, and steps of one segment, which leave a rank without work."""
    tmp = tmp_path_factory.mktemp("step")
    model = tiny_model(tmp / "model")
    trainer = {"lr": 1e-4, "micro_tokens": micro, **rest}
    algorithm = {"entropy_coef": 0.01}
    settings = tree(trainer={**trainer, "sharding": sharding}, algorithm=algorithm)
    items = tuple(write_groups(tmp / "groups", shapes))
    alone, world = Rank(), ranks.world(2, model, settings, store=str(tmp / "store"))
    alone.init(tree(trainer=trainer, algorithm=algorithm), str(model))
    start = {name: tensor.clone() for name, tensor in alone._policy.tensors().items()}
    for version in range(2):
        ours, theirs = world("train", items=items, version=version), alone.train(items, version)
        assert ours["refused"] is theirs["refused"] is None
        for name, value in theirs.items():
            if name not in ("seconds", "micro_batches", "computed_tokens", "padded_tokens"):
                assert ours[name] == (value if value is None else pytest.approx(value, abs=1e-5, rel=1e-5)), name
    world("publish", version=1)
    published = load_file(tmp / "store" / "1" / "weights.safetensors")
    # Where a gradient is rounding alone, AdamW's first steps have any size: a few entries differ, the policy does not.
    moved = apart = 0.0
    for name, tensor in alone._policy.tensors().items():
        moved += float((tensor - start[name]).double().square().sum())
        apart += float((tensor - published[name]).double().square().sum())
    assert moved > 0 and apart < 1e-3 * moved
    world("logprobs", items=items, out=str(tmp / "two"))
    alone.logprobs(items, str(tmp / "one"))
    one, two = read_logprobs(tmp / "one"), read_logprobs(tmp / "two")
    assert one.keys() == two.keys()
    for key, values in one.items():
        np.testing.assert_allclose(two[key], values, atol=1e-5)


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


@pytest.mark.parametrize("sharding", ["replicate", "fsdp"])
def test_log_probs_and_kl_are_those_of_one_rank(ranks, tmp_path: Path, sharding: str) -> None:
    model, settings = tiny_model(tmp_path / "model"), tree(trainer={"sharding": sharding})
    items = tuple(write_groups(tmp_path / "groups", SHAPES))
    alone, world = Rank(), ranks.world(2, model, settings)
    alone.init(tree(), str(model))
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


@pytest.mark.parametrize("sharding", ["replicate", "fsdp"])
def test_a_step_that_one_rank_finds_not_finite_is_refused_by_all(ranks, tmp_path: Path, sharding: str) -> None:
    """The rank whose segments are sound steps no further than the other, and both take the next step."""
    model, settings = tiny_model(tmp_path / "model"), tree(trainer={"sharding": sharding})
    items = tuple(write_groups(tmp_path / "groups", SHAPES))
    bad = tuple(write_groups(tmp_path / "groups", SHAPES, seed=1))
    group = Group.load(Path(bad[0]["path"]))
    first = group.trajectories[0].segments[0]
    unknown = replace(first, logprobs=np.where(first.loss_mask, np.nan, 0).astype(np.float32))
    spoilt = replace(group.trajectories[0], segments=(unknown,))
    replace(group, trajectories=(spoilt, *group.trajectories[1:])).save(Path(bad[0]["path"]))
    alone, world = Rank(), ranks.world(2, model, settings, store=str(tmp_path / "store"))
    alone.init(tree(), str(model))
    figures = world("train", items=bad, version=0)
    assert (figures["refused"], figures["steps"]) == ("loss", 0)
    states = world.wait(_gather(*(rank.call("status", deadline_s=10) for rank in ranks.ranks[:2])))
    assert [state["steps"] for state in states] == [0, 0] and len({state["refused"] for state in states}) == 1
    world("publish", version=0)
    for name, tensor in load_file(tmp_path / "store" / "0" / "weights.safetensors").items():
        assert bool((tensor == load_file(model / "model.safetensors")[name]).all()), name
    ours, theirs = world("train", items=items, version=0), alone.train(items, 0)
    assert ours["refused"] is None and ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)


async def _gather(*calls: Any) -> list[Any]:
    return list(await asyncio.gather(*calls))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("sharding", ["replicate", "fsdp"])
def test_a_checkpoint_of_two_ranks_is_resumed_by_one_and_by_four(
    ranks, tmp_path: Path, sharding: str, optimizer: str
) -> None:
    """And one of one by two. Whole tensors lie in it, whoever wrote them."""
    trainer = {"optimizer": optimizer, "lr": 1e-2}
    model, settings = tiny_model(tmp_path / "model"), tree(trainer={**trainer, "sharding": sharding})
    items, path = tuple(write_groups(tmp_path / "groups", SHAPES)), str(tmp_path / "c")
    world = ranks.world(2, model, settings)
    world("train", items=items, version=0)
    world("save", path=path, extra={"step": 1})
    follows = [world("train", items=items, version=1) for _ in range(2)]
    alone = Rank()
    assert alone.init(tree(trainer=trainer), str(model), checkpoint=path)["extra"] == {"step": 1}
    four = ranks.world(4, model, settings, checkpoint=path)
    assert [reply["steps"] for reply in four.started] == [1] * 4
    alone.save(str(tmp_path / "of one"))
    for size, source in ((4, path), (2, str(tmp_path / "of one"))):
        again = ranks.world(size, model, settings, checkpoint=source)
        for expected in follows:
            figures = again("train", items=items, version=1)
            assert figures["loss"] == pytest.approx(expected["loss"], abs=1e-5)
            assert figures["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
    for expected in follows:
        assert alone.train(items, 1)["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)


def test_a_damaged_checkpoint_is_found_by_one_rank_and_hashed_by_no_other(ranks, tmp_path: Path) -> None:
    """Each of many ranks read all of a checkpoint's bytes once more."""
    model, settings = tiny_model(tmp_path / "model"), tree()
    alone = Rank()
    alone.init(settings, str(model), store=str(tmp_path / "store"))
    alone.publish(7)
    alone.save(str(tmp_path / "c"))
    with (tmp_path / "c" / "tokenizer.json").open("a") as file:
        file.write(" ")  # which changes nothing but the sum
    second = ranks.world(2, model, settings)
    with pytest.raises(RemoteError, match=r"tokenizer\.json is missing or not what was written"):
        ranks.world(2, model, settings, checkpoint=str(tmp_path / "c"))
    until = time.monotonic() + 30
    while second.wait(ranks.ranks[1].call("status", deadline_s=10))["version"] != 7 and time.monotonic() < until:
        time.sleep(0.05)
    states = [second.wait(rank.call("status", deadline_s=10))["version"] for rank in ranks.ranks[:2]]
    assert states == [-1, 7]


@pytest.mark.parametrize("sharding", ["replicate", "fsdp"])
def test_an_adapter_on_two_ranks_is_that_of_one_with_its_reference_for_free(
    ranks, tmp_path: Path, sharding: str
) -> None:
    trainer = {"lora": {"rank": 2}, "lr": 1e-3}  # of four ranks, two have no row of its A
    algorithm = {"kl_coef": 0.1}
    model = tiny_model(tmp_path / "model")
    items = tuple(write_groups(tmp_path / "groups", SHAPES))
    settings = tree(trainer={**trainer, "sharding": sharding}, algorithm=algorithm)
    alone, world = Rank(), ranks.world(2, model, settings, store=str(tmp_path / "store"))
    alone.init(tree(trainer=trainer, algorithm=algorithm), str(model), store=str(tmp_path / "alone"))
    for step in range(3):
        for call, name in ((world, "two"), (lambda method, **payload: getattr(alone, method)(**payload), "one")):
            out = str(tmp_path / name)
            call("logprobs", items=items, out=out, reference=True)
            figures = call("train", items=items, version=step, ref_logprobs=out)
            if name == "two":
                ours = figures
        assert ours["kl_reference"] == pytest.approx(figures["kl_reference"], rel=1e-3, abs=1e-7)
        assert ours["loss"] == pytest.approx(figures["loss"], abs=1e-5)
    assert figures["kl_reference"] > 0
    world("publish", version=3)
    alone.publish(3)
    assert all(".lora_" in name for name in load_file(tmp_path / "store" / "3" / "weights.safetensors"))
    one, two = (WeightStore(tmp_path / d).load(3) for d in ("alone", "store"))  # merged
    assert one.keys() == two.keys() and not any("lora" in name for name in one)
    for name, tensor in one.items():
        assert float((tensor - two[name]).abs().max()) < 1e-5, name
    world("save", path=str(tmp_path / "c"))
    assert "model.safetensors" not in {p.name for p in (tmp_path / "c").iterdir()}
    resumed = Rank()
    resumed.init(tree(trainer=trainer, algorithm=algorithm), str(model), checkpoint=str(tmp_path / "c"))
    resumed.logprobs(items, str(tmp_path / "three"), reference=True)
    assert (tmp_path / "three").read_bytes()[-64:] == (tmp_path / "one").read_bytes()[-64:], "the start travels along"
    again = ranks.world(4, model, settings, checkpoint=str(tmp_path / "c"))(
        "train", items=items, version=3, ref_logprobs=out
    )
    assert again["loss"] == pytest.approx(alone.train(items, 3, ref_logprobs=out)["loss"], abs=1e-5)


def test_bfloat16_is_computed_with_and_float32_kept(ranks, tmp_path: Path) -> None:
    """Steps far below bfloat16's resolution add up, as the master weights are float32."""
    model = tiny_model(tmp_path / "model")
    items = tuple(write_groups(tmp_path / "groups", SHAPES))
    norms = {}
    start = load_file(model / "model.safetensors")
    for name, dtypes in {
        "full": {},
        "params": {"param_dtype": "bfloat16"},
        "both": {"param_dtype": "bfloat16", "reduce_dtype": "bfloat16"},
    }.items():
        settings = tree(trainer={"sharding": "fsdp", "lr": 1e-6, **dtypes})
        world = ranks.world(2, model, settings, store=str(tmp_path / name))
        norms[name] = world("train", items=items, version=0)["grad_norm"]
        world("publish", version=1)
        for key, tensor in load_file(tmp_path / name / "1" / "weights.safetensors").items():
            assert tensor.dtype == start[key].dtype, key
            assert 0 < float((tensor - start[key]).abs().max()) < 3e-6, key
    assert norms["params"] == pytest.approx(norms["full"], rel=0.05)
    assert norms["both"] == pytest.approx(norms["params"], rel=0.02)
    assert len(set(norms.values())) == 3


def test_activation_checkpointing_computes_layers_twice_and_changes_nothing(ranks, tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    items = tuple(write_groups(tmp_path / "groups", SHAPES))
    found = {}
    for on in (False, True):
        rank = Rank()
        rank.init(tree(trainer={"activation_checkpointing": on}), str(model))
        calls = []
        rank._policy.model.model.layers[1].mlp.register_forward_pre_hook(lambda *_: calls.append(1))  # noqa: B023
        found[on] = (rank.train(items, 0)["grad_norm"], len(calls))
    assert found[True] == (found[False][0], 2 * found[False][1])
    world = ranks.world(2, model, tree(trainer={"activation_checkpointing": True, "sharding": "fsdp"}))
    assert world("train", items=items, version=0)["grad_norm"] == pytest.approx(found[True][0], rel=1e-5)


def test_ranks_that_would_share_one_device_are_refused() -> None:
    with pytest.raises(ValueError, match=r'trainer\.device: 2 ranks cannot share cuda:1; write "cuda"'):
        Collective.join(0, 2, "file:///nowhere", "cuda:1")


def anonymous_bytes(process: Any) -> int:
    status = Path(f"/proc/{process.pid}/status").read_text()
    return 1024 * int(re.search(r"RssAnon:\s+(\d+)", status)[1])


def test_a_rank_that_holds_its_rows_only_is_smaller_by_the_others(ranks, tmp_path: Path) -> None:
    """Weights and two moments of float32 stay after a step: 12 bytes a parameter, of which two ranks hold half each."""
    model = tiny_model(tmp_path / "model", vocab=40_000, tokens=64, hidden=256)
    parameters = sum(t.numel() for t in load_file(model / "model.safetensors").values())
    items = tuple(write_groups(tmp_path / "groups", SHAPES))
    held = {}
    before = [anonymous_bytes(rank.process) for rank in ranks.ranks[:2]]
    for sharding in ("fsdp", "replicate"):
        ranks.world(2, model, tree(trainer={"sharding": sharding}))("train", items=items, version=0)
        now = [anonymous_bytes(rank.process) for rank in ranks.ranks[:2]]
        held[sharding] = max(b - a for a, b in zip(before, now, strict=True)) / parameters
    assert held["replicate"] > 11.5 and held["fsdp"] < 0.6 * held["replicate"], held


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.alone
@pytest.mark.parametrize("sharding", ["replicate", "fsdp"])
def test_a_rank_that_waits_for_another_sleeps(ranks, tmp_path: Path, sharding: str) -> None:
    """On few cores the others need what a spinning rank would take."""
    model = tiny_model(tmp_path / "model")
    items = tuple(write_groups(tmp_path / "groups", SHAPES))
    world = ranks.world(2, model, tree(trainer={"sharding": sharding}))
    waiting, stopped = (rank.process.pid for rank in ranks.ranks[:2])
    os.kill(stopped, signal.SIGSTOP)
    try:
        call = asyncio.run_coroutine_threadsafe(
            world.world.call("train", deadline_s=60, items=items, version=0), world.loop
        )
        time.sleep(1.5)
        before = cpu_seconds(waiting)
        time.sleep(1.0)
        assert cpu_seconds(waiting) - before < 0.2 and not call.done()
    finally:
        os.kill(stopped, signal.SIGCONT)
    assert call.result(45)["refused"] is None


def test_a_rank_that_fails_alone_ends_the_call_although_the_others_wait(ranks, tmp_path: Path) -> None:
    """The last test of these processes: rank 0 waits in a collective from now on, and must still end when told."""
    model = tiny_model(tmp_path / "model")
    items = tuple(write_groups(tmp_path / "groups", SHAPES))
    world = ranks.world(2, model, tree())
    other = {"rank": 0, "size": 1, "meet": f"file://{tmp_path}/meet"}
    world.wait(
        ranks.ranks[1].call("init", deadline_s=60, config=tree(), model=str(model), world=other, role="reference")
    )
    started = time.monotonic()
    with pytest.raises(RemoteError, match="this rank is a reference; only a trainer rank trains"):
        world("train", items=items, version=0)
    assert time.monotonic() - started < 20
