"""vLLM as an engine, over a real server.

    SPRINGTIDE_VLLM_PYTHON=vllm/bin/python pytest tests/test_vllm_server.py -m slow

Servers take half a minute to start on a free machine, so each test does many things with its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.engine_models import Tiny
from tests.run_support import descendants, records, run_config, start_run, wait_for
from transformers import AutoModelForCausalLM

from springtide.config import make_config
from springtide.engine.client import EngineClient
from springtide.engine.protocol import EngineError, Sampling
from springtide.ledger import Ledger
from springtide.models.presets import resolve_model
from springtide.process import Process, start_process
from springtide.trace import Group
from springtide.weights.store import Canary, WeightStore
from springtide.wire import ConnectionLost

PYTHON = os.environ.get("SPRINGTIDE_VLLM_PYTHON")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PYTHON is None, reason="SPRINGTIDE_VLLM_PYTHON names no environment with vLLM (docs/vllm.md)"),
]
VLLM = {"kind": "vllm", "kv_tokens": 8192, "vllm": {"python": PYTHON, "args": ["--enforce-eager"]}}
NANO = resolve_model("springtide-nano")  # vLLM's attention on a CPU knows no heads smaller than 32
PROMPT = np.random.default_rng(0).integers(5, 200, 70).astype(np.int32)
CONTEXT = 256


def publish(store: Path, model: Path, versions: int) -> dict[int, Tiny]:
    """Versions 1..n of the model's weights, each moved further; transformers' model of each."""
    store.mkdir()
    kept, made = WeightStore(store), {}
    for version in range(1, versions + 1):
        copy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in copy.parameters():
                parameter += 0.02 * version * torch.randn(parameter.shape, generator=generator)
        made[version] = tiny = Tiny(model, copy)
        ids = PROMPT[:32]
        canary = Canary(tuple(ids.tolist()), tuple(tiny.logprobs(ids).tolist()))
        kept._pins.add(version, "test")
        kept.publish(version, {n: p.detach() for n, p in copy.named_parameters()}, canary)
    return made


@contextlib.asynccontextmanager
async def engine(model: Path, store: Path, log: Path) -> AsyncIterator[tuple[Process, EngineClient]]:
    config = make_config({"suites": [{"use": "db"}], "model": {"context": CONTEXT}, "engine": VLLM})
    args = {"model": str(model), "store": str(store), "config": config.model_dump(mode="json"), "index": 0}
    async with start_process(
        "engine", "springtide.engine.vllm:main", args, log_path=log, deadline_s=600, silent_s=60
    ) as child:
        yield child, EngineClient(child.client)


def listening_beyond_loopback(pids: set[int]) -> list[str]:
    """Local addresses (hex) of TCP sockets that any of the processes listens on, loopback aside."""
    inodes = set()
    for pid in pids:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                inodes.add(os.readlink(fd))
    found = []
    for table, loopback in (("tcp", ("0100007F",)), ("tcp6", ("0" * 24 + "01000000",))):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes and not fields[1].startswith(loopback):
                found.append(fields[1])
    return found


def named(pids: set[int], name: str) -> int:
    return next(p for p in pids if name in Path(f"/proc/{p}/cmdline").read_text().replace("\0", " "))


def test_every_version_reaches_the_live_model_and_log_probs_are_those_of_the_draw(tmp_path: Path) -> None:
    models, store = publish(tmp_path / "store", NANO, 3), tmp_path / "store"

    async def walk() -> None:
        async with engine(NANO, store, tmp_path / "log") as (child, client):
            for version, model in models.items():
                await client.load(version)
                for number, temperature in enumerate((1.0, 0.7, 0.0)):
                    sampling = Sampling(version, number, 24, temperature, (2,))
                    turns = [client.generate(f"s{i}", PROMPT, sampling, prefix="g") for i in range(4)]
                    first, *others = await asyncio.gather(*turns)
                    full = np.concatenate([PROMPT, first.ids])
                    expected = model.logprobs(full, temperature or 1.0)[len(PROMPT) - 1 :]
                    np.testing.assert_allclose(first.logprobs, expected, atol=1e-4)
                    assert first.version == version and (first.finish == "stop") == (first.ids[-1] == 2)
                    assert number == 0 or all(t.cached_tokens == 64 for t in (first, *others))
                    if number == 0:  # of the version before, nothing may be used
                        assert min(t.cached_tokens for t in (first, *others)) == 0
                    again = await client.generate("s0", PROMPT, sampling)
                    assert again.recomputed_tokens == len(PROMPT) - 64
                forced = await client.generate("f", PROMPT[:40], Sampling(0, 0, 30), forced_ids=PROMPT[40:])
                np.testing.assert_allclose(forced.logprobs, model.logprobs(PROMPT)[39:], atol=1e-4)
            seeds = [(await client.generate("x", PROMPT, Sampling(seed, 0, 12))).ids.tolist() for seed in (1, 1, 2)]
            assert seeds[0] == seeds[1] != seeds[2]

            below = descendants(child.pid)
            assert len(below) >= 3 and listening_beyond_loopback(below) == []

            # What is wrong on its way is refused by the reader, before it touches the model.
            shutil.copytree(store / "2", store / "4")
            file = store / "4" / "weights.safetensors"
            broken = bytearray(file.read_bytes())
            broken[-1001] ^= 0x40
            file.write_bytes(broken)
            with pytest.raises(EngineError, match=r"version 2: .* differs from what was published"):
                await client.load(4)

        assert child.returncode == 0
        wait_for("the server's end", lambda: not any(Path(f"/proc/{p}").exists() for p in below))

    asyncio.run(walk())


def test_a_server_that_dies_in_the_middle_of_an_update_ends_its_engine_with_the_cause(tmp_path: Path) -> None:
    publish(tmp_path / "store", NANO, 2)

    async def walk() -> None:
        async with engine(NANO, tmp_path / "store", tmp_path / "log") as (child, client):
            await client.load(1)
            below = descendants(child.pid)
            os.kill(named(below, "VLLM::Worker"), signal.SIGSTOP)
            loading = asyncio.create_task(client.load(2))
            await asyncio.sleep(1)
            assert not loading.done()
            os.kill(named(below, "vllm_worker import serve"), signal.SIGKILL)
            with pytest.raises(ConnectionLost):
                await loading
            await asyncio.wait_for(child.exited.wait(), 30)
            assert "vLLM ended with status -9" in str(child.failure())
        wait_for("the server's end", lambda: not any(Path(f"/proc/{p}").exists() for p in below))

    asyncio.run(walk())


def test_a_run_plays_on_vllm_and_learns_from_its_tokens(tmp_path: Path) -> None:
    """With a stale pool on a server of its own, an evaluation beside training, and a server killed in the middle."""
    tables: dict[str, Any] = {
        "run": {"steps": 8},
        "engine": VLLM,
        "runtime": {"start_s": 600},
        "rollout": {"stale_probability": 0.3, "stale_refresh": 2, "group": {"n": 4, "deadline_s": 900}},
        "algorithm": {"equal_rewards": "keep"},  # the shipped model may say the same to all of a group
        "eval": {"every": 3, "tasks": 4, "at_ends": False, "greedy": False},
    }
    config = run_config(NANO, tmp_path / "runs", **tables)
    run = start_run(config, output=tmp_path / "out")
    try:
        log = config.run_dir / "metrics.jsonl"
        wait_for("two steps", lambda: log.exists() and len(records(config)) >= 2, 900)
        os.kill(named(descendants(run.pid), "VLLM::EngineCore"), signal.SIGKILL)
        assert run.wait(1800) == 0, (tmp_path / "out").read_text()[-3000:]
    finally:
        if run.poll() is None:
            run.terminate()
            run.wait(60)
    steps = records(config)
    assert [r["step"] for r in steps] == list(range(1, 9))
    assert sum(n for name, n in steps[-1]["restarts"].items() if name.startswith("engine")) >= 1
    assert all(r["trainer"]["gap_mean"] < 1e-4 for r in steps if r["trainer"]["gap_tokens"])
    assert {r["label"] for r in records(config, "eval")} == {"step 3", "step 6"}
    audit = Ledger(config.run_dir / "ledger.sqlite").audit()
    assert audit["trained"] == 8 * config.trainer.groups * config.rollout.group.n
    policies = set()
    for file in (config.run_dir / "trajectories").glob("0*.msgpack"):
        for trajectory in Group.load(file).trajectories:
            policies |= {t.policy for t in trajectory.turns}
    assert policies == {"current", "stale"}
