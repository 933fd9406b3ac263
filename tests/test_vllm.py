"""vLLM as an engine, without its server: what is checked, asked and read, and what each fault says.

`test_vllm_server.py` holds the same to a real server.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.fake_vllm import Answers, fake_vllm
from tokenizers import Tokenizer

from springtide.config import Config, ConfigError, make_config
from springtide.engine import vllm
from springtide.engine.protocol import EVALUATION, EngineError, Generation, Sampling
from springtide.engine.vllm import VllmEngine, read_reply, request_body, turn_seed
from springtide.engine.vllm_server import (
    VllmSettings,
)
from springtide.models.presets import resolve_model
from springtide.process import ProcessFailed
from springtide.rollout.seat import Seat
from springtide.runtime.local import Runtime
from springtide.weights.pins import Pins
from springtide.weights.store import Canary, WeightStore

PROMPT = np.arange(10, 20, dtype=np.int32)
URL = "http://127.0.0.1:1"


def asynchronous(test: Callable[..., Any]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), 30))

    return run


def config(*, context: int = 256, **engine: Any) -> Config:
    engine = {"kind": "vllm", "vllm": {"urls": [URL], "start_s": 0.5}, **engine}
    return make_config({"suites": [{"use": "db"}], "model": {"context": context}, "engine": engine})


# --- the configuration -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({"engine": {"kind": "vllm"}}, "engine.kind.*needs engine.vllm.python"),
        ({"engine": {"kind": "vllm", "vllm": {"python": "p", "urls": [URL]}}}, "needs engine.vllm.python"),
        ({"engine": {"vllm": {"python": "p"}}}, 'engine.vllm: is read with engine.kind = "vllm" only'),
        ({"engine": {"kind": "vllm", "ranks": 2, "vllm": {"urls": [URL]}}}, "1 servers for 2 engines"),
        (
            {"engine": {"kind": "vllm", "vllm": {"urls": [URL]}}, "rollout": {"stale_probability": 0.1}},
            "1 servers for 2 engines .a stale pool needs its own",
        ),
        ({"engine": {"kind": "vllm", "vllm": {"urls": [URL]}}, "rollout": {"temperature": 0.005}}, "below 0.01"),
        ({"engine": {"kind": "vllm", "vllm": {"urls": ["localhost:8000"]}}}, "no vLLM server's URL"),
    ],
)
def test_a_contradiction_is_one_line(tables: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_config({"suites": [{"use": "db"}], **tables})


def test_a_stale_pool_is_one_more_engine_and_evaluations_need_no_slot() -> None:
    tables = {"suites": [{"use": "db"}], "rollout": {"stale_probability": 0.1}, "eval": {"every": 5}}
    made = make_config({**tables, "engine": {"kind": "vllm", "ranks": 2, "vllm": {"python": "p"}}})
    assert made.stale_apart and made.engines == 3 and made.engine.slots == 1
    urls = [f"http://127.0.0.1:{i + 1}" for i in range(3)]
    given = make_config({**tables, "engine": {"kind": "vllm", "ranks": 2, "vllm": {"urls": urls}}})
    args = {"model": "m", "store": "s", "config": given.model_dump(mode="json")}
    settings = [VllmSettings.of({**args, "index": i}) for i in range(3)]
    assert [s.stale for s in settings] == [False, False, True] and [s.url for s in settings] == urls
    local = make_config(tables)
    assert not local.stale_apart and local.engines == 1 and local.engine.slots == 4


# --- requests and replies ----------------------------------------------------------------------------------------


def test_a_request_says_every_parameter_of_its_draw() -> None:
    body = request_body(PROMPT, Sampling(7, 2, 12, 0.6, (3, 4)), (1 << 32) + 5, EVALUATION)
    assert body["token_ids"] == PROMPT.tolist() and body["cache_salt"] == str((1 << 32) + 5) and body["priority"] == -1
    assert body["sampling_params"] == {
        "max_tokens": 12,
        "temperature": 0.6,
        "seed": turn_seed(7, 2),
        "stop_token_ids": [3, 4],
        "ignore_eos": True,
        "logprobs": 0,
        "detokenize": False,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
    }
    seeds = {turn_seed(seed, turn) for seed in (0, 1, 2**63 - 1) for turn in range(50)}
    assert len(seeds) == 150 and all(0 <= s < 2**63 for s in seeds)


def reply(**changes: Any) -> dict[str, Any]:
    choice = {
        "token_ids": [5, 6],
        "finish_reason": "stop",
        "logprobs": {"content": [{"token_id": 5, "logprob": -0.5}, {"token_id": 6, "logprob": -1.5}]},
        "weight_versions": [{"version": "9", "start": 0, "end": 2}],
    }
    return {"choices": [{**choice, **changes}], "usage": {"prompt_tokens_details": {"cached_tokens": 32}}}


def test_a_reply_is_read_as_it_was_drawn() -> None:
    ids, logprobs, finish, cached = read_reply(reply(), 9)
    assert ids.tolist() == [5, 6] and ids.dtype == np.int32 and logprobs.dtype == np.float32
    assert logprobs.tolist() == [-0.5, -1.5] and (finish, cached) == ("stop", 32)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (reply(finish_reason="abort"), "ended the turn with 'abort'"),
        (reply(token_ids=[5, 7]), r"log-probs are of the tokens \[5, 6\]..., its reply is \[5, 7\]"),
        (reply(token_ids=[], logprobs={"content": []}), "its reply is"),
        (reply(logprobs={"content": [{"token_id": t, "logprob": -9999.0} for t in (5, 6)]}), "are no numbers"),
        (reply(logprobs={"content": [{"token_id": t, "logprob": 0.5} for t in (5, 6)]}), "are no numbers"),
        (reply(weight_versions=[{"version": "8", "start": 0, "end": 1}]), r"the weights of version \['8'\], not of 9"),
        (reply(weight_versions=None), r"the weights of version \[\], not of 9"),
        (reply(logprobs=None), "is no turn"),
        ({"choices": []}, "is no turn"),
    ],
)
def test_a_reply_that_cannot_be_trained_on_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(EngineError, match=said):
        read_reply(given, 9)


# --- the engine over a stand-in ----------------------------------------------------------------------------------


@pytest.fixture
def answers(tiny_model: Path) -> Answers:
    return Answers(Tokenizer.from_file(str(tiny_model / "tokenizer.json")))


@asynccontextmanager
async def opened(model: Path, store: Path, answers: Answers, *, stale: bool = False) -> AsyncIterator[VllmEngine]:
    async with fake_vllm(answers) as url:
        async with VllmEngine.open(VllmSettings(str(model), str(store), config(), url, stale)) as engine:
            answers.asked.clear()
            yield engine


def publish(store: Path, *versions: int, value: float | None = None, canary: float = -1.0) -> None:
    store.mkdir(exist_ok=True)
    for version in versions:
        weight = torch.full((4,), float(version) if value is None else value)
        WeightStore(store).publish(version, {"w": weight}, Canary((1, 2, 3), (canary, canary)))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"version": "0.31.0"}, "holds vLLM 0.31.0; supported"),
        ({"rl_routes": False}, "takes no weights from us .*Not Found.*start it as docs/vllm.md says"),
        ({"text": "something else"}, "ids and text differ at character 0: ids say .*, the text 'something else'; mend"),
    ],
)
def test_a_server_that_is_not_what_the_run_needs_is_refused_by_name(
    tiny_model: Path, tmp_path: Path, answers: Answers, changes: dict[str, Any], said: str
) -> None:
    @asynchronous
    async def check() -> None:
        for name, value in changes.items():
            setattr(answers, name, value)
        with pytest.raises(ConfigError, match=said):
            async with opened(tiny_model, tmp_path, answers):
                pass

    check()


@asynchronous
async def test_a_server_with_another_tokenizer_is_refused(tiny_model: Path, tmp_path: Path, answers: Answers) -> None:
    answers.tokenizer = Tokenizer.from_file(str(resolve_model("springtide-nano") / "tokenizer.json"))
    with pytest.raises(ConfigError, match=r"has another tokenizer than .*: ids differ at 0 of a probe"):
        async with opened(tiny_model, tmp_path, answers):
            pass


@asynchronous
async def test_a_url_where_nobody_answers_is_said_at_once(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(store: Path, url: str, start_s: float, said: str) -> None:
        run = config(vllm={"urls": [url], "start_s": start_s})
        with pytest.raises(ProcessFailed, match=said) as caught:
            async with VllmEngine.open(VllmSettings(str(tiny_model), str(store), run, url)):
                pass
        assert "\n" not in str(caught.value)

    monkeypatch.setattr(vllm, "_REACH_S", 0.2)
    here, nowhere = r"nobody answers at http://127.0.0.1:1 \(engine.vllm.urls\): ", "http://nobody.invalid:1"
    await refused(tmp_path, URL, 25, f"{here}Connection refused; start it first")
    await refused(tmp_path, nowhere, 25, r"nobody answers at http://nobody.invalid:1 .*: .*; start it first")
    publish(tmp_path / "s", 1)  # a run that has begun waits for its server, which may be started again
    await refused(tmp_path / "s", URL, 0.5, "1 was not up within engine.vllm.start_s = 0.5 s: Connection refused")


@asynchronous
async def test_a_given_server_that_was_left_in_the_middle_of_an_update_serves_again(
    tiny_model: Path, tmp_path: Path, answers: Answers
) -> None:
    publish(tmp_path / "s", 1)
    answers.paused, answers.updating, answers.canary = True, True, (-1.0, -1.0)
    async with asyncio.timeout(20), opened(tiny_model, tmp_path / "s", answers) as engine:
        await engine.load(1)
        assert (await engine.generate("a", PROMPT, Sampling(1, 0, 4))).version == 1


@asynchronous
async def test_a_version_is_taken_between_turns_and_salts_their_kv(
    tiny_model: Path, tmp_path: Path, answers: Answers
) -> None:
    publish(tmp_path / "s", 1, 2)
    answers.canary = (-1.0, -1.0)
    async with opened(tiny_model, tmp_path / "s", answers) as engine:
        await engine.load(1)
        assert answers.paths() == [
            "pause", "start_weight_update", "update_weights", "finish_weight_update", "resume",
            "weight_checker", "inference/v1/generate",
        ]  # fmt: skip
        assert answers.asked[0][2] == {"mode": "wait"} and answers.asked[2][1] == {"update_info": {"version": 1}}
        answers.slow = asyncio.Event()
        running = asyncio.create_task(engine.generate("a", PROMPT, Sampling(1, 0, 4)))
        while "inference/v1/generate" not in answers.paths()[7:]:
            await asyncio.sleep(0.01)
        loading = asyncio.create_task(engine.load(2))
        waiting = asyncio.create_task(engine.generate("b", PROMPT, Sampling(1, 0, 4)))
        await asyncio.sleep(0.05)
        assert answers.paths().count("pause") == 1, "an update does not cut a turn"
        assert (await engine.stats()).waiting == 1
        answers.slow.set()
        first, second = await running, await waiting
        await loading
        assert (first.version, second.version) == (1, 2)
        salts = [body["cache_salt"] for _, body, _ in answers.asked if "cache_salt" in body]
        assert salts == ["1", "2"]
        stats = await engine.stats()
        assert (stats.newest, stats.versions, stats.generated_tokens, stats.running) == (2, (2,), 8, 0)
        assert stats.kv_tokens == stats.kv_capacity // 4 and stats.cached_tokens == 6


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"update": (500, "FingerprintMismatch: w differs from what was published")},
            "500: FingerprintMismatch: w dif",
        ),
        ({"canary": (-1.0, -1.5)}, "the canary's log-probs differ by 0.5 .*do not compute the same model"),
        ({"canary": (float("nan"), -1.0)}, "differ by nan"),
        ({"checksums": {"w": "the same"}}, "those of the version before; nothing arrived"),
    ],
)
def test_weights_that_did_not_arrive_are_never_drawn_from(
    tiny_model: Path, tmp_path: Path, answers: Answers, changes: dict[str, Any], said: str
) -> None:
    """verl#7495, ms-swift#9855, OpenRLHF#1349: updates that never reached the engine looked like staleness."""

    @asynchronous
    async def check() -> None:
        publish(tmp_path / "s", 1, 2)
        answers.canary = (-1.0, -1.0)
        if "checksums" in changes:
            answers.checksums = changes["checksums"]
        async with opened(tiny_model, tmp_path / "s", answers) as engine:
            await engine.load(1)
            for name, value in changes.items():
                setattr(answers, name, value)
            with pytest.raises(EngineError, match=said):
                await engine.load(2)
            turn = asyncio.create_task(engine.generate("a", PROMPT, Sampling(1, 0, 4)))
            await asyncio.sleep(0.1)
            assert not turn.done()
            turn.cancel()

    check()


