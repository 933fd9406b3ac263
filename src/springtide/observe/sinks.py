"""Where figures go: JSON lines always, TensorBoard and Weights & Biases when asked.

Owns: `metrics.jsonl`. Invariants: a record is on disk before the next is written; a sink that is not installed is one
clear line before the run starts, not an error in its middle. Steps passed to the sinks never fall within a run.
Called by: `observe.metrics`.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import IO, Any, Protocol

from springtide.config import Config, ConfigError


class Sink(Protocol):
    def write(self, record: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


def append_lines(path: Path) -> IO[str]:
    """Open `path` to append lines; a torn last line (a full disk, a lost machine) keeps to itself."""
    file = open(path, "a+", encoding="utf-8")  # noqa: SIM115 - its caller closes it
    if file.tell():
        with open(path, "rb") as reader:
            reader.seek(-1, os.SEEK_END)
            if reader.read(1) != b"\n":
                file.write("\n")
                file.flush()
    return file


class JsonLines:
    """Append-only; one record a line."""

    def __init__(self, path: Path) -> None:
        self._file = append_lines(path)

    def write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(plain(record), default=float) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    def __init__(self, directory: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ConfigError("observe.tensorboard: pip install 'springtide[tensorboard]' first") from None
        self._writer = SummaryWriter(str(directory))

    def write(self, record: dict[str, Any]) -> None:
        for key, value in flatten(record):
            self._writer.add_scalar(key, value, record["step"])
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    def __init__(self, project: str, config: Config, directory: Path) -> None:
        try:
            import wandb
        except ImportError:
            raise ConfigError("observe.wandb: pip install 'springtide[wandb]' first") from None
        self._run = wandb.init(
            project=project, name=config.run.name, dir=str(directory), config=config.model_dump(mode="json")
        )

    def write(self, record: dict[str, Any]) -> None:
        # No step argument: asynchronous evaluations arrive late, and wandb drops what falls behind (prime-rl#1668).
        self._run.log({**dict(flatten(record)), "step": record["step"]})

    def close(self) -> None:
        self._run.finish()


def open_sinks(config: Config, directory: Path) -> list[Sink]:
    """Every sink the configuration asks for. Raises: ConfigError."""
    sinks: list[Sink] = [JsonLines(directory / "metrics.jsonl")]
    if config.observe.tensorboard:
        sinks.append(TensorBoard(directory / "tensorboard"))
    if config.observe.wandb:
        sinks.append(WeightsAndBiases(config.observe.wandb, config, directory))
    return sinks


def read_records(path: Path) -> list[dict[str, Any]]:
    """The surviving lineage of `metrics.jsonl`: a step that was trained again after a resume counts once, as last."""
    return read_lines(path)[0]


def read_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The surviving lineage, and how many lines are no record; a last line without its end is one being written."""
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return [], 0
    kept: list[dict[str, Any]] = []
    skipped = 0
    for number, line in enumerate(lines, 1):
        record = _record(line)
        if record is None:
            skipped += bool(line.strip()) and number < len(lines)
            continue
        if record["kind"] == "resume":
            kept = [r for r in kept if r["step"] <= record["step"] and r.get("label") != "end"]
        kept.append(record)
    return kept, skipped


def _record(line: bytes) -> dict[str, Any] | None:
    """What `JsonLines` wrote, or None: a line torn by a full disk or a kill, or another's."""
    try:
        record = json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
    right = isinstance(record, dict) and isinstance(record.get("kind"), str) and type(record.get("step")) is int
    return record if right else None


def plain(value: Any) -> Any:
    """The same tree with null where a number is not finite: JSON has no other word for it."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def flatten(record: dict[str, Any], prefix: str = "") -> list[tuple[str, float]]:
    """Numbers of a nested record as `a/b` keys; text and lists are left out."""
    out: list[tuple[str, float]] = []
    for key, value in record.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            out += flatten(value, f"{name}/")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            out.append((name, float(value)))
    return out
