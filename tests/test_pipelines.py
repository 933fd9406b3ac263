"""How the reference's log-probs reach the trainer (RA2P): streamed, aggregated, resident; the step is the same."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file
from tests.run_support import records, run_config
from tests.test_trainer_rank import SHAPES, settings
from tests.world_parts import Processes, processes

import springtide
from springtide.config import Config, ConfigError, make_config
from springtide.runtime.ranks import Rank as RuntimeRank
from springtide.trainer import parts as streaming
from springtide.trainer.data import DataError
from springtide.trainer.driver import Driver
from springtide.trainer.loop import train
from springtide.trainer.rank import Rank
from springtide.trainer.start import open_run
from trainer_parts import tiny_model, write_groups

ALGORITHM = {"kl_coef": 0.1}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    with processes(2, tmp_path_factory.mktemp("logs")) as started:
        yield started


def resident_bytes(process: Any) -> int:
    return 1024 * int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{process.pid}/status").read_text())[1])


def weights(rank: Rank) -> list[bytes]:
    assert rank._policy is not None
    return [p.detach().numpy().tobytes() for p in rank._policy.parameters()]


@pytest.mark.parametrize("inflight", [1, 3])
def test_a_streamed_step_is_the_whole_files_step_to_the_bit(tmp_path: Path, inflight: int) -> None:
    model = tiny_model(tmp_path / "model")
    items = tuple({**i, "advantage": 1.0 - i["member"]} for i in write_groups(tmp_path / "groups", SHAPES))
    tables = {"algorithm": {**ALGORITHM, "old_logprobs": "recompute"}, "trainer": {"micro_tokens": 48}}
    tables["trainer"]["inflight"] = inflight
    reference = Rank()
    reference.init(settings(**tables), str(model), role="reference")
    whole, streamed = Rank(), Rank()
    for rank in (whole, streamed):
        rank.init(settings(**tables), str(model))
    file, directory = str(tmp_path / "whole"), tmp_path / "parts"
    directory.mkdir()
    reference.logprobs(items, file)
    told = reference.logprobs(items, str(directory), streamed=True)
    a = whole.train(items, 0, ref_logprobs=file, old_logprobs=file)
    b = streamed.train(items, 0, ref_logprobs=str(directory), old_logprobs=str(directory), streamed=True)
    assert a["micro_batches"] == len(told["spans"]) > 2
    assert (a["loss"], a["grad_norm"]) == (b["loss"], b["grad_norm"]) and weights(whole) == weights(streamed)
    assert (
        [s[0] for s in b["spans"]].count("forward")
        == [s[0] for s in b["spans"]].count("backward")
        == len(told["spans"])
    )


@pytest.mark.parametrize("inflight", [1, 3])
def test_no_more_forward_passes_run_ahead_than_are_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inflight: int
) -> None:
    """Each holds its activations."""
    model = tiny_model(tmp_path / "model")
    items = tuple(write_groups(tmp_path / "groups", SHAPES))
    rank = Rank()
    rank.init(settings(algorithm=ALGORITHM, trainer={"micro_tokens": 48, "inflight": inflight}), str(model))
    passes: list[str] = []
    monkeypatch.setattr(streaming, "_PART_S", 0.05)
    monkeypatch.setattr(streaming.Parts, "span", lambda self, what, number: lambda: passes.append(what))
    (tmp_path / "parts").mkdir()
    with pytest.raises(DataError, match=r"no reference log-probs of micro-batch 0 within 0\.05 s"):
        rank.train(items, 0, ref_logprobs=str(tmp_path / "parts"), streamed=True)
    assert passes == ["forward"] * inflight


def test_parts_of_other_rows_are_refused(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    items = tuple(write_groups(tmp_path / "groups", SHAPES))
    rank = Rank()
    rank.init(settings(algorithm=ALGORITHM, trainer={"micro_tokens": 48}), str(model))
    (tmp_path / "parts").mkdir()
    reference = Rank()
    reference.init(settings(algorithm=ALGORITHM, trainer={"micro_tokens": 96}), str(model), role="reference")
    reference.logprobs(items, str(tmp_path / "parts"), streamed=True)
    with pytest.raises(DataError, match="are not those of its micro-batch"):
        rank.train(items, 0, ref_logprobs=str(tmp_path / "parts"), streamed=True)


def test_a_loaded_reference_is_in_memory_only_where_it_is_resident(ranks: Processes, tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model", vocab=40_000, tokens=64, hidden=256)
    size = 4 * sum(t.numel() for t in load_file(model / "model.safetensors").values())
    items = tuple(write_groups(tmp_path / "groups", SHAPES))
    held = []
    for pipeline in ("aggregate", "resident", "aggregate"):
        tables = settings(algorithm=ALGORITHM, reference={"pipeline": pipeline})
        world = ranks.world(1, model, tables, reference=str(model))
        first, again = [
            world("logprobs", items=items, out=str(tmp_path / name), reference=True) for name in ("first", "again")
        ]
        assert first["swap_s"] > 0 and (again["swap_s"] < 0.2 * first["swap_s"]) == (pipeline == "resident")
        held.append(resident_bytes(ranks.ranks[0].process) / size)
    assert held[1] - held[0] > 0.5 and held[1] - held[2] > 0.5, held


def test_a_reference_in_the_trainer_does_not_train(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    items = tuple(write_groups(tmp_path / "groups", SHAPES))
    for tables in ({}, {"lora": {"rank": 2}}):  # a reference.path is followed also beside an adapter
        rank = Rank()
        options = {"pipeline": "aggregate", "path": str(model)}
        trainer = {"lr": 0.1, **tables}
        rank.init(settings(algorithm=ALGORITHM, reference=options, trainer=trainer), str(model), reference=str(model))
        rank.logprobs(items, str(tmp_path / "first"), reference=True)
        rank.train(items, 0, ref_logprobs=str(tmp_path / "first"))
        rank.logprobs(items, str(tmp_path / "again"), reference=True)
        rank.logprobs(items, str(tmp_path / "own"))
        assert (tmp_path / "first").read_bytes() == (tmp_path / "again").read_bytes() != (tmp_path / "own").read_bytes()


@pytest.mark.parametrize("sharding", ["replicate", "fsdp"])
def test_two_trainer_ranks_are_fed_by_micro_batch_and_load_a_reference(
    ranks: Processes, tmp_path: Path, sharding: str
) -> None:
    """Also a rank without work: its rounds are empty ones."""
    model = tiny_model(tmp_path / "model")
    tables: dict[str, Any] = {"algorithm": ALGORITHM, "trainer": {"micro_tokens": 48, "sharding": sharding, "ranks": 2}}
    reference = Rank()
    reference.init(settings(**tables), str(model), role="reference")
    for name, shapes in (("many", SHAPES), ("one", [[[(30, 12)]]])):
        items = tuple({**i, "advantage": 1.0 - i["member"]} for i in write_groups(tmp_path / name, shapes))
        (parts := tmp_path / f"{name}-parts").mkdir()
        told = reference.logprobs(items, str(parts), streamed=True)
        assert {rank for _, rank, *_ in told["spans"]} == ({0, 1} if name == "many" else {0})
        figures = []
        for streamed in (True, False):
            world = ranks.world(2, model, settings(**tables, reference={"pipeline": "aggregate"}), reference=str(model))
            if not streamed:
                world("logprobs", items=items, out=str(tmp_path / f"{name}-whole"), reference=True)
            files = str(parts) if streamed else str(tmp_path / f"{name}-whole")
            learned = world("train", items=items, version=0, ref_logprobs=files, streamed=streamed)
            figures.append((learned["loss"], learned["grad_norm"], learned["kl_reference"]))
        assert figures[0] == figures[1]


def test_a_pipeline_that_cannot_be_is_refused_before_the_run() -> None:
    def given(**tables: Any) -> Config:
        return make_config({"suites": [{"use": "db"}], **tables})

    with pytest.raises(ConfigError, match=r"reference\.pipeline: there is no reference without algorithm\.kl_coef"):
        given(reference={"pipeline": "streaming"})
    with pytest.raises(ConfigError, match=r"reference\.pipeline: an adapter is its own reference"):
        given(reference={"pipeline": "aggregate"}, algorithm=ALGORITHM, trainer={"lora": {"rank": 4}})


@pytest.fixture(scope="module")
def runs(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Config]:
    """One synchronous run (it repeats bit for bit) by each pipeline."""
    made = {}
    for pipeline in ("streaming", "aggregate", "resident"):
        made[pipeline] = run_config(
            tiny_model, tmp_path_factory.mktemp("runs"), pipeline, run={"steps": 2},
            algorithm={**ALGORITHM, "equal_rewards": "keep"}, schedule={"policy": "synchronous"},
            reference={"pipeline": pipeline}, trainer={"micro_tokens": 64},
        )  # fmt: skip
        springtide.train(made[pipeline])
    return made


def test_every_pipeline_trains_the_same_run(runs: dict[str, Config]) -> None:
    """Whole runs of real processes, whose every figure of every step is equal to the bit."""
    names = ("loss", "grad_norm", "kl_reference", "loss_tokens")
    figures = {
        pipeline: [[r["trainer"][name] for name in names] for r in records(config)] for pipeline, config in runs.items()
    }
    assert figures["streaming"] == figures["aggregate"] == figures["resident"]
    assert figures["streaming"][-1][2] > 0


def test_the_reference_of_one_micro_batch_overlaps_the_training_of_another(runs: dict[str, Config]) -> None:
    spans = [json.loads(line) for line in (runs["streaming"].run_dir / "spans.jsonl").read_text().splitlines()]
    of = {(s["step"], s["what"], s["micro_batch"]): (s["from"], s["to"]) for s in spans}
    overlaps = []
    for (step, what, number), (begun, ended) in of.items():
        if what == "reference" or (later := of.get((step, "reference", number + 1))) is None:
            continue
        overlaps.append(min(ended, later[1]) - max(begun, later[0]))
    assert max(overlaps) > 0, "reference of micro-batch j+1 beside the training of j"
    for step in (1, 2):
        order = [s["micro_batch"] for s in spans if s["step"] == step and s["what"] == "backward"]
        assert order == sorted(order)
        for number in order:
            assert of[step, "reference", number][1] <= of[step, "backward", number][1]


def test_costs_are_told_to_the_policy_and_the_pipelines_own_are_in_the_figures(runs: dict[str, Config]) -> None:
    for pipeline, config in runs.items():
        events = map(json.loads, (config.run_dir / "events.jsonl").read_text().splitlines())
        costs = {e["what"] for e in events if e["kind"] == "Measured"}
        assert costs == {"train_token", "reference_token"} | ({"swap"} if pipeline != "streaming" else set())
        seconds = records(config)[-1]["trainer"]["seconds"]
        assert seconds["reference_s"] > 0 and ("reference_wait_s" in seconds) == (pipeline == "streaming")


def test_a_smallest_micro_batch_comes_last(tmp_path: Path) -> None:
    """Whoever waits for the last one waits least (tiderl_async 1.4)."""
    model = tiny_model(tmp_path / "model")
    items = tuple(write_groups(tmp_path / "groups", [[[(n, 4)] for n in (60, 8, 50, 40)]]))
    reference = Rank()
    reference.init(settings(algorithm=ALGORITHM, trainer={"micro_tokens": 60}), str(model), role="reference")
    (tmp_path / "parts").mkdir()
    told = reference.logprobs(items, str(tmp_path / "parts"), streamed=True)
    last = max(number for _, _, number, *_ in told["spans"])
    rows = streaming.read_logprobs(streaming.part_file(tmp_path / "parts", 0, last))
    assert [key[2] for key in rows] == [1] and np.isfinite(next(iter(rows.values()))).all()


def test_a_reference_rank_that_is_killed_in_mid_stream_is_replaced_and_the_step_is_trained(
    tiny_model: Path, tmp_path: Path
) -> None:
    config = run_config(
        tiny_model, tmp_path, "killed", run={"steps": 3}, algorithm={**ALGORITHM, "equal_rewards": "keep"},
        trainer={"micro_tokens": 64},
    )  # fmt: skip
    restarts = 0

    async def kill(run: Driver) -> None:
        reference, files = run._runtime.reference, run._runtime.weights / "logprobs"
        assert isinstance(reference, RuntimeRank)
        while run.step < 1 or not list(files.glob("*/*.msgpack")):
            await asyncio.sleep(0.001)
        assert reference.process is not None
        os.kill(reference.process.pid, signal.SIGKILL)

    async def main() -> None:
        nonlocal restarts
        async with open_run(config) as run, asyncio.TaskGroup() as tasks:
            tasks.create_task(kill(run))
            await train(run)
            assert isinstance(run._runtime.reference, RuntimeRank)
            restarts = run._runtime.reference.restarts

    asyncio.run(main())
    steps = records(config)
    assert restarts == 1 and [r["step"] for r in steps] == [1, 2, 3]
    assert all(r["trainer"]["refused"] is None and r["trainer"]["kl_reference"] is not None for r in steps)