@asynchronous
async def test_equal_weights_published_twice_are_no_fault(tiny_model: Path, tmp_path: Path, answers: Answers) -> None:
    publish(tmp_path / "s", 1, 2, value=0.5)
    answers.canary, answers.checksums = (-1.0, -1.0), {"w": "the same"}
    async with opened(tiny_model, tmp_path / "s", answers) as engine:
        await engine.load(1)
        await engine.load(2)


@asynchronous
async def test_weights_that_training_broke_are_refused_before_the_server_sees_them(
    tiny_model: Path, tmp_path: Path, answers: Answers
) -> None:
    publish(tmp_path / "s", 1, value=float("inf"))
    async with opened(tiny_model, tmp_path / "s", answers) as engine:
        with pytest.raises(EngineError, match="w holds values that are not finite: training broke its weights"):
            await engine.load(1)
        assert answers.paths() == []
        with pytest.raises(EngineError, match="version 7 is not in"):
            await engine.load(7)


@asynchronous
async def test_the_stale_pool_draws_no_turn_of_another_version_and_the_rest_goes_on(
    tiny_model: Path, tmp_path: Path, answers: Answers
) -> None:
    publish(tmp_path / "s", 1)
    answers.canary = (-1.0, -1.0)
    for stale in (True, False):
        async with opened(tiny_model, tmp_path / "s", answers, stale=stale) as engine:
            await engine.load(1)
            assert (await engine.generate("a", PROMPT, Sampling(1, 0, 4), version=1)).version == 1
            if stale:
                with pytest.raises(EngineError, match="the stale pool no longer holds version 0"):
                    await engine.generate("a", PROMPT, Sampling(1, 0, 4), version=0)
            else:
                assert (await engine.generate("a", PROMPT, Sampling(1, 0, 4), version=0)).version == 1


