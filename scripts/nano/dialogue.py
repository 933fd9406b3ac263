"""A whole conversation as data, as text and as tokens: what drills and gold are turned into for training.

Owns: `Dialogue`, its text in nano's template, and which of its tokens are the model's own. Invariant: the text equals
what `springtide.chat` renders for the same messages with the shipped template, and the mask equals the one of its
segments (tests hold both), so supervised training sees the very ids that rollouts will.
Called by: `drills`, `gold`, `tokenizer`, `training`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import Tokenizer

START, END, CALL, CALL_END, PAD = "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<|endoftext|>"
SPECIAL = (PAD, START, END, CALL, CALL_END)

Call = tuple[str, dict[str, Any]]  # ("", {"text": answer}) is plain text
Signatures = tuple[tuple[str, tuple[str, ...]], ...]  # (tool, its arguments), in the order they are offered


@dataclass(frozen=True, slots=True)
class Turn:
    """One call and its reply. `learn`: whether the call is worth imitating (a slip is shown, not taught)."""

    call: Call
    reply: str = ""
    learn: bool = True


@dataclass(frozen=True, slots=True)
class Dialogue:
    """One conversation of a suite's form."""

    suite: str
    tools: Signatures
    prompt: str
    turns: tuple[Turn, ...]

    def text(self) -> str:
        """The conversation as nano's template writes it, up to the last turn's end."""
        return self.laid_out()[0]

    def laid_out(self) -> tuple[str, list[int]]:
        """The text, and where in it each assistant turn's own words begin."""
        text = "".join([START, "system", *(f"\n{signature(*tool)}" for tool in self.tools), END])
        text += f"{START}user\n{self.prompt}{END}"
        begins = []
        for i, turn in enumerate(self.turns):
            text += f"{START}assistant\n"
            begins.append(len(text))
            text += f"{call_text(turn.call)}{END}"
            if i + 1 < len(self.turns):
                text += f"{START}tool\n{turn.reply}{END}"
        return text, begins


def signature(name: str, arguments: Sequence[str]) -> str:
    """A tool as the template shows it: `go(place)`."""
    return f"{name}({', '.join(arguments)})"


def call_text(call: Call) -> str:
    """An assistant turn's text: a Hermes call, or the plain answer."""
    name, arguments = call
    if not name:
        return str(arguments["text"])
    body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"{CALL}\n{body}\n{CALL_END}"


def encode(dialogues: Sequence[Dialogue], tokenizer: Tokenizer) -> list[tuple[np.ndarray, np.ndarray]]:
    """(ids int32 [T], learn bool [T]) of each; `learn` marks the tokens of its taught turns, their end included."""
    start, end = tokenizer.token_to_id(START), tokenizer.token_to_id(END)
    encodings = tokenizer.encode_batch_fast([d.text() for d in dialogues], add_special_tokens=False)
    encoded = []
    for dialogue, encoding in zip(dialogues, encodings):
        ids = np.asarray(encoding.ids, np.int32)
        starts, ends = np.flatnonzero(ids == start), np.flatnonzero(ids == end)
        learn = np.zeros(len(ids), np.bool_)
        # messages: system, user, then assistant and tool in turn; a header is the start token and the role's token
        for k, turn in enumerate(dialogue.turns):
            message = 2 + 2 * k
            learn[starts[message] + 2 : ends[message] + 1] = turn.learn
        encoded.append((ids, learn))
    return encoded
