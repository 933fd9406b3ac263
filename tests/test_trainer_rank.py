"""The rank as a process: it learns, answers while it works, and refuses what cannot be trained."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from springtide.process import Process, start_process
from springtide.trace import Group
from springtide.trainer.checkpoint import NotFinite
from springtide.trainer.data import load_step, read_logprobs
from springtide.trainer.rank import Rank
from springtide.wire import RemoteError
from trainer_parts import config, segment, task, tiny_model, trajectory, write_groups

SHAPES = [[[(30, 12)], [(24, 9)], [(40, 20)]], [[(16, 5), (12, 4)], [(33, 15)], [(20, 8)]]]
ENTRY = "springtide.trainer.rank:main"


def settings(**tables) -> dict:
    return config(**tables).model_dump(mode="json")


async def call(process: Process, method: str, **payload):
    return await process.client.call(method, deadline_s=60, **payload)


def on_policy(items: list[dict], rank: Rank, directory: Path) -> list[dict]:
    """The same groups with the rank's own log-probs as what the engine would have recorded."""
    rank.logprobs(tuple(items), str(directory / "own"))
    own = read_logprobs(directory / "own")
    for path in {i["path"] for i in items}:
        group = Group.load(Path(path))
        made = []
        for t in group.trajectories:
            segments = []
            for index, s in enumerate(t.segments):
                logprobs = np.zeros(len(s.ids), np.float32)
                logprobs[s.loss_mask] = own[(t.task.id, t.visit, t.member, index)]
                segments.append(replace(s, logprobs=logprobs))
            made.append(replace(t, segments=tuple(segments)))
        replace(group, trajectories=tuple(made)).save(Path(path))
    return items


def test_the_process_learns_answers_while_it_works_publishes_and_is_resumed(tmp_path):
    model = tiny_model(tmp_path / "model")
    items = tuple(write_groups(tmp_path / "groups", SHAPES))
    long_items = tuple(write_groups(tmp_path / "groups", [[[(250, 200)]] * 8] * 4, seed=1))
    arguments = {"config": settings(trainer={"lr": 3e-2}), "model": str(model), "store": str(tmp_path / "store")}

    async def run() -> None:
        async with start_process("trainer", ENTRY, {}, log_path=tmp_path / "log") as process:
            with pytest.raises(RemoteError, match="call init first"):
                await call(process, "train", items=items, version=0)
            with pytest.raises(RemoteError, match="no method 'fly'; it has status, cold_start"):
                await call(process, "fly")
            await call(process, "init", **arguments)

            paths = tuple(sorted({i["path"] for i in items}))
            losses = [(await call(process, "supervised", paths=paths))["loss"] for _ in range(12)]
            assert losses[-1] < 0.7 * losses[0]

            step = asyncio.create_task(call(process, "train", items=long_items, version=0))
            seen = []
            while not step.done():
                seen.append((await call(process, "status"))["busy"])
            assert (await step)["refused"] is None
            assert seen.count("train") >= 3

            await call(process, "publish", version=5)
            assert (await call(process, "status"))["version"] == 5
            await call(process, "save", path=str(tmp_path / "c"), extra={"step": 12})
            await call(process, "logprobs", items=items, out=str(tmp_path / "a"))

    asyncio.run(run())
    resumed = Rank()
    assert resumed.init(**arguments, checkpoint=str(tmp_path / "c"))["extra"] == {"step": 12}
    assert resumed.status()["steps"] == 13 and resumed.version == 5
    figures = resumed.logprobs(items, str(tmp_path / "b"))
    assert figures["loss_tokens"] == sum(n for g in SHAPES for m in g for _, n in m)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_ppo_step_raises_what_was_better_and_lowers_what_was_worse(tmp_path):
    rank = Rank()
    rank.init(settings(trainer={"lr": 3e-3}, rollout={"temperature": 0.8}), str(tiny_model(tmp_path / "model")))
    items = on_policy(write_groups(tmp_path / "groups", SHAPES), rank, tmp_path)
    items = [{**i, "advantage": 1.0 if i["member"] == 0 else -0.5} for i in items]
    figures = rank.train(tuple(items), version=0)
    assert figures["ratio"] == pytest.approx(1, abs=1e-5) and figures["clipped"] == 0
    assert figures["gap_max"] < 1e-5 and figures["gap_tokens"] == figures["loss_tokens"]
    assert figures["kl_behaviour"] == pytest.approx(0, abs=1e-6)
    before = read_logprobs(tmp_path / "own")
    rank.logprobs(tuple(items), str(tmp_path / "after"))
    for key, after in read_logprobs(tmp_path / "after").items():
        change = float((after - before[key]).mean())
        assert change > 0 if key[2] == 0 else change < 0, (key, change)


def test_reference_and_recomputed_log_probs_come_by_file(tmp_path):
    model = tiny_model(tmp_path / "model")
    items = tuple(write_groups(tmp_path / "groups", SHAPES))
    algorithm = {"kl_coef": 0.1, "old_logprobs": "recompute", "weight_cap": 2.0}
    rank, reference = Rank(), Rank()
    rank.init(settings(algorithm=algorithm), str(model))
    reference.init(settings(algorithm=algorithm), str(model), role="reference")
    out = str(tmp_path / "ref")
    reference.logprobs(items, out)
    with pytest.raises(ValueError, match="needs old_logprobs"):
        rank.train(items, 0, ref_logprobs=out)
    figures = rank.train(items, 0, ref_logprobs=out, old_logprobs=out)
    assert figures["kl_reference"] == pytest.approx(0, abs=1e-6), "the reference is the policy itself"
    assert figures["ratio"] == pytest.approx(1, abs=1e-5)
    assert 0 < figures["weight"] <= 2
    reference.logprobs(items[:1], out)
    with pytest.raises(Exception, match="log-probs file has none"):
        rank.train(items, 0, ref_logprobs=out, old_logprobs=out)


