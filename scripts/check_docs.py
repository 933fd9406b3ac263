"""Check the documentation against the program: what a page shows must exist and work.

    python scripts/check_docs.py            name every fault, exit 1 if there is one (`make docs`)
    python scripts/check_docs.py --write    write the generated parts of docs/configuration.md first

Owns: the tables of docs/configuration.md, made from the configuration's own types, defaults and descriptions; and five
checks over every page: relative links and their headings resolve; a fence under `<!-- FILE -->` is that file's code;
tests, files and folders in backticks exist; every `springtide ...` command parses and the configuration it names is
valid; `make` targets and `python FILE.py` scripts exist. Nothing is started.
Called by: `make docs`, tests/test_docs.py.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
import typer.main

from springtide.config import RESUMABLE, Config, ConfigError, load_config

ROOT = Path(__file__).resolve().parent.parent
CONFIGURATION = "docs/configuration.md"
_USAGE_ERROR: type[Exception] = typer.BadParameter.__bases__[0]  # typer may carry its own copy of click
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_EXCERPT = re.compile(r"^<!-- (\S+) -->\n```\w*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`((?:springtide|make|python) [^`\n]+)`")
_HEADING = re.compile(r"^#{1,6} (.+)$", re.MULTILINE)
_PLACEHOLDER = re.compile(r"^[A-Z][A-Z|]*$")  # RUN, CONFIG, N: stands for something of the reader's


def main() -> int:
    pages = find_pages(ROOT)
    if "--write" in sys.argv[1:]:
        path = ROOT / CONFIGURATION
        path.write_text(generate(path.read_text()))
    faults = [fault for page in pages for fault in check_page(ROOT, page)]
    for fault in faults:
        print(fault)
    print(f"docs: {len(pages)} pages, {len(faults)} faults")
    return 1 if faults else 0


def find_pages(root: Path) -> list[Path]:
    return [*sorted(root.glob("*.md")), *sorted((root / "docs").glob("*.md"))]


def check_page(root: Path, page: Path) -> list[str]:
    """Every fault of one page, a line each."""
    text, name = page.read_text(), page.relative_to(root).as_posix()
    faults = [*links(root, page, text), *excerpts(root, text), *names(root, text), *commands(root, text)]
    if name == CONFIGURATION and generate(text) != text:
        faults.append("is not what the configuration says; run python scripts/check_docs.py --write")
    return [f"{name}: {fault}" for fault in faults]


# --- links and excerpts -----------------------------------------------------------------------------------------------


def links(root: Path, page: Path, text: str) -> Iterator[str]:
    for target in _LINK.findall(_FENCE.sub("", text)):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, heading = target.partition("#")
        path = (page.parent / file).resolve() if file else page
        if not path.exists() or not path.is_relative_to(root):
            yield f"the link {target} leads nowhere"
        elif heading and heading not in {_slug(h) for h in _HEADING.findall(_FENCE.sub("", path.read_text()))}:
            yield f"the link {target} names a heading that is not there"


def _slug(heading: str) -> str:
    """A heading's anchor, as code hosts make it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def excerpts(root: Path, text: str) -> Iterator[str]:
    for name, code in _EXCERPT.findall(text):
        path = root / name
        if not path.is_file():
            yield f"the excerpt {name} has no such file"
        elif code.strip() not in path.read_text():
            yield f"the excerpt {name} is not what the file says"


_TEST = re.compile(r"`(tests/\w+\.py)::(\w+)`")
_MADE = (  # by a run or by set-up
    "runs/",
    "trajectories/",
    "checkpoints/",
    "logs/",
    "evaluations/",
    "my-",
    "test-data/",
)
_FILE = re.compile(r"`((?:[\w-]+/)*[\w-]+\.(?:py|toml|c|jinja)|(?:[\w-]+/)+)`")


def names(root: Path, text: str) -> Iterator[str]:
    """Faults of the tests, files and folders that stand in backticks; those of the package may be named from inside."""
    for file, test in _TEST.findall(text):
        path = root / file
        if not path.is_file() or not re.search(rf"^(async )?def {test}\(", path.read_text(), re.MULTILINE):
            yield f"`{file}::{test}` is no test"
    for file in dict.fromkeys(_FILE.findall(_FENCE.sub("", text))):
        if (
            "/" in file
            and not file.startswith(_MADE)
            and not any((place / file).exists() for place in (root, root / "src/springtide"))
        ):
            yield f"`{file}` is neither in the repository nor in the package"


# --- commands ---------------------------------------------------------------------------------------------------------


def commands(root: Path, text: str) -> Iterator[str]:
    """Faults of the commands shown in fences (a command a line) and in line."""
    shown = [
        line.strip() for language, body in _FENCE.findall(text) if language != "python" for line in body.split("\n")
    ]
    lines = [line.removeprefix("$ ") for line in shown] + _INLINE.findall(_FENCE.sub("", text))
    targets = set(re.findall(r"^([a-z-]+):", (root / "Makefile").read_text(), re.MULTILINE))
    for line in dict.fromkeys(lines):
        words = shlex.split(line.replace("...", ""), comments=True) if _is_command(line) else []
        if words[:1] == ["make"]:
            wrong = [w for w in words[1:] if "=" not in w and w not in targets]
            if wrong:
                yield f"`{line}`: the Makefile has no target {wrong[0]}"
        elif words[:1] == ["python"] and words[1].endswith(".py") and not (root / words[1]).is_file():
            yield f"`{line}`: there is no {words[1]}"
        elif words[:1] == ["springtide"] and (fault := _springtide(root, words[1:])):
            yield f"`{line}`: {fault}"


