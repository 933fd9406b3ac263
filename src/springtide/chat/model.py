"""A model's way of talking: its tokenizer, its chat template, its tool-call format and its stop tokens.

Owns: `Chat`, made by `load_chat` from a Hugging Face directory with `tokenizers` and `jinja2` alone. Invariants: the
ids of a rendered conversation equal transformers' `apply_chat_template`; what cannot work (no template, no end-of-turn
token, tools for a template that shows none, more tokens than the model has rows) is one clear `ChatError`, before any
sampling. A Chat is immutable and shared by all conversations of a process.
Called by: rollout workers, evaluation, supervised data, `springtide doctor model`.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from springtide.chat.conversation import Conversation
from springtide.chat.template import (
    ChatError,
    ChatTemplate,
    ContentError,
    ToolSchema,
    View,
    find_template,
    read_json,
    special_tokens,
)
from springtide.chat.tools import FORMATS, NoCalls, ToolFormat, describe_tools, detect_format
from springtide.trace import Message, ToolCall

_CACHED_PROMPTS = 512  # a group's members start from one prompt; this many distinct prompts are in flight at most

_CACHED_TOOL_SETS = 256  # one a suite is usual; environments that make tools up must not fill the memory


class Chat:
    """Messages to tokens and back, for one model.

    ends: the tokens (text, id) with which the template ends a reply in text and one with calls: usually one end-of-turn
    for both; with GLM, which has none, the header of what follows. stop_ids: every id that ends a turn, those first.
    vocab_size: one more than the largest id the tokenizer knows. fingerprints: sha256 of what decides the ids
    (`tokenizer`, `template`).
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        tool_format: ToolFormat | None = None,
        stop_tokens: Sequence[int] = (),
        tokenizer_hash: str = "",
    ) -> None:
        """tool_format: None means detect it. Raises: ChatError if the template ends a turn with no token of its own."""
        self.tokenizer = tokenizer
        self.template = template
        source = template.source(tools=True)
        self.format = tool_format or detect_format(source)
        self._closes = True  # whether a reply is ended even when nothing follows it
        self.ends = self._find_ends()
        self.stop_ids = tuple(dict.fromkeys((*(token_id for _, token_id in self.ends), *stop_tokens)))
        self.vocab_size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())
        self.reads_reasoning = "reasoning_content" in source or "</think>" in source or ".thinking" in source
        self._calls_as_text = self._shows_call_text_verbatim()
        what = json.dumps([template.sources, template.variables, self.format.name], sort_keys=True)
        self.fingerprints = {"tokenizer": tokenizer_hash, "template": hashlib.sha256(what.encode()).hexdigest()}
        self._prompts: OrderedDict[str, np.ndarray] = OrderedDict()
        self._tools: dict[str, tuple[ToolSchema, ...]] = {}

    def start(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> Conversation:
        """A conversation whose prompt is these messages, ready for the first turn.

        Raises: ChatError if the template refuses the roles or has no place for tools.
        """
        return Conversation(self, messages, tools)

    def encode(self, text: str) -> np.ndarray:
        """ids int32 [T] of a rendered text; special tokens in it are recognised, none are added."""
        try:
            ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        except (UnicodeEncodeError, TypeError):
            # Half a surrogate pair, from a JSON escape that a model wrote and an environment quoted.
            clean = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            ids = self.tokenizer.encode(clean, add_special_tokens=False).ids
        return np.asarray(ids, np.int32)

    def encode_after(self, token: str, text: str) -> np.ndarray:
        """ids int32 [T] of a text as they stand behind a special token (some tokenizers differ at a start)."""
        return self.encode(token + text)[1:]

    def find_end(self, text: str, start: int, reply: str) -> tuple[int, str, int] | None:
        """Where the template ends the turn that starts at `start` of a rendered text: (position, token, id), or None.

        reply: what the turn says; it may spell such a token in ordinary tokens.
        """
        spelled = sum(reply.count(token) for token, _ in set(self.ends))
        at = start
        for _ in range(1 + spelled):
            found = [(i, token, token_id) for token, token_id in self.ends if (i := text.find(token, at)) >= 0]
            if not found:
                return None
            end = min(found)
            at = end[0] + len(end[1])
        return end

    def encode_prompt(self, text: str) -> np.ndarray:
        """As `encode`, remembered: the members of a group start from the same text. Do not write to the result."""
        ids = self._prompts.get(text)
        if ids is None:
            ids = self._prompts[text] = self.encode(text)
            if len(self._prompts) > _CACHED_PROMPTS:
                self._prompts.popitem(last=False)
        else:
            self._prompts.move_to_end(text)
        return ids

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of ids, special tokens included, nothing cleaned up."""
        return self.tokenizer.decode(np.asarray(ids, np.int64).tolist(), skip_special_tokens=False)

    def render(
        self, views: Sequence[View], tools: Sequence[ToolSchema] = (), *, add_generation_prompt: bool = False
    ) -> str:
        """The text of a conversation. An in-text format puts its tools into the system message."""
        if self.format.in_text and tools:
            text = describe_tools(tools)
            if views and views[0]["role"] == "system":
                first: View = views[0] | {"content": f"{views[0]['content']}\n\n{text}"}
                views = [first, *views[1:]]
            else:
                views = [{"role": "system", "content": text}, *views]
            tools = ()
        return self.template.render(views, tools, add_generation_prompt)

    def gold_after(
        self, prompt: str, before: Sequence[View], message: Message, schemas: Sequence[ToolSchema]
    ) -> np.ndarray:
        """The ids a model has to sample for `message` after a prompt that shows `before`, its end-of-turn token
        included: int32 [T]. Raises: ChatError."""
        whole = self.render([*before, self.view(message)], schemas)
        if whole.startswith(prompt):
            body = whole[len(prompt) :]
        else:  # The generation prompt is not how the template writes a past turn: cut behind the turn's header.
            common = self.render(before, schemas)
            if not whole.startswith(common):
                raise ChatError(
                    "the chat template rewrites its history when a reply is added: no gold ids exist for it"
                )
            header = prompt[len(common) :] if prompt.startswith(common) else ""
            shared = next((i for i, (a, b) in enumerate(zip(header, whole[len(common) :])) if a != b), len(header))
            body = whole[len(common) + shared :]
        token, token_id = self.ends[1 if message.tool_calls else 0]
        if self._closes:
            end = self.find_end(body, 0, self._gold_text(message))
            if end is None:
                raise ChatError(f"the chat template does not end this reply with {token}: {body!r}")
            body = body[: end[0]]
        return np.append(self.encode_after(token, body), np.int32(token_id)).astype(np.int32)

    def tools(self, tools: Sequence[dict[str, Any]]) -> tuple[ToolSchema, ...]:
        """Schemas as templates see them, made once for each tool set. Raises: ChatError if the template shows none."""
        if not tools:
            return ()
        key = json.dumps(list(tools))
        if key not in self._tools:
            schemas = tuple(ToolSchema(tool) for tool in tools)
            self._check_tools(schemas)
            if len(self._tools) >= _CACHED_TOOL_SETS:
                self._tools.clear()
            self._tools[key] = schemas
        return self._tools[key]

    def views(self, messages: Sequence[Message]) -> list[View]:
        """Messages as the template sees them. In-text formats join tool results and the user text behind them."""
        views: list[View] = []
        joined = False
        for message in messages:
            view = self.view(message)
            result = self.format.in_text and message.role == "tool"
            both = (views[-1], view) if views else ()
            if (result or joined) and both and all(v["role"] == "user" and isinstance(v["content"], str) for v in both):
                views[-1] = views[-1] | {"content": f"{views[-1]['content']}\n\n{view['content']}"}
            else:
                views.append(view)
            joined = result or (joined and view["role"] == "user")
        return views

    def view(self, message: Message, raw: str | None = None) -> View:
        """One message as the template sees it. raw: the sampled text, for a reply whose calls could not be read."""
        if raw is not None:
            return {"role": message.role, "content": raw}
        if not isinstance(message.content, str):
            message = replace(message, content=_only_text(message.content))
        if self.format.in_text:
            return self._text_view(message)
        view = message.to_openai()
        if message.tool_calls:
            view["tool_calls"] = [
                {"type": "function", "id": c.id, "function": {"name": c.name, "arguments": self._arguments(c)}}
                for c in message.tool_calls
            ]
        if message.reasoning_content:
            if self.reads_reasoning:
                view = {
                    "thinking": message.reasoning_content,
                    **view,
                }  # its other name, as in transformers
            else:
                view["content"] = _with_thinking(message)
        return view

    def _text_view(self, message: Message) -> View:
        if message.role == "tool":
            label = f"Result of {message.name}" if message.name else "Result"
            return {"role": "user", "content": f"{label}: {message.text}"}
        if message.role == "assistant":
            return {"role": "assistant", "content": self._gold_text(message)}
        return message.to_openai()

    def _gold_text(self, message: Message) -> str:
        """The message as an in-text format writes it: thinking, text, then calls."""
        parts = [_with_thinking(message), self.format.render(message.tool_calls)]
        return "\n".join(part for part in parts if part)

    def _arguments(self, call: ToolCall) -> Any:
        """Arguments as the template wants them: as written where it copies text, else as an object."""
        if self._calls_as_text:
            return call.arguments
        try:
            return json.loads(call.arguments)
        except ValueError:
            return call.arguments

    def _find_ends(self) -> tuple[tuple[str, int], tuple[str, int]]:
        mark = "springtide-probe"
        turn: list[View] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": mark}]

        def after(following: list[View]) -> str:
            text = self.template.render([*turn, *following], None, False)
            if mark not in text:
                raise ChatError("the chat template does not show what an assistant message says")
            return text[text.rfind(mark) + len(mark) :]

        if closing := after([]).strip():
            token = self._leading_token(closing)
            return token, token
        self._closes = False
        results: list[View] = [{"role": "user" if self.format.in_text else "tool", "content": "b"}]
        return self._leading_token(after([{"role": "user", "content": "b"}])), self._leading_token(after(results))

    def _leading_token(self, text: str) -> tuple[str, int]:
        """The added token a text starts with, white space aside."""
        text = text.lstrip()
        known = self.tokenizer.get_added_tokens_decoder().items()
        found = [(t.content, i) for i, t in known if t.content.strip() and text.startswith(t.content)]
        if not found:
            raise ChatError(
                f"the chat template ends an assistant turn with {text[:40]!r}, which starts with no added token of the "
                "tokenizer: a model could not say where its turn stops. Add one (an eos_token, say) to both"
            )
        return max(found, key=lambda pair: len(pair[0]))

    def _shows_call_text_verbatim(self) -> bool:
        if self.format.in_text:
            return False
        written = '{"springtide": "probe"}'
        call = {"type": "function", "id": "call_0", "function": {"name": "f", "arguments": written}}
        views: list[View] = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
        try:
            return written in self.template.render(views, None, False)
        except ChatError:
            return False

    def _check_tools(self, schemas: Sequence[ToolSchema]) -> None:
        if self.format.in_text:
            return
        user: list[View] = [{"role": "user", "content": "a"}]
        if self.template.render(user, schemas, False) == self.template.render(user, None, False):
            raise ChatError(
                "this chat template shows no tools (it renders the same with and without them): use a model made for "
                'tools, or set model.tool_format = "plain", which describes them in the system message'
            )
        if isinstance(self.format, NoCalls):
            raise ChatError(
                "the tool-call syntax of this chat template is not one we know by its text: set model.tool_format to "
                f"one of {', '.join(FORMATS)}"
            )


def load_chat(model_dir: Path | str, tool_format: str = "auto", options: Mapping[str, Any] | None = None) -> Chat:
    """The Chat of a Hugging Face directory: tokenizer.json, tokenizer_config.json, and its template.

    tool_format: `auto`, `hermes`, `glm` or `plain`. options: variables for the template (`enable_thinking`, say).
    Raises: ChatError, one line, if something is missing or does not fit.
    """
    directory = Path(model_dir)
    file = directory / "tokenizer.json"
    if not file.is_file():
        raise ChatError(f"{directory} has no tokenizer.json: save the model with a fast tokenizer there")
    if tool_format != "auto" and tool_format not in FORMATS:
        raise ChatError(f"tool_format {tool_format!r} is not known: use auto, {', '.join(FORMATS)}")
    data = file.read_bytes()
    try:
        tokenizer = Tokenizer.from_buffer(data)
    except ValueError as error:
        raise ChatError(f"{file} is no tokenizer ({error}): copy the model again") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config = read_json(directory / "tokenizer_config.json")
    named = special_tokens(config)
    template = ChatTemplate(find_template(directory, config), named | dict(options or {}))
    eos = read_json(directory / "generation_config.json").get("eos_token_id")
    stops = [eos] if isinstance(eos, int) else list(eos or ())
    own = tokenizer.token_to_id(named["eos_token"]) if "eos_token" in named else None
    stops += [] if own is None else [own]
    chosen = None if tool_format == "auto" else FORMATS[tool_format]
    return Chat(tokenizer, template, chosen, stops, hashlib.sha256(data).hexdigest())


def check_vocab(chat: Chat, config_vocab_size: int) -> None:
    """Raises ChatError if the tokenizer can make an id the model has no row for (more rows than tokens are padding)."""
    highest = max((chat.vocab_size - 1, *chat.stop_ids))
    if highest >= config_vocab_size:
        raise ChatError(
            f"tokenizer and model disagree: the tokenizer has ids up to {highest}, the model's vocab_size is "
            f"{config_vocab_size}: use the tokenizer the model was trained with, or resize its embeddings"
        )


def _only_text(parts: Sequence[dict[str, Any]]) -> str:
    """Content parts as one text. Templates would refuse them, or pass over what is no text without a word."""
    if other := [part.get("type") for part in parts if part.get("type") != "text"]:
        raise ContentError(f"the environment gave content of type {other[0]!r:.60}, and the model reads text only")
    return "".join(part.get("text", "") for part in parts)


def _with_thinking(message: Message) -> str:
    if not message.reasoning_content:
        return message.text
    return f"<think>\n{message.reasoning_content}\n</think>\n\n{message.text}"
