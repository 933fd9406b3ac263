"""Data sets of questions as suites: a prompt, one reply, and a verifier that compares it with the row's answer.

Owns: the description (a TOML file), reading rows, their splits, and the environment that asks them. Invariants: a row
is the same task in every process, and its split depends on nothing but its prompt (or its own column); changed rows are
another version of the suite, which a run does not resume on; a row that cannot be used is one line with its place.
Called by: `env.registry`, for names that are data files.

    data = "questions.jsonl"    # or .parquet, a directory of datasets' save_to_disk, a name on the Hugging Face hub
    prompt = "question"         # a column: text, or a list of messages. answer = "reward_model.ground_truth" is nested
    answer = "answer"
    verifier = "numeric"
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import json
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from springtide.env import verify
from springtide.env.environment import Environment, TaskList
from springtide.env.registry import DATA_SUFFIXES, load_file
from springtide.env.suite import SPLITS, Suite, SuiteError
from springtide.trace import Limits, Message, Task

_PROMPTS = ("prompt", "question", "problem", "messages")
_ANSWERS = ("answer", "ground_truth", "target", "label", "solution", "reward_model.ground_truth")
_ROLES = ("system", "user", "assistant")
# Of a data set's own splits; validation data are for tuning, which the dev tenth of `train` is for, so they test.
_SPLIT_NAMES = {"validation": "test", "valid": "test", "val": "test", "dev": "test"}


class Description(BaseModel):
    """What a data set's TOML file may say."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    data: str
    subset: str | None = None
    name: str | None = None
    system: str | None = None
    prompt: str | None = None
    answer: str | None = None
    verifier: str = "exact"
    extract: str | None = None
    tolerance: float = Field(0.0, ge=0, lt=1)
    split: str | None = None
    test: float = Field(0.1, ge=0, lt=1)
    score_s: float = Field(30.0, gt=0, le=3600)


Row = dict[str, Any]


class Question(Environment):
    """Asks a row's prompt; the first reply is the answer. `suite_of` makes a subclass for each data set."""

    plain_answer = True
    max_turns = 1
    score_with: Callable[[str, list[str], Row], float]
    verifier: str

    async def start(self) -> list[Message]:
        return [Message(role, text) for role, text in self.task.payload["messages"]]

    def score(self) -> float:  # type: ignore[override]  # in a thread: a verifier may take its time
        payload = self.task.payload
        return 0.0 if self.answer is None else self.score_with(self.answer, payload["answers"], payload["row"])

    async def gold(self) -> list[tuple[str, dict[str, Any]]] | None:
        answers = self.task.payload["answers"]
        return [("", {"text": answers[0]})] if answers and self.verifier != "regex" else None


def dataset_suite(use: str) -> Suite:
    """The suite of a description, or of a data file with every setting at its default. Raises: SuiteError."""
    path = Path(use)
    if not path.is_file():
        raise SuiteError(f"suite {use}: there is no file {path.resolve()}")
    if path.suffix != ".toml":
        return suite_of(Description(data=path.name), path.parent, use, path.stem)
    try:
        described = Description.model_validate(tomllib.loads(path.read_text()))
    except ValidationError as error:
        first = error.errors()[0]
        known = ", ".join(Description.model_fields)
        told = f"no such key; there are {known}" if first["type"] == "extra_forbidden" else first["msg"]
        raise SuiteError(f"suite {use}: {'.'.join(map(str, first['loc']))}: {told}") from None
    except (OSError, ValueError) as error:
        raise SuiteError(f"suite {use}: {path} cannot be read as TOML: {error}") from None
    return suite_of(described, path.parent, use, path.stem)


def suite_of(described: Description, directory: Path, use: str, stem: str) -> Suite:
    """Read all rows, and say what is wrong with the first that cannot be used."""
    name = described.name or re.sub(r"[^a-z0-9_]+", "_", stem.lower()).strip("_") or "dataset"
    score_with = _scorer(described, directory, use)
    payloads: dict[str, list[dict[str, Any]]] = {split: [] for split in SPLITS}
    digest = hashlib.blake2b(described.model_dump_json(exclude={"data"}).encode(), digest_size=6)
    count = 0
    for where, own, row in _rows(described, directory, use):
        count += 1
        try:
            split, payload = _task_of(described, own, row)
            text = json.dumps([split, payload], sort_keys=True, ensure_ascii=False)
            digest.update(text.encode())
        except UnicodeEncodeError:
            raise SuiteError(f"{where}: it holds half a surrogate pair, which is no text") from None
        except (_BadRow, TypeError) as error:  # TypeError: a date, bytes, an image
            raise SuiteError(f"{where}: {error}") from None
        payloads[split].append(payload)
    if not count:
        raise SuiteError(f"suite {use}: {described.data} holds no row")
    version = digest.hexdigest()
    body = {
        "name": name, "version": version, "score_with": staticmethod(score_with), "verifier": described.verifier,
        "limits": Limits(max_turns=1, score_s=described.score_s), "__module__": __name__,
    }  # fmt: skip
    environment: type[Question] = type("Question", (Question,), body)

    def tasks(split: str, level: str) -> Sequence[Task]:
        rows = payloads[split]
        return TaskList(len(rows), lambda i: environment.make_task(split, level, i, rows[i]))

    return Suite(name, version, environment, ("default",), tasks)


