"""One conversation's tokens: rendered once, then only appended to.

Owns: the ids an engine is given, turn by turn, and the record of which of them were sampled. Invariants (property
tests): a sampled token is kept as sampled, never re-tokenised, with mask 1 in exactly one segment; every prompt that
was answered is a prefix, id for id, of a stored segment; whatever a template writes around a turn (end of turn of a cut
reply, newline behind it, the next header) has mask 0. If the template does not show the next turn what stands in the
context (Qwen3 drops past thinking; a changed tool set), a new segment starts from a full rendering: checked at every
append, never asserted (prime-rl#947). One full rendering a turn.
Called by: the agent loop, evaluation, supervised data.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from springtide.chat.tools import Finish, ParsedReply
from springtide.trace import Message, Segment, Turn

if TYPE_CHECKING:
    from springtide.chat.model import Chat
    from springtide.chat.template import View


@dataclass(slots=True)
class _Open:
    """A segment in the making. ids: int32 [T]. `sampled`: (start, logprobs [n], versions [n]) of each turn."""

    ids: np.ndarray
    sampled: list[tuple[int, np.ndarray, np.ndarray]] = field(default_factory=list)

    def close(self) -> Segment:
        """The segment up to its last sampled token: nothing was conditioned on what follows."""
        start, last, _ = self.sampled[-1]
        length = start + len(last)
        mask = np.zeros(length, np.bool_)
        logprobs = np.zeros(length, np.float32)
        versions = np.full(length, -1, np.int64)
        for start, turn_logprobs, turn_versions in self.sampled:
            here = slice(start, start + len(turn_logprobs))
            mask[here], logprobs[here], versions[here] = True, turn_logprobs, turn_versions
        return Segment(self.ids[:length].copy(), mask, logprobs, versions)


class Conversation:
    """Made by `Chat.start`. The cycle is `ids` -> (engine) -> `assistant` -> (environment) -> `observe` -> `ids`.

    messages: every message so far. turns: a `trace.Turn` for each reply, with segment, start, end and finish set.
    """

    def __init__(self, chat: Chat, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> None:
        self.chat = chat
        self._tools = chat.tools(tools)
        self._views: list[View] = chat.views(messages)
        self._prompt = chat.render(self._views, self._tools, add_generation_prompt=True)
        self._closed: list[Segment] = []
        self._open = _Open(chat.encode_prompt(self._prompt))
        self._reply: str | None = None  # the last turn's text, until its observation comes
        self._last_id = -1  # the stop token it ended with; -1 for a reply that was cut
        self.messages: list[Message] = list(messages)
        self.turns: list[Turn] = []

    @property
    def ids(self) -> np.ndarray:
        """The whole context of the current segment: int32 [T]. Do not write to it."""
        return self._open.ids

    @property
    def waiting(self) -> bool:
        """Whether the last reply has not been observed yet."""
        return self._reply is not None

    @property
    def segment(self) -> int:
        """The number of the current segment."""
        return len(self._closed)

    def assistant(
        self,
        ids: np.ndarray,
        finish: Finish,
        logprobs: np.ndarray | None = None,
        versions: np.ndarray | int = 0,
    ) -> Message:
        """Record one sampled turn and take it apart.

        ids: int32 [n], as sampled, its stop token included. logprobs: float32 [n], zeros if not given. versions: one
        tag, or int64 [n]. Returns the reply; a call that must not be executed has `error` set. Raises: ValueError if
        the lengths differ, or if the previous turn has not been observed.
        """
        ids = np.asarray(ids, np.int32)
        scores = np.zeros(len(ids), np.float32) if logprobs is None else np.asarray(logprobs, np.float32)
        tags = np.full(len(ids), versions, np.int64) if np.ndim(versions) == 0 else np.asarray(versions, np.int64)
        if not ids.shape == scores.shape == tags.shape or ids.ndim != 1:
            raise ValueError(f"a turn's ids {ids.shape}, logprobs {scores.shape}, versions {tags.shape} must be equal")
        if self._reply is not None:
            raise ValueError("two assistant turns in a row: call observe() between them, with no messages if need be")
        stopped = len(ids) > 0 and int(ids[-1]) in self.chat.stop_ids
        self._reply = self.chat.decode(ids[:-1] if stopped else ids)
        self._last_id = int(ids[-1]) if stopped else -1
        start = len(self._open.ids)
        self._open.ids = np.concatenate((self._open.ids, ids))
        self._open.sampled.append((start, scores, tags))
        self.turns.append(Turn(self.segment, start, start + len(ids), finish=finish))
        parsed = self._parse(self._reply, finish)
        calls = tuple(replace(c, id=f"call_{len(self.turns) - 1}_{i}") for i, c in enumerate(parsed.calls))
        message = Message("assistant", parsed.content, calls, reasoning_content=parsed.reasoning)
        self.messages.append(message)
        # A reply that cannot be read is shown again as it was written, not as something it did not say.
        verbatim = parsed.malformed or self.chat.format.in_text
        self._views.append(self.chat.view(message, self._reply if verbatim else None))
        return message

    def observe(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None = None) -> bool:
        """Append what the template writes for new messages, and the next turn's header; all of it mask 0.

        tools: a changed tool set, if it changed. Returns whether the segment went on; False if a new one had to
        start, because the template no longer shows what was sampled. Raises: ChatError if the template refuses.
        """
        chat = self.chat
        if tools is not None:
            self._tools = chat.tools(tools)
        self._views += chat.views(messages)
        self.messages += messages
        rendered = chat.render(self._views, self._tools, add_generation_prompt=True)
        tail = self._tail(rendered)
        self._prompt, self._reply = rendered, None
        if tail is not None:
            self._open.ids = np.concatenate((self._open.ids, tail))
            return True
        if self._open.sampled:
            self._closed.append(self._open.close())
        self._open = _Open(chat.encode(rendered))
        return False

    def segments(self) -> tuple[Segment, ...]:
        """Every segment in which something was sampled, closed ones first; `turns[i].segment` indexes them."""
        return (*self._closed, self._open.close()) if self._open.sampled else tuple(self._closed)

    def render_gold(self, message: Message) -> np.ndarray:
        """The ids (int32 [T], end of turn included) that answer the current prompt with `message`."""
        return self.chat.gold_after(self._prompt, self._views, message, self._tools)

    def rendered(self) -> str:
        """The conversation as the template writes it from scratch, for the next turn or after the last one."""
        return self.chat.render(self._views, self._tools, add_generation_prompt=self._reply is None)

    def _tail(self, rendered: str) -> np.ndarray | None:
        """ids behind the sampled ones, or None if `rendered` does not show the context as it stands."""
        chat, reply = self.chat, self._reply
        if reply is None or not rendered.startswith(self._prompt):
            return None
        found = chat.find_end(rendered, len(self._prompt), reply)
        if found is None:
            return None
        end, token, token_id = found
        if not self._same_reply(rendered[len(self._prompt) : end], reply):
            return None
        tail = chat.encode_after(token, rendered[end + len(token) :])
        return tail if self._last_id == token_id else np.append(np.int32(token_id), tail).astype(np.int32)

    def _same_reply(self, shown: str, sampled: str) -> bool:
        """Whether the template shows a reply as sampled, up to white space and the spelling of JSON."""
        if shown.strip() == sampled.strip():
            return True
        a, b = self._parse(shown, "stop"), self._parse(sampled, "stop")
        return (a.content, a.reasoning) == (b.content, b.reasoning) and _meaning(a) == _meaning(b)

    def _parse(self, text: str, finish: Finish) -> ParsedReply:
        opened = self._prompt.rstrip().endswith("<think>")
        return self.chat.format.parse("<think>" + text if opened else text, finish, self._tools)


def _meaning(reply: ParsedReply) -> list[tuple[str, Any]]:
    """Calls without the spelling of their JSON; one that is not JSON stands for itself."""
    return [(c.name, c.arguments if c.error else json.loads(c.arguments)) for c in reply.calls]
