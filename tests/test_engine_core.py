"""Continuous batching over paged KV: exact log-probs, exact counters, bounded memory, whatever runs beside."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import springtide.engine.local.kernels as kernels_module
from engine_models import KINDS, VOCABULARY, Tiny, random_ids, tiny
from springtide.engine.local.core import EngineCore, Request
from springtide.engine.local.engine import EngineSettings, make_core
from springtide.engine.local.kernels import TorchPaged
from springtide.engine.local.kv import BLOCK
from springtide.engine.local.native import library
from springtide.engine.local.sampling import uniforms
from springtide.engine.protocol import EngineError, Generation, Sampling
from springtide.models.decoder import Decoder, DecoderConfig

STOPS = (3, 5)


@functools.cache
def decoder(kind: str = "qwen3", seed: int = 0) -> Decoder:
    model = tiny(kind, seed)
    return Decoder(DecoderConfig.read(model.path), model.tensors())


def core(kind: str = "qwen3", *, kernels: str = "auto", **sizes: int) -> EngineCore:
    settings = EngineSettings("", "", **{"kv_tokens": 4096, "max_batch": 8, **sizes}, kernels=kernels)  # type: ignore[arg-type]
    made = make_core(decoder(kind).config, settings)
    made.add_version(1, decoder(kind))
    return made


def ask(engine: EngineCore, session: str, ids: np.ndarray, sampling: Sampling, **more) -> list:
    """Submit a turn; its result appears in the returned list."""
    result: list = []
    engine.submit(Request(session, np.asarray(ids, np.int32), sampling, result.append, **more))
    return result


def run(engine: EngineCore) -> None:
    while engine.step():
        assert engine.cache.used_tokens <= engine.cache.pool.total * BLOCK
        check_blocks(engine)


def check_blocks(engine: EngineCore) -> None:
    """Every reference to a block is owned by exactly one record, and nothing leaks."""
    refs = np.zeros(engine.cache.pool.total, np.int64)
    for record in (*engine.cache.sessions.values(), *engine.cache.prefixes.values()):
        np.add.at(refs, record.blocks, 1)
    np.testing.assert_array_equal(refs, engine.cache.pool.refs)
    assert engine.cache.pool.used == np.count_nonzero(refs)


def turn(engine: EngineCore, session: str, ids: np.ndarray, sampling: Sampling, **more) -> Generation:
    result = ask(engine, session, ids, sampling, **more)
    run(engine)
    assert isinstance(result[0], Generation), result
    return result[0]


@dataclass
class Episode:
    """A random episode: a prompt its group shares, then observations of given lengths."""

    name: str
    seed: int
    prompt: np.ndarray
    observations: list[np.ndarray]
    new_tokens: int
    temperature: float
    prefix: str | None
    ids: np.ndarray = field(init=False)
    results: list[Generation] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ids = self.prompt

    def sampling(self) -> Sampling:
        return Sampling(self.seed, len(self.results), self.new_tokens, self.temperature, STOPS)

    def take(self, result: Generation) -> None:
        self.results.append(result)
        observation = self.observations[len(self.results) - 1]
        self.ids = np.concatenate((self.ids, result.ids, observation))

    @property
    def over(self) -> bool:
        return len(self.results) == len(self.observations)


def play(engine: EngineCore, episodes: list[Episode], order: np.random.Generator) -> None:
    """Play episodes together; a turn is asked for at a random later step, as environments answer at their own pace."""
    pending: dict[int, list] = {}
    while pending or any(not e.over for e in episodes):
        for index, episode in enumerate(episodes):
            if index not in pending and not episode.over and order.random() < 0.5:
                pending[index] = ask(engine, episode.name, episode.ids, episode.sampling(), prefix=episode.prefix)
        engine.step()
        assert engine.cache.pool.used <= engine.cache.pool.total
        check_blocks(engine)
        for index in [i for i, result in pending.items() if result]:
            episodes[index].take(pending.pop(index)[0])


def make_episodes(rng: np.random.Generator, groups: int, members: int) -> list[Episode]:
    episodes = []
    for group in range(groups):
        start = random_ids(rng, int(rng.integers(1, 60)))
        new_tokens = int(rng.integers(1, 12))
        temperature = float(rng.choice([0.0, 0.7, 1.0, 1.3]))
        own = rng.random() < 0.3  # members whose prompts part after the common start
        for member in range(members):
            prompt = np.concatenate((start, random_ids(rng, int(rng.integers(1, 9))))) if own else start
            turns = int(rng.integers(1, 4))
            observations = [random_ids(rng, int(rng.integers(1, 30))) for _ in range(turns)]
            seed = group * 100 + member
            prefix = f"group-{group}"
            episodes.append(Episode(f"{group}.{member}", seed, prompt, observations, new_tokens, temperature, prefix))
    return episodes


def reference_logprobs(kind: str, prompt: np.ndarray, result: Generation, temperature: float) -> np.ndarray:
    return tiny(kind).logprobs(np.concatenate((prompt, result.ids)), temperature or 1.0)[len(prompt) - 1 :]


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("kind", KINDS)
def test_session_logprobs_equal_transformers_over_turns(kind: str, kernels: str) -> None:
    """Prefix sharing, chunked prefill, mixed batches and eviction at once: still the full forward's log-probs."""
    rng = np.random.default_rng(1)
    episodes = make_episodes(rng, groups=3, members=3)
    engine = core(kind, kernels=kernels, kv_tokens=320, prefill_chunk=24)
    play(engine, episodes, rng)
    assert engine.cache.evicted_tokens > 0
    for episode in episodes:
        ids = episode.prompt
        for result, observation in zip(episode.results, episode.observations):
            expected = reference_logprobs(kind, ids, result, episode.temperature)
            np.testing.assert_allclose(result.logprobs, expected, atol=1e-4)
            ids = np.concatenate((ids, result.ids, observation))


