"""A model's chat template: found on disk, compiled as transformers compiles it, rendered to text.

Owns: where templates and special tokens are read from, and the Jinja environment (sandboxed, block trimming, loop
controls, `tojson`, `raise_exception`, `strftime_now`, the `generation` tag ignored). Invariant: the text equals that of
`transformers.PreTrainedTokenizerBase.apply_chat_template` for the same messages, tools and options (golden tests).
Imports neither torch nor transformers. Called by: `chat.Chat`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

View = dict[str, Any]  # a message as templates see it: OpenAI's form


class ChatError(Exception):
    """A model directory, template or conversation that cannot be used. One line, with the remedy."""


class ContentError(ChatError):
    """A message with content that the model cannot read: an image, say."""


class ChatTemplate:
    """The templates of one model directory: usually one, or `default` and `tool_use`."""

    def __init__(self, sources: Mapping[str, str], variables: Mapping[str, Any]) -> None:
        """sources: template text by name. variables: what every rendering sees (special tokens, options)."""
        self.sources = dict(sources)
        self.variables = dict(variables)
        environment = _environment()
        try:
            self._compiled = {name: environment.from_string(text) for name, text in self.sources.items()}
        except jinja2.TemplateSyntaxError as error:
            raise ChatError(f"the chat template does not compile: line {error.lineno}: {error.message}") from error

    def source(self, tools: bool) -> str:
        return self.sources[self._name(tools)]

    def render(self, messages: Sequence[View], tools: Sequence[View] | None, add_generation_prompt: bool) -> str:
        """The conversation's text. Raises: ChatError if the template refuses these messages."""
        try:
            return self._compiled[self._name(bool(tools))].render(
                messages=messages,
                tools=tools or None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self.variables,
            )
        except (jinja2.TemplateError, TypeError, ValueError, AttributeError, KeyError, IndexError) as error:
            roles = ", ".join(str(m.get("role")) for m in messages)
            why = " ".join(str(error).split())
            raise ChatError(f"the chat template refuses the roles [{roles}]: {why}") from error

    def _name(self, tools: bool) -> str:
        if tools and "tool_use" in self.sources:
            return "tool_use"
        return "default" if "default" in self.sources else next(iter(self.sources))


def find_template(model_dir: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Template texts by name, from chat_template.jinja, additional_chat_templates/, or tokenizer_config.json.

    Raises: ChatError if there is none.
    """
    sources: dict[str, str] = {}
    listed = config.get("chat_template")
    if isinstance(listed, str):
        sources["default"] = listed
    elif isinstance(listed, list):
        sources |= {entry["name"]: entry["template"] for entry in listed}
    legacy = model_dir / "chat_template.json"
    if legacy.is_file():
        sources["default"] = read_json(legacy)["chat_template"]
    main = model_dir / "chat_template.jinja"
    if main.is_file():
        sources["default"] = main.read_text("utf-8")
    for path in sorted((model_dir / "additional_chat_templates").glob("*.jinja")):
        sources[path.stem] = path.read_text("utf-8")
    if not sources:
        raise ChatError(
            f"{model_dir} has no chat template (a base model?): put one into chat_template.jinja, see docs/models.md"
        )
    return sources


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file of a model directory; empty where there is none. Raises: ChatError if it is torn."""
    try:
        return json.loads(path.read_text("utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise ChatError(f"{path} is not JSON ({error}): copy the model again") from None


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Named special tokens (`bos_token`, …) of a tokenizer_config.json, as text."""
    named = {key: value for key, value in config.items() if key.endswith("_token")}
    extra = config.get("extra_special_tokens")
    if isinstance(extra, dict):
        named = extra | named
    return {key: text for key, value in named.items() if (text := _token_text(value)) is not None}


def _token_text(value: Any) -> str | None:
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


class _IgnoreGeneration(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks assistant text for other tools; here it renders its body."""

    tags = {"generation"}  # noqa: RUF012 (the attribute Jinja reads)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        # A scope of its own, as in transformers: what is `set` inside is not seen outside.
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class _Sandbox(ImmutableSandboxedEnvironment):
    """The sandbox, with a short way to a dict's own keys: half of a render's time is `message.role` and its like."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is dict and attribute in obj and attribute not in _DICT_ATTRIBUTES:
            return obj[attribute]  # what the sandbox answers too, after failing to find an attribute
        return super().getattr(obj, attribute)


_DICT_ATTRIBUTES = frozenset(dir(dict))


def _environment() -> ImmutableSandboxedEnvironment:
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_IgnoreGeneration, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


class ToolSchema(dict[str, Any]):
    """A tool's schema whose default JSON text is written once: `tojson` of tools is most of a render's cost."""

    text: str

    def __init__(self, schema: Mapping[str, Any]) -> None:
        super().__init__(schema)
        self.text = json.dumps(schema, ensure_ascii=False)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if isinstance(value, ToolSchema) and not ensure_ascii and indent is None and separators is None and not sort_keys:
        return value.text
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