# --- rows -------------------------------------------------------------------------------------------------------------


class _BadRow(Exception):
    """What is wrong with a row."""


def _task_of(described: Description, own: str | None, row: Row) -> tuple[str, dict[str, Any]]:
    """A row's split, and what its task holds: messages, accepted answers, the row without its split."""
    prompt = _column(row, described.prompt, _PROMPTS, "prompt")
    messages = _messages(prompt, described.system)
    needed = described.verifier in ("exact", "numeric", "choice", "regex")
    value = _column(row, described.answer, _ANSWERS, "answer", required=needed or described.answer is not None)
    answers = _answers(value, described) if needed or value is not None else []
    column = described.split or ("split" if "split" in row else None)
    if column is not None:
        own, row = str(_column(row, column, (), "split")), {k: v for k, v in row.items() if k != column}
    if own is None:
        said = json.dumps([message for message in messages if message[0] != "system"])
        share = int.from_bytes(hashlib.blake2b(said.encode(), digest_size=4).digest(), "big") / 2**32
        own = "test" if share < described.test else "train"
    split = _SPLIT_NAMES.get(own, own)
    if split not in SPLITS:
        raise _BadRow(f"its split is {own!r}; it may be {', '.join((*SPLITS, *_SPLIT_NAMES))}")
    return split, {"messages": messages, "answers": answers, "row": row}


def _column(row: Row, name: str | None, names: Sequence[str], what: str, *, required: bool = True) -> Any:
    """The value of the column `name`, or of the first of `names` there is; a dot goes into a nested one."""
    for candidate in [name] if name else names:
        value: Any = row
        for part in [candidate] if candidate in row else candidate.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is not None:
            return value
    if required:
        wanted = f"no column {name!r}" if name else f"none of the columns {', '.join(names)}"
        raise _BadRow(f"{wanted} (set {what} = ...); it has {', '.join(row) or 'none'}")
    return None


def _messages(prompt: Any, system: str | None) -> list[tuple[str, str]]:
    """(role, text) of each message of the opening."""
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list | tuple) or not prompt:
        raise _BadRow(f"its prompt is {prompt!r:.60}; it must be a text or a list of messages")
    messages = []
    for item in prompt:
        if not isinstance(item, Mapping) or item.get("role") not in _ROLES or not isinstance(item.get("content"), str):
            raise _BadRow(
                f"its prompt holds {item!r:.80}; a message has a role ({', '.join(_ROLES)}) and a text as content"
            )
        messages.append((str(item["role"]), str(item["content"])))
    role, text = messages[-1]
    if role != "user":
        raise _BadRow(f"its prompt ends with a message of the {role}; the policy answers the user")
    if not text.strip():
        raise _BadRow("its prompt is empty")
    if system is not None and messages[0][0] != "system":
        messages.insert(0, ("system", system))
    return messages


def _answers(value: Any, described: Description) -> list[str]:
    """What is accepted, as text. A list: each of them. Raises: _BadRow where the verifier can make nothing of it."""
    values = value if isinstance(value, list | tuple) else [value]
    answers = []
    for item in values:
        if isinstance(item, bool) or not isinstance(item, str | int | float):
            raise _BadRow(f"its answer is {item!r:.60}; it must be a text, a number, or a list of them")
        if described.verifier == "choice" and isinstance(item, int):
            if not 0 <= item < 26:
                raise _BadRow(f"its answer is {item}; the number of a choice is 0 (for A) to 25")
            item = chr(ord("A") + item)
        text = str(item)
        extracts = described.verifier in ("exact", "numeric", "choice")
        if extracts:
            text = verify.final(text) or ""
        if not text.strip():
            raise _BadRow("its answer is empty")
        if described.verifier == "numeric" and verify.number(text) is None:
            raise _BadRow(f'its answer {text!r:.60} holds no number, which verifier = "numeric" compares')
        if described.verifier == "choice" and verify.letter(text) is None:
            raise _BadRow(f'its answer {text!r:.60} holds no letter, which verifier = "choice" compares')
        if described.verifier == "regex":
            try:
                re.compile(text)
            except re.error as error:
                raise _BadRow(f"its answer {text!r:.60} is no regular expression: {error}") from None
        answers.append(text)
    if not answers:
        raise _BadRow("its answer is an empty list")
    return answers


