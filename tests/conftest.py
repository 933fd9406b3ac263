"""Fixtures that several areas share: a real but tiny model directory, made once a session."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

# A shell's background job ignores SIGINT and so would all it starts; the tests of Ctrl-C would wait in vain.
signal.signal(signal.SIGINT, signal.default_int_handler)

TEMPLATE = """{%- if tools %}<|im_start|>system
{%- for tool in tools %}
{{ tool.function.name }}({{ tool.function.parameters.properties | join(', ') }})
{%- endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>
{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def make_tiny_model(directory: Path, *, seed: int = 0, hidden: int = 32) -> Path:
    """A random Qwen3 of two layers with a byte-level tokenizer and a Hermes-style template."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import Qwen3Config, Qwen3ForCausalLM

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"]
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    vocab = len(alphabet) + len(special)
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocab, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, head_dim=16, max_position_embeddings=1024,
            tie_word_embeddings=True, eos_token_id=tokenizer.token_to_id("<|im_end|>"), bos_token_id=None,
        )
    )  # fmt: skip
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Of tests that run in several processes, one marked `alone` waits for the others and they for it: it measures."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if run is None:
        return (yield)
    locks = Path(tempfile.gettempdir()) / f"springtide-tests-{run}"
    with open(f"{locks}-turn", "w") as turn, open(locks, "w") as running:
        fcntl.flock(turn, fcntl.LOCK_EX)  # held while one waits to be alone, so that no other starts before it
        fcntl.flock(running, fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH)
        fcntl.flock(turn, fcntl.LOCK_UN)
        return (yield)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny-model"))
