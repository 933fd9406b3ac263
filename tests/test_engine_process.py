"""The engine as others meet it: asynchronous, in its own process, over a socket, and sometimes killed."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine_models import random_ids, tiny
from springtide.chat import load_chat
from springtide.config import make_config
from springtide.engine.client import EngineClient, EngineDeadlines
from springtide.engine.local.engine import EngineSettings, LocalEngine
from springtide.engine.protocol import Engine, EngineError, Sampling
from springtide.env.inprocess import InProcessClient
from springtide.process import start_process
from springtide.rollout.episode import EpisodeSpec, play
from springtide.weights.pins import Pins
from springtide.weights.store import Canary, FingerprintMismatch, StoreError, WeightStore
from springtide.wire import ConnectionLost, DeadlineExceeded, RemoteError

RNG = np.random.default_rng(0)
PROMPT = random_ids(RNG, 40)


def asynchronous(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        asyncio.run(test(**fixtures))

    return run


def publish(directory: Path, versions: int = 1) -> WeightStore:
    store = WeightStore(directory)
    for version in range(1, versions + 1):
        store.publish(version, tiny("qwen3", version - 1).tensors())
        Pins(directory).add(version, "test")
    return store


@contextlib.asynccontextmanager
async def local(directory: Path, versions: int = 1, **sizes: int) -> AsyncIterator[LocalEngine]:
    publish(directory, versions)
    settings = EngineSettings(str(tiny().path), str(directory), **{"kv_tokens": 4096, "max_batch": 8, **sizes})  # type: ignore[arg-type]
    async with LocalEngine.open(settings) as engine:
        yield engine


async def long_turn(engine: Engine, session: str = "long", version: int | None = None) -> None:
    await engine.generate(session, PROMPT, Sampling(0, 0, 400), version=version)


async def until(condition, timeout_s: float = 10) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0)


@asynchronous
async def test_pause_keeps_turns_and_costs_them_nothing(tmp_path) -> None:
    async with local(tmp_path) as engine:
        await engine.load(1)
        expected = await engine.generate("a", PROMPT, Sampling(0, 0, 50))
        started = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(engine.generate("b", PROMPT, Sampling(0, 0, 50)))
            await until(lambda: engine.core.counts["generated"] > 60)
            await engine.pause("keep")
            made = engine.core.counts["generated"]
            await asyncio.sleep(0.1)
            assert engine.core.counts["generated"] == made and not task.done()
            stats = await engine.stats()
            assert stats.paused_s >= 0.09 and stats.running == 1
            queued = tasks.create_task(engine.generate("c", PROMPT, Sampling(0, 0, 5)))
            await asyncio.sleep(0.1)
            await engine.resume()
        np.testing.assert_array_equal(task.result().ids, expected.ids)
        assert expected.paused_s == 0
        assert task.result().paused_s >= 0.19
        assert 0.09 <= queued.result().paused_s < task.result().paused_s
        for turn in (task.result(), queued.result()):
            assert turn.queue_s >= 0 and turn.decode_s >= 0
            assert turn.queue_s + turn.decode_s + turn.paused_s <= time.monotonic() - started


@asynchronous
async def test_pause_abort_ends_every_turn_with_its_cause(tmp_path) -> None:
    async with local(tmp_path, max_batch=1) as engine:
        await engine.load(1)
        turns = [asyncio.ensure_future(long_turn(engine, f"s{i}")) for i in range(3)]
        await until(lambda: engine.core.running)
        await engine.pause("abort")
        for result in await asyncio.gather(*turns, return_exceptions=True):
            assert isinstance(result, EngineError) and "paused" in str(result)
        after = asyncio.ensure_future(engine.generate("s0", PROMPT, Sampling(0, 0, 5)))
        await asyncio.sleep(0.02)
        assert not after.done()
        await engine.resume()
        assert len((await after).ids) == 5


@asynchronous
async def test_times_add_up_and_idleness_has_a_cause(tmp_path) -> None:
    started = time.monotonic()
    async with local(tmp_path) as engine:
        waiting = asyncio.ensure_future(engine.generate("a", PROMPT, Sampling(0, 0, 20)))
        await asyncio.sleep(0.05)
        assert (await engine.stats()).waiting == 1
        await engine.load(1)
        await waiting
        await asyncio.sleep(0.05)
        stats = await engine.stats()
        total = stats.busy_s + stats.idle_s + stats.paused_s
        assert total <= time.monotonic() - started
        assert total >= 0.1
        assert stats.busy_s > 0
        causes = stats.extra["idle_causes"]
        assert causes["no_weights"] >= 0.04 and causes["no_requests"] >= 0.04
        assert sum(causes.values()) == pytest.approx(stats.idle_s)


@asynchronous
async def test_slots_free_the_oldest_unpinned_version_once_drained(tmp_path) -> None:
    async with local(tmp_path, versions=5, weight_slots=3) as engine:
        for version in (1, 2, 3):
            await engine.load(version)
        running = asyncio.ensure_future(long_turn(engine, version=1))
        await until(lambda: engine.core.turns_of(1))
        await engine.load(4)  # 2 is idle, so it goes before 1, which is busy
        assert list(engine.core.decoders) == [1, 3, 4] and not running.done()
        await engine.pin(3)
        await engine.pin(4)
        loading = asyncio.ensure_future(engine.load(5))
        await asyncio.sleep(0)
        late = await engine.generate("late", PROMPT, Sampling(0, 0, 3), version=1)
        assert late.version == 4 and not running.done()
        await loading
        assert running.done() and list(engine.core.decoders) == [3, 4, 5]
        await engine.pin(5)
        with pytest.raises(EngineError, match=r"all 3 weight slots are pinned \(\[3, 4, 5\]\)"):
            await engine.load(2)
        await engine.drop(3)
        await engine.drop(5)  # the newest: only unpinned
        assert list(engine.core.decoders) == [4, 5]
        with pytest.raises(EngineError, match="version 1 is not loaded"):
            await engine.pin(1)


@asynchronous
async def test_one_slot_serves_each_version_in_turn(tmp_path) -> None:
    async with local(tmp_path, versions=2, weight_slots=1) as engine:
        await engine.load(1)
        running = asyncio.ensure_future(engine.generate("a", PROMPT, Sampling(0, 0, 100)))
        await until(lambda: engine.core.running)
        loading = asyncio.ensure_future(engine.load(2))
        await asyncio.sleep(0)
        late = asyncio.ensure_future(engine.generate("b", PROMPT, Sampling(0, 0, 3)))
        await loading
        assert ((await running).version, (await late).version) == (1, 2)


@asynchronous
async def test_a_load_that_needs_a_paused_turns_slot_is_refused_and_a_released_turn_frees_it(tmp_path) -> None:
    """prime-rl#2673: a pause without a way out."""
    async with local(tmp_path, versions=2, weight_slots=1) as engine:
        await engine.load(1)
        running = asyncio.ensure_future(long_turn(engine))
        await until(lambda: engine.core.running)
        await engine.pause("keep")
        with pytest.raises(EngineError, match="resume first"):
            await engine.load(2)
        await engine.resume()
        loading = asyncio.ensure_future(engine.load(2))
        await asyncio.sleep(0)
        await engine.release("long")
        async with asyncio.timeout(5):
            await loading
        with pytest.raises(EngineError, match="released"):
            await running