def _rows(described: Description, directory: Path, use: str) -> Iterator[tuple[str, str | None, Row]]:
    """(where it stands, the split it comes from or None, the row), in order."""
    path = directory / described.data
    if path.suffix == ".jsonl" and path.is_file():
        yield from _jsonl(path)
        return
    if path.is_file() and path.suffix != ".parquet":
        raise SuiteError(f"suite {use}: {path} is neither .jsonl nor .parquet")
    if not path.exists() and (path.suffix in DATA_SUFFIXES or described.data.startswith((".", "/"))):
        raise SuiteError(f"suite {use}: there is no file {path.resolve()}")
    try:
        import datasets
    except ImportError:
        kind = path.suffix or "such a data set"
        raise SuiteError(
            f"suite {use}: {kind} is read with Hugging Face datasets; install springtide[datasets]"
        ) from None
    datasets.disable_progress_bars()
    try:
        if path.is_file():
            loaded = datasets.Dataset.from_parquet(str(path))
        elif path.is_dir():
            loaded = datasets.load_from_disk(str(path))
        else:
            loaded = datasets.load_dataset(described.data, described.subset)
    except Exception as error:  # datasets raises many kinds, and its own; each is a reason why there are no rows
        told = " ".join(str(error).split())[:300]
        raise SuiteError(f"suite {use}: {described.data} cannot be loaded: {type(error).__name__}: {told}") from error
    if isinstance(loaded, dict) and len(loaded) == 1:  # one split is none
        (loaded,) = loaded.values()
    parts: Iterable[tuple[str | None, Any]] = loaded.items() if isinstance(loaded, dict) else [(None, loaded)]
    for own, part in parts:
        for index, row in enumerate(part):
            yield f"{described.data}{'' if own is None else f' ({own})'}, row {index}", own, row


def _jsonl(path: Path) -> Iterator[tuple[str, str | None, Row]]:
    try:
        with open(path, encoding="utf-8-sig") as file:  # some programs write a byte order mark
            for line, text in enumerate(file, 1):
                if not text.strip():
                    continue
                where = f"{path}:{line}"
                try:
                    row = json.loads(text)
                except (ValueError, RecursionError) as error:
                    raise SuiteError(f"{where}: not JSON: {getattr(error, 'msg', error)}") from None
                if not isinstance(row, dict):
                    raise SuiteError(f"{where}: {type(row).__name__}, not an object with columns")
                yield where, None, row
    except (OSError, UnicodeDecodeError) as error:
        raise SuiteError(f"{path}: {error}") from None


# --- verifiers --------------------------------------------------------------------------------------------------------


def _scorer(described: Description, directory: Path, use: str) -> Callable[[str, list[str], Row], float]:
    """(the reply's text, the row's answers, the row) -> the reward. Raises: SuiteError."""
    try:
        extract = re.compile(described.extract) if described.extract is not None else None
    except re.error as error:
        raise SuiteError(f"suite {use}: extract is no regular expression: {error}") from None
    named: dict[str, verify.Verifier] = {
        "exact": verify.exact,
        "numeric": verify.numeric(described.tolerance),
        "choice": verify.choice,
        "regex": verify.matches,
    }
    file, colon, function = described.verifier.rpartition(":")
    if not colon or not file.endswith(".py"):
        if described.verifier not in named:
            raise SuiteError(
                f"suite {use}: there is no verifier {described.verifier!r}; there are {', '.join(named)}, or give "
                "FILE.py:function"
            )
        verifier, whole = named[described.verifier], described.verifier == "regex"

        def by_name(reply: str, answers: list[str], row: Row) -> float:
            given = reply if whole and extract is None else verify.final(reply, extract)
            return float(given is not None and verifier(given, answers))

        return by_name

    module = load_file((directory / file).resolve(), use)
    theirs = getattr(module, function, None)
    if not callable(theirs) or asyncio.iscoroutinefunction(theirs):
        raise SuiteError(
            f"suite {use}: {file} has no plain function {function!r}, called with the reply's text and the row"
        )

    def by_function(reply: str, answers: list[str], row: Row) -> float:
        given = reply if extract is None else verify.final(reply, extract)
        return 0.0 if given is None else theirs(given, copy.deepcopy(row))

    return by_function
