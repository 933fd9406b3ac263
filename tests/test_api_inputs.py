"""What the Python functions and the commands are given: what cannot work is one line, before anything starts."""

from __future__ import annotations

import asyncio
import functools
import gc
import json
import math
import re
import shutil
import sqlite3
import warnings
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import springtide
from springtide import api
from springtide.api import _eval_config
from springtide.cli.main import _of_files, app
from springtide.config import ConfigError, RuntimeTable
from springtide.env.suite import SuiteError
from springtide.models.presets import resolve_model
from springtide.trainer.suites import name_suites

SUITE = f"{Path(__file__).parent / 'letters.py'}:Letters"


@pytest.mark.parametrize(
    ("name", "value"),
    [("tasks", 0), ("tasks", 2.5), ("samples", 0), ("samples", True), ("concurrency", -1), ("concurrency", 10**9)]
    + [("temperature", value) for value in (math.nan, -1.0, 1e-320, 1e300, "hot", True)],
)  # fmt: skip
def test_an_argument_of_evaluate_that_cannot_be_is_named(name: str, value: Any) -> None:
    arguments: Any = {name: value}
    with pytest.raises(ConfigError, match=rf"^{name}: must be .*, not {re.escape(repr(value))}$"):
        springtide.evaluate("springtide-nano", SUITE, **arguments)


@pytest.mark.parametrize("item", ["trainer.lr=1e-4", "model.path=other", "suites.0.level=hard", "context=9"])
def test_what_an_evaluation_does_not_read_cannot_be_set(item: str) -> None:
    with pytest.raises(ConfigError, match=r"reads only the tables model, engine, rollout, runtime$"):
        springtide.evaluate("springtide-nano", SUITE, sets=(item,))
    with pytest.raises(ConfigError, match=r"an endpoint reads only the tables rollout, runtime$"):
        springtide.evaluate("http://127.0.0.1:9/v1", SUITE, sets=("model.context=9",))


def test_an_evaluated_episode_may_reach_what_the_model_can_attend_over_or_what_is_set(tmp_path: Path) -> None:
    model = shutil.copytree(resolve_model("springtide-nano"), tmp_path / "model")
    file = model / "config.json"
    for most, expected in ((700, 700), (10**6, 65536)):
        file.write_text(json.dumps({**json.loads(file.read_text()), "max_position_embeddings": most}))
        assert _eval_config(model, SUITE, "test", "default", None, 0)[0].model.context == expected
    sets = ("model.context=300", "model.tool_format=plain", "rollout.max_turns=2")
    config, path, _ = _eval_config(model, SUITE, "test", "default", 32, 0, sets)
    assert (config.model.context, config.model.tool_format, config.rollout.max_turns) == (300, "plain", 2)
    assert (config.rollout.max_new_tokens, path) == (32, model)


@pytest.mark.parametrize("target", ["springtide-nano", "http://127.0.0.1:9/v1"])
def test_a_suite_whose_tasks_or_import_do_not_return_holds_no_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    """It was loaded by the caller itself, which it held for ever."""
    file, use = tmp_path / "author.py", f"{tmp_path / 'author.py'}:Sleeps"
    monkeypatch.setattr(api, "name_suites", functools.partial(name_suites, tasks_s=1.0))
    monkeypatch.setattr(api, "RuntimeTable", lambda: RuntimeTable(start_s=1.0))
    file.write_text(
        f"import sys, time\nsys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"
        "from tests.letters import Letters\n\n"
        "class Sleeps(Letters):\n    def tasks(split, level): time.sleep(1000)\n"
    )
    with pytest.raises(SuiteError, match=r"tasks\('test', 'quick'\) did not return within 1 s; make a task"):
        springtide.evaluate(target, use, level="quick")
    file.write_text("import time\ntime.sleep(1000)\n")
    with pytest.raises(SuiteError, match="its import did not return within 1 s; try `springtide doctor env"):
        springtide.evaluate(target, use)


def test_an_evaluation_is_played_as_it_was_set() -> None:
    result = springtide.evaluate("springtide-nano", "household", tasks=2, sets=("model.context=100",))
    assert result.suites["household"].status["context_limit"] == 1


@pytest.mark.parametrize("config", [None, 3, [], b"x"])
def test_what_is_no_configuration_is_named_with_what_is(config: Any) -> None:
    given = type(config).__name__
    with pytest.raises(ConfigError, match=rf"a Config, a dict or the path of a TOML file, not as {given}$"):
        springtide.train(config)


def test_a_path_that_cannot_be_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^'a\\x00b\.toml' holds a NUL character"):
        springtide.train("a\0b.toml")


def test_inside_an_event_loop_the_remedy_is_told_and_no_coroutine_is_left() -> None:
    async def inside() -> None:
        for name, arguments in (("train", ({},)), ("evaluate", ("springtide-nano", SUITE))):
            with pytest.raises(RuntimeError, match=rf"as await asyncio\.to_thread\(springtide\.{name}, \.\.\.\)$"):
                getattr(springtide, name)(*arguments)

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        asyncio.run(inside())
        gc.collect()
    assert [w for w in seen if "never awaited" in str(w.message)] == []


@pytest.mark.parametrize(
    ("out", "says"), [("", "is a directory; name a file in it"), ("x" * 300, "File name too long")]
)
def test_a_file_of_figures_that_cannot_be_is_refused_before_an_episode(tmp_path: Path, out: str, says: str) -> None:
    result = CliRunner().invoke(app, ["eval", "springtide-nano", "--suite", "db", "--out", str(tmp_path / out)])
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception).startswith("--out: ") and says in str(result.exception)


def test_what_sqlite_refuses_is_told_as_what_it_is(tmp_path: Path) -> None:
    """Every fault of the ledger's file was called a full disk."""

    def refused(database: sqlite3.Connection, *statements: str) -> str:
        with pytest.raises(sqlite3.OperationalError) as caught:
            for statement in statements:
                database.execute(statement)
        text = _of_files(caught.value)
        assert text is not None and "\n" not in text
        return text

    path = tmp_path / "ledger.sqlite"
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("CREATE TABLE t (x)")
    holder.execute("BEGIN EXCLUSIVE")
    locked = refused(sqlite3.connect(path, timeout=0), "INSERT INTO t VALUES (1)")
    assert "database is locked; end the program that holds ledger.sqlite" in locked and "room" not in locked
    holder.execute("COMMIT")
    full = refused(holder, "PRAGMA max_page_count = 1", "INSERT INTO t VALUES (zeroblob(100000))")
    assert "database or disk is full; make room" in full
    reader = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    assert "attempt to write a readonly database; mend that" in refused(reader, "INSERT INTO t VALUES (1)")
    assert _of_files(ValueError("another")) is None
