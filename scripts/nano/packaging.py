"""The shipped directory: bfloat16 weights, configurations, tokenizer, template.

Invariant: what is written loads in transformers and in `springtide.chat`, has at most two million parameters and a
weight file under 5 MB. Called by: the command line, tests.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from scripts.nano.dialogue import END, PAD
from scripts.nano.tokenizer import write_tokenizer
from tokenizers import Tokenizer
from transformers import Qwen3ForCausalLM

MOST_BYTES = 5_000_000


def package(model: Qwen3ForCausalLM, tokenizer: Tokenizer, directory: Path) -> None:
    """Write the directory. Raises: ValueError if the weights are 5 MB or more."""
    write_tokenizer(tokenizer, directory)
    tensors = {
        name: tensor.detach().to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"  # tied: the embedding serves
    }
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    if size >= MOST_BYTES:
        raise ValueError(f"nano's weights are {size} bytes; they must stay under {MOST_BYTES}")
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_dict()
    config |= {"architectures": ["Qwen3ForCausalLM"], "dtype": "bfloat16"}
    config.pop("_name_or_path", None)
    _write(directory / "config.json", config)
    stops = {"eos_token_id": tokenizer.token_to_id(END), "pad_token_id": tokenizer.token_to_id(PAD)}
    _write(directory / "generation_config.json", {"do_sample": True, "temperature": 1.0, **stops})


def _write(path: Path, data: dict) -> None:
    path.write_text(json.dumps(data, indent=2, sort_keys=True) + "\n", "utf-8")
