"""A run directory as people's pages read it: at any moment of a run's life, without disturbing it.

Owns: the reading of config, records, summary, ledger and trajectories together. Invariants: nothing is written;
a summary counts only if it is of the run's last incarnation; a ledger that cannot be read is a sentence, not an error.
Called by: `observe.{report,view}`.
"""

from __future__ import annotations

import json
import sqlite3
import tomllib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from springtide.config import ConfigError
from springtide.ledger import Ledger, LedgerError, VisitRow
from springtide.observe.plots import suite_colors
from springtide.observe.sinks import read_lines
from springtide.rundir import RunDirectory
from springtide.trace import Group
from springtide.wire import WireError


@dataclass(frozen=True)
class RunView:
    """A run as its directory shows it now."""

    path: Path
    config_text: str
    records: list[dict[str, Any]]
    skipped: int  # lines of metrics.jsonl that are no record

    @classmethod
    def open(cls, path: Path) -> RunView:
        """Raises: ConfigError when `path` holds no run."""
        directory = RunDirectory(path)
        if not directory.config.is_file():
            raise ConfigError(f"{path} holds no run (no config.toml); give a run directory, as runs/NAME")
        return cls(path, directory.config.read_text(errors="replace"), *read_lines(directory.metrics))

    @cached_property
    def config(self) -> dict[str, Any]:
        return tomllib.loads(self.config_text)

    @cached_property
    def steps(self) -> list[dict[str, Any]]:
        return [r for r in self.records if r["kind"] == "step"]

    @cached_property
    def counted(self) -> list[dict[str, Any]]:
        """Every record that counts losses: the steps', and the end's for what came after the last."""
        return [r for r in self.records if r["kind"] in ("step", "end")]

    @cached_property
    def evals(self) -> list[dict[str, Any]]:
        return [r for r in self.records if r["kind"] == "eval"]

    @cached_property
    def colors(self) -> dict[str, str]:
        return suite_colors(self.records)

    @cached_property
    def summary(self) -> dict[str, Any] | None:
        """The summary, if the run ended since it last began (a resume makes the one before void) and it is whole."""
        path = RunDirectory(self.path).summary
        if not path.exists() or not self.records or self.records[-1]["kind"] == "resume":
            return None
        try:
            summary = json.loads(path.read_text())
        except (OSError, ValueError):
            return None
        ended = self.steps[-1]["step"] if self.steps else 0
        return summary if isinstance(summary, dict) and summary.get("steps") == ended else None

    @cached_property
    def ledger(self) -> tuple[dict[str, Any], list[VisitRow]] | str:
        """The ledger's audit and its trained visits, or why it cannot be read."""
        path = RunDirectory(self.path).ledger
        if not path.exists():
            return "the run has no ledger yet"
        try:
            ledger = Ledger(path, read_only=True)
            try:
                return ledger.audit(), ledger.visits("trained")
            finally:
                ledger.close()
        except (LedgerError, sqlite3.Error) as error:
            return f"the ledger cannot be read: {error}"

    @staticmethod
    def group(path: Path) -> Group | str:
        """The group in a file of `trajectories`, or why it cannot be read."""
        try:
            return Group.load(path)
        except (WireError, ValueError, TypeError, OSError) as error:
            return f"{path.name} cannot be read: {error}"

    def trajectories(self, pattern: str) -> list[Path]:
        return sorted(RunDirectory(self.path).trajectories.glob(pattern))