def test_a_step_that_is_not_finite_is_refused_counted_and_leaves_the_weights(tmp_path):
    rank = Rank()
    rank.init(settings(), str(tiny_model(tmp_path / "model")))
    items = tuple(write_groups(tmp_path / "groups", SHAPES))
    path = Path(items[0]["path"])
    group = Group.load(path)
    (s, *rest), t = group.trajectories[0].segments, group.trajectories[0]
    bad = replace(s, logprobs=np.where(s.loss_mask, np.nan, 0).astype(np.float32))
    changed = replace(t, segments=(bad, *rest))
    replace(group, trajectories=(changed, *group.trajectories[1:])).save(path)
    before = {n: w.clone() for n, w in rank._policy.tensors().items()}
    figures = rank.train(items, 0)
    assert figures["refused"] == "loss" and figures["refused_steps"] == 1 and figures["steps"] == 0
    assert all(bool((w == before[n]).all()) for n, w in rank._policy.tensors().items())
    assert rank.status()["refused"] == 1
    assert figures["refused_tensor"] is None, "the clip left no gradient there"


def test_weights_that_are_not_finite_are_neither_published_nor_saved(tmp_path):
    """A step may be finite and what it leaves not: the checkpoint before stays the newest."""
    rank = Rank()
    rank.init(settings(), str(tiny_model(tmp_path / "model")), store=str(tmp_path / "store"))
    name, tensor = list(rank._policy.tensors().items())[3]
    tensor.view(-1)[5] = float("inf")
    says = f"after step 7 the weights are not finite, the first in {name}: lower trainer.lr"
    with pytest.raises(NotFinite, match=says):
        rank.publish((2 << 32) | 7)
    with pytest.raises(NotFinite, match="after step 7"):
        rank.save(str(tmp_path / "checkpoint"), {"step": 7})
    assert not list(tmp_path.glob("*checkpoint*")) and rank.version == -1


def test_nothing_to_train_is_one_clear_line(tmp_path):
    rank = Rank()
    rank.init(settings(), str(tiny_model(tmp_path / "model")))
    Group(task(0), 0, (trajectory([segment(np.random.default_rng(0), 9, 0)], task(0), 0),)).save(tmp_path / "g")
    with pytest.raises(Exception, match="nothing to train"):
        rank.train(({"path": str(tmp_path / "g"), "member": 0, "advantage": 1.0},), 0)


def test_a_cold_start_is_deterministic_and_leaves_a_fresh_optimiser(tmp_path):
    items = write_groups(tmp_path / "groups", [[[(20, 6)]] for _ in range(5)])
    paths = tuple(i["path"] for i in items)
    model = tiny_model(tmp_path / "model")
    ends = []
    for order in (paths, paths[::-1]):
        rank = Rank()
        rank.init(settings(), str(model))
        reply = rank.cold_start(order, steps=8, batch=3, lr=2e-2)
        assert reply["loss_end"] < reply["loss_start"] and reply["loss_tokens"] == 8 * 3 * 6
        assert rank.status()["steps"] == 0
        ends.append(rank._policy.score(np.arange(20, dtype=np.int32)))
    np.testing.assert_array_equal(*ends)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_an_episodes_kl_is_the_sum_over_its_action_tokens(tmp_path, estimator):
    items = tuple({k: i[k] for k in ("path", "member")} for i in write_groups(tmp_path / "groups", SHAPES))
    rank = Rank()
    options = {"kl_coef": 0.1, "kl_in": "reward", "kl_estimator": estimator}
    rank.init(settings(algorithm=options), str(tiny_model(tmp_path / "model")), role="reference")
    reply = rank.kl(items)
    rank.logprobs(items, str(tmp_path / "out"))
    found = read_logprobs(tmp_path / "out")
    want: dict[tuple[int, int], float] = {}
    for row in load_step(items, "token_mean").sequences:
        d = found[row.key].astype(np.float64) - row.rollout
        terms = {"k1": -d, "k2": d * d / 2, "k3": np.exp(d) - d - 1}[estimator]
        want[row.key[1:3]] = want.get(row.key[1:3], 0.0) + float(np.clip(terms, -10, 10).sum())
    assert {(visit, member): kl for visit, member, kl in reply["kl"]} == pytest.approx(want, rel=1e-4)


def test_aggregations_differ_where_lengths_do(tmp_path):
    """Every option changes what it says it changes (SkyRL#2246)."""
    model = tiny_model(tmp_path / "model")
    items = tuple(write_groups(tmp_path / "groups", SHAPES))
    losses = set()
    for aggregation in ("token_mean", "trajectory_mean", "segment_mean"):
        rank = Rank()
        rank.init(settings(algorithm={"aggregation": aggregation}), str(model))
        figures = rank.train(items, 0)
        losses.add(round(figures["loss"], 6))
        count = {"token_mean": "loss_tokens", "trajectory_mean": "trajectories", "segment_mean": "segments"}
        assert figures["denominator"] == figures[count[aggregation]]
    assert len(losses) == 3
