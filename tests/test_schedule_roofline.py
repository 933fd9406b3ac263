"""The roofline: hand-computed cases, what others published, and that more work never takes less time."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from springtide.schedule.roofline import (
    DECODE,
    DEVICES,
    FORWARD,
    MODELS,
    PREFILL,
    STEP_S,
    TRAIN,
    Device,
    Roofline,
    Shape,
    UnknownHardware,
    causal_pairs,
)

H100 = DEVICES["h100"]
ROUND = Shape(parameters=10e9, layers=10, heads=16, kv_heads=4, head_dim=100)  # KV: 2 x 2 x 10 x 4 x 100 = 16,000 B
SIMPLE = Roofline(Device(flops=1e15, bandwidth=2e12, memory=100e9), ROUND)


def test_decoding_a_few_sequences_is_bound_by_memory() -> None:
    # 20 GB of weights at 2 TB/s: 10 ms. 8 sequences' products, 160 GFLOP at half of 1 PFLOP/s: 0.32 ms, hidden behind.
    # 8 x 1000 keys of 16 kB: 64 us.
    assert SIMPLE.engine_step_s(decode=8, context=8000) == pytest.approx(10e-3 + 64e-6 + STEP_S)


def test_decoding_very_many_is_bound_by_compute() -> None:
    # 2 x 10e9 x 1000 / (0.5 x 1e15): 40 ms, more than the 10 ms of reading the weights.
    assert SIMPLE.engine_step_s(decode=1000) == pytest.approx(40e-3 + STEP_S)


def test_prefill_is_bound_by_compute() -> None:
    # Products 2 x 10e9 x 8192 / 0.5e15 = 327.68 ms. Attention: 4 x 10 layers x 1600 x 8192 x 8193 / 2 pairs = 2.148
    # TFLOP: 4.296 ms.
    pairs = causal_pairs(8192)
    assert SIMPLE.engine_step_s(prefill=8192, pairs=pairs) == pytest.approx(327.68e-3 + 4.2955e-3 + STEP_S, rel=1e-5)


def test_a_chunk_attends_over_what_came_before_it() -> None:
    whole, parts = causal_pairs(1000), causal_pairs(600) + causal_pairs(400, before=600)
    assert whole == parts == 1000 * 1001 / 2


def test_prefill_and_decoding_share_one_reading_of_the_weights() -> None:
    both = SIMPLE.engine_step_s(prefill=100, decode=4)
    assert both == SIMPLE.engine_step_s(decode=4) < SIMPLE.engine_step_s(prefill=100) + SIMPLE.engine_step_s(decode=4)


def test_training_takes_six_operations_a_parameter_and_eight_with_recomputation() -> None:
    def of(n: float, **options: bool) -> float:
        return SIMPLE.forward_s(n, 0) + SIMPLE.backward_s(n, 0, **options)

    assert of(1000, recompute=False) == pytest.approx(6 * 10e9 * 1000 / (TRAIN * 1e15))
    assert of(1000, recompute=True) == pytest.approx(8 * 10e9 * 1000 / (TRAIN * 1e15))
    assert of(1000, recompute=False, adapter=True) == pytest.approx(4 * 10e9 * 1000 / (TRAIN * 1e15))
    assert SIMPLE.logprobs_s(1000, 0) == pytest.approx(2 * 10e9 * 1000 / (FORWARD * 1e15))
    # Attention: forward once, backward twice, recomputed once.
    pairs = causal_pairs(1000)
    attention = 4 * 10 * 1600 * pairs / (TRAIN * 1e15)
    forward = SIMPLE.forward_s(0, pairs)
    assert forward == pytest.approx(attention)
    assert SIMPLE.backward_s(0, pairs, recompute=True) == pytest.approx(3 * attention)


def test_grouped_query_attention_keeps_the_kv_of_its_heads_and_each_device_at_least_one() -> None:
    assert SIMPLE.kv_bytes == 16_000
    assert replace(SIMPLE, shape=replace(ROUND, kv_heads=16)).kv_bytes == 64_000
    assert replace(SIMPLE, devices=4).kv_bytes == 16_000
    assert replace(SIMPLE, devices=8).kv_bytes == 32_000


def test_capacity_is_what_weights_and_workspace_leave() -> None:
    # 0.9 x 100 - 4 - 20 GB = 66 GB of 16 kB each.
    assert SIMPLE.kv_capacity() == 4_125_000
    assert replace(SIMPLE, device=Device(1e15, 2e12, 20e9)).kv_capacity() < 0
    # 16 bytes a trained parameter: 160 GB; an adapter's base 20 GB.
    assert not SIMPLE.trains() and replace(SIMPLE, devices=2).trains() and SIMPLE.trains(adapter=True)


def test_few_tokens_meet_few_experts_and_many_meet_all() -> None:
    shape = Shape.of("qwen3-30b-a3b")
    assert shape.active == shape.met(1) == pytest.approx(3.35e9, rel=0.01)
    assert shape.met(8) == pytest.approx(shape.parameters - shape.experts * (15 / 16) ** 8)
    assert shape.met(4096) == pytest.approx(shape.parameters, rel=1e-6)


# Billions of parameters and of active ones as the models' cards give them; KiB of KV a token; millions of KV tokens on
# 80 GB devices (how many); thousands of prefilled, and of trained (6N), tokens a second and H100.
PUBLISHED = {
    "qwen2.5-7b": (7.62, 7.62, 56, 0.90, 1, 32, 7.6),
    "qwen3-4b": (4.02, 4.02, 144, 0.406, 1, 61, 14.4),
    "qwen3-8b": (8.2, 8.2, 144, 0.35, 1, 30, 7.0),
    "qwen2.5-14b": (14.7, 14.7, 192, 0.20, 1, 17, 3.9),
    "qwen3-14b": (14.8, 14.8, 160, 0.24, 1, 17, 3.9),
    "qwen3-32b": (32.8, 32.8, 256, 0.27, 2, 7.5, 1.8),
    "qwen3-30b-a3b": (30.5, 3.3, 96, 0.75, 2, 50, 12),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_known_models_are_those_of_their_cards(name: str) -> None:
    total, active, kv_kib, kv_million, devices, prefill, trained = PUBLISHED[name]
    shape = Shape.of(name)
    roofline = Roofline(H100, shape)
    assert shape.parameters == pytest.approx(total * 1e9, rel=0.01)
    assert shape.active == pytest.approx(active * 1e9, rel=0.02)
    assert roofline.kv_bytes == kv_kib * 1024
    assert Roofline(H100, shape, devices).kv_capacity() == pytest.approx(kv_million * 1e6, rel=0.03)
    assert 8192 / roofline.engine_step_s(prefill=8192) == pytest.approx(prefill * 1e3, rel=0.03)
    seconds = roofline.forward_s(1, 0) + roofline.backward_s(1, 0, recompute=False)
    assert 1 / seconds == pytest.approx(trained * 1e3, rel=0.03)


@pytest.mark.parametrize(("device", "slowest", "fastest"), [("h100", 6.6e3, 10.4e3), ("a100", 3.9e3, 5.8e3)])
def test_published_serving_speeds_are_within_a_factor_of_two(device: str, slowest: float, fastest: float) -> None:
    """GPUStack's figures of Qwen3-14B on ShareGPT, defaults to tuned: tokens in and out a second. A roofline is above
    the first and, as it leaves out what a server does besides, may be above the second."""
    roofline = Roofline(DEVICES[device], Shape.of("qwen3-14b"))
    batch, tokens_in, tokens_out = 256, 225, 200
    new = batch * tokens_in / tokens_out
    step_s = roofline.engine_step_s(
        prefill=new, pairs=new * tokens_in / 2, decode=batch, context=batch * (tokens_in + tokens_out / 2)
    )
    assert slowest < (new + batch) / step_s < 2 * fastest


def test_one_published_latency_is_met() -> None:
    """8B on one H100, one ShareGPT request (about 200 tokens) at a time: 1.66 s."""
    roofline = Roofline(H100, Shape.of("qwen3-8b"))
    assert 200 * roofline.engine_step_s(decode=1, context=325) == pytest.approx(1.66, rel=0.15)


WORK = st.floats(0, 1e6)


@given(
    st.sampled_from(sorted(DEVICES)), st.sampled_from(sorted(MODELS)), st.sampled_from([1, 2, 4, 8]),
    st.tuples(WORK, WORK, WORK, WORK), st.tuples(WORK, WORK, WORK, WORK),
)  # fmt: skip
def test_more_work_never_takes_less_time_and_more_devices_never_more(
    device: str, model: str, devices: int, work: tuple[float, ...], more: tuple[float, ...]
) -> None:
    roofline = Roofline(DEVICES[device], Shape.of(model), devices)
    doubled = replace(roofline, devices=2 * devices)
    names = ("prefill", "pairs", "decode", "context")
    less, most = (dict(zip(names, values)) for values in (work, [a + b for a, b in zip(work, more)]))
    assert STEP_S <= roofline.engine_step_s(**less) <= roofline.engine_step_s(**most) * (1 + 1e-12)
    if devices < roofline.shape.kv_heads:  # beyond, KV is held twice and its reading no longer shared
        assert doubled.engine_step_s(**less) <= roofline.engine_step_s(**less) * (1 + 1e-12)
    tokens, pairs = work[:2]
    for time in (Roofline.logprobs_s, Roofline.forward_s):
        assert 0 <= time(doubled, tokens, pairs) <= time(roofline, tokens, pairs)
        assert time(roofline, tokens, pairs) <= time(roofline, tokens + more[0], pairs + more[1]) * (1 + 1e-12)
    plain, again = (roofline.backward_s(tokens, pairs, recompute=r) for r in (False, True))
    assert roofline.forward_s(tokens, pairs) <= plain <= again


def test_prefill_and_decode_shares_leave_the_memory_bound_below_the_ridge() -> None:
    """The batch at which decoding turns from memory to compute is what the page says, some 150 on an H100."""
    roofline = Roofline(H100, Shape.of("qwen2.5-7b"))
    floor = roofline.engine_step_s(decode=1)
    assert roofline.engine_step_s(decode=140) == floor < roofline.engine_step_s(decode=160)
    assert PREFILL == DECODE == 0.5


def test_a_model_is_read_from_its_directory(tmp_path: Path) -> None:
    tree = {**MODELS["qwen3-8b"], "architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(tree))
    assert Shape.of(str(tmp_path)) == Shape.of("qwen3-8b")
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {**tree, "tie_word_embeddings": True}}))
    assert Shape.of("qwen3-8b").parameters - Shape.of(str(tmp_path)).parameters == 4096 * 151936


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (None, "neither a known model"),
        ("{", "is not JSON"),
        ('{"hidden_size": 4}', "'num_hidden_layers' is missing"),
        ('{"kv_lora_rank": 512}', "kv_lora_rank"),
        ('{"n_routed_experts": 64}', "n_routed_experts"),
        (json.dumps({**MODELS["qwen3-8b"], "num_experts": 8}), "'num_experts_per_tok' is missing"),
    ],
)
def test_what_is_no_decoder_is_refused_in_a_line(tmp_path: Path, text: str | None, fault: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(UnknownHardware, match=fault) as caught:
        Shape.of(str(tmp_path))
    assert "\n" not in str(caught.value)