@given(seed=st.integers(0, 10_000), groups=st.integers(1, 3), members=st.integers(1, 4))
@settings(max_examples=12, deadline=None)
def test_a_turn_is_the_same_whatever_runs_beside_it(seed: int, groups: int, members: int) -> None:
    def alone_and_together() -> tuple[list[Episode], list[Episode]]:
        return tuple(make_episodes(np.random.default_rng(seed), groups, members) for _ in range(2))  # type: ignore[return-value]

    alone, together = alone_and_together()
    for episode in alone:
        engine = core(kv_tokens=1024)
        while not episode.over:
            episode.take(turn(engine, episode.name, episode.ids, episode.sampling()))
    rng = np.random.default_rng(seed + 1)
    tight = int(rng.integers(400, 900))
    play(core(kv_tokens=tight, prefill_chunk=int(rng.integers(5, 64)), max_batch=5), together, rng)
    for a, b in zip(alone, together):
        for x, y in zip(a.results, b.results):
            np.testing.assert_array_equal(x.ids, y.ids)
            np.testing.assert_allclose(x.logprobs, y.logprobs, atol=1e-5)


@given(seed=st.integers(0, 10_000), tight=st.booleans())
@settings(max_examples=12, deadline=None)
def test_a_group_computes_its_new_tokens_once(seed: int, tight: bool) -> None:
    """The sum of computed prompt tokens over an n-turn group is the sum of its new tokens; evictions are apart."""
    rng = np.random.default_rng(seed)
    start = random_ids(rng, int(rng.integers(2, 70)))
    turns = int(rng.integers(1, 5))
    episodes = [
        Episode(f"m{m}", m, start, [random_ids(rng, int(rng.integers(1, 20))) for _ in range(turns)], 8, 1.0, "g")
        for m in range(4)
    ]
    engine = core(kv_tokens=336 if tight else 4096, prefill_chunk=16, max_batch=3)
    play(engine, episodes, rng)
    new = len(start) + sum(len(o) for e in episodes for o in e.observations[:-1])
    computed = sum(r.computed_tokens for e in episodes for r in e.results)
    recomputed = sum(r.recomputed_tokens for e in episodes for r in e.results)
    assert computed - recomputed == new
    if not tight:
        assert recomputed == 0
    counts = engine.counts
    assert (counts["computed"], counts["recomputed"]) == (computed, recomputed)
    prompts = sum(len(e.prompt) * turns for e in episodes) + sum(
        (turns - 1 - i) * (len(e.results[i].ids) + len(e.observations[i])) for e in episodes for i in range(turns - 1)
    )
    assert counts["cached"] + counts["computed"] == prompts


