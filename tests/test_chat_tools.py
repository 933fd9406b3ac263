"""Call formats: what a model wrote is read exactly, or answered; nothing is guessed, nothing raises."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from springtide.chat.tools import CUT, FORMATS, NoCalls, ParsedReply, ToolFormat, detect_format, split_reasoning
from springtide.trace import ToolCall

EVERY: list[ToolFormat] = [*FORMATS.values(), NoCalls()]
HERMES, GLM, PLAIN = FORMATS["hermes"], FORMATS["glm"], FORMATS["plain"]

NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.\-]{0,15}", fullmatch=True)
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=20)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
OBJECTS = st.dictionaries(st.text(max_size=8), VALUES, max_size=4)
JSON_TEXT = st.builds(
    json.dumps, OBJECTS, ensure_ascii=st.booleans(), indent=st.sampled_from([None, 2]), sort_keys=st.booleans()
)
TAGS = ["<tool_call>", "</tool_call>", "<think>", "</think>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"]
PARTS = ['{"name": "f", "arguments": {}}', '{"name": "f"', '"arguments":', 'Action: f({"a": 1})', "Action:", "\\ud800"]
PIECES = st.sampled_from([*TAGS, *PARTS, *'{}[]():,-é\n "\\', "null", "NaN", "1e999"])
TEXTS = st.one_of(st.text(), st.lists(PIECES | st.text(max_size=4), max_size=20).map("".join))


def calls_of(pairs: list[tuple[str, str]]) -> tuple[ToolCall, ...]:
    return tuple(ToolCall(f"call_{i}", name, arguments) for i, (name, arguments) in enumerate(pairs))


@settings(max_examples=250, deadline=None)
@given(text=TEXTS, finish=st.sampled_from(["stop", "length"]))
@pytest.mark.parametrize("form", EVERY, ids=lambda f: f.name)
def test_parsing_never_raises_and_a_good_call_is_an_object(form: ToolFormat, text: str, finish: Any) -> None:
    reply = form.parse(text, finish)
    for call in reply.calls:
        call.name.encode()
        if finish == "length":
            assert call.error == CUT
        if call.error is None:
            assert call.name and isinstance(json.loads(call.arguments), dict)


@settings(max_examples=100, deadline=None)
@given(pairs=st.lists(st.tuples(NAMES, JSON_TEXT), min_size=1, max_size=3))
@pytest.mark.parametrize("form", [HERMES, PLAIN], ids=lambda f: f.name)
def test_written_calls_read_back_with_their_own_text(form: ToolFormat, pairs: list[tuple[str, str]]) -> None:
    calls = calls_of(pairs)
    assert form.parse(form.render(calls), "stop") == ParsedReply(calls=calls)


def schema(arguments: dict[str, Any], name: str) -> dict[str, Any]:
    kinds = {
        str: "string",
        int: "integer",
        float: "number",
        bool: "boolean",
        dict: "object",
        list: "array",
        type(None): "null",
    }
    properties = {k: {"type": kinds.get(type(v), "null")} for k, v in arguments.items()}
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


GLM_KEYS = st.from_regex(r"[^\s<>](?:[^<>]*[^\s<>])?", fullmatch=True).filter(lambda k: len(k) < 12)
GLM_VALUES = VALUES.filter(lambda v: "</arg_value>" not in str(v) and "</tool_call>" not in str(v))


@settings(max_examples=100, deadline=None)
@given(pairs=st.lists(st.tuples(NAMES, st.dictionaries(GLM_KEYS, GLM_VALUES, max_size=3)), min_size=1, max_size=2))
def test_glm_calls_read_back_by_the_types_of_the_schema(pairs: list[tuple[str, dict[str, Any]]]) -> None:
    pairs = [(f"{name}{i}", arguments) for i, (name, arguments) in enumerate(pairs)]
    calls = calls_of([(name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in pairs])
    tools = [schema(arguments, name) for name, arguments in pairs]
    assert GLM.parse(GLM.render(calls), "stop", tools) == ParsedReply(calls=calls)


def test_a_glm_string_that_looks_like_a_number_stays_text_where_the_schema_says_so() -> None:
    pairs = "<arg_key>code</arg_key>\n<arg_value>007</arg_value>\n<arg_key>n</arg_key>\n<arg_value>7</arg_value>\n"
    text = f"<tool_call>find\n{pairs}</tool_call>"
    tools = [schema({"code": "", "n": 1}, "find")]
    assert json.loads(GLM.parse(text, "stop", tools).calls[0].arguments) == {"code": "007", "n": 7}
    assert json.loads(GLM.parse(text, "stop").calls[0].arguments) == {"code": "007", "n": 7}
    wrong = text.replace(">7<", ">seven<")
    assert "n must be integer" in (GLM.parse(wrong, "stop", tools).calls[0].error or "")


def test_glm_reads_the_compact_spelling_too() -> None:
    """GLM-4.7 and later write the pairs without line breaks."""
    text = "<tool_call>look<arg_key>where</arg_key><arg_value>box\n 1</arg_value></tool_call>"
    assert GLM.parse(text, "stop").calls == (ToolCall("call_0", "look", '{"where": "box\\n 1"}'),)


@pytest.mark.parametrize(
    ("text", "name", "error"),
    [
        (
            '<tool_call>\n{"name": "f", "arguments": {"a": 1,}}\n</tool_call>',
            "f",
            "Illegal trailing comma|property name",
        ),
        ('<tool_call>\n{"name": "f", "arguments": [1]}\n</tool_call>', "f", '"arguments" must be a JSON object'),
        ('<tool_call>\n{"arguments": {}}\n</tool_call>', "", '"name" must be the name'),
        ('<tool_call>\n{"name": "f", "arguments": {"a": NaN}}\n</tool_call>', "f", "NaN is not JSON"),
        ('<tool_call>\n{"name": "f", "arguments": {}}', "f", "</tool_call> must follow"),
        ('<tool_call>\n{"name": "f", "arguments": {}} oh\n</tool_call>', "f", "</tool_call> must follow"),
        ("<tool_call>\nf(1)\n</tool_call>", "", "a JSON object must come here"),
        ("<tool_call>", "", "a JSON object must come here"),
        ('<tool_call>{"name": "f", "arguments": ' + '{"a": ' * 5000 + "1" + "}" * 5001 + "</tool_call>", "f", "nested"),
        (
            '<tool_call>{"name": "f", "arguments": ' + '{"a": ' * 80 + "1" + "}" * 81 + "</tool_call>",
            "f",
            "nested more",
        ),
        ('<tool_call>{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}</tool_call>", "f", "4300 digits"),
    ],
)
def test_a_malformed_hermes_call_is_answered_not_raised(text: str, name: str, error: str) -> None:
    """verifiers#1763: malformed arguments killed a quarter of the rollouts."""
    (call,) = HERMES.parse("Let me see. " + text, "stop").calls
    assert call.name == name
    assert call.error and re.search(error, call.error)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("Action: look", "write Action: name"),
        ("Action: look(", "a JSON object must come here"),
        ('Action: look({"a": 1}', r"\) must follow"),
        ('Action: look({"a": })', "Expecting value"),
        ("Action:", "write Action: name"),
    ],
)
def test_a_malformed_plain_call_is_answered_not_raised(text: str, error: str) -> None:
    (call,) = PLAIN.parse(text + "\nand so on", "stop").calls
    assert call.error and re.search(error, call.error)


