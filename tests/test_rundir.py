"""A run's directory: whose it is, and what a resume may change."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.run_support import run_config

from springtide.config import Config, ConfigError, load_config
from springtide.rundir import RunDirectory, prepare


def _go(config: Config, *, resume: bool) -> RunDirectory:
    directory, lock = prepare(config, resume=resume)
    directory.begin(config)
    lock.close()
    return directory


def test_a_run_is_resumed_under_any_spelling_of_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`runs` and `./runs/` and the whole path were three runs; a resume was refused for a slash."""
    monkeypatch.chdir(tmp_path)
    made = _go(run_config(tmp_path, Path("runs")), resume=False)
    (tmp_path / "link").symlink_to(tmp_path / "runs")
    (tmp_path / "runs" / "alias").symlink_to(tmp_path / "runs" / "run")
    base = run_config(tmp_path, Path("runs"))
    for place, name in (
        ("runs/", "run"),
        ("./runs/../runs", "run"),
        (str(tmp_path / "runs"), "run"),
        ("link", "alias"),
    ):
        config = base.model_copy(update={"run": base.run.model_copy(update={"dir": place, "name": name})})
        directory = _go(config, resume=True)
        assert directory.config.samefile(made.config)
        assert load_config(directory.config) == config
    (tmp_path / "runs").rename(tmp_path / "moved")
    _go(run_config(tmp_path, tmp_path / "moved"), resume=True)
    with pytest.raises(ConfigError, match=r"cannot change rollout\.temperature;"):
        _go(run_config(tmp_path, tmp_path / "moved", rollout={"temperature": 0.5}), resume=True)
    with pytest.raises(ConfigError, match="holds no run to resume"):
        _go(run_config(tmp_path, tmp_path / "elsewhere"), resume=True)


def test_what_a_killed_process_wrote_goes_and_what_it_had_set_aside_comes_back(tmp_path: Path) -> None:
    """Killed between two renames, a checkpoint that was written anew was lost: the old one and the new."""
    directory = _go(run_config(tmp_path, tmp_path), resume=False)
    for name in (".step-000004.9.old", ".step-000004.9.tmp", ".step-000002.9.old", "step-000002"):
        (directory.checkpoints / name).mkdir()
        (directory.checkpoints / name / "of").write_text(name)
    _go(run_config(tmp_path, tmp_path), resume=True)
    assert {p.name: (p / "of").read_text() for p in directory.checkpoints.iterdir()} == {
        "step-000002": "step-000002",
        "step-000004": ".step-000004.9.old",
    }


def test_checkpoints_are_newest_first_by_number(tmp_path: Path) -> None:
    """Sorted as text, step 1000000 stood before step 999999 and was taken for the oldest: never resumed, forgotten."""
    directory = RunDirectory(tmp_path)
    for step in (999_999, 1_000_000, 7, 1_000_001):
        directory.checkpoint(step).mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-3-mine").mkdir()
    assert [path.name for path in directory.saved()] == ["step-1000001", "step-1000000", "step-999999", "step-000007"]