def test_after_eviction_the_extra_is_recomputed_tokens() -> None:
    rng = np.random.default_rng(0)
    engine = core(kv_tokens=128)
    first = random_ids(rng, 40)
    result = turn(engine, "a", first, Sampling(0, 0, 5))
    assert (result.computed_tokens, result.recomputed_tokens) == (40, 0)
    turn(engine, "b", random_ids(rng, 100), Sampling(1, 0, 5))  # needs a's blocks
    longer = np.concatenate((first, result.ids, random_ids(rng, 7)))
    result = turn(engine, "a", longer, Sampling(0, 1, 5))
    # 40 prompt and 4 sampled tokens had KV and lost it; the fifth sampled token is computed for the first time
    assert (result.cached_tokens, result.computed_tokens, result.recomputed_tokens) == (1, 51, 44)
    assert engine.counts["recomputed_evicted"] == 44
    np.testing.assert_allclose(result.logprobs, reference_logprobs("qwen3", longer, result, 1.0), atol=1e-4)


def test_members_that_arrive_together_share_their_start() -> None:
    engine = core()
    start = random_ids(np.random.default_rng(0), 50)
    results = [ask(engine, f"s{m}", start, Sampling(m, 0, 6), prefix="g") for m in range(6)]
    run(engine)
    assert [r[0].computed_tokens for r in results] == [50, 0, 0, 0, 0, 0]
    for r in results:
        np.testing.assert_allclose(r[0].logprobs, reference_logprobs("qwen3", start, r[0], 1.0), atol=1e-4)


def test_a_group_goes_on_when_its_first_member_is_aborted() -> None:
    engine = core(prefill_chunk=8)
    start = random_ids(np.random.default_rng(0), 50)
    results = [ask(engine, f"s{m}", start, Sampling(m, 0, 6), prefix="g") for m in range(3)]
    engine.step()
    engine.abort("s0", "gone")
    run(engine)
    assert isinstance(results[0][0], EngineError)
    assert [r[0].computed_tokens for r in results[1:]] == [50, 0]


def test_seeds_make_members_differ() -> None:
    """verl#2646: equal seeds on replicas clone a group's members; ours depend on (seed, turn, position)."""
    draws = {tuple(uniforms(seed, turn, 4)) for seed in range(50) for turn in range(4)}
    assert len(draws) == 200
    assert len({u for d in draws for u in d}) == 800
    engine = core()
    start = random_ids(np.random.default_rng(0), 20)
    results = [ask(engine, f"s{m}", start, Sampling(m, 0, 12), prefix="g") for m in range(8)]
    run(engine)
    assert len({tuple(r[0].ids) for r in results}) == 8


def test_uniforms_never_change() -> None:
    """A seed names its samples for good: on every machine, in every later version."""
    assert uniforms(7, 3, 3).tolist() == [0.5653749399701449, 0.1026086875644282, 0.5374666320519002]
    assert uniforms(-1, 0, 1).tolist() == uniforms(2**64 - 1, 0, 1).tolist() == [0.040152895465942584]