@asynchronous
async def test_weights_that_are_not_what_was_published_are_not_used(tmp_path) -> None:
    from safetensors.torch import load_file, save_file

    async with local(tmp_path, versions=2) as engine:
        await engine.load(1)
        path = tmp_path / "2" / "weights.safetensors"
        tensors = load_file(path)
        tensors["model.norm.weight"] *= 1.01
        save_file(tensors, path)
        with pytest.raises(FingerprintMismatch, match=r"model\.norm\.weight"):
            await engine.load(2)
        with pytest.raises(StoreError, match="version 9"):
            await engine.load(9)
        assert (await engine.generate("a", PROMPT, Sampling(0, 0, 3))).version == 1


@asynchronous
async def test_the_canary_notices_that_engine_and_trainer_compute_differently(tmp_path) -> None:
    """verl#7495, ms-swift#9855: the bytes arrived, and still the engine did not run the trainer's policy."""
    ids = tuple(PROMPT.tolist())
    right = tuple(tiny().logprobs(PROMPT).tolist())
    wrong = (right[0] + 0.01, *right[1:])
    async with local(tmp_path) as engine:
        engine.store.publish(2, tiny().tensors(), Canary(ids, right))
        engine.store.publish(3, tiny().tensors(), Canary(ids, wrong))
        await engine.load(2)
        with pytest.raises(FingerprintMismatch, match=r"version 3: the canary's log-probs differ by 0\.01"):
            await engine.load(3)
        assert engine.core.newest == 2


@asynchronous
async def test_weights_that_are_not_finite_are_refused_by_name_and_not_as_a_mismatch(tmp_path) -> None:
    broken = {name: tensor.clone() for name, tensor in tiny().tensors().items()}
    broken["model.layers.1.mlp.up_proj.weight"][3, 3] = float("nan")
    canary = Canary(tuple(PROMPT.tolist()), (float("nan"),) * (len(PROMPT) - 1))
    async with local(tmp_path) as engine:
        await engine.load(1)
        engine.store.publish(2, broken, canary)
        engine.store.publish(3, tiny().tensors(), canary)
        with pytest.raises(EngineError, match=r"version 2: model\.layers\.1\.mlp\.up_proj\.weight .*not finite"):
            await engine.load(2)
        with pytest.raises(EngineError, match=r"version 3: the publisher's own .*not finite"):
            await engine.load(3)
        assert engine.core.newest == 1


