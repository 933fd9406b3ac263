"""Four real tokenizers and templates: our ids equal transformers', turn by turn, and appending equals rendering.

The files come from `make setup` (scripts/fetch_test_data.py).
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from springtide.chat import FORMATS, Chat, ChatError, Conversation, load_chat, measure_drift
from springtide.trace import Message, ToolCall

DATA = Path(__file__).resolve().parent.parent / "test-data" / "tokenizers"
# name -> how its calls are written: only Qwen3's template shows tools, the others get them as plain text
MODELS = {"qwen3": "auto", "gemma3": "plain", "llama3_1": "plain", "deepseek_v3": "plain"}

TOOLS: tuple[dict[str, Any], ...] = (
    {
        "type": "function",
        "function": {
            "name": "execute_sql",
            "description": "Run one statement; rows come back as text. Quotes “like this” & <that> survive.",
            "parameters": {"type": "object", "properties": {"sql": {"type": "string"}}, "required": ["sql"]},
        },
    },
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look around.",
            "parameters": {"type": "object", "properties": {"times": {"type": "integer"}}},
        },
    },
)
SYSTEM = Message("system", "You help.\nBe brief.")
USER = Message("user", "How many albums has “Ménage à trois” 🎷?\n")


def call(name: str, arguments: str, number: int = 0) -> ToolCall:
    return ToolCall(f"call_{number}", name, arguments)


def result(text: str, number: int = 0) -> Message:
    return Message("tool", text, tool_call_id=f"call_{number}")


ONE = Message("assistant", "", (call("execute_sql", '{"sql": "SELECT count(*) FROM albums WHERE a < \'ü\'"}'),))
SAID = Message("assistant", "I look first.", (call("look", '{"times": 2}'),))
TWO = Message("assistant", "Both:", (call("look", "{}"), call("execute_sql", '{"sql": "SELECT 1;\\n-- x"}', 1)))
THOUGHT = Message("assistant", "It is 3.", reasoning_content="The user wants a number.\n\nI know it: 3.")
THOUGHT_CALL = Message("assistant", "", (call("look", '{"times": 1}'),), reasoning_content="I must look first.")

SHAPES: dict[str, tuple[Message, ...]] = {
    "text reply": (USER, Message("assistant", "Three.")),
    "system and two user turns": (SYSTEM, USER, Message("assistant", "Three."), Message("user", "Sure?")),
    "one call and its result": (SYSTEM, USER, ONE, result("3"), Message("assistant", "Three.")),
    "call with text": (USER, SAID, result("a shelf\n  and a box\n\n"), Message("assistant", "Nothing.")),
    "two calls in a turn": (USER, TWO, result("dark"), result("[(1,)]", 1), Message("assistant", "One.")),
    "five turns": (SYSTEM, USER, SAID, result("x"), ONE, result("4"), SAID, result(""), ONE, result("5"), ONE),
    "user after tools": (USER, ONE, result("3"), Message("assistant", "3"), Message("user", "and\n\n\nnow?"), ONE),
    "result and user text together": (USER, ONE, result("3"), Message("user", "Go on.")),
    "reasoning": (SYSTEM, USER, THOUGHT, Message("user", "Thanks"), THOUGHT),
    "reasoning over tools": (USER, THOUGHT_CALL, result("a box"), THOUGHT_CALL, result("a lid"), THOUGHT),
    "code and odd text": (
        Message("user", "```py\n\tx = {'a': [1,2]}  # 日本語\r\n```"),
        Message("assistant", "ok \u200b \n- a\n- b"),
        Message("user", "<|not_special|> </tool_call> {}"),
    ),
}


def needs(name: str) -> None:
    if not (DATA / name / "tokenizer.json").is_file():
        pytest.skip(f"test-data/tokenizers/{name} is absent: run python scripts/fetch_test_data.py")


@cache
def chat_of(name: str, tool_format: str | None = None) -> Chat:
    needs(name)
    if tool_format is not None:  # the same files, not read twice
        first = chat_of(name)
        return Chat(first.tokenizer, first.template, None if tool_format == "auto" else FORMATS[tool_format])
    return load_chat(DATA / name, MODELS[name])


@cache
def reference(name: str) -> Any:
    needs(name)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(DATA / name)


def their_ids(name: str, chat: Chat, messages: tuple[Message, ...], prompt: bool, tools: bool = True) -> np.ndarray:
    """transformers' ids. Where the template knows no tools, it gets our text form of them."""
    shown = chat.views(messages)
    if chat.format.in_text:
        from springtide.chat.tools import describe_tools

        if tools:
            text = describe_tools(chat.tools(TOOLS))
            if shown[0]["role"] == "system":
                shown[0] = {"role": "system", "content": f"{shown[0]['content']}\n\n{text}"}
            else:
                shown.insert(0, {"role": "system", "content": text})
        given = None
    else:
        shown = [m.to_openai() for m in messages]
        given = list(TOOLS) if tools else None
    out = reference(name).apply_chat_template(shown, tools=given, add_generation_prompt=prompt)
    return np.asarray(out["input_ids"], np.int32)