def test_uniforms_are_uniform() -> None:
    values = np.concatenate([uniforms(seed, turn, 100) for seed in range(100) for turn in range(10)])
    assert values.min() >= 0 and values.max() < 1
    counts, _ = np.histogram(values, bins=50, range=(0, 1))
    expected = len(values) / 50
    assert ((counts - expected) ** 2 / expected).sum() < 100  # chi-square of 49 degrees: p about 2e-5
    lagged = np.corrcoef(uniforms(0, 0, 100_000)[:-1], uniforms(0, 0, 100_000)[1:])[0, 1]
    assert abs(lagged) < 0.015


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_samples_follow_the_tempered_distribution(kernels: str) -> None:
    engine = core(kernels=kernels, max_batch=64)
    prompt = random_ids(np.random.default_rng(3), 12)
    results = [ask(engine, f"s{i}", prompt, Sampling(i, 0, 1, 2.0), prefix="g") for i in range(3000)]
    run(engine)
    drawn = np.bincount([int(r[0].ids[0]) for r in results], minlength=VOCABULARY)
    with torch.inference_mode():
        scores = tiny().model(torch.tensor(prompt[None], dtype=torch.long)).logits[0, -1] / 2.0
    expected = 3000 * scores.softmax(-1).numpy()
    likely = expected > 5
    assert ((drawn - expected)[likely] ** 2 / expected[likely]).sum() < 2 * likely.sum() + 20
    assert drawn[~likely].sum() < expected[~likely].sum() * 1.5 + 20


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_greedy_takes_the_likeliest_and_reports_untempered_logprobs(kernels: str) -> None:
    engine = core(kernels=kernels)
    prompt = random_ids(np.random.default_rng(4), 30)
    result = turn(engine, "s", prompt, Sampling(0, 0, 10, temperature=0.0))
    ids = prompt
    for token in result.ids:
        with torch.inference_mode():
            best = int(tiny().model(torch.tensor(ids[None], dtype=torch.long)).logits[0, -1].argmax())
        assert token == best
        ids = np.append(ids, token)
    np.testing.assert_allclose(result.logprobs, reference_logprobs("qwen3", prompt, result, 1.0), atol=1e-4)


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
def test_forced_ids_are_followed_with_their_true_logprobs(temperature: float) -> None:
    rng = np.random.default_rng(5)
    engine = core(prefill_chunk=7)
    prompt, forced = random_ids(rng, 33), random_ids(rng, 21)
    forced[-1] = STOPS[0]
    sampling = Sampling(0, 0, 4, temperature, STOPS)
    turn(engine, "leader", prompt, sampling, prefix="g")  # its stored start must not hide the forced turn's first token
    result = turn(engine, "s", prompt, sampling, forced=forced, prefix="g")
    np.testing.assert_array_equal(result.ids, forced)
    assert result.finish == "stop"
    np.testing.assert_allclose(result.logprobs, reference_logprobs("qwen3", prompt, result, temperature), atol=1e-4)
    following = np.concatenate((prompt, forced, random_ids(rng, 5)))
    after = turn(engine, "s", following, sampling)
    assert after.computed_tokens == 5
    np.testing.assert_allclose(after.logprobs, reference_logprobs("qwen3", following, after, temperature), atol=1e-4)


def test_a_context_that_changed_is_computed_from_where_it_parts() -> None:
    """A template that strips past thinking starts a new segment: its ids leave the session's at some token."""
    rng = np.random.default_rng(6)
    engine = core()
    first = random_ids(rng, 45)
    turn(engine, "s", first, Sampling(0, 0, 8), prefix="g")
    other = np.concatenate((first[:37], random_ids(rng, 20)))
    result = turn(engine, "s", other, Sampling(0, 1, 8))
    assert result.cached_tokens in (36, 37)
    np.testing.assert_allclose(result.logprobs, reference_logprobs("qwen3", other, result, 1.0), atol=1e-4)
    # the group's stored start, whose block was shared, is still whole
    member = turn(engine, "t", first, Sampling(1, 0, 8), prefix="g")
    assert member.computed_tokens == 0
    np.testing.assert_allclose(member.logprobs, reference_logprobs("qwen3", first, member, 1.0), atol=1e-4)


def test_new_weights_never_meet_old_kv() -> None:
    """prime-rl#1650, NeMo-RL#4018: a prefix cache that survived the weight update."""
    rng = np.random.default_rng(7)
    engine = core()
    prompt = random_ids(rng, 40)
    for member in range(2):
        turn(engine, f"s{member}", prompt, Sampling(member, 0, 5), prefix="g")
    engine.add_version(2, decoder("qwen3", 1))
    fresh = turn(engine, "new", prompt, Sampling(9, 0, 5), prefix="g")
    record = turn(engine, "s0", prompt, Sampling(0, 1, 5), prefix="g")
    for result in (fresh, record):
        expected = tiny("qwen3", 1).logprobs(np.concatenate((prompt, result.ids)))[39:]
        assert result.version == 2
        np.testing.assert_allclose(result.logprobs, expected, atol=1e-4)
    longer = np.concatenate((prompt, random_ids(rng, 9)))
    moved = turn(engine, "s1", longer, Sampling(1, 1, 5))
    assert moved.recomputed_tokens == 40 and engine.counts["recomputed_version"] == 80
    old = turn(engine, "old", prompt, Sampling(0, 0, 5), version=1, prefix="g")
    assert old.version == 1 and old.computed_tokens == 0
    np.testing.assert_allclose(old.logprobs, reference_logprobs("qwen3", prompt, old, 1.0), atol=1e-4)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