@asynchronous
async def test_a_pinned_version_stays_and_a_paused_engine_refuses_an_update(
    tiny_model: Path, tmp_path: Path, answers: Answers
) -> None:
    publish(tmp_path / "s", 1, 2)
    answers.canary = (-1.0, -1.0)
    async with opened(tiny_model, tmp_path / "s", answers) as engine:
        with pytest.raises(EngineError, match="version 1 is not loaded"):
            await engine.pin(1)
        await engine.load(1)
        await engine.pin(1)
        with pytest.raises(EngineError, match="version 1 is pinned, and vLLM holds one"):
            await engine.load(2)
        await engine.drop(1)
        await engine.pause("keep")
        with pytest.raises(EngineError, match="the engine is paused"):
            await engine.load(2)
        turn = asyncio.create_task(engine.generate("a", PROMPT, Sampling(1, 0, 4)))
        given_up = asyncio.create_task(engine.generate("b", PROMPT, Sampling(1, 0, 4)))
        await asyncio.sleep(0.1)
        assert not turn.done()
        engine.forget("b")  # its caller has given up, and may come back
        again = asyncio.create_task(engine.generate("b", PROMPT, Sampling(1, 1, 4)))
        await asyncio.sleep(0)
        await engine.resume()
        generation = await turn
        with pytest.raises(EngineError, match="session b was released"):
            await given_up
        assert len((await again).ids) == 4
        assert generation.paused_s >= 0.09 and generation.queue_s < 0.09 and generation.decode_s < 0.09
        await engine.load(2)
        assert ("pause", {}, {"mode": "keep"}) in answers.asked
        stats = await engine.stats()
        assert stats.paused_s >= 0.09 and stats.extra["pinned"] == []


