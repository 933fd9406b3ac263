"""A conversation's tokens: what was sampled stays, what was written around it is masked, segments hold every prompt."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.chat_models import TEMPLATES, TOOLS, chat, tokenizer, user

from springtide.chat import FORMATS, Chat, ChatTemplate, ContentError, Conversation, measure_drift, undecodable
from springtide.chat.tools import CUT
from springtide.trace import Message, ToolCall

TEXT = st.one_of(
    st.sampled_from(["", "ok", "the box\n", "  two  spaces ", "<|im_end|>", "a<|user|>b", "日本 🎷", "</think>"]),
    st.text(max_size=12),
)
REPLIES = st.one_of(
    st.sampled_from(
        [
            '<tool_call>\n{"name": "look", "arguments": {"a": "x"}}\n</tool_call>',
            '<tool_call>{"name":"look","arguments":{}}</tool_call>\nand '
            '<tool_call>{"name": "put", "arguments": {"n": 1e2}}</tool_call>',
            '<tool_call>\n{"name": "look", "arguments": {"a": }}\n</tool_call>',
            "<tool_call>look\n<arg_key>a</arg_key>\n<arg_value>x</arg_value>\n</tool_call>",
            "<think>\nhm, I see\n</think>\n\nDone.",
            "<think>never closed",
            '<think>\nso\n</think>\n\n<tool_call>\n{"name": "take", "arguments": {"a": "y"}}\n</tool_call>',
        ]
    ),
    TEXT,
)


@dataclass
class Turn:
    ids: np.ndarray
    finish: str
    following: list[Message]
    tools: int | None


@st.composite
def turns(draw: st.DrawFn, name: str) -> Turn:
    model = chat(name)
    if draw(st.booleans()):
        ids = model.encode(draw(REPLIES))
    else:  # anything a policy may sample: not the tokenizer's own spelling, broken characters, stray control tokens
        ids = np.array(draw(st.lists(st.integers(0, model.vocab_size - 1), max_size=12)), np.int32)
    finish = draw(st.sampled_from(["stop", "length"]))
    if finish == "stop":
        ids = np.append(ids, np.int32(draw(st.sampled_from(model.stop_ids))))
    following = draw(st.lists(st.builds(Message, st.sampled_from(["tool", "user"]), TEXT), max_size=3))
    tools = draw(st.sampled_from([None, None, None, 0, 1, 3]))
    return Turn(ids, finish, following, tools)


@dataclass
class Record:
    conversation: Conversation
    prompts: list[np.ndarray] = field(default_factory=list)
    sampled: list[np.ndarray] = field(default_factory=list)


def play(name: str, start: list[Message], tools: int, played: list[Turn], observe_last: bool) -> Record:
    record = Record(chat(name).start(start, TOOLS[:tools]))
    for number, turn in enumerate(played):
        record.prompts.append(record.conversation.ids.copy())
        record.sampled.append(turn.ids)
        logprobs = -np.arange(1, len(turn.ids) + 1, dtype=np.float32)
        record.conversation.assistant(turn.ids, turn.finish, logprobs, number)
        if number < len(played) - 1 or observe_last:
            record.conversation.observe(turn.following, None if turn.tools is None else TOOLS[: turn.tools])
    return record


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_every_sampled_token_stands_once_and_every_prompt_is_a_prefix(name: str, data: st.DataObject) -> None:
    start = [*data.draw(st.lists(st.builds(Message, st.just("system"), TEXT), max_size=1)), user(data.draw(TEXT))]
    played = data.draw(st.lists(turns(name), max_size=5))
    record = play(name, start, data.draw(st.integers(0, 3)), played, data.draw(st.booleans()))
    segments, spans = record.conversation.segments(), record.conversation.turns
    marked = [np.zeros(len(s.ids), bool) for s in segments]
    for number, (span, prompt, ids) in enumerate(zip(spans, record.prompts, record.sampled, strict=True)):
        segment, here = segments[span.segment], slice(span.start, span.end)
        assert np.array_equal(segment.ids[: span.start], prompt)
        assert np.array_equal(segment.ids[here], ids)
        assert np.array_equal(segment.logprobs[here], -np.arange(1, len(ids) + 1))
        assert (segment.versions[here] == number).all()
        assert not marked[span.segment][here].any()
        marked[span.segment][here] = True
    for segment, expected in zip(segments, marked, strict=True):
        assert np.array_equal(segment.loss_mask, expected)
        assert np.array_equal(segment.versions >= 0, expected)
    assert sum(s.loss_tokens for s in segments) == sum(map(len, record.sampled))


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_new_segment_is_a_full_rendering(name: str, data: st.DataObject) -> None:
    conversation = chat(name).start([user("go")], TOOLS)
    for turn in data.draw(st.lists(turns(name), min_size=1, max_size=4)):
        conversation.assistant(turn.ids, turn.finish)
        if not conversation.observe(turn.following):
            assert np.array_equal(conversation.ids, chat(name).encode(conversation.rendered()))
            assert not measure_drift(conversation)


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_a_stable_template_keeps_one_segment_whatever_is_sampled(data: st.DataObject) -> None:
    conversation = chat("stable").start([user("go")], TOOLS)
    for turn in data.draw(st.lists(turns("stable"), min_size=1, max_size=4)):
        conversation.assistant(turn.ids, turn.finish)
        assert conversation.observe(turn.following)


def say(conversation: Conversation, text: str) -> Message:
    return conversation.assistant(conversation.chat.encode(text), "stop")


def test_the_newline_behind_a_turn_belongs_to_the_tail() -> None:
    """verl#6501, AReaL#736: the newline after the end of turn is there, once, and is not trained on."""
    conversation = chat("stable").start([user("hi")])
    say(conversation, "yes<|im_end|>")
    assert conversation.observe([user("and?")])
    say(conversation, "no<|im_end|>")
    (segment,) = conversation.segments()
    first = conversation.turns[0]
    decode = conversation.chat.decode
    assert decode(segment.ids[first.start : first.end]) == "yes<|im_end|>"
    assert decode(segment.ids[first.end : conversation.turns[1].start]) == (
        "\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert not segment.loss_mask[first.end : conversation.turns[1].start].any()


def test_a_segment_ends_with_its_last_sampled_token() -> None:
    conversation = chat("stable").start([user("hi")])
    assert conversation.segments() == ()
    say(conversation, "yes<|im_end|>")
    conversation.observe([user("a very long answer " * 50)])
    (segment,) = conversation.segments()
    assert len(segment.ids) == conversation.turns[0].end
    assert segment.loss_mask[-1]


def test_another_stop_token_stays_and_the_turn_is_ended_behind_it() -> None:
    model = Chat(tokenizer(), ChatTemplate({"default": TEMPLATES["stable"]}, {}), stop_tokens=(0,))
    conversation = model.start([user("hi")])
    message = say(conversation, "yes<pad>")
    assert message.text == "yes"
    assert conversation.observe([user("and?")])
    assert "yes<pad><|im_end|>\n<|im_start|>user\nand?" in model.decode(conversation.ids)


def test_a_turn_ended_by_the_next_header_shares_that_token() -> None:
    """GLM writes no end of turn: `<|observation|>` is sampled, and not written again."""
    model = chat("glm")
    assert [token for token, _ in model.ends] == ["<|user|>", "<|observation|>"]
    conversation = model.start([user("hi")], TOOLS)
    ids = conversation.render_gold(Message("assistant", "", (ToolCall("c", "look", '{"a": "x", "n": 3}'),)))
    assert model.decode(ids[-1:]) == "<|observation|>"
    message = conversation.assistant(ids, "stop")
    assert [(c.name, c.arguments, c.error) for c in message.tool_calls] == [("look", '{"a": "x", "n": 3}', None)]
    assert conversation.observe([Message("tool", "dark")])
    assert model.decode(conversation.ids).count("<|observation|>") == 1
    assert not measure_drift(conversation)
    ids = conversation.render_gold(Message("assistant", "Dark."))
    conversation.assistant(ids, "stop")
    assert model.decode(ids[-1:]) == "<|user|>"
    assert conversation.observe([user("sure?")])
    assert not measure_drift(conversation)


def test_thinking_that_a_template_strips_starts_a_segment_and_keeps_the_old_one() -> None:
    conversation = chat("stripping").start([user("hi")])
    say(conversation, "<think>\nhm\n</think>\n\nyes<|im_end|>")
    assert conversation.observe([Message("tool", "x")])
    say(conversation, "<think>\nso\n</think>\n\nyes<|im_end|>")
    assert not conversation.observe([user("and?")])
    say(conversation, "no<|im_end|>")
    assert conversation.observe([user("and?")])
    assert [t.segment for t in conversation.turns] == [0, 0, 1]
    first, second = conversation.segments()
    assert "hm" in conversation.chat.decode(first.ids) and "hm" not in conversation.chat.decode(second.ids)
    assert second.loss_tokens == conversation.turns[2].end - conversation.turns[2].start


def test_thinking_that_the_prompt_opened_is_thinking() -> None:
    """DeepSeek-R1's way: the generation prompt ends in `<think>`, the reply starts inside it."""
    opened = TEMPLATES["stable"].replace("assistant\\n' }}{% endif %}", "assistant\\n<think>\\n' }}{% endif %}")
    model = Chat(tokenizer(), ChatTemplate({"default": opened}, {}))
    conversation = model.start([user("hi")], TOOLS)
    assert model.decode(conversation.ids).endswith("assistant\n<think>\n")
    ids = conversation.render_gold(Message("assistant", "yes", reasoning_content="hm"))
    assert model.decode(ids) == "hm\n</think>\n\nyes<|im_end|>"
    message = conversation.assistant(ids, "stop")
    assert (message.reasoning_content, message.text) == ("hm", "yes")
    assert conversation.observe([user("and?")])
    assert not measure_drift(conversation)
    cut = conversation.assistant(model.encode('so <tool_call>{"name": "look"}</tool_call>'), "length")
    assert cut.tool_calls == () and "look" in cut.reasoning_content
    assert conversation.observe([user("and?")])


def test_plain_calls_need_no_template_support() -> None:
    """Tools stand in the system message, calls and results in ordinary text; results of one turn are one message."""
    model = Chat(
        tokenizer(), ChatTemplate({"default": "{% set tools = none %}" + TEMPLATES["stable"]}, {}), FORMATS["plain"]
    )
    conversation = model.start([Message("system", "Be kind."), user("hi")], TOOLS[:2])
    assert conversation.rendered().startswith("<|im_start|>system\nBe kind.\n\nYou can use these tools:\n{")
    message = say(conversation, 'I look.\nAction: look({"a": "x"})\nAction: take({})<|im_end|>')
    assert [(c.name, c.arguments) for c in message.tool_calls] == [("look", '{"a": "x"}'), ("take", "{}")]
    assert message.text == "I look."
    assert conversation.observe([Message("tool", "dark", name="look"), Message("tool", "taken"), user("Go on.")])
    tail = "<|im_start|>user\nResult of look: dark\n\nResult: taken\n\nGo on.<|im_end|>\n<|im_start|>assistant\n"
    assert model.decode(conversation.ids).endswith(tail)
    assert not measure_drift(conversation)
    say(conversation, "Done.<|im_end|>")
    assert not conversation.observe([user("now?")], TOOLS)
    assert '"put"' in model.decode(conversation.ids)


def test_a_changed_tool_set_starts_a_segment() -> None:
    """verifiers#955: a prefix match must not overlook changed tools."""
    conversation = chat("stable").start([user("hi")], TOOLS[:1])
    say(conversation, "yes<|im_end|>")
    assert conversation.observe([user("a")], TOOLS[:1])
    say(conversation, "yes<|im_end|>")
    assert not conversation.observe([user("b")], TOOLS[:2])
    assert '"take"' in conversation.chat.decode(conversation.ids)
    say(conversation, "yes<|im_end|>")
    assert conversation.observe([user("c")])


def test_a_malformed_call_is_shown_again_as_written() -> None:
    """verifiers#1763: it is answered, and the context keeps the model's own words in the same segment."""
    conversation = chat("stable").start([user("hi")], TOOLS)
    said = '<tool_call>\n{"name": "look", "arguments": {"a": }\n</tool_call>'
    message = say(conversation, said + "<|im_end|>")
    assert message.tool_calls[0].error and message.tool_calls[0].name == "look"
    assert conversation.observe([Message("tool", message.tool_calls[0].error, tool_call_id="call_0_0")])
    assert said in conversation.chat.decode(conversation.ids)
    assert not measure_drift(conversation)


def test_a_call_in_a_cut_turn_is_not_executable_and_the_context_goes_on() -> None:
    """mini-swe-agent#851: also when it was complete."""
    conversation = chat("stable").start([user("hi")], TOOLS)
    whole = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    message = conversation.assistant(conversation.chat.encode(whole + "\n<tool_call>\n{"), "length")
    assert [c.error for c in message.tool_calls] == [CUT, CUT]
    assert conversation.observe([Message("tool", CUT), Message("tool", CUT)])
    assert not measure_drift(conversation)


def test_other_spelling_of_json_is_the_same_reply() -> None:
    conversation = chat("stable").start([user("hi")], TOOLS)
    said = '  <tool_call>{"arguments":{"n":1.50},"name":"look"}</tool_call>'
    say(conversation, said + "<|im_end|>")
    assert conversation.observe([Message("tool", "x")])
    assert said in conversation.chat.decode(conversation.ids)
    drift = measure_drift(conversation)
    assert drift.kind == "text" and drift.sampled


def test_drift_tells_other_tokens_from_other_text() -> None:
    """SkyRL#213, verl#6719: where ids differ, and whether the model or the template wrote them."""
    conversation = chat("stable").start([user("hi")])
    letters = np.concatenate([conversation.chat.encode(c) for c in "arguments"])
    assert len(letters) > len(conversation.chat.encode("arguments"))
    conversation.assistant(np.append(letters, np.int32(conversation.chat.stop_ids[0])), "stop")
    conversation.observe([user("and?")])
    drift = measure_drift(conversation)
    assert (drift.kind, drift.sampled, drift.position) == ("tokens", True, conversation.turns[0].start)


def test_ids_that_do_not_decode_to_the_text_returned_are_told() -> None:
    """agent-lightning#326: control tokens swallowed between ids and text."""
    model = chat("stable")
    ids = model.encode('<tool_call>\n{"name": "look"}<|im_end|>')
    assert undecodable(model, ids, '<tool_call>\n{"name": "look"}') is None
    assert undecodable(model, ids, '<tool_call>\n{"name": "look"}<|im_end|>') is None
    assert "character 0" in (undecodable(model, ids, '{"name": "look"}') or "")


def test_two_turns_in_a_row_and_unequal_lengths_are_errors() -> None:
    conversation = chat("stable").start([user("hi")])
    with pytest.raises(ValueError, match="must be equal"):
        conversation.assistant(np.array([3, 4]), "stop", np.zeros(1, np.float32))
    say(conversation, "yes<|im_end|>")
    with pytest.raises(ValueError, match="observe"):
        say(conversation, "yes<|im_end|>")


def test_half_a_surrogate_pair_in_a_tool_result_is_rendered() -> None:
    conversation = chat("stable").start([user("hi")])
    say(conversation, "yes<|im_end|>")
    assert conversation.observe([Message("tool", json.loads('"no item \\ud800 here"'))])
    assert "no item \ufffd here" in conversation.chat.decode(conversation.ids)


class CountingTemplate(ChatTemplate):
    """The real template, with its renderings counted."""

    rendered = 0

    def render(self, *args: Any, **kwargs: Any) -> str:
        self.rendered += 1
        return super().render(*args, **kwargs)


def test_a_turn_costs_one_rendering_and_the_tokens_of_its_tail() -> None:
    template = CountingTemplate({"default": TEMPLATES["stable"]}, {})
    model = Chat(tokenizer(), template)
    model.start([user("warm up")], TOOLS)
    before = template.rendered
    conversation = model.start([user("hi")], TOOLS)
    for number in range(5):
        assert template.rendered == before + 1 + number
        say(conversation, "yes<|im_end|>")
        assert conversation.observe([user("and?")])


def test_members_of_a_group_do_not_write_into_each_other() -> None:
    one, two = (chat("stable").start([user("same")]) for _ in range(2))
    before = two.ids.copy()
    say(one, "yes<|im_end|>")
    one.observe([user("x")])
    assert np.array_equal(two.ids, before)
    assert one.ids.dtype == two.ids.dtype == np.int32


@pytest.mark.parametrize("format_name", [None, "plain"])
def test_text_parts_are_their_text_and_other_parts_are_refused_by_their_type(format_name: str | None) -> None:
    model = Chat(tokenizer(), ChatTemplate({"default": TEMPLATES["stable"]}, {}), format_name and FORMATS[format_name])
    call = Message("assistant", "", (ToolCall("1", "look", "{}"),))

    def asked(*parts: dict[str, Any]) -> list[Message]:
        return [user("hi"), call, Message("tool", parts, tool_call_id="1", name="look")]

    text = [{"type": "text", "text": "the "}, {"type": "text", "text": "box"}]
    assert "the box" in model.start(asked(*text), TOOLS).rendered()
    with pytest.raises(ContentError, match="content of type 'image_url', and the model reads text only"):
        model.start(asked(text[0], {"type": "image_url", "image_url": {"url": "x"}}), TOOLS)
    with pytest.raises(ContentError, match="content of type None"):
        model.start(asked({"image": "x"}), TOOLS)