def test_turns_of_two_versions_run_side_by_side(kind: str, kernels: str) -> None:
    engine = core(kind, kernels=kernels)
    engine.add_version(2, decoder(kind, 1))
    prompt = random_ids(np.random.default_rng(8), 30)
    results = {v: ask(engine, f"s{v}", prompt, Sampling(0, 0, 9), version=v, prefix="g") for v in (1, 2)}
    run(engine)
    for version, (result,) in results.items():
        assert result.version == version
        expected = tiny(kind, version - 1).logprobs(np.concatenate((prompt, result.ids)))[29:]
        np.testing.assert_allclose(result.logprobs, expected, atol=1e-4)


def test_a_version_that_lost_its_slot_goes_on_with_the_newest() -> None:
    engine = core()
    prompt = random_ids(np.random.default_rng(9), 20)
    first = turn(engine, "s", prompt, Sampling(0, 0, 4), version=1)
    engine.add_version(2, decoder("qwen3", 1))
    engine.remove_version(1)
    longer = np.concatenate((prompt, first.ids, prompt[:3]))
    result = turn(engine, "s", longer, Sampling(0, 1, 4), version=1)
    assert result.version == 2
    assert engine.counts["recomputed_version"] == result.recomputed_tokens == 23
    with pytest.raises(EngineError, match="version 7 is unknown"):
        ask(engine, "t", prompt, Sampling(0, 0, 4), version=7)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("kind", ["qwen3-window", "gemma3"])
def test_a_token_sees_its_window_wherever_chunks_and_blocks_end(kind: str, kernels: str) -> None:
    """Contexts of many windows, prompt chunks of every alignment to them, and decoding far beyond the first block."""
    rng, windows = np.random.default_rng(17), decoder(kind).config.windows
    assert 0 < max(windows) < 20 and 0 in windows
    for chunk in (1, 7, BLOCK, 50, 400):
        prompt, forced = random_ids(rng, int(rng.integers(150, 250))), random_ids(rng, 40)
        engine = core(kind, kernels=kernels, prefill_chunk=chunk)
        for session, wanted in (("sampled", None), ("scored", forced)):
            result = turn(engine, session, prompt, Sampling(0, 0, 40), forced=wanted)
            np.testing.assert_allclose(result.logprobs, reference_logprobs(kind, prompt, result, 1.0), atol=1e-4)


def test_a_request_waits_for_room_and_the_running_keep_theirs() -> None:
    engine = core(kv_tokens=160)
    prompt = random_ids(np.random.default_rng(10), 60)
    results = [ask(engine, f"s{i}", prompt, Sampling(i, 0, 20)) for i in range(4)]
    engine.step()
    assert engine.running == 2 and len(engine.waiting) == 2
    run(engine)
    for r in results:
        np.testing.assert_allclose(r[0].logprobs, reference_logprobs("qwen3", prompt, r[0], 1.0), atol=1e-4)


def test_a_waiting_evaluation_starts_before_training_that_waits_longer_and_nobody_passes_it() -> None:
    prompt = random_ids(np.random.default_rng(10), 60)
    order = ["running-0", "running-1", "train-0", "train-1", "eval-0", "eval-1"]

    def history(priority: int, **sizes: int) -> tuple[list[str], dict[str, np.ndarray]]:
        engine, ended, ids = core(**sizes), [], {}

        def submit(name: str, number: int, prompt: np.ndarray) -> None:
            def done(result: Generation | EngineError) -> None:
                assert isinstance(result, Generation)
                ended.append(name)
                ids[name] = result.ids

            sampling = Sampling(number, 0, 5 + 5 * number if name.startswith("running") else 20)
            engine.submit(Request(name, prompt, sampling, done, priority=priority * name.startswith("eval")))

        for number, name in enumerate(order):
            # Evaluation needs more KV than one training turn frees: nothing smaller may slip past it meanwhile.
            submit(name, number, np.concatenate((prompt, prompt)) if name.startswith("eval") else prompt)
            if name == "running-1":
                engine.step()
                assert engine.running == 2
        run(engine)
        return ended, ids

    for sizes in ({"max_batch": 2, "kv_tokens": 4096}, {"kv_tokens": 160}):
        first, sampled = history(1, **sizes)
        assert first == ["running-0", "running-1", "eval-0", "eval-1", "train-0", "train-1"], sizes
        plain, same = history(0, **sizes)
        assert plain == order
        assert all(np.array_equal(sampled[name], same[name]) for name in order)


