"""Model directories: what is found, what is refused with a remedy, and Jinja as transformers runs it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.chat_models import GLM, SPECIAL, STABLE, TOOLS, chat, tokenizer, user, write_model

from springtide.chat import ChatError, ChatTemplate, check_vocab, load_chat
from springtide.trace import Message, ToolCall


def test_a_model_directory_is_read_without_torch_and_transformers(tmp_path: Path) -> None:
    write_model(tmp_path)
    code = (
        "import sys; from springtide.chat import load_chat; from springtide.trace import Message\n"
        f"load_chat({str(tmp_path)!r}).start([Message('user', 'hi')])\n"
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.json"]
)
def test_a_file_that_is_torn_is_named_in_one_line(tmp_path: Path, name: str) -> None:
    write_model(tmp_path)
    (tmp_path / name).write_text('{"model": ')
    with pytest.raises(ChatError, match=rf"^.*/{re.escape(name)} is n.* copy the model again$"):
        load_chat(tmp_path)


def test_stop_ids_come_from_template_generation_config_and_tokenizer(tmp_path: Path) -> None:
    write_model(tmp_path, eos_token={"content": "<|user|>", "lstrip": False})
    end, eos = tokenizer().token_to_id("<|im_end|>"), tokenizer().token_to_id("<|user|>")
    assert load_chat(tmp_path).stop_ids == (end, eos)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [0, 2]}')
    assert load_chat(tmp_path).stop_ids == (end, 0, eos)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 0}')
    assert load_chat(tmp_path).stop_ids == (end, 0, eos)


def test_the_jinja_file_goes_before_the_config_and_lists_have_a_tool_template(tmp_path: Path) -> None:
    other = STABLE.replace("<|im_start|>system", "<|im_start|>tools")
    listed = [{"name": "default", "template": STABLE}, {"name": "tool_use", "template": other}]
    write_model(tmp_path, listed)  # type: ignore[arg-type]
    loaded = load_chat(tmp_path)
    assert "<|im_start|>tools" in loaded.decode(loaded.start([user("a")], TOOLS).ids)
    assert "<|im_start|>tools" not in loaded.decode(loaded.start([user("a")]).ids)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ nothing }}"}))
    (tmp_path / "chat_template.jinja").write_text(STABLE)
    again = load_chat(tmp_path)
    assert again.fingerprints["tokenizer"] == loaded.fingerprints["tokenizer"]
    assert again.fingerprints["template"] != loaded.fingerprints["template"]


def test_what_cannot_work_is_one_line_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ChatError, match=r"no tokenizer\.json"):
        load_chat(tmp_path)
    write_model(tmp_path)
    with pytest.raises(ChatError, match="use auto, hermes, glm, plain"):
        load_chat(tmp_path, "xml")
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ChatError, match=r"no chat template .*chat_template\.jinja"):
        load_chat(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}")
    with pytest.raises(ChatError, match=r"does not compile: line 1"):
        load_chat(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    with pytest.raises(ChatError, match="no added token"):
        load_chat(tmp_path)
    with pytest.raises(ChatError) as caught:
        (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('only\nimages') }}")
        load_chat(tmp_path)
    assert "\n" not in str(caught.value)


def test_an_unknown_call_syntax_is_refused_with_tools_only(tmp_path: Path) -> None:
    write_model(tmp_path, STABLE.replace("tool_call>", "call>"))
    assert len(load_chat(tmp_path).start([user("a")]).ids)
    with pytest.raises(ChatError, match=r"set model\.tool_format to one of hermes, glm, plain"):
        load_chat(tmp_path).start([user("a")], TOOLS)
    assert len(load_chat(tmp_path, "hermes").start([user("a")], TOOLS).ids)


def test_a_vocabulary_smaller_than_the_tokenizer_is_refused() -> None:
    model = chat("stable")
    check_vocab(model, model.vocab_size)
    check_vocab(model, model.vocab_size + 64)
    with pytest.raises(ChatError, match=f"ids up to {model.vocab_size - 1}.* vocab_size is {model.vocab_size - 1}"):
        check_vocab(model, model.vocab_size - 1)


def test_options_reach_the_template(tmp_path: Path) -> None:
    write_model(
        tmp_path, STABLE + "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    )
    quiet = load_chat(tmp_path, options={"enable_thinking": False})
    assert quiet.decode(quiet.start([user("a")]).ids).endswith("assistant\n<think></think>")
    assert quiet.fingerprints["template"] != load_chat(tmp_path).fingerprints["template"]


def test_gold_of_a_call_is_read_back_and_holds_one_stop_token_its_last() -> None:
    message = Message("assistant", "", (ToolCall("c", "look", '{"a": "x"}'),))
    for name in ("stable", "glm"):
        model = chat(name)
        conversation = model.start([user("")])
        ids = conversation.render_gold(message)
        said = conversation.assistant(ids, "stop")
        assert [(c.name, c.arguments) for c in said.tool_calls] == [("look", '{"a": "x"}')]
        assert ids[-1] in model.stop_ids and not set(ids[:-1].tolist()) & set(model.stop_ids)


def test_arguments_are_objects_where_a_template_cannot_copy_text() -> None:
    """GLM iterates over them; the text form would be a Jinja error."""
    call = Message("assistant", "", (ToolCall("c", "look", '{"a": "x"}'),))
    assert chat("glm").view(call)["tool_calls"][0]["function"]["arguments"] == {"a": "x"}
    assert chat("stable").view(call)["tool_calls"][0]["function"]["arguments"] == '{"a": "x"}'


FEATURES = {
    "blocks are trimmed": "  {% if messages %}\n  x\n  {% endif %}\n  {{ messages[0].content }}\n",
    "tojson keeps html and unicode": "{{ tools | tojson }} {{ messages | tojson(indent=2) }}",
    "tojson in ascii": "{{ 'é<' | tojson(ensure_ascii=True) }}",
    "tojson options": "{{ tools[0] | tojson(separators=(',', ':'), sort_keys=true) }}{{ tools[0] | tojson }}",
    "loop controls": "{% for m in messages %}{% if loop.index0 == 1 %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
    "the generation tag": (
        "{% for m in messages %}{% generation %}{% set x = 1 %}{{ m.content }}\n{% endgeneration %}{{ x }}{% endfor %}"
    ),
    "undefined is empty": "{{ nothing }}{{ messages[0].nothing }}{{ documents is none }}{{ bos_token }}",
    "dict methods": "{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}{{ messages[0].get('role') }}",
    "namespaces": "{% set ns = namespace(a=1) %}{% for m in messages %}{% set ns.a = ns.a + 1 %}{% endfor %}{{ ns.a }}",
    "reasoning": "{% for m in messages %}{{ m.reasoning_content }}{{ m.thinking }}{% endfor %}",
    "the year": "{{ strftime_now('%Y') }}",
}


@pytest.mark.parametrize("feature", FEATURES)
def test_jinja_runs_as_in_transformers(feature: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = [
        Message("user", "<a & 'b'> “é”"),
        Message("assistant", "c", reasoning_content="why"),
        Message("tool", "", tool_call_id="call_0", name="f"),
    ]
    template = ChatTemplate({"default": FEATURES[feature]}, {"bos_token": "<s>"})
    theirs, _ = render_jinja_template(
        conversations=[[m.to_openai() for m in messages]],
        tools=[dict(t) for t in TOOLS],
        chat_template=FEATURES[feature],
        add_generation_prompt=True,
        bos_token="<s>",
    )
    model = chat("stable")
    views: list[dict[str, Any]] = model.views(messages)
    assert template.render(views, model.tools(TOOLS), True) == theirs[0]


@pytest.mark.parametrize(
    "text", ["{{ messages.append(1) }}", "{{ ''.__class__.__mro__ }}", "{{ messages[0].clear() }}"]
)
def test_a_template_cannot_leave_the_sandbox(text: str) -> None:
    with pytest.raises(ChatError):
        ChatTemplate({"default": text}, {}).render([{"role": "user", "content": ""}], None, False)


def test_the_template_of_the_documentation_works(tmp_path: Path) -> None:
    text = (Path(__file__).resolve().parent.parent / "docs" / "models.md").read_text("utf-8")
    (template,) = re.findall(r"```jinja\n(.*?)```", text, re.DOTALL)
    write_model(tmp_path, template, eos_token="<|im_end|>")
    plain = load_chat(tmp_path, "plain")
    conversation = plain.start([user("hi")], TOOLS)
    call = Message("assistant", "", (ToolCall("c", "look", '{"a": "x"}'),))
    conversation.assistant(conversation.render_gold(call), "stop")
    assert conversation.observe([Message("tool", "dark", name="look")])
    end = 'assistant:\nAction: look({"a": "x"})<|im_end|>\n\nuser:\nResult of look: dark\n\nassistant:\n'
    assert plain.decode(conversation.ids).endswith(end)


def test_glm_tools_and_special_tokens_are_seen() -> None:
    model = chat("glm")
    assert model.format.name == "glm" and "<arg_key>" in GLM
    ids = model.start([user("a")], TOOLS).ids
    assert ids[0] == SPECIAL.index("<|system|>")
