"""How far a conversation's tokens stand from a rendering of the same messages from scratch.

A difference is not a fault by itself: sampled tokens need not be what a tokenizer makes of their text, and some
templates rewrite history. It tells where, so that a change of template, tokenizer or parser is noticed (verl#6719).
Called by: `springtide doctor model`, tests over a corpus of conversations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from springtide.trace import common_start

if TYPE_CHECKING:
    from springtide.chat.conversation import Conversation
    from springtide.chat.model import Chat

_AROUND = 8  # tokens shown on each side of a difference


@dataclass(frozen=True, slots=True)
class Drift:
    """The first difference. kind: `none`; `tokens` (equal text, other ids); `text`. position: index into the ids.

    ours and theirs: the text around it, in the conversation and in the full rendering. sampled: whether it stands
    inside a sampled turn (then usually a tokenisation of the model's own) or in what the template wrote.
    """

    kind: Literal["none", "tokens", "text"]
    position: int = -1
    ours: str = ""
    theirs: str = ""
    sampled: bool = False

    def __bool__(self) -> bool:
        return self.kind != "none"


def measure_drift(conversation: Conversation) -> Drift:
    """Compare the current segment's ids with a full rendering of its messages.

    Call it with a prompt ready (after `start` or `observe`) or after a reply; a reply that still waits for its
    observation is compared up to its own end.
    """
    chat, ours = conversation.chat, conversation.ids
    theirs = chat.encode(conversation.rendered())
    if conversation.waiting:  # what stands behind the turn is the template's business once something follows
        ours = ours[:-1] if len(ours) and int(ours[-1]) in chat.stop_ids else ours
        theirs = theirs[: len(ours)]
    if np.array_equal(ours, theirs):
        return Drift("none")
    at = common_start(ours, theirs)
    equal_text = chat.decode(ours) == chat.decode(theirs)
    here = slice(max(0, at - _AROUND), at + _AROUND)
    inside = any(t.segment == conversation.segment and t.start <= at < t.end for t in conversation.turns)
    return Drift("tokens" if equal_text else "text", at, chat.decode(ours[here]), chat.decode(theirs[here]), inside)


def undecodable(chat: Chat, ids: Sequence[int] | np.ndarray, text: str) -> str | None:
    """What is wrong if `ids` do not decode to the `text` an engine returned with them; None if they do.

    A trailing stop token may be missing from the text (agent-lightning#326: an engine's parser swallowed control
    tokens, so ids and text were two different replies).
    """
    whole, text = chat.decode(ids).rstrip("\ufffd"), text.rstrip("\ufffd")  # of a character that was cut
    if whole == text or (len(ids) and int(ids[-1]) in chat.stop_ids and chat.decode(ids[:-1]) == text):
        return None
    at = next((i for i, (a, b) in enumerate(zip(whole, text)) if a != b), min(len(whole), len(text)))
    return f"ids and text differ at character {at}: ids say {whole[at : at + 40]!r}, the text {text[at : at + 40]!r}"
