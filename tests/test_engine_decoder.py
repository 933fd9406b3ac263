"""The decoder computes what transformers computes, and says plainly what it cannot."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch

from engine_models import KINDS, random_ids, tiny
from run_support import run_config
from springtide.models.decoder import (
    Decoder,
    DecoderConfig,
    DenseKernels,
    UnsupportedModel,
    read_checkpoint,
    sequence_logprobs,
)
from springtide.models.presets import ModelNotFound, _expected_shapes, check_weights
from springtide.trainer.start import check_run


@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_equal_transformers(kind: str) -> None:
    model = tiny(kind)
    decoder = Decoder(DecoderConfig.read(model.path), read_checkpoint(model.path))
    ids = random_ids(np.random.default_rng(0), 200)
    found = sequence_logprobs(decoder, torch.tensor(ids), chunk=1000)  # chunked: a large vocabulary's path
    np.testing.assert_allclose(found.numpy(), model.logprobs(ids), atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_states_of_some_tokens_are_those_of_a_whole_pass_and_their_last_layer_alone_is_computed(kind: str) -> None:
    class Counts(DenseKernels):
        tokens = 0

        def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
            self.tokens += len(gate_up)
            return super().gate(gate_up)

    decoder = Decoder(DecoderConfig.read(tiny(kind).path), read_checkpoint(tiny(kind).path))
    ids, rows = torch.tensor(random_ids(np.random.default_rng(2), 90)), torch.tensor([89, 3, 40])
    kernels = Counts(decoder.config, len(ids))
    with torch.inference_mode():
        whole = decoder.forward(ids, DenseKernels(decoder.config, len(ids)))
        torch.testing.assert_close(decoder.forward(ids, kernels, rows), whole[rows], atol=1e-5, rtol=1e-5)
    assert kernels.tokens == (decoder.config.layers - 1) * len(ids) + len(rows)


def test_sharded_and_bfloat16_checkpoints_are_read(tmp_path) -> None:
    model = tiny("qwen3-untied")
    half = {k: v.to(torch.bfloat16) for k, v in model.tensors().items()}
    from safetensors.torch import save_file

    names = sorted(half)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, keys in parts.items():
        save_file({k: half[k] for k in keys}, tmp_path / file)
    index = {"weight_map": {k: file for file, keys in parts.items() for k in keys}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_text((model.path / "config.json").read_text())
    ids = torch.tensor(random_ids(np.random.default_rng(1), 50))
    config = DecoderConfig.read(tmp_path)
    read = sequence_logprobs(Decoder(config, read_checkpoint(tmp_path)), ids)
    direct = sequence_logprobs(Decoder(config, {k: v.float() for k, v in half.items()}), ids)
    assert torch.equal(read, direct)
    in_bfloat16 = sequence_logprobs(Decoder(config, half, dtype=torch.bfloat16), ids)
    assert (in_bfloat16 - read).abs().mean() < 0.3


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "known: Gemma3ForCausalLM, LlamaForCausalLM, Qwen2ForCausalLM"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope type yarn is unknown"),
        ({"use_sliding_window": True, "layer_types": ["chunked_attention"] * 3}, "layer type chunked_attention"),
        ({"use_sliding_window": True, "layer_types": ["full_attention"]}, "3 layers, but 1 layer_types"),
        ({"hidden_act": "gelu"}, "activation gelu is unknown"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    ],
)
def test_what_it_cannot_run_is_one_clear_line(change: dict, says: str) -> None:
    data = json.loads((tiny().path / "config.json").read_text()) | change
    with pytest.raises(UnsupportedModel, match=says) as error:
        DecoderConfig.parse(data)
    assert "\n" not in str(error.value)
    if "layer_types" not in change or len(change["layer_types"]) == 3:
        assert 'engine.kind = "vllm"' in str(error.value)


def test_another_architecture_is_refused_before_anything_starts_and_named_a_way(tiny_model, tmp_path) -> None:
    """It is refused for the local engine only: vLLM runs others, and the trainer any causal LM that it can check."""
    model = shutil.copytree(tiny_model, tmp_path / "model")
    (model / "config.json").write_text(
        json.dumps(json.loads((model / "config.json").read_text()) | {"architectures": ["Phi3ForCausalLM"]})
    )
    with pytest.raises(ModelNotFound, match=r'Phi3ForCausalLM; known: .*engine.kind = "vllm"') as error:
        check_run(run_config(model, tmp_path / "runs"))
    assert "\n" not in str(error.value)
    vllm = {"kind": "vllm", "vllm": {"urls": ["http://127.0.0.1:1"]}}
    check_run(run_config(model, tmp_path / "runs", engine=vllm))


@pytest.mark.parametrize("window", [{}, {"sliding_window": None}, {"sliding_window": 9}])
def test_a_window_that_is_null_or_absent_means_what_it_means_to_transformers(window: dict) -> None:
    from transformers import Qwen2Config

    given = {"use_sliding_window": True, "max_window_layers": 1, "num_hidden_layers": 3, **window}
    theirs = Qwen2Config(hidden_size=64, num_attention_heads=4, **given)
    ours = DecoderConfig.parse(
        {"architectures": ["Qwen2ForCausalLM"], "vocab_size": 9, "hidden_size": 64, "intermediate_size": 8}
        | {"num_attention_heads": 4, **given}
    )
    seen = [theirs.sliding_window if kind == "sliding_attention" else 0 for kind in theirs.layer_types]
    assert list(ours.windows) == seen


def test_a_missing_or_misshapen_weight_is_named() -> None:
    model = tiny()
    config = DecoderConfig.read(model.path)
    tensors = model.tensors()
    name = "model.layers.1.mlp.down_proj.weight"
    with pytest.raises(UnsupportedModel, match=name):
        Decoder(config, {k: v for k, v in tensors.items() if k != name})
    with pytest.raises(UnsupportedModel, match=name):
        Decoder(config, {**tensors, name: tensors[name].t()})


@pytest.mark.parametrize("kind", KINDS)
def test_the_shapes_checked_before_a_run_are_those_of_the_weights(kind: str) -> None:
    path = tiny(kind).path
    check_weights(path)
    expected = _expected_shapes(json.loads((path / "config.json").read_text()))
    checked = {n for n in read_checkpoint(path) if not n.endswith((".bias", "q_norm.weight", "k_norm.weight"))}
    assert checked == expected.keys()


def test_older_rope_settings_mean_the_same() -> None:
    """transformers 5 writes rope_parameters; checkpoints of earlier versions have rope_theta and rope_scaling."""
    data = json.loads((tiny("llama").path / "config.json").read_text())
    scaling = dict(data.pop("rope_parameters"))
    old = {**data, "rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling}
    assert DecoderConfig.parse(old).rope == DecoderConfig.read(tiny("llama").path).rope


SIZES = {"vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 8, "num_attention_heads": 4}


@pytest.mark.parametrize(
    "written",
    [
        {},
        {"sliding_window_pattern": 2, "sliding_window": 64, "head_dim": 32, "query_pre_attn_scalar": 168},
        {"rope_theta": 5e5, "rope_local_base_freq": 2e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        {"rope_scaling": None, "final_logit_softcapping": None, "use_bidirectional_attention": False},
    ],
)
def test_what_a_gemma_config_leaves_out_is_as_transformers_fills_it_in(written: dict) -> None:
    """google's own config.json of Gemma 3 1B names neither the types of its layers nor that its embeddings are tied."""
    from transformers import Gemma3TextConfig

    short = {"architectures": ["Gemma3ForCausalLM"], "num_key_value_heads": 1, **SIZES, **written}
    full = Gemma3TextConfig(**short).to_dict()
    assert full["layer_types"] and full["rope_parameters"]["sliding_attention"]
    assert DecoderConfig.parse(short) == DecoderConfig.parse(full)
