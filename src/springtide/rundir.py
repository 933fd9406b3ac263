"""The run directory: where everything a run leaves behind lies, and the rules for using one again.

Owns: the paths of DESIGN section 10, and what `--resume` may change. Invariants: a run never writes into another run's
directory by accident; one driver at a time (a lock that dies with its holder).
Called by: the driver and every command that reads a run.
"""

from __future__ import annotations

import fcntl
import json
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

    def evaluation(self, label: str) -> Path:
        """One line an episode of the evaluation named so: `start`, `end`, `step-20`."""
        return self.path / "evaluations" / f"{label}.jsonl"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:06d}"

    def saved(self) -> list[Path]:
        """Checkpoints, newest first."""
        steps = {int(p.name[5:]): p for p in self.checkpoints.glob("step-*") if p.name[5:].isdigit()}
        return [steps[step] for step in sorted(steps, reverse=True)]

    def write_json(self, path: Path, data: Any) -> None:
        atomic_write(path, (json.dumps(data, indent=1, sort_keys=True) + "\n").encode())


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
        if exists and resume:
            _check_changes(load_config(directory.config), config)
        elif exists:  # a start that failed before its first checkpoint: nothing was learned, begin afresh
            for path in (*directory.path.glob("ledger.sqlite*"), directory.metrics, directory.events):
                path.unlink(missing_ok=True)
        atomic_write(directory.config, config.to_toml().encode())
    except BaseException:
        lock.close()
        raise
    return directory, lock


def _check_changes(old: Config, new: Config) -> None:
    # Where the run lies is where its configuration was found: another spelling (relative, through a link, moved) is no
    # other run.
    changed = changed_keys(old, new) - RESUMABLE - {"run.dir", "run.name"}
    if changed:
        raise ConfigError(
            f"--resume cannot change {', '.join(sorted(changed))}; it accepts {', '.join(sorted(RESUMABLE))}"
        )
