"""Tools: a decorated method becomes a schema the model sees and a check of what the model sends.

Owns: `@tool`, the schema made from type hints and docstring, and argument validation. Invariants: a tool that cannot
be described, or that another definition in the same class body replaces, is an error when its class is created, not in
a run; a tool is called by the name it has in its class; a call that does not fit its schema yields one line
that names the argument, what was given and what is allowed, and never reaches the method; a value is converted only
where nothing is lost.
Called by: `env.environment` (class creation) and `env.runner` (every call).
"""

from __future__ import annotations

import inspect
import json
import math
import re
import sys
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, overload

F = TypeVar("F", bound=Callable[..., Any])
_MARK = "__springtide_tool__"
_DECLARED = "__springtide_declared__"  # in a class body: what @tool was put on, whatever became of it
_ALLOWED = "str, int, float, bool, Literal[...], X | None, list[X], dict or dict[str, X]"
_SHOWN = 60  # characters of a rejected value that an answer repeats


class ToolError(Exception):
    """Raise it in a tool to answer the model with this text (an SQL error, say). The episode goes on."""


class BadArguments(Exception):
    """A call that does not fit its tool's schema. The text is what the model is answered."""


@overload
def tool(function: F) -> F: ...
@overload
def tool(*, final: bool = False) -> Callable[[F], F]: ...
def tool(function: Any = None, *, final: bool = False) -> Any:
    """Offer a method to the model: `@tool`, or `@tool(final=True)` for one that ends the episode.

    The schema comes from the signature and the docstring: every parameter has a type hint (str, int, float, bool,
    Literal, `X | None`, list, dict), and a line `name: text` in the docstring describes it. `async def` runs in the
    worker's event loop and must not block it; plain `def` runs in a thread. The method returns a str, a dict (sent as
    JSON) or a list of OpenAI content parts.
    """

    if function is not None:
        return _mark(function, final, sys._getframe(1))
    return lambda method: _mark(method, final, sys._getframe(1))


def _mark(method: F, final: bool, body: types.FrameType) -> F:
    setattr(method, _MARK, final)
    # Python forgets the first of two methods of one name without a word. In a class body the frame's locals are the
    # class's own namespace, so a list kept there lets `collect_tools` see what is missing.
    if "__qualname__" in body.f_locals and "__module__" in body.f_locals:
        body.f_locals.setdefault(_DECLARED, []).append(method)
    return method


@dataclass(frozen=True)
class Tool:
    """One tool of an environment class: what the model is told, and how its arguments are checked."""

    name: str
    description: str
    final: bool
    parameters: dict[str, Parameter]

    @property
    def schema(self) -> dict[str, Any]:
        """OpenAI's function form."""
        required = [name for name, parameter in self.parameters.items() if parameter.required]
        properties = {name: parameter.schema for name, parameter in self.parameters.items()}
        parameters = {"type": "object", "properties": properties, "required": required}
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": parameters},
        }

    def arguments(self, text: str) -> dict[str, Any]:
        """Parse and check a call's JSON text. Raises: BadArguments with one line for the model."""
        given = parse_object(self.name, text)
        for name in given:
            if name not in self.parameters:
                allowed = ", ".join(self.parameters) or "no arguments"
                raise BadArguments(f"{self.name} has no argument {_show(name)}; it takes {allowed}")
        for name, parameter in self.parameters.items():
            if parameter.required and name not in given:
                raise BadArguments(f"{self.name} needs the argument {name} ({_describe(parameter.hint)})")
        return {
            name: _convert(value, self.parameters[name].hint, f"{self.name}: {name}") for name, value in given.items()
        }


@dataclass(frozen=True)
class Parameter:
    hint: Any
    schema: dict[str, Any]
    required: bool