def play(chat: Chat, messages: tuple[Message, ...], gold: bool) -> tuple[Conversation, list[np.ndarray]]:
    """Let a model say the assistant messages. gold: with all the template writes (Qwen3: an empty thinking block)."""
    first = next(i for i, m in enumerate(messages) if m.role == "assistant")
    conversation = chat.start(messages[:first], TOOLS)
    prompts: list[np.ndarray] = []
    at = first
    while at < len(messages):
        following = next((i for i in range(at + 1, len(messages)) if messages[i].role == "assistant"), len(messages))
        prompts.append(conversation.ids)
        ids = conversation.render_gold(messages[at]) if gold else written(chat, messages[at])
        conversation.assistant(ids, "stop")
        conversation.observe(messages[at + 1 : following])
        at = following
    return conversation, prompts


def written(chat: Chat, message: Message) -> np.ndarray:
    """The reply without an empty thinking block, as a non-thinking model writes it."""
    thought = f"<think>\n{message.reasoning_content}\n</think>\n\n" if message.reasoning_content else ""
    said = "\n".join(part for part in (message.text, chat.format.render(message.tool_calls)) if part)
    return np.append(chat.encode(thought + said), np.int32(chat.ends[0][1]))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", MODELS)
def test_rendered_ids_equal_those_of_transformers(name: str, shape: str) -> None:
    """Every prefix of the conversation, with tools, with and without a generation prompt (verifiers#476)."""
    chat = chat_of(name)
    for length in range(1, len(SHAPES[shape]) + 1):
        messages = SHAPES[shape][:length]
        if messages[-1].role == "system":
            continue
        conversation = chat.start(messages, TOOLS)
        if messages[-1].role != "assistant":
            assert np.array_equal(conversation.ids, their_ids(name, chat, messages, prompt=True))
        whole = chat.encode(chat.render(chat.views(messages), chat.tools(TOOLS)))
        assert np.array_equal(whole, their_ids(name, chat, messages, prompt=False))


@pytest.mark.parametrize("name", MODELS)
def test_conversations_without_tools_equal_those_of_transformers(name: str) -> None:
    chat = chat_of(name)
    for shape in ("text reply", "system and two user turns", "code and odd text"):
        messages = SHAPES[shape]
        if messages[-1].role == "assistant":
            messages = messages[:-1]
        assert np.array_equal(chat.start(messages).ids, their_ids(name, chat, messages, prompt=True, tools=False))


@pytest.mark.parametrize("name", ["llama3_1", "deepseek_v3"])
def test_tool_messages_of_a_template_without_tools_equal_those_of_transformers(name: str) -> None:
    chat = chat_of(name, "auto")
    messages = (USER, Message("assistant", "Looking."), result("a box"), Message("assistant", "A box."), USER)
    for length in (1, 3, 5):
        theirs = their_ids(name, chat, messages[:length], prompt=True, tools=False)
        assert np.array_equal(chat.start(messages[:length]).ids, theirs)
    conversation = chat.start(messages[:1])
    for at in (1, 3):
        conversation.assistant(conversation.render_gold(messages[at]), "stop")
        assert conversation.observe(messages[at + 1 : at + 2])
        assert np.array_equal(conversation.ids, their_ids(name, chat, messages[: at + 2], prompt=True, tools=False))


@pytest.mark.parametrize("shape", [s for s in SHAPES if "reasoning" not in s])
@pytest.mark.parametrize("name", MODELS)
def test_appending_equals_rendering_from_scratch(name: str, shape: str) -> None:
    """No newline lost or doubled at a turn's end (verl#6501, AReaL#736), over every template and shape (verl#6719)."""
    chat = chat_of(name)
    messages = SHAPES[shape]
    if messages[-1].role == "assistant":
        messages = (*messages, result("end") if messages[-1].tool_calls else Message("user", "And?"))
    conversation, prompts = play(chat, messages, gold=False)
    assert conversation.segment == 0
    said = [i for i, m in enumerate(messages) if m.role == "assistant"]
    for prompt, at in zip([*prompts, conversation.ids], [*said, len(messages)], strict=True):
        assert np.array_equal(prompt, their_ids(name, chat, messages[:at], prompt=True))
    assert not measure_drift(conversation)


