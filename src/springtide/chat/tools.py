"""Tool calls as text: how a model writes them, and how its reply is taken apart.

Owns: the `ToolFormat` protocol and its three formats. `hermes` is a JSON object in `<tool_call>` tags (Qwen, Hermes,
springtide-nano); `glm` is `<tool_call>name` with `<arg_key>`/`<arg_value>` pairs (GLM-4.5 and later); `plain` is a line
`Action: name({…})`, for models and templates that know no tools (see `describe_tools`).
Invariants: `parse` never raises, whatever the text; what cannot be executed is a ToolCall with `error` set, never a
lost call and never a guessed one; a turn cut by the token limit has no executable call; text inside `<think>` is never
read as a call; `parse(render(calls)).calls == calls` for calls with valid arguments.
Called by: `chat.Chat` and `chat.Conversation`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from springtide.trace import ToolCall

Finish = Literal["stop", "length"]
CUT = "cut by the token limit: the call was not executed; write a shorter one"

_MAX_DEPTH = 64  # far below Python's recursion limit, far above any tool's arguments
_SPACE = re.compile(r"\s*")
_NAME = re.compile(r"[^\s(){}<>\"',]+")


@dataclass(frozen=True, slots=True)
class ParsedReply:
    """A reply taken apart: `content` is the text outside calls and thinking, its pieces joined by newlines."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()

    @property
    def malformed(self) -> bool:
        return any(call.error for call in self.calls)


class ToolFormat(Protocol):
    """One way of writing calls. `in_text`: tools, calls and results are ordinary text, unknown to the template."""

    name: str
    in_text: bool

    def parse(self, text: str, finish: Finish, tools: Sequence[dict[str, Any]] = ()) -> ParsedReply:
        """Take a reply apart. text: without its stop token. tools: OpenAI schemas, used for argument types only."""
        ...

    def render(self, calls: Sequence[ToolCall]) -> str:
        """The text a model writes for these calls (inside its turn, without any stop token)."""
        ...


class Hermes:
    """`<tool_call>\\n{"name": "f", "arguments": {"k": 1}}\\n</tool_call>`, one block a call."""

    name = "hermes"
    in_text = False

    def parse(self, text: str, finish: Finish, tools: Sequence[dict[str, Any]] = ()) -> ParsedReply:
        return _parse(text, finish, "<tool_call>", _hermes_call)

    def render(self, calls: Sequence[ToolCall]) -> str:
        bodies = (f'{{"name": {_dump(c.name)}, "arguments": {c.arguments}}}' for c in calls)
        return "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)


class Glm:
    """`<tool_call>f\\n<arg_key>k</arg_key>\\n<arg_value>1</arg_value>\\n</tool_call>`.

    A value is raw text where the tool's schema says `string`, JSON where it says another type; without a schema it is
    JSON if it reads as JSON and text otherwise. A string that contains `</arg_value>` cannot be written.
    """

    name = "glm"
    in_text = False

    def parse(self, text: str, finish: Finish, tools: Sequence[dict[str, Any]] = ()) -> ParsedReply:
        return _parse(text, finish, "<tool_call>", lambda t, at: _glm_call(t, at, tools))

    def render(self, calls: Sequence[ToolCall]) -> str:
        blocks = []
        for call in calls:
            pairs = [
                f"<arg_key>{k}</arg_key>\n<arg_value>{v if isinstance(v, str) else _dump(v)}</arg_value>\n"
                for k, v in json.loads(call.arguments).items()
            ]
            blocks.append(f"<tool_call>{call.name}\n{''.join(pairs)}</tool_call>")
        return "\n".join(blocks)


class Plain:
    """`Action: f({"k": 1})`, each call at the start of a line. Needs no special token and no tools in the template."""

    name = "plain"
    in_text = True

    def parse(self, text: str, finish: Finish, tools: Sequence[dict[str, Any]] = ()) -> ParsedReply:
        return _parse(text, finish, re.compile(r"^[ \t]*Action:", re.MULTILINE), _plain_call)

    def render(self, calls: Sequence[ToolCall]) -> str:
        return "\n".join(f"Action: {c.name}({c.arguments})" for c in calls)


class NoCalls:
    """For a template whose call syntax is not known: text and thinking only. Conversations with tools are refused."""

    name = "none"
    in_text = False

    def parse(self, text: str, finish: Finish, tools: Sequence[dict[str, Any]] = ()) -> ParsedReply:
        reasoning, rest = split_reasoning(text)
        return ParsedReply(rest.strip(), reasoning)

    def render(self, calls: Sequence[ToolCall]) -> str:
        return ""