def test_what_can_never_run_is_refused() -> None:
    engine = core(kv_tokens=128)
    ids = random_ids(np.random.default_rng(0), 100)
    with pytest.raises(EngineError, match=r"100 prompt \+ 29 new tokens exceed the engine's 128"):
        ask(engine, "s", ids, Sampling(0, 0, 29))
    with pytest.raises(EngineError, match="tokenizer and model disagree"):
        ask(engine, "s", np.array([1, VOCABULARY]), Sampling(0, 0, 5))
    with pytest.raises(EngineError, match="must be >= 1"):
        ask(engine, "s", ids[:0], Sampling(0, 0, 5))
    with pytest.raises(EngineError, match=r"'a' in .* is not an integer"):
        ask(engine, "s", ids[:5], Sampling("a", 0, 5))  # type: ignore[arg-type]
    with pytest.raises(EngineError, match="temperature nan"):
        ask(engine, "s", ids[:5], Sampling(0, 0, 5, float("nan")))
    ask(engine, "s", ids[:5], Sampling(0, 0, 5))
    with pytest.raises(EngineError, match="turn in flight"):
        ask(engine, "s", ids[:5], Sampling(0, 0, 5))
    run(engine)


def test_scores_that_are_not_finite_are_an_error_not_a_token() -> None:
    engine = core()
    tensors = {k: v.clone() for k, v in tiny().tensors().items()}
    tensors["model.norm.weight"].fill_(float("nan"))
    engine.add_version(2, Decoder(decoder().config, tensors))
    results = [ask(engine, f"s{v}", np.array([1, 2, 3]), Sampling(0, 0, 5), version=v) for v in (1, 2)]
    run(engine)
    assert isinstance(results[0][0], Generation)
    assert isinstance(results[1][0], EngineError) and "not finite" in str(results[1][0])


def test_release_frees_what_only_the_session_held() -> None:
    engine = core()
    prompt = random_ids(np.random.default_rng(11), 50)
    turn(engine, "a", prompt, Sampling(0, 0, 5))
    result = ask(engine, "b", prompt, Sampling(0, 0, 50))
    engine.step()
    engine.release("b")
    assert isinstance(result[0], EngineError) and "released" in str(result[0])
    engine.release("a")
    engine.release("never was")
    assert engine.cache.used_tokens == 0 and not engine.cache.sessions
    check_blocks(engine)


def test_tokens_of_turns_that_end_early_are_counted_as_such() -> None:
    engine = core()
    broken = {k: v.clone() for k, v in tiny().tensors().items()}
    broken["model.norm.weight"].fill_(float("nan"))
    engine.add_version(2, Decoder(decoder().config, broken))
    prompt = random_ids(np.random.default_rng(15), 40)
    for session in ("whole", "aborted", "released"):
        ask(engine, session, prompt, Sampling(1, 0, 30), version=1)
    for _ in range(5):
        engine.step()
    engine.abort("aborted")
    engine.step()
    engine.release("released")
    run(engine)
    assert (engine.counts["generated"], engine.counts["aborted"]) == (30 + 5 + 6, 5 + 6)
    ask(engine, "not finite", prompt, Sampling(1, 0, 30), version=2)
    ask(engine, "forced", prompt, Sampling(1, 0, 30), version=2, forced=prompt)
    run(engine)
    assert (engine.counts["generated"], engine.counts["aborted"]) == (30 + 5 + 6 + 1, 5 + 6 + 1)


def test_an_aborted_turn_keeps_what_it_computed() -> None:
    engine = core()
    prompt = random_ids(np.random.default_rng(12), 40)
    ask(engine, "a", prompt, Sampling(0, 0, 50))
    for _ in range(5):
        engine.step()
    engine.abort("a")
    check_blocks(engine)
    result = turn(engine, "a", np.concatenate((prompt, prompt)), Sampling(0, 0, 5))
    assert result.cached_tokens == 40
    np.testing.assert_allclose(
        result.logprobs, reference_logprobs("qwen3", np.concatenate((prompt, prompt)), result, 1.0), atol=1e-4
    )