@pytest.mark.parametrize("name", MODELS)
def test_white_space_that_a_template_trims_stays_as_sampled(name: str) -> None:
    """TRL#5224: past turns are never tokenised again."""
    chat = chat_of(name)
    conversation = chat.start((USER,), TOOLS)
    sampled = np.append(chat.encode(" \n Three . \n"), np.int32(chat.stop_ids[0]))
    conversation.assistant(sampled, "stop")
    assert conversation.observe((Message("user", "And?"),))
    turn = conversation.turns[0]
    assert np.array_equal(conversation.ids[turn.start : turn.end], sampled)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", MODELS)
def test_gold_ids_read_back_as_the_message(name: str, shape: str) -> None:
    chat = chat_of(name)
    conversation, _ = play(chat, SHAPES[shape], gold=True)
    said = [m for m in conversation.messages if m.role == "assistant"]
    meant = [m for m in SHAPES[shape] if m.role == "assistant"]
    for a, b in zip(said, meant, strict=True):
        assert (a.text, a.reasoning_content) == (b.text.strip(), b.reasoning_content)
        assert [(c.name, c.arguments, c.error) for c in a.tool_calls] == [
            (c.name, c.arguments, None) for c in b.tool_calls
        ]


@pytest.mark.parametrize("shape", SHAPES)
def test_qwen3_gold_is_what_transformers_shows_last(shape: str) -> None:
    """Prompt plus gold is the start of the full rendering, id for id."""
    chat = chat_of("qwen3")
    messages = SHAPES[shape]
    for at in (i for i, m in enumerate(messages) if m.role == "assistant"):
        prompt = chat.start(messages[:at], TOOLS).ids
        gold = chat.start(messages[:at], TOOLS).render_gold(messages[at])
        theirs = their_ids("qwen3", chat, messages[: at + 1], prompt=False)
        assert gold[-1] == chat.stop_ids[0]
        assert np.array_equal(np.concatenate((prompt, gold)), theirs[: len(prompt) + len(gold)])


def test_qwen3_thinking_survives_tool_results_and_starts_a_segment_at_the_next_user_turn() -> None:
    """prime-rl#947, #1334: the template strips past thinking once a user speaks; the old segment is kept."""
    chat = chat_of("qwen3")
    conversation = chat.start((USER,), TOOLS)
    conversation.assistant(conversation.render_gold(THOUGHT_CALL), "stop")
    assert conversation.observe((result("a box"),))
    conversation.assistant(conversation.render_gold(THOUGHT), "stop")
    before = conversation.ids
    assert not conversation.observe((Message("user", "Thanks"),))
    messages = (USER, THOUGHT_CALL, result("a box"), THOUGHT, Message("user", "Thanks"))
    assert np.array_equal(conversation.ids, their_ids("qwen3", chat, messages, prompt=True))
    assert "I must look" not in chat.decode(conversation.ids)
    (kept,) = conversation.segments()
    assert np.array_equal(kept.ids, before)
    assert kept.loss_tokens == sum(t.end - t.start for t in conversation.turns)
    conversation.assistant(conversation.render_gold(THOUGHT), "stop")
    assert [t.segment for t in conversation.turns] == [0, 0, 1]
    assert conversation.segments()[1].loss_mask[: len(conversation.ids) - len(kept.ids)].sum() == 0


@pytest.mark.parametrize("name", ["gemma3", "llama3_1", "deepseek_v3"])
def test_a_template_without_tools_refuses_them_with_the_remedy(name: str) -> None:
    with pytest.raises(ChatError, match=r"shows no tools.*tool_format = \"plain\""):
        chat_of(name, "auto").start((USER,), TOOLS)


def test_a_template_that_refuses_roles_says_which() -> None:
    with pytest.raises(ChatError, match=r"refuses the roles \[user, user\].*must alternate"):
        chat_of("gemma3", "auto").start((USER, USER))


@pytest.mark.parametrize("name", MODELS)
def test_the_stop_token_is_the_templates_own(name: str) -> None:
    chat = chat_of(name)
    assert chat.stop_ids == (reference(name).eos_token_id,)
    assert chat.vocab_size == len(reference(name))


@pytest.mark.parametrize("name", MODELS)
def test_a_cut_turn_gets_its_end_in_the_tail(name: str) -> None:
    """NeMo-RL PR#1337: the missing end of turn is spliced in, and is nobody's action."""
    chat = chat_of(name)
    conversation = chat.start((USER,), TOOLS)
    sampled = chat.encode("I was going to say that")
    conversation.assistant(sampled, "length")
    assert conversation.observe((Message("user", "Go on."),))
    whole = (USER, Message("assistant", "I was going to say that"), Message("user", "Go on."))
    assert np.array_equal(conversation.ids, their_ids(name, chat, whole, prompt=True))
    conversation.assistant(chat.encode("x"), "length")
    (segment,) = conversation.segments()
    turn = conversation.turns[0]
    assert segment.ids[turn.end] == chat.stop_ids[0] and not segment.loss_mask[turn.end]
    assert segment.loss_tokens == len(sampled) + 1