def _is_command(line: str) -> bool:
    return bool(re.match(r"(springtide|make|python) [\w\-]", line))


def _springtide(root: Path, words: list[str]) -> str | None:
    """Why the command line would be refused, or None."""
    from springtide.cli.main import app

    words = [re.sub(r"^\[?(--[\w-]+|[A-Z]+)\]?$", r"\1", w) for w in words]  # [--live] of a signature
    command, name = typer.main.get_command(app), "springtide"
    try:
        context = command.make_context(name, list(words))
        while hasattr(command, "commands"):
            if not words or words[0].startswith("-") or _PLACEHOLDER.match(words[0]):
                return None  # `springtide --help`, `springtide COMMAND`
            name, command, words = command.resolve_command(context, words)  # type: ignore[attr-defined]
            if hasattr(command, "commands"):
                context = command.make_context(name, list(words), parent=context)
        values = _filled(words)
        if "--help" in values:
            return None
        given = command.make_context(name, values, parent=context).params
    except _USAGE_ERROR as error:
        return error.format_message()  # type: ignore[attr-defined]
    except typer.Exit:
        return None  # `springtide --version`
    return _configuration(root, name or "", given)


def _filled(words: list[str]) -> list[str]:
    """Placeholders behind an option become a number (which is a text too); a bare `springtide train` asks for help."""
    return [
        "1" if i and words[i - 1].startswith("--") and _PLACEHOLDER.match(w) else w for i, w in enumerate(words)
    ] or ["--help"]


def _configuration(root: Path, name: str, given: dict[str, Any]) -> str | None:
    """The fault of the configuration that a `train` or `quickstart` line would run, as far as it is there."""
    if name not in ("train", "quickstart"):
        return None
    preset = root / "src/springtide/cli/quickstart.toml"
    path = preset if name == "quickstart" else root / given["config"]
    sets = tuple(s for s in given["set_"] or () if "=" in s)
    placeholder = name == "train" and bool(re.fullmatch(r"[A-Z]+|my\.toml|runs/NAME(/.*)?", str(given["config"])))
    try:
        load_config(preset if placeholder else path, sets)
    except ConfigError as error:
        return str(error)
    return None


# --- the tables of docs/configuration.md ------------------------------------------------------------------------------


def generate(text: str) -> str:
    """The page with its generated parts made anew."""
    for name, body in (("options", options()), ("resumable", resumable())):
        begin, end = f"<!-- generated: {name} -->\n", "<!-- end -->"
        before, found, rest = text.partition(begin)
        if not found or end not in rest:
            raise SystemExit(f"{CONFIGURATION} has no part {begin.strip()} ... {end}")
        text = f"{before}{begin}\n{body}\n{end}{rest.partition(end)[2]}"
    return text


def resumable() -> str:
    return "\n".join(f"- `{key}`" for key in sorted(RESUMABLE)) + "\n"


def options() -> str:
    """One section a table, one row an option."""
    schema = Config.model_json_schema()
    return "\n".join(_tables(schema, schema["$defs"], ""))


def _tables(node: dict[str, Any], defs: dict[str, Any], prefix: str) -> Iterator[str]:
    for key, field in node["properties"].items():
        table = _table(field, defs)
        if table is None:
            continue
        path = f"{prefix}{key}"
        head = f"[[{path}]]" if field.get("type") == "array" else f"[{path}]"
        yield f"### `{head}`\n\n| key | value | default | meaning |\n|---|---|---|---|"
        for name, option in table["properties"].items():
            if _table(option, defs) is None:
                default = _default(option, required=name in table.get("required", ()))
                yield f"| `{name}` | {_kind(option)} | {default} | {option.get('description', '')} |"
        yield ""
        yield from _tables(table, defs, f"{path}.")


def _table(field: dict[str, Any], defs: dict[str, Any]) -> dict[str, Any] | None:
    """The table that a field holds (one, or a list of them), or None for an option."""
    ref = field.get("$ref") or field.get("items", {}).get("$ref")
    return defs[ref.rpartition("/")[2]] if ref else None


def _kind(option: dict[str, Any]) -> str:
    if "anyOf" in option:
        return " or ".join(_kind(o) for o in option["anyOf"] if o["type"] != "null")
    if "const" in option:
        return f"`{json.dumps(option['const'])}`"
    if "enum" in option:
        return ", ".join(f"`{json.dumps(v)}`" for v in option["enum"])
    if option["type"] == "array":
        return f"{len(option['prefixItems'])} numbers" if "prefixItems" in option else "list of text"
    names = {"string": "text", "boolean": "`true`, `false`"}
    bounds = (("exclusiveMinimum", ">"), ("minimum", "≥"), ("exclusiveMaximum", "<"), ("maximum", "≤"))
    limits = [f"{sign} {option[key]:g}" for key, sign in bounds if key in option]
    return " ".join([names.get(option["type"], option["type"]), ", ".join(limits)]).strip()


def _default(option: dict[str, Any], *, required: bool) -> str:
    if required:
        return "required"
    value = option.get("default")
    return "unset" if value is None else f"`{json.dumps(value)}`"


if __name__ == "__main__":
    sys.exit(main())