@asynchronous
async def test_episodes_of_an_evaluation_go_before_training_in_the_engine(tiny_model, tmp_path) -> None:
    suite = f"{Path(__file__).with_name('talk.py')}:NoSleepers"
    settings = EngineSettings(str(tiny_model), str(tmp_path), kv_tokens=4096)
    async with InProcessClient((suite,)) as env, LocalEngine.open(settings) as engine:  # without weights: all wait
        ref, chat = (await env.catalog(suite, "train", "quick"))[0], load_chat(tiny_model)
        episodes = []
        for visit, purpose in enumerate(("train", "train", "eval", "train", "eval")):
            spec = EpisodeSpec(ref, visit, 0, 0, purpose, 0, 1.0, 5, 256)
            episodes.append(asyncio.ensure_future(play(spec, env, engine, chat)))
            await until(lambda: len(engine.core.waiting) == len(episodes))
        order = [request.session.split("/")[:2] for request in engine.core.waiting]
        assert order == [["eval", "2"], ["eval", "4"], ["train", "0"], ["train", "1"], ["train", "3"]]
        for episode in episodes:
            episode.cancel()
        await asyncio.gather(*episodes, return_exceptions=True)
        assert not engine.core.waiting


@asynchronous
async def test_an_rpc_is_answered_within_about_a_step_while_the_engine_works(tmp_path) -> None:
    async with local(tmp_path) as engine:
        await engine.load(1)
        turns = [asyncio.ensure_future(long_turn(engine, f"s{i}")) for i in range(6)]
        await until(lambda: engine.core.running == 6)
        before = engine.core.counts["generated"]
        for _ in range(20):
            await engine.stats()
            await asyncio.sleep(0)
        assert engine.core.counts["generated"] - before <= 6 * 20
        await engine.pause("abort")
        await asyncio.gather(*turns, return_exceptions=True)


ENGINE = {"kv_tokens": 4096, "max_batch": 8, "prefill_chunk": 64}


@contextlib.asynccontextmanager
async def process(directory: Path, versions: int = 1):
    publish(directory / "store", versions)
    config = make_config({"suites": [{"use": "db"}], "engine": ENGINE}).model_dump(mode="json")
    args = {"model": str(tiny().path), "store": str(directory / "store"), "config": config}
    async with start_process("engine", "springtide.engine.server:main", args, log_path=directory / "log") as child:
        yield child


@asynchronous
async def test_many_clients_share_an_engine_process_until_it_is_killed(tmp_path) -> None:
    """One process for the whole walk, as starting one costs seconds."""
    async with process(tmp_path, versions=2) as child:
        address = child.client._writer.get_extra_info("peername")
        async with contextlib.AsyncExitStack() as stack:
            one, two = [await stack.enter_async_context(EngineClient.connect(address)) for _ in range(2)]
            await one.load(1)
            results = await asyncio.gather(
                *(
                    c.generate(f"{n}", PROMPT, Sampling(n, 0, 8), prefix="g", priority=n)
                    for n, c in enumerate((one, two))
                )
            )
            for result in results:
                expected = tiny().logprobs(np.concatenate((PROMPT, result.ids)))[len(PROMPT) - 1 :]
                np.testing.assert_allclose(result.logprobs, expected, atol=1e-4)
            assert sum(r.computed_tokens for r in results) == len(PROMPT)

            with pytest.raises(EngineError, match="exceed the engine's 512"):
                await one.generate("x", PROMPT, Sampling(0, 0, 1000))
            with pytest.raises(RemoteError, match="StoreError"):
                await one.load(77)
            too_long = {"session": "m1", "ids": PROMPT, "sampling": Sampling(0, 0, 1000)}
            fine = {"session": "m0", "ids": PROMPT, "sampling": Sampling(0, 0, 5), "prefix": "g"}
            many = await two.generate_many((fine, too_long))
            assert len(many[0].ids) == 5 and "exceed" in many[1]

            hasty = EngineClient(two._client, EngineDeadlines(generate=0.05))
            await one.pause("keep")
            with pytest.raises(DeadlineExceeded, match="session h, 40 prompt tokens"):
                await hasty.generate("h", PROMPT, Sampling(0, 0, 400))
            await one.resume()
            stats = await one.stats()
            assert (stats.running, stats.waiting) == (0, 0)

            # a client that goes away takes its turns and sessions with it
            sessions = stats.sessions
            third = await stack.enter_async_context(EngineClient.connect(address))
            lost = asyncio.ensure_future(third.generate("third", PROMPT, Sampling(0, 0, 400)))
            while (await one.stats()).running == 0:
                await asyncio.sleep(0.002)
            await third._client.close()
            lost.cancel()
            async with asyncio.timeout(5):
                while (await one.stats()).running or (await one.stats()).sessions > sessions:
                    await asyncio.sleep(0.002)

            # verl#6583, verl-omni#433: a dead engine must not be waited for
            pending = asyncio.ensure_future(one.generate("last", PROMPT, Sampling(0, 0, 400)))
            await asyncio.sleep(0.005)
            killed = time.monotonic()
            child.kill()
            with pytest.raises(ConnectionLost):
                await pending
            with pytest.raises(ConnectionLost):
                await two.stats()
            assert time.monotonic() - killed < 1.0


def test_clients_and_pins_need_no_torch() -> None:
    code = "import sys, springtide.engine.client, springtide.weights.pins; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
