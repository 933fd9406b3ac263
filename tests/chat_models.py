"""Small chat models for tests: a trained byte-level tokenizer of a few hundred tokens, and templates of three kinds."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from springtide.chat import Chat, ChatTemplate
from springtide.trace import Message

SPECIAL = ["<pad>", "<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|system|>"]

TOOLS: tuple[dict[str, Any], ...] = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Does {name}.",
            "parameters": {"type": "object", "properties": {"a": {"type": "string"}, "n": {"type": "integer"}}},
        },
    }
    for name in ("look", "take", "put")
)

_TOOL_HEAD = """{%- if tools %}{{ '<|im_start|>system\\n' }}
{%- for tool in tools %}{{ tool | tojson }}{{ '\\n' }}{% endfor %}
{{- '<|im_end|>\\n' }}{% endif %}
"""
_BODY = """{{ m.content }}
{%- for call in m.tool_calls or [] %}
    {%- if not loop.first or m.content %}{{ '\\n' }}{% endif %}
    {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments }}
    {{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
"""
_PROMPT = "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
_THINKING = "{{ '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}"

# Every message stands as it was said, thinking included: prefix-stable.
STABLE = f"""{_TOOL_HEAD}
{{%- for m in messages %}}{{{{ '<|im_start|>' + m.role + '\\n' }}}}
{{%- if m.reasoning_content %}}{_THINKING}{{% endif %}}
{{{{- '' }}}}{_BODY}
{{%- endfor %}}
{_PROMPT}"""

# Past thinking is dropped as soon as a user speaks again, as Qwen3 does.
STRIPPING = f"""{_TOOL_HEAD}
{{%- set ns = namespace(last=-1) %}}
{{%- for m in messages %}}{{% if m.role == 'user' %}}{{% set ns.last = loop.index0 %}}{{% endif %}}{{% endfor %}}
{{%- for m in messages %}}{{{{ '<|im_start|>' + m.role + '\\n' }}}}
{{%- if m.reasoning_content and loop.index0 > ns.last %}}{_THINKING}{{% endif %}}
{{{{- '' }}}}{_BODY}
{{%- endfor %}}
{_PROMPT}"""

# No end of turn: the next header ends a turn; arguments must be objects; calls in key/value tags (GLM-4.5's ways).
GLM = """{%- if tools %}<|system|>
{%- for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{% endfor %}{% endif %}
{%- for m in messages %}
    {%- if m.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|observation|>' }}{% endif %}
        {{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
    {%- elif m.role == 'assistant' %}
        {{- '<|assistant|>\\n<think>' + (m.reasoning_content or '') + '</think>' }}
        {%- if m.content %}{{ '\\n' + m.content }}{% endif %}
        {%- for call in m.tool_calls or [] %}
            {{- '\\n<tool_call>' + call.function.name + '\\n' }}
            {%- for k, v in call.function.arguments.items() %}
                {{- '<arg_key>' + k + '</arg_key>\\n<arg_value>' + (v if v is string else v | tojson) }}
                {{- '</arg_value>\\n' }}
            {%- endfor %}
            {{- '</tool_call>' }}
        {%- endfor %}
    {%- else %}
        {{- '<|' + m.role + '|>\\n' + m.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""

TEMPLATES = {"stable": STABLE, "stripping": STRIPPING, "glm": GLM}


@cache
def tokenizer() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    corpus = [
        '<tool_call>\n{"name": "look", "arguments": {"a": "the box", "n": 12}}\n</tool_call>',
        *TEMPLATES.values(),
    ]
    made.train_from_iterator(corpus * 3, trainer)
    return made


@cache
def chat(name: str) -> Chat:
    return Chat(tokenizer(), ChatTemplate({"default": TEMPLATES[name]}, {}))


def write_model(directory: Path, template: str = STABLE, **config: Any) -> Path:
    """A Hugging Face directory, as far as `load_chat` reads one."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer().save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, **config}), "utf-8")
    return directory


def user(text: str) -> Message:
    return Message("user", text)