@asynchronous
async def test_a_released_session_ends_its_turn_and_refusals_name_their_cause(
    tiny_model: Path, tmp_path: Path, answers: Answers
) -> None:
    publish(tmp_path / "s", 1)
    answers.canary = (-1.0, -1.0)
    async with opened(tiny_model, tmp_path / "s", answers) as engine:
        await engine.load(1)
        answers.slow = asyncio.Event()
        turn = asyncio.create_task(engine.generate("a", PROMPT, Sampling(1, 0, 4)))
        await asyncio.sleep(0.1)
        with pytest.raises(EngineError, match="session a has a turn in flight"):
            await engine.generate("a", PROMPT, Sampling(1, 0, 4))
        engine.forget("a")
        with pytest.raises(EngineError, match="session a was released"):
            await turn
        answers.slow.set()
        with pytest.raises(EngineError, match=r"more than model\.context"):
            await engine.generate("a", PROMPT, Sampling(1, 0, 250))
        with pytest.raises(EngineError, match=r"no temperature between 0 and 0\.01"):
            await engine.generate("a", PROMPT, Sampling(1, 0, 4, 0.001))
        fine, refused = await engine.generate_many(
            (
                {"session": "x", "ids": PROMPT, "sampling": Sampling(1, 0, 4)},
                {"session": "y", "ids": PROMPT, "sampling": Sampling(1, 0, 250)},
            )
        )
        assert len(fine.ids) == 4 and "more than model.context" in refused
        answers.canary = (-0.25,) * (len(PROMPT) + 2)
        forced = await engine.generate("f", PROMPT, Sampling(1, 0, 9), forced_ids=np.array([7, 8], np.int32))
        assert forced.ids.tolist() == [7, 8] and forced.logprobs.tolist() == [-0.25, -0.25]