def test_exclusive_batches_run_alone_and_repeat_bit_for_bit() -> None:
    def history(disturbed: bool) -> list[np.ndarray]:
        engine = core(max_batch=4)
        rng = np.random.default_rng(13)
        prompts = [random_ids(rng, int(n)) for n in rng.integers(5, 60, 6)]
        collected: list[np.ndarray] = []
        for number in range(3):
            if disturbed:  # ordinary turns before the batch end first, and those after it wait
                ask(engine, f"before-{number}", prompts[0], Sampling(5, number, 3))
                engine.step()
            results: list[list] = [[] for _ in prompts]
            engine.submit_many(
                [
                    Request(f"s{i}", p, Sampling(i, number, 10), results[i].append, prefix=f"g{i // 3}")
                    for i, p in enumerate(prompts)
                ]
            )
            if disturbed:
                ask(engine, f"after-{number}", prompts[1], Sampling(5, number, 3))
            run(engine)
            collected += [r[0].logprobs for r in results]
            prompts = [np.concatenate((p, r[0].ids, p[:4])) for p, r in zip(prompts, results)]
        return collected

    first, second, disturbed = history(False), history(False), history(True)
    assert all(np.array_equal(a, b) for a, b in zip(first, second))
    assert all(np.array_equal(a, b) for a, b in zip(first, disturbed))


def test_a_large_vocabularys_scores_are_never_held_for_many_tokens(monkeypatch) -> None:
    rng = np.random.default_rng(14)
    prompts, forced = [random_ids(rng, 30) for _ in range(5)], random_ids(rng, 25)

    def results() -> list[Generation]:
        engine = core()
        waiting = [ask(engine, f"s{i}", p, Sampling(i, 0, 6)) for i, p in enumerate(prompts)]
        waiting.append(ask(engine, "forced", prompts[0], Sampling(0, 0, 1), forced=forced))
        run(engine)
        return [w[0] for w in waiting]

    whole, sizes, logits = results(), [], Decoder.logits

    def watched(self: Decoder, hidden: torch.Tensor) -> torch.Tensor:
        scores = logits(self, hidden)
        sizes.append(scores.numel())
        return scores

    monkeypatch.setattr(Decoder, "logits", watched)
    monkeypatch.setattr(kernels_module, "_SCORES", 2 * VOCABULARY)
    for a, b in zip(whole, results()):
        np.testing.assert_array_equal(a.ids, b.ids)
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)
    assert max(sizes) == 2 * VOCABULARY


@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
def test_bfloat16_models_run(kind: str) -> None:
    half = {k: v.to(torch.bfloat16) for k, v in tiny(kind).tensors().items()}
    config = decoder(kind).config
    engine = make_core(config, EngineSettings("", "", kv_tokens=1024, dtype="bfloat16"))
    engine.add_version(1, Decoder(config, half, dtype=torch.bfloat16))
    exact = core(kind)
    exact.add_version(2, Decoder(config, half))  # the same weights, computed in float32
    prompt, forced = random_ids(np.random.default_rng(15), 40), random_ids(np.random.default_rng(16), 20)
    results = [turn(e, "s", prompt, Sampling(0, 0, 1), forced=forced) for e in (engine, exact)]
    theirs = copy.deepcopy(tiny(kind).model).to(torch.bfloat16)
    rounded = Tiny(tiny(kind).path, theirs).logprobs(np.concatenate((prompt, forced)))[39:]
    gaps = [np.abs(found - results[1].logprobs).mean() for found in (results[0].logprobs, rounded)]
    assert 0 < gaps[0] < 1.5 * gaps[1]  # no further from float32 than transformers in bfloat16
    assert len(turn(engine, "s", np.concatenate((prompt, forced)), Sampling(0, 1, 8)).ids) == 8


@pytest.mark.parametrize("work", ["exit 1", 'while [ "$1" != -o ]; do shift; done; echo no library > "$2"'])
def test_without_compiled_kernels_that_load_the_pytorch_kernels_serve(monkeypatch, tmp_path, caplog, work) -> None:
    (tmp_path / "cc").write_text(f"#!/bin/sh\n{work}\n")
    (tmp_path / "cc").chmod(0o755)
    monkeypatch.setenv("CC", str(tmp_path / "cc"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library.cache_clear()
    try:
        engine = core()
        assert isinstance(engine.kernels, TorchPaged)
        assert "uses its PyTorch kernels" in caplog.text
        assert len(turn(engine, "s", random_ids(np.random.default_rng(0), 9), Sampling(0, 0, 5)).ids) == 5
    finally:
        library.cache_clear()
