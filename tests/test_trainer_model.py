"""Loading a model directory: what is wrong with it is one clear line. Log-probs never need the whole logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GraniteConfig, GraniteForCausalLM

from springtide.trainer.data import Row, load_step
from springtide.trainer.model import ModelError, load_policy
from springtide.trainer.packing import collate
from springtide.trainer.step import Shape, accumulate_supervised
from trainer_parts import VOCAB, tiny_model, write_groups


def test_a_missing_path_is_one_clear_line(tmp_path):
    with pytest.raises(ModelError, match=r"has no config\.json") as error:
        load_policy(tmp_path / "nowhere")
    assert "\n" not in str(error.value)


def test_a_directory_without_weights_is_one_clear_line(tmp_path):
    tiny_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="does not load") as error:
        load_policy(tmp_path)
    assert "\n" not in str(error.value)


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path):
    with pytest.raises(ModelError, match=rf"ids up to {VOCAB + 2}, the model a vocabulary of {VOCAB}"):
        load_policy(tiny_model(tmp_path, tokens=VOCAB + 3))


def test_an_added_token_outside_the_vocabulary_is_refused(tmp_path):
    tiny_model(tmp_path)
    data = json.loads((tmp_path / "tokenizer.json").read_text())
    data["added_tokens"] = [{"id": VOCAB, "content": "<|im_end|>"}]
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(ModelError, match=f"ids up to {VOCAB}"):
        load_policy(tmp_path)


def test_weights_that_lack_a_tensor_are_refused_not_filled_with_noise(tmp_path):
    tiny_model(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lack model\.layers\.1\.mlp\.up_proj\.weight"):
        load_policy(tmp_path)


def test_an_architecture_that_scales_its_logits_is_refused(tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    GraniteForCausalLM(GraniteConfig(vocab_size=32, logits_scaling=3.0, **sizes, **heads)).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="scales or caps its logits"):
        load_policy(tmp_path)


@pytest.mark.parametrize(("name", "lacks"), [("Gemma2", "softcap"), ("GptOss", "s_aux")])
def test_an_attention_that_cannot_be_computed_is_one_line(tmp_path: Path, name: str, lacks: str) -> None:
    import transformers

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8}
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1} if name == "GptOss" else {}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = getattr(transformers, f"{name}Config")(vocab_size=VOCAB, **heads, **sizes, **experts)
    getattr(transformers, f"{name}ForCausalLM")(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=rf"{name}ForCausalLM cannot be trained: .*{lacks}") as error:
        load_policy(tmp_path)
    assert "\n" not in str(error.value)


def test_an_attention_that_is_not_ours_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from springtide.trainer import attention

    model = tiny_model(tmp_path)
    computed = attention.padded_attention

    def other(*given, scaling=None, **options):  # as an architecture that scales what ours does not know of
        return computed(*given, scaling=2 * scaling, **options)

    monkeypatch.setattr(attention, "library", lambda: None)
    monkeypatch.setattr(attention, "padded_attention", other)
    with pytest.raises(ModelError, match="has another attention"):
        load_policy(model)


@pytest.mark.parametrize("name", ["Phi3", "Mistral", "Olmo2"])
def test_architectures_the_local_engine_does_not_run_can_be_trained(tmp_path: Path, name: str) -> None:
    """docs/models.md: with engine.kind = "vllm" a run samples what vLLM knows; the trainer has to hold its own."""
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    ids = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}
    config = getattr(transformers, f"{name}Config")(vocab_size=VOCAB, num_key_value_heads=1, **sizes, **ids)
    getattr(transformers, f"{name}ForCausalLM")(config).save_pretrained(tmp_path)
    policy = load_policy(tmp_path)  # its log-probs are compared with the model's own
    assert policy.score(np.arange(2, 10, dtype=np.int32)).shape == (7,)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Qwen2Moe", {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 3}),
        ("Phimoe", {"sliding_window": 3}),
        ("Llama4", {"attention_chunk_size": 4, "no_rope_layers": [1, 0], "intermediate_size_mlp": 32, "head_dim": 8}),
    ],
)
def test_a_window_that_only_the_mask_tells_of_is_trained_on(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    experts = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    special = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1, "shared_expert_intermediate_size": 8}
    kind = getattr(transformers, f"{name}TextConfig" if name == "Llama4" else f"{name}Config")
    config = kind(vocab_size=VOCAB, num_key_value_heads=1, **sizes, **experts, **special, **options)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    model.save_pretrained(tmp_path)
    model.set_attn_implementation("eager")
    ids = np.arange(2, 14, dtype=np.int32)

    def theirs() -> np.ndarray:
        tokens = torch.from_numpy(ids.astype(np.int64))
        with torch.no_grad():
            logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1]
        return logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0].numpy()

    policy, expected = load_policy(tmp_path), theirs()
    assert np.abs(policy.score(ids) - expected).max() < 1e-4
    at, zeros = np.arange(1, len(ids)), np.zeros(len(ids) - 1, np.float32)
    row = Row(("t", 0, 0, 0), ids, at, zeros, zeros.astype(np.int64), 0.0, 1.0)
    with torch.no_grad():
        ours = policy.logprobs(collate([row], policy.device), 1.0, 100).numpy()
    assert np.abs(ours - expected).max() < 1e-4
    model.config.sliding_window = model.config.attention_chunk_size = 100
    assert np.abs(theirs() - expected).max() > 1e-3, "the window is to be seen"


class LargestWithVocabulary(TorchDispatchMode):
    """The most rows any tensor whose last dimension is the vocabulary had."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.vocab, self.rows = vocab, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, torch.Tensor) and t.ndim and t.shape[-1] == self.vocab:
                self.rows = max(self.rows, t.numel() // self.vocab)
        return out


@pytest.mark.parametrize("chunk", [40, 1000])
def test_logits_never_exist_for_more_than_a_chunk_of_tokens(tmp_path, chunk):
    vocab = 509  # a prime: no other tensor of the model has this width
    policy = load_policy(tiny_model(tmp_path, vocab=vocab))
    data = load_step(write_groups(tmp_path, [[[(50, 40)], [(50, 40)]]]), "token_mean")
    with LargestWithVocabulary(vocab) as seen:
        accumulate_supervised(policy, data, Shape(8192, chunk, 1.0))
    assert seen.rows == min(chunk, data.loss_tokens)