FORMATS: dict[str, ToolFormat] = {f.name: f for f in (Hermes(), Glm(), Plain())}


def detect_format(template: str) -> ToolFormat:
    """The format a chat template's own text teaches; `NoCalls` if it teaches none of ours."""
    if "<arg_key>" in template:
        return FORMATS["glm"]
    if "<tool_call>" in template and "<function=" not in template:  # Qwen3-Coder writes XML in these tags
        return FORMATS["hermes"]
    return NoCalls()


def describe_tools(tools: Sequence[dict[str, Any]]) -> str:
    """The system text that teaches `plain`: the schemas, one a line, and how a call is written."""
    return (
        "You can use these tools:\n"
        + "\n".join(_dump(tool.get("function", tool)) for tool in tools)
        + '\nTo use one, write a line of its own: Action: name({"argument": value})'
    )


def split_reasoning(text: str) -> tuple[str, str]:
    """(thinking, the rest). An unclosed `<think>` is thinking to the end; a lone `</think>` closes one that the prompt
    opened. Text before `<think>` belongs to the rest."""
    start, end = text.find("<think>"), text.find("</think>")
    if start >= 0 and end < 0:
        return text[start + 7 :].strip(), text[:start]
    if end < 0:
        return "", text
    if start < 0 or start > end:
        return text[:end].strip(), text[end + 8 :]
    return text[start + 7 : end].strip(), text[:start] + text[end + 8 :]


@dataclass(frozen=True, slots=True)
class _Read:
    """One call as read: where it ended, and either its parts or what is wrong with it."""

    end: int
    name: str = ""
    arguments: str = ""
    error: str | None = None


def _parse(text: str, finish: Finish, opening: str | re.Pattern[str], read: Callable[[str, int], _Read]) -> ParsedReply:
    reasoning, rest = split_reasoning(text)
    pattern = opening if isinstance(opening, re.Pattern) else re.compile(re.escape(opening))
    pieces: list[str] = []
    calls: list[ToolCall] = []
    at = 0
    while (match := pattern.search(rest, at)) is not None:
        pieces.append(rest[at : match.start()])
        found = read(rest, match.end())
        error = CUT if finish == "length" else found.error
        # A name may hold half a surrogate pair (JSON escapes allow it), which no tokenizer and no log can write.
        name = found.name.encode("utf-8", "replace").decode()
        calls.append(ToolCall(f"call_{len(calls)}", name, found.arguments, error))
        at = found.end
    pieces.append(rest[at:])
    return ParsedReply("\n".join(p.strip() for p in pieces if p.strip()), reasoning, tuple(calls))


def _hermes_call(text: str, at: int) -> _Read:
    try:
        value, slices, end = _read_object(text, at)
    except (ValueError, RecursionError) as error:
        return _broken(text, at, "</tool_call>", f"malformed call: {_why(error)}")
    closing = _skip(text, end)
    name = value.get("name")
    arguments = value.get("arguments", {})
    raw = slices.get("arguments", "{}")
    if isinstance(arguments, str):  # Some models quote the object once more; the text inside is what they meant.
        raw = arguments
        arguments, problem = _loads(arguments)
        if problem:
            arguments = None
    if not text.startswith("</tool_call>", closing):
        return _broken(text, at, "</tool_call>", "malformed call: </tool_call> must follow the JSON object")
    done = closing + len("</tool_call>")
    if not isinstance(name, str) or not name:
        return _Read(done, "", raw, 'malformed call: "name" must be the name of a tool')
    if not isinstance(arguments, dict):
        return _Read(done, name, raw, 'malformed call: "arguments" must be a JSON object')
    return _Read(done, name, raw)


def _glm_call(text: str, at: int, tools: Sequence[dict[str, Any]]) -> _Read:
    end = text.find("</tool_call>", at)
    if end < 0:
        return _broken(text, at, "</tool_call>", "malformed call: </tool_call> is missing")
    done = end + len("</tool_call>")
    body = text[at:end]
    head, separator, pairs = body.partition("<arg_key>")
    name = head.strip()
    if not name or "<" in name:
        return _Read(done, "", body.strip(), "malformed call: a tool's name must follow <tool_call>")
    types = _argument_types(name, tools)
    arguments: dict[str, Any] = {}
    position, pairs = 0, separator + pairs
    while position < len(pairs.rstrip()):
        match = _GLM_PAIR.match(pairs, position)
        if match is None:
            return _Read(
                done, name, body.strip(), "malformed call: expected <arg_key>…</arg_key><arg_value>…</arg_value>"
            )
        key, raw = match[1].strip(), match[2]
        kind = types.get(key)
        value, problem = (raw, None) if kind == "string" else _loads(raw)
        if problem and kind is not None:
            return _Read(done, name, body.strip(), f"malformed call: {key} must be {kind} in JSON: {problem}")
        arguments[key] = raw if problem else value
        position = match.end()
    return _Read(done, name, _dump(arguments))


