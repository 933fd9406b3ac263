"""Nano's own byte-level BPE and chat template, and the directory's files that hold them.

Owns: how text is cut before merging, which pieces of syntax are tokens of their own, and the template. Invariants: a
word is cut the same way wherever it stands (a space is never part of it, camelCase falls into its words, digits stand
alone), so a name of the prompt is copied token by token into a call; at most 2,048 tokens; no merge is spent on syntax.
Called by: `python -m scripts.nano tokenizer`, tests.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from scripts.nano.dialogue import END, PAD, SPECIAL, START, Signatures, signature
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

MOST_TOKENS = 2048

# A capitalised or lower-case word, a run of capitals, one digit, or whatever stands between (spaces included).
_PIECES = Regex(r"\p{Lu}?[\p{Ll}\p{M}]+|\p{Lu}+(?![\p{Ll}])|\p{L}|\p{N}|[^\p{L}\p{N}]+")

_SYNTAX = (
    "user\n", "assistant\n", "tool\n", '\n{"name": "', '"}}\n', "Final Answer: #",
    "PRAGMA table_list", "PRAGMA table_info(", "SELECT COUNT(*) FROM ", "SELECT ", " FROM ", " WHERE ", " ORDER BY ",
    " DESC LIMIT 1", " LIMIT 1", "UPDATE ", " SET ",
)  # fmt: skip

TEMPLATE = """\
{%- set ns = namespace(system='') -%}
{%- if messages and messages[0].role == 'system' -%}{%- set ns.system = messages[0].content -%}{%- endif -%}
{%- if tools or ns.system -%}
{{- '<|im_start|>system' -}}
{%- if ns.system -%}{{- '\\n' + ns.system -}}{%- endif -%}
{%- for tool in tools or [] -%}
{{- '\\n' + tool.function.name + '(' + (tool.function.parameters.properties | default({}) | list | join(', ')) + ')' -}}
{%- endfor -%}
{{- '<|im_end|>' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'system' and loop.first -%}
{%- else -%}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') -}}
{%- for call in message.tool_calls or [] -%}
{%- if message.content or not loop.first -%}{{- '\\n' -}}{%- endif -%}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' -}}
{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson -}}
{{- '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def syntax_tokens(tools: Iterable[Signatures]) -> list[str]:
    """The pieces of syntax that are one token each: a tool's signature, a call up to its first value, and so on."""
    tokens = list(_SYNTAX)
    for offered in tools:
        for name, arguments in offered:
            tokens.append("\n" + signature(name, arguments))
            tokens.append(f'{name}", "arguments": {{' + (f'"{arguments[0]}": "' if arguments else ""))
            tokens += [f'", "{argument}": "' for argument in arguments[1:]]
    return list(dict.fromkeys(tokens))


def train_tokenizer(texts: Iterable[str], tools: Iterable[Signatures], size: int) -> Tokenizer:
    """A byte-level BPE of `size` tokens, special and syntax tokens included. Raises: ValueError if over 2,048."""
    if size > MOST_TOKENS:
        raise ValueError(f"nano's vocabulary is at most {MOST_TOKENS} tokens, not {size}")
    syntax = syntax_tokens(tools)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(_PIECES, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size - len(syntax),
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_without_syntax(texts, syntax), trainer)
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in syntax])
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """tokenizer.json, tokenizer_config.json, chat_template.jinja: what transformers and `springtide.chat` read."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "additional_special_tokens": [START, END],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1024,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    (directory / "chat_template.jinja").write_text(TEMPLATE, "utf-8")


def _without_syntax(texts: Iterable[str], syntax: list[str]) -> Iterable[str]:
    """The texts in parts, without the pieces that are tokens anyway, so that no merge is spent on them."""
    longest_first = sorted((*syntax, *SPECIAL), key=len, reverse=True)
    for text in texts:
        parts = [text]
        for piece in longest_first:
            parts = [p for part in parts for p in part.split(piece)]
        yield from parts
