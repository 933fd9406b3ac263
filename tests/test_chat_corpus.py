"""A corpus of made-up conversations over four real tokenizers and templates: appending equals rendering, id for id.

Each conversation has up to eight turns of calls (one or several, of two tools), text, both, odd white space and
scripts, results that quote control tokens, and users who speak up in between. Fifty a template by default; two thousand
under `-m slow`. transformers renders every prefix anew; what a rollout appended turn by turn must equal it.
"""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from tests.test_chat_golden import MODELS, call, chat_of, play, result, their_ids

from springtide.chat import measure_drift
from springtide.trace import Message, ToolCall

WORDS = (
    "albums", "SELECT", "ü", "東京", "🚲", "naïve", "l'été", "a_b", "x=1;", "“so”", "\u200b", "Ωmega", "1,234.5",
    "don't", "</tool_call>", "<|im_end|>", "{}", '{"a": 1}', "```py", "\\n", "\t", "--", "مرحبا",
)  # fmt: skip
ENDS = ("", "", "", "\n", "\n\n", " ", ".", "…")
COUNT, MANY = 50, 2000


def text(rng: random.Random, most: int = 12) -> str:
    joined = rng.choice((" ", " ", "\n", "  ", "")).join(rng.choice(WORDS) for _ in range(rng.randint(1, most)))
    return joined + rng.choice(ENDS)


def reply_text(rng: random.Random) -> str:
    """What a model says beside its calls: without control tokens or calls of its own spelling."""
    plain = [w for w in WORDS if "<" not in w]
    return " ".join(rng.choice(plain) for _ in range(rng.randint(1, 8))).strip() or "ok"


def some_call(rng: random.Random, number: int) -> ToolCall:
    if rng.random() < 0.5:
        return call("look", json.dumps({"times": rng.randint(-5, 10**6)} if rng.random() < 0.8 else {}), number)
    # "<" would end a Hermes call only inside a string that spells its closing tag, which no parser can tell apart.
    words = [w for w in WORDS if "tool_call" not in w and "im_end" not in w]
    sql = " ".join(rng.choice(words) for _ in range(rng.randint(1, 10)))
    return call("execute_sql", json.dumps({"sql": sql}, ensure_ascii=rng.random() < 0.5), number)


def conversation(seed: int) -> tuple[Message, ...]:
    """Ends with a message that is not the assistant's."""
    rng = random.Random(seed)
    messages = [Message("system", text(rng))] if rng.random() < 0.5 else []
    messages.append(Message("user", text(rng, 30)))
    for _ in range(rng.randint(1, 8)):
        if rng.random() < 0.25:
            messages += [Message("assistant", reply_text(rng)), Message("user", text(rng))]
            continue
        calls = tuple(some_call(rng, i) for i in range(rng.choice((1, 1, 1, 2, 3))))
        messages.append(Message("assistant", reply_text(rng) if rng.random() < 0.3 else "", calls))
        messages += [result(text(rng, 20) if rng.random() < 0.9 else "", i) for i in range(len(calls))]
        if rng.random() < 0.1:
            messages.append(Message("user", text(rng)))
    return tuple(messages)


def compare(name: str, seeds: range) -> None:
    chat = chat_of(name)
    turns = calls = 0
    for seed in seeds:
        messages = conversation(seed)
        appended, prompts = play(chat, messages, gold=False)
        assert appended.segment == 0, seed
        said = [i for i, m in enumerate(messages) if m.role == "assistant"]
        for prompt, at in zip([*prompts, appended.ids], [*said, len(messages)], strict=True):
            assert np.array_equal(prompt, their_ids(name, chat, messages[:at], prompt=True)), (seed, at)
        assert not measure_drift(appended), seed
        turns += len(said)
        read = [m for m in appended.messages if m.role == "assistant"]
        for mine, theirs in zip(read, (messages[i] for i in said), strict=True):
            got = [(c.name, json.loads(c.arguments), c.error) for c in mine.tool_calls]
            assert got == [(c.name, json.loads(c.arguments), None) for c in theirs.tool_calls], seed
            calls += len(got)
    assert turns > 2 * len(seeds) and calls > turns / 2


@pytest.mark.parametrize("name", MODELS)
def test_appending_equals_rendering_over_a_corpus(name: str) -> None:
    compare(name, range(COUNT))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_appending_equals_rendering_over_a_large_corpus(name: str) -> None:
    compare(name, range(COUNT, COUNT + MANY))
