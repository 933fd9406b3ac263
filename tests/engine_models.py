"""Tiny random checkpoints with transformers' own forward pass beside them: what the engine's tests compare with."""

from __future__ import annotations

import functools
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

VOCABULARY = 97
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
GEMMA = {  # a window shorter than the contexts, two rotary bases, a head size and a query scale of their own
    "head_dim": 24,
    "query_pre_attn_scalar": 20,
    "sliding_window": 19,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 50000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3-untied": ("Qwen3", {"head_dim": 8, "tie_word_embeddings": False, "num_attention_heads": 6}),
    "llama": ("Llama", {"rope_parameters": LLAMA3_ROPE, "num_key_value_heads": 4, "hidden_size": 64}),
    "llama-biased": ("Llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": False}),
    "qwen3-window": (
        "Qwen3",
        {"use_sliding_window": True, "sliding_window": 13, "max_window_layers": 2, "head_dim": 16},
    ),
    "gemma3": ("Gemma3", GEMMA),
}


@dataclass(frozen=True)
class Tiny:
    """A checkpoint directory and the transformers model that wrote it."""

    path: Path
    model: Any

    @torch.inference_mode()
    def logprobs(self, ids: np.ndarray, temperature: float = 1.0) -> np.ndarray:
        """transformers' log-probs of ids[1:], float32 [T - 1]."""
        tokens = torch.as_tensor(np.asarray(ids), dtype=torch.long)
        scores = (self.model(tokens[None]).logits[0, :-1].float() / temperature).log_softmax(-1)
        return scores.gather(1, tokens[1:, None])[:, 0].numpy()

    def tensors(self) -> dict[str, torch.Tensor]:
        return dict(self.model.state_dict())


@functools.cache
def tiny(kind: str = "qwen3", seed: int = 0) -> Tiny:
    """A random model of 3 layers. Its scores spread well (a model at its initialisation is close to uniform)."""
    import transformers

    torch.set_num_threads(1)
    name, options = KINDS[kind]
    settings = getattr(transformers, f"{name}TextConfig" if name == "Gemma3" else f"{name}Config")
    config = settings(
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            **options,
        }
    )
    torch.manual_seed(seed)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.15)
            else:
                parameter.uniform_(0.5, 1.5)
    path = Path(tempfile.mkdtemp(prefix=f"tiny-{kind}-"))
    model.save_pretrained(path)
    return Tiny(path, model)


def random_ids(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.integers(0, VOCABULARY, count).astype(np.int32)