def parse_object(name: str, text: str) -> dict[str, Any]:
    """A call's arguments as a dict. Raises: BadArguments when the text is not one JSON object."""
    try:
        value = json.loads(text or "{}", parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise BadArguments(f"the arguments of {name} are not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise BadArguments(f"the arguments of {name} must be a JSON object, not {_kind(value)}")
    return value


def collect_tools(cls: type) -> dict[str, Tool]:
    """The tools of a class and its bases, in order of definition. Raises: TypeError for one it cannot describe."""
    found: dict[str, Tool] = {}
    for owner in reversed(cls.__mro__):
        _refuse_replaced(owner)
        for name, value in vars(owner).items():
            if hasattr(value, _MARK):
                found[name] = _make_tool(cls, name, value)
            elif name in found and value is None:
                del found[name]  # `search = None` withdraws an inherited tool
            elif name in found:
                raise TypeError(f"{owner.__name__}.{name} overrides a tool; put @tool above it, or set it to None")
    return found


def _refuse_replaced(owner: type) -> None:
    """Raises: TypeError for a tool of this class body that the class does not hold in the end."""
    held: list[Any] = []
    for value in vars(owner).values():
        while hasattr(value, _MARK):
            held.append(value)
            value = getattr(value, "__wrapped__", None)  # a decorator above @tool that says what it wraps is fine
    for method in vars(owner).get(_DECLARED, ()):
        if not any(value is method for value in held):
            line = getattr(getattr(method, "__code__", None), "co_firstlineno", "?")
            raise TypeError(
                f"{owner.__name__}.{method.__name__}: the tool of line {line} is replaced in the same class, by "
                f"another {method.__name__} (rename one) or by a decorator above @tool (put @tool on top)"
            )


def _make_tool(cls: type, name: str, method: Callable[..., Any]) -> Tool:
    where = f"{cls.__name__}.{name}"
    signature = list(inspect.signature(method).parameters.values())[1:]
    for parameter in signature:
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"{where}: parameter {parameter} cannot be offered to a model; name every parameter")
        if parameter.annotation is parameter.empty:
            raise TypeError(f"{where}: parameter {parameter.name!r} has no type hint; use one of {_ALLOWED}")
    names = [parameter.name for parameter in signature]
    description, texts = _read_docstring(inspect.getdoc(method) or "", names)
    if not description:
        raise TypeError(f"{where} has no docstring; its first lines tell the model what the tool does")
    annotated = types.SimpleNamespace(__annotations__={p.name: p.annotation for p in signature})
    try:
        hints = typing.get_type_hints(annotated, method.__globals__, dict(vars(cls)), include_extras=True)
    except NameError as error:
        raise TypeError(f"{where}: a type hint cannot be resolved: {error}") from None
    parameters = {}
    for parameter in signature:
        hint, text = hints[parameter.name], texts.get(parameter.name, "")
        if get_origin(hint) is Annotated:
            hint, *notes = get_args(hint)
            text = text or next((note for note in notes if isinstance(note, str)), "")
        schema = _schema(hint, f"{where}: parameter {parameter.name!r}")
        if text:
            schema["description"] = text
        required = parameter.default is parameter.empty
        if not required and parameter.default is not None:
            schema["default"] = parameter.default
        parameters[parameter.name] = Parameter(hint, schema, required)
    return Tool(name, description, getattr(method, _MARK), parameters)


def _read_docstring(text: str, names: list[str]) -> tuple[str, dict[str, str]]:
    """Split a docstring into the tool's description and its parameters' (from `name: text` lines)."""
    description: list[str] = []
    texts: dict[str, str] = {}
    current: str | None = None
    for line in text.splitlines():
        bare = line.strip()
        match = re.match(r"(?:[-*] )?`?(\w+)`?(?: \([^)]*\))?: *(.+)", bare)
        if match and match[1] in names:
            current = match[1]
            texts[current] = match[2]
        elif re.fullmatch(r"(Args|Arguments|Parameters):", bare):
            current = None
        elif re.fullmatch(r"(Returns|Raises|Yields|Notes?|Examples?):", bare):
            break  # for readers of the code
        elif not bare:
            current = None
        elif current is not None:
            texts[current] += " " + bare
        else:
            description.append(bare)
    return " ".join(description), texts


def _union(hint: Any) -> tuple[Any, bool] | None:
    """(X, True) for `X | None`; None for what is not a union."""
    if get_origin(hint) not in (Union, types.UnionType):
        return None
    rest = tuple(arg for arg in get_args(hint) if arg is not type(None))
    return (rest[0] if len(rest) == 1 else None, len(rest) < len(get_args(hint)))


def _schema(hint: Any, where: str) -> dict[str, Any]:
    simple = {str: "string", int: "integer", float: "number", bool: "boolean"}
    if hint in simple:
        return {"type": simple[hint]}
    origin, args = get_origin(hint), get_args(hint)
    union = _union(hint)
    if union is not None and union[0] is not None and union[1]:
        return _schema(union[0], where)  # absence says null; a union type would cost tokens in every prompt
    if origin is Literal:
        kinds = {type(arg) for arg in args}
        if len(kinds) == 1 and kinds <= set(simple):
            return {"type": simple[kinds.pop()], "enum": list(args)}
        raise TypeError(f"{where} is {hint}; a Literal's values must all be str, all int, or all bool")
    if hint is list or origin is list:
        return {"type": "array", "items": _schema(args[0], where)} if args else {"type": "array"}
    if hint is dict or origin is dict:
        if args and args[0] is not str:
            raise TypeError(f"{where} is {hint}; a dict's keys must be str")
        if args and args[1] is not Any:
            return {"type": "object", "additionalProperties": _schema(args[1], where)}
        return {"type": "object"}
    raise TypeError(f"{where} has the type {hint}; use one of {_ALLOWED}")


def _convert(value: Any, hint: Any, where: str) -> Any:
    """`value` as `hint` says, converted only where nothing is lost. Raises: BadArguments."""
    union = _union(hint)
    if union is not None:
        return None if value is None else _convert(value, union[0], where)
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        with_type = _lossless(value, type(args[0]))
        if any(type(with_type) is type(option) and with_type == option for option in args):
            return with_type
    elif hint in (str, int, float, bool):
        converted = _lossless(value, hint)
        if type(converted) is hint:
            return converted
    elif (hint is list or origin is list) and isinstance(value, list):
        return [
            _convert(item, args[0], f"{where}[{i}]") if args else _clean(item, where) for i, item in enumerate(value)
        ]
    elif (hint is dict or origin is dict) and isinstance(value, dict):
        inner = args[1] if args and args[1] is not Any else None
        for key in value:
            _clean(key, where)
        return {k: _convert(v, inner, f"{where}[{_show(k)}]") if inner else _clean(v, where) for k, v in value.items()}
    raise BadArguments(f"{where} must be {_describe(hint)}, not {_show(value)}")


def _lossless(value: Any, kind: type) -> Any:
    """`value` as `kind` if that loses nothing, else `value` itself. Raises: BadArguments for broken Unicode."""
    if isinstance(value, str):
        if kind is int and re.fullmatch(r"-?\d{1,18}", value):
            return int(value)
        if kind is float and re.fullmatch(r"-?\d{1,15}(\.\d{1,15})?", value):
            return float(value)
        if kind is bool and value in ("true", "false"):
            return value == "true"
        return _clean(value, "a text")
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if kind is float and type(value) is int and abs(value) <= 2**53:
        return float(value)
    if kind is float and isinstance(value, float) and not math.isfinite(value):
        return None  # 1e999 parses as infinity
    return value


def _clean(value: Any, where: str) -> Any:
    """`value`, whose texts must be Unicode: half a surrogate pair would fail inside a database or on the wire."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        raise BadArguments(f"{where} holds half a surrogate pair, which is no character") from None
    except ValueError:
        raise BadArguments(f"{where} holds a number that is not finite") from None
    return value


def _describe(hint: Any) -> str:
    words = {str: "a string", int: "an integer", float: "a number", bool: "true or false", list: "a list"}
    if hint in words:
        return words[hint]
    union = _union(hint)
    if union is not None:
        return f"{_describe(union[0])} or null"
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(json.dumps(option) for option in get_args(hint))
    return "a list" if get_origin(hint) is list else "an object"


def _kind(value: Any) -> str:
    kinds = {str: "a string", bool: "a boolean", list: "a list", dict: "an object", type(None): "null"}
    return kinds.get(type(value), "a number")


def _show(value: Any) -> str:
    text = json.dumps(value)  # ASCII: half a surrogate pair is shown escaped
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")
