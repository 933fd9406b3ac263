"""The run directory: where everything a run leaves behind lies, and the rules for using one again.

Owns: the paths of DESIGN section 10, which run a path means, and what `--resume` may change. Invariants: a run never
writes into another run's directory by accident; one driver at a time (a lock that dies with its holder); a resume that
is refused has changed nothing.
Called by: the driver and every command that reads a run.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from springtide.config import RESUMABLE, Config, ConfigError, changed_keys, load_config
from springtide.trace import atomic_write


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """Paths only; creating and locking are separate steps."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.toml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def trajectories(self) -> Path:
        return self.path / "trajectories"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def ledger(self) -> Path:
        return self.path / "ledger.sqlite"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def pace(self) -> Path:
        return self.path / "pace.json"

    def evaluation(self, label: str) -> Path:
        """One line an episode of the evaluation named so: `start`, `end`, `step-20`."""
        return self.path / "evaluations" / f"{label}.jsonl"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:06d}"

    def saved(self) -> list[Path]:
        """Checkpoints, newest first."""
        steps = {int(p.name[5:]): p for p in self.checkpoints.glob("step-*") if p.name[5:].isdigit()}
        return [steps[step] for step in sorted(steps, reverse=True)]

    def begin(self, config: Config) -> None:
        """The run is under `config` from now on."""
        atomic_write(self.config, config.to_toml().encode())

    def write_json(self, path: Path, data: Any) -> None:
        atomic_write(path, (json.dumps(data, indent=1, sort_keys=True) + "\n").encode())


def apart_from_place(use: str) -> str:
    """What a suite is called wherever its file lies: `safe.py:Safe`, of `examples/safe.py:Safe`."""
    return use.rpartition("/")[2]


def load_run(path: Path, sets: tuple[str, ...] = (), *, resume: bool = False) -> Config:
    """The configuration at `path`: a TOML file, or to resume also a run's directory. Raises: ConfigError.

    A run that is resumed from its own `config.toml` is the one that lies there, wherever it was when it began, unless
    `sets` names another.
    """
    if os.path.isdir(path):
        if not resume:
            raise ConfigError(f"{path} is a directory: name a TOML file, or continue the run in it with --resume")
        if not os.path.isfile(RunDirectory(path).config):
            raise ConfigError(f"{path} holds no run to resume (no config.toml); give a run directory, as runs/NAME")
        path = RunDirectory(path).config
    config = load_config(path, sets)
    own = RunDirectory(path.parent)
    named = {item.partition("=")[0].strip() for item in sets} & {"run.dir", "run.name"}
    if not resume or named or path.name != own.config.name or not os.path.isfile(own.ledger):
        return config
    if config.run_dir.resolve() == own.path.resolve():
        return config
    place = own.path.resolve()
    here = {"run.dir": str(place.parent), "run.name": place.name}
    return load_config(path, (*sets, *(f"{key}={json.dumps(text, ensure_ascii=False)}" for key, text in here.items())))


def prepare(config: Config, *, resume: bool) -> tuple[RunDirectory, IO[str]]:
    """Create or reopen the run's directory and lock it; keep the returned file open. Raises: ConfigError."""
    directory = RunDirectory(config.run_dir)
    exists = directory.config.exists()
    if exists and not resume and directory.saved():
        raise ConfigError(f"{directory.path} holds a run; choose another run.name, or continue it with --resume")
    if resume and not exists:
        raise ConfigError(f"{directory.path} holds no run to resume; start it without --resume")
    try:
        for path in (directory.trajectories, directory.checkpoints, directory.logs):
            path.mkdir(parents=True, exist_ok=True)
        lock = open(directory.path / ".lock", "w")  # noqa: SIM115 - held as long as the run
    except OSError as error:
        raise ConfigError(f"run.dir: cannot write {directory.path}: {error.strerror or error}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise ConfigError(f"{directory.path} is in use by another springtide process") from None
    try:
        _remove_torn(directory)
        if resume:  # its new configuration is written by `begin`, when nothing refuses it any more
            old = load_config(directory.config)
            _check_changes(old, config)
            _check_totals(directory, old, config)
        elif exists:  # a start that failed before its first checkpoint: nothing was learned, begin afresh
            for path in (*directory.path.glob("ledger.sqlite*"), directory.metrics, directory.events):
                path.unlink(missing_ok=True)
        if not resume:
            directory.begin(config)
    except BaseException:
        lock.close()
        raise
    return directory, lock


def _remove_torn(directory: RunDirectory) -> None:
    """Remove what a killed process was about to write: it takes its name only when it is whole. What it had set aside
    to write anew, but had not yet, takes its name again."""
    for place in (directory.path, directory.trajectories, directory.checkpoints):
        for path in (*place.glob(".*.tmp"), *place.glob(".*.old")):
            name = place / path.name[1:].rsplit(".", 2)[0]
            if path.suffix == ".old" and not name.exists():
                path.rename(name)
                continue
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _check_changes(old: Config, new: Config) -> None:
    # Where the run lies is where its configuration was found: another spelling (relative, through a link, moved) is no
    # other run. So it is with a suite's file: that its tasks are the same is for the ledger to say.
    changed = changed_keys(_without_places(old), _without_places(new)) - RESUMABLE - {"run.dir", "run.name"}
    if changed:
        raise ConfigError(
            f"--resume cannot change {', '.join(sorted(changed))}; it accepts {', '.join(sorted(RESUMABLE))}"
        )


def _without_places(config: Config) -> Config:
    entries = tuple(e.model_copy(update={"use": apart_from_place(e.use)}) for e in config.suites)
    return config.model_copy(update={"suites": entries})


def _check_totals(directory: RunDirectory, old: Config, new: Config) -> None:
    """Refuse a resume that has nothing left to train: `run.steps` and `run.minutes` count from the run's first start.

    A run that has trained all that its own configuration asks for, but was killed before its end, goes on to its end.
    """
    try:
        saved = json.loads((directory.saved()[0] / "extra.json").read_text())
        step, minutes = int(saved["step"]), saved["trained_s"] / 60
    except (IndexError, OSError, ValueError, KeyError, TypeError):
        return  # none yet, or damaged: its reader says so
    reached: list[tuple[str, float, str]] = []
    if step >= new.run.steps:
        reached.append(("run.steps", new.run.steps, str(2 * step)))
    if new.run.minutes is not None and minutes >= new.run.minutes:
        reached.append(("run.minutes", new.run.minutes, f"{2 * minutes:.0f}" if minutes >= 5 else f"{2 * minutes:.2g}"))
    less = (new.run.steps, new.run.minutes) != (old.run.steps, old.run.minutes)
    if reached and (less or _ended(directory, step)):
        at = " and ".join(f"{key} = {value}" for key, value, _ in reached)
        more = " ".join(f"--set {key}={value}" for key, _, value in reached)
        raise ConfigError(
            f"{directory.path} is already at {at}: it has trained {step} steps in {minutes:.1f} minutes, all starts "
            f"together; continue with {more}"
        )


def _ended(directory: RunDirectory, step: int) -> bool:
    """Whether the run has its summary, of this step."""
    try:
        return bool(json.loads(directory.summary.read_text())["steps"] == step)
    except (OSError, ValueError, KeyError, TypeError):
        return False