@asynchronous
async def test_a_server_that_goes_away_ends_the_engine_and_answers_no_turn(
    tiny_model: Path, tmp_path: Path, answers: Answers
) -> None:
    publish(tmp_path / "s", 1)
    answers.canary = (-1.0, -1.0)
    turn: asyncio.Task[Any] | None = None
    with pytest.raises(ProcessFailed, match="does not answer any more"):
        async with AsyncExitStack() as server:
            url = await server.enter_async_context(fake_vllm(answers))
            async with VllmEngine.open(VllmSettings(str(tiny_model), str(tmp_path / "s"), config(), url)) as engine:
                await engine.load(1)
                answers.slow = asyncio.Event()
                turn = asyncio.create_task(engine.generate("a", PROMPT, Sampling(1, 0, 4)))
                await asyncio.sleep(0.1)
                await server.aclose()
                await asyncio.sleep(5)
    assert turn is not None and not turn.done()
    turn.cancel()


@asynchronous
async def test_a_server_that_hangs_in_an_update_and_listens_no_more_ends_the_engine(
    tiny_model: Path, tmp_path: Path, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM, its core killed while it paused, waited for our call to end before it did; the run stood for minutes."""
    monkeypatch.setattr(vllm, "_LOOK_EVERY_S", 0.1)
    publish(tmp_path / "s", 1, 2)
    answers.canary = (-1.0, -1.0)
    loading: asyncio.Task[None] | None = None
    with pytest.raises(ProcessFailed, match="does not answer any more"):
        async with opened(tiny_model, tmp_path / "s", answers) as engine:
            await engine.load(1)
            await asyncio.sleep(0.5)  # many looks: it is well
            answers.stuck = True
            loading = asyncio.create_task(engine.load(2))
            await asyncio.sleep(0.1)
            assert answers.deaf is not None
            await answers.deaf()
            await asyncio.sleep(10)
    assert loading is not None and loading.cancel()


# --- where turns and versions go ---------------------------------------------------------------------------------


class Recorded:
    """An engine, its link and its rank in one: what each call was, and whether it refuses."""

    up = True

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.refuses = False
        self.then: Callable[[], Any] = lambda: None

    async def client(self) -> Any:
        return self

    async def generate(self, session: str, ids: np.ndarray, sampling: Sampling, **options: Any) -> Generation:
        if self.refuses:
            raise EngineError("the stale pool no longer holds it")
        self.calls.append((session, options["version"]))
        return Generation(ids, np.zeros(len(ids), np.float32), 0, "stop")

    async def release(self, session: str) -> None:
        self.calls.append(("release", session))

    async def call(self, method: str, *, deadline_s: float, version: int) -> None:
        self.calls.append((method, version))
        self.then()

    call_again = call


@asynchronous
async def test_stale_turns_go_to_the_stale_pool_and_to_the_newest_once_it_was_refreshed() -> None:
    current, stale = Recorded(), Recorded()
    engine = Seat({"engine-0": current}, "engine-0", stale=(stale, 3))  # type: ignore[arg-type]
    sampling = Sampling(1, 0, 4)
    await engine.generate("a/stale", PROMPT, sampling, version=3)
    await engine.generate("a/current", PROMPT, sampling, version=None)
    stale.refuses = True
    await engine.generate("a/stale", PROMPT, sampling, version=3)
    assert stale.calls == [("a/stale", 3)] and current.calls == [("a/current", None), ("a/stale", None)]
    await engine.release("a/stale")
    assert ("release", "a/stale") in stale.calls and ("release", "a/stale") in current.calls


@asynchronous
async def test_the_stale_pools_engine_is_given_its_version_only_also_when_it_starts_again(tmp_path: Path) -> None:
    first, second, stale = engines = [Recorded() for _ in range(3)]
    nothing: Any = None
    ranks: Any = engines
    runtime = Runtime(*[nothing] * 5, ranks, [], nothing, tmp_path, tmp_path, Pins(tmp_path), 1.0, ranks[2])
    await runtime.load(5, stale=5)
    await runtime.load(6)
    await runtime.pin(6)
    assert first.calls == second.calls == [("load", 5), ("load", 6), ("pin", 6)] and stale.calls == [("load", 5)]
    for engine in engines:
        engine.calls.clear()
        await runtime.prepare_engine(engine)  # type: ignore[arg-type]
    assert first.calls == [("load", 6), ("pin", 6)] and stale.calls == [("load", 5)]
    apart, runtime.stale = runtime.stale, None  # all versions in one engine, of which two are given up as it loads
    runtime.versions.update(other=3)
    first.calls.clear()
    first.then = lambda: [runtime.versions.pop(h, None) for h in ("stale", "other")]
    await runtime.prepare_engine(ranks[0])
    assert first.calls == [("load", 6), ("pin", 6)]
    runtime.stale, runtime.versions["stale"], first.then = apart, 5, lambda: None
    assert Pins(tmp_path).versions() == {5, 6}
    for newest in (6, 7):  # although it is still the newest, or also the stale pool's: a pin that stays keeps the slot
        first.calls.clear()
        await runtime.unpin()
        assert first.calls == [("drop", newest)]
        await runtime.load(7, stale=7)
        await runtime.pin(7)
    assert stale.calls == [("load", 5), ("load", 7), ("load", 7)] and Pins(tmp_path).versions() == {7}