_GLM_PAIR = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)


def _plain_call(text: str, at: int) -> _Read:
    line_end = text.find("\n", at)
    line_end = len(text) if line_end < 0 else line_end
    match = _NAME.match(text, _skip(text, at))
    if match is None or not text.startswith("(", match.end()) or match.end() > line_end:
        return _Read(line_end, "", text[at:line_end].strip(), 'malformed call: write Action: name({"argument": value})')
    name, opened = match[0], match.end() + 1
    if text.startswith(")", _skip(text, opened)):
        return _Read(_skip(text, opened) + 1, name, "{}")
    try:
        _, _, end = _read_object(text, opened)
    except (ValueError, RecursionError) as error:
        return _Read(line_end, name, text[opened:line_end].strip(), f"malformed call: {_why(error)}")
    if not text.startswith(")", _skip(text, end)):
        return _Read(
            max(end, line_end), name, text[opened:end].strip(), "malformed call: ) must follow the JSON object"
        )
    return _Read(_skip(text, end) + 1, name, text[_skip(text, opened) : end])


def _broken(text: str, at: int, closing: str, error: str) -> _Read:
    """A call that could not be read: it reaches to its closing tag, the next opening one, or the end of the text."""
    end, following = text.find(closing, at), text.find(closing.replace("/", ""), at)
    closed = end >= 0 and not 0 <= following < end
    stop = end if closed else following if following >= 0 else len(text)
    raw = text[at:stop].strip()
    named = re.search(r'"name"\s*:\s*"([^"\\]+)"', raw)
    return _Read(stop + len(closing) if closed else stop, named[1] if named else "", raw, error)


def _reject_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_reject_constant)


def _read_object(text: str, at: int) -> tuple[dict[str, Any], dict[str, str], int]:
    """Read one JSON object: its value, the source text of each of its values, and where it ends. Raises: ValueError."""
    at = _skip(text, at)
    if not text.startswith("{", at):
        raise ValueError("a JSON object must come here")
    value, end = _DECODER.raw_decode(text, at)
    _check_depth(value)
    slices: dict[str, str] = {}
    at = _skip(text, at + 1)
    while text[at] != "}":  # the object is valid as a whole, so each step below finds what it expects
        key, at = _DECODER.raw_decode(text, at)
        start = _skip(text, _skip(text, at) + 1)
        _, at = _DECODER.raw_decode(text, start)
        slices[key] = text[start:at]
        at = _skip(text, at)
        if text[at] == ",":
            at = _skip(text, at + 1)
    return value, slices, end


def _loads(text: str) -> tuple[Any, str | None]:
    """(value, None) or (None, what is wrong)."""
    try:
        value = json.loads(text, parse_constant=_reject_constant)
        _check_depth(value)
        return value, None
    except (ValueError, RecursionError) as error:
        return None, _why(error)


def _check_depth(value: Any) -> None:
    """Refuse nesting that other readers and writers of JSON would fail on. Raises: ValueError."""
    layer = [value]
    for _ in range(_MAX_DEPTH):
        layer = [
            child
            for item in layer
            if isinstance(item, dict | list)
            for child in (item.values() if isinstance(item, dict) else item)
        ]
        if not layer:
            return
    raise ValueError(f"nested more than {_MAX_DEPTH} deep")


def _why(error: Exception) -> str:
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


def _skip(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match else at


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _argument_types(name: str, tools: Iterable[dict[str, Any]]) -> dict[str, str | None]:
    for tool in tools:
        function = tool.get("function", tool)
        if function.get("name") == name:
            properties = function.get("parameters", {}).get("properties", {})
            return {key: _single_type(schema) for key, schema in properties.items()}
    return {}


def _single_type(schema: Any) -> str | None:
    kind = schema.get("type") if isinstance(schema, dict) else None
    return kind if isinstance(kind, str) else None