@pytest.mark.parametrize("form", FORMATS.values(), ids=lambda f: f.name)
def test_a_turn_cut_by_the_token_limit_executes_nothing(form: ToolFormat) -> None:
    """mini-swe-agent#851, mastra#15717: neither the call that was cut nor the complete one before it."""
    calls = calls_of([("look", "{}"), ("take", '{"a": 1}')])
    whole = form.render(calls)
    for end in range(len(whole), 0, -1):
        reply = form.parse("text\n" + whole[:end], "length")
        assert all(call.error == CUT for call in reply.calls)
    assert [c.name for c in form.parse(whole, "length").calls] == ["look", "take"]
    assert form.parse(whole[:-4], "length").calls[1].error == CUT


def test_text_around_calls_is_kept_and_calls_keep_their_order() -> None:
    one, two = '{"name": "a"}', '{"name":"b","arguments":{"x":1}}'
    text = f"First.\n<tool_call>\n{one}\n</tool_call>\nThen\n<tool_call>{two}</tool_call> end"
    reply = HERMES.parse(text, "stop")
    assert reply.content == "First.\nThen\nend"
    assert reply.calls == calls_of([("a", "{}"), ("b", '{"x":1}')])


def test_a_closing_tag_inside_a_string_does_not_end_the_call() -> None:
    call = ToolCall("call_0", "write", json.dumps({"text": 'a </tool_call> b <tool_call> "} c'}))
    assert HERMES.parse(HERMES.render([call]), "stop").calls == (call,)


def test_an_unclosed_call_does_not_swallow_the_next_one() -> None:
    text = '<tool_call>\n{"name": "a", "arguments": {}}\n<tool_call>\n{"name": "b", "arguments": {}}\n</tool_call>'
    first, second = HERMES.parse(text, "stop").calls
    assert first.error and (second.name, second.error) == ("b", None)


def test_arguments_quoted_once_more_are_read() -> None:
    (call,) = HERMES.parse('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "stop").calls
    assert (call.arguments, call.error) == ('{"a": 1}', None)


@pytest.mark.parametrize(
    ("text", "reasoning", "rest"),
    [
        ("<think>\nhm\n</think>\n\nyes", "hm", "\n\nyes"),
        ("<think>never closed", "never closed", ""),
        ("the prompt opened it</think>yes", "the prompt opened it", "yes"),
        ("yes", "", "yes"),
        ("so <think>a</think> b", "a", "so  b"),
    ],
)
def test_thinking_is_split_off(text: str, reasoning: str, rest: str) -> None:
    assert split_reasoning(text) == (reasoning, rest)


@pytest.mark.parametrize("form", FORMATS.values(), ids=lambda f: f.name)
def test_a_call_inside_thinking_is_not_a_call(form: ToolFormat) -> None:
    """AReaL#736: reasoning text parsed as a tool call."""
    inside = form.render(calls_of([("look", "{}")]))
    assert form.parse(f"<think>\n{inside}\n</think>\n\nno", "stop").calls == ()
    assert form.parse(f"<think>\n{inside}", "length").calls == ()


def test_half_a_surrogate_pair_in_a_name_can_be_written() -> None:
    (call,) = HERMES.parse('<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>', "stop").calls
    call.name.encode()


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("<tool_call>{{ t.name }}<arg_key>{{ k }}</arg_key>", "glm"),
        ('<tool_call>\n{"name": "', "hermes"),
        ("<tool_call>\n<function={{ name }}>", "none"),
        ("<|tool_call>call:{{ name }}", "none"),
        ("{{ message.content }}", "none"),
    ],
)
def test_the_format_is_detected_from_the_templates_text(template: str, name: str) -> None:
    assert detect_format(template).name == name
