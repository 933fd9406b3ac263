"""From group files to the sequences of one optimiser step. Numpy only; called by the trainer and reference ranks.

Owns: reading the named members, the weight each action token has in the named aggregation, and the file that carries
log-probs between ranks. Invariants: members are found by number, never by position; the count that divides the loss is
made from the same mask as the loss (trl#6439); sequences come out in one canonical order, so the order in which items
are named cannot change a result; every array has its segment's length, checked here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from springtide.trace import Group, Trajectory, atomic_write
from springtide.wire import pack, unpack

Aggregation = Literal["token_mean", "trajectory_mean", "segment_mean"]


class DataError(Exception):
    """Trajectories that cannot be trained: a missing member, a mismatch of lengths. The text names the file."""


@dataclass(frozen=True, slots=True)
class Row:
    """One segment with at least one action token. Arrays `at` and below: one entry an action token, A of them.

    ids: int32 [T]. at: int64 [A], positions of the action tokens (each >= 1). rollout, old, reference: float32 [A].
    versions: int64 [A]. weight: what each action token counts in the aggregation.
    """

    key: tuple[str, int, int, int]  # task id, visit, member, segment
    ids: np.ndarray
    at: np.ndarray
    rollout: np.ndarray
    versions: np.ndarray
    advantage: float
    weight: float
    old: np.ndarray | None = None
    reference: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class StepData:
    """The sequences of a step and what they count. `denominator` belongs to the aggregation they were read for."""

    sequences: tuple[Row, ...]
    denominator: int
    trajectories: int
    loss_tokens: int
    tokens: int


def load_step(
    items: Sequence[dict[str, Any]],
    aggregation: Aggregation,
    *,
    old_logprobs: Path | None = None,
    reference_logprobs: Path | None = None,
) -> StepData:
    """Read items `{path, member, advantage}` (advantage 0 where absent). Trajectories without action tokens count in
    nothing. Raises: DataError."""
    old = read_logprobs(old_logprobs) if old_logprobs else None
    reference = read_logprobs(reference_logprobs) if reference_logprobs else None
    sequences: list[Row] = []
    seen: set[tuple[str, int, int]] = set()
    for item, trajectory in _trajectories(items):
        key = (trajectory.task.id, trajectory.visit, trajectory.member)
        if key in seen:
            raise DataError(f"{item['path']}: member {trajectory.member} is named twice in one step")
        seen.add(key)
        advantage = float(item.get("advantage", 0.0))
        if not np.isfinite(advantage):
            raise DataError(f"{item['path']}: member {trajectory.member} has advantage {advantage}")
        sequences += _sequences(trajectory, key, advantage, aggregation, old, reference, str(item["path"]))
    sequences.sort(key=lambda s: s.key)
    trajectories = len({s.key[:3] for s in sequences})
    loss_tokens = sum(len(s.at) for s in sequences)
    denominator = {"token_mean": loss_tokens, "trajectory_mean": trajectories, "segment_mean": len(sequences)}
    return StepData(
        tuple(sequences), denominator[aggregation], trajectories, loss_tokens, sum(len(s) for s in sequences)
    )


def write_logprobs(path: Path, version: int, sequences: Iterable[Row], logprobs: Iterable[np.ndarray]) -> None:
    """Write float32 [A] log-probs of each sequence's action tokens, atomically, keyed as the rows are."""
    rows = tuple((s.key, np.asarray(a, dtype=np.float32)) for s, a in zip(sequences, logprobs, strict=True))
    atomic_write(path, pack({"version": version, "rows": rows}))


def read_logprobs(path: Path) -> dict[tuple[str, int, int, int], np.ndarray]:
    """Read what `write_logprobs` wrote. Raises: OSError, WireError."""
    return {tuple(key): array for key, array in unpack(path.read_bytes())["rows"]}


def _trajectories(items: Sequence[dict[str, Any]]) -> Iterable[tuple[dict[str, Any], Trajectory]]:
    """Each item with its trajectory; every file is read once. An item without `member` means all of its members."""
    by_path: dict[str, list[dict[str, Any]]] = {}
    for item in items:
        by_path.setdefault(str(item["path"]), []).append(item)
    for path, wanted in by_path.items():
        members = {t.member: t for t in Group.load(Path(path)).trajectories}
        for item in wanted:
            for member in (item["member"],) if "member" in item else members:
                if member not in members:
                    raise DataError(f"{path} has no member {member}; it has {sorted(members)}")
                yield item, members[member]


def _sequences(
    trajectory: Trajectory,
    key: tuple[str, int, int],
    advantage: float,
    aggregation: Aggregation,
    old: dict[tuple[str, int, int, int], np.ndarray] | None,
    reference: dict[tuple[str, int, int, int], np.ndarray] | None,
    path: str,
) -> list[Row]:
    if trajectory.outcome.failed_environment:
        raise DataError(f"{path}: member {trajectory.member} is an environment error; those are never trained")
    out = []
    for index, segment in enumerate(trajectory.segments):
        count = segment.loss_tokens
        if count == 0:
            continue
        if segment.loss_mask[0]:
            raise DataError(f"{path}: member {trajectory.member} segment {index} starts with a sampled token")
        if segment.images:
            raise DataError(f"{path}: member {trajectory.member} holds images; this trainer reads text only")
        weight = {"token_mean": 1.0, "trajectory_mean": 1 / trajectory.loss_tokens, "segment_mean": 1 / count}
        at = np.flatnonzero(segment.loss_mask)
        extra = {}
        for name, table in (("old", old), ("reference", reference)):
            if table is not None:
                array = table.get((*key, index))
                if array is None or array.shape != (count,):
                    found = "none" if array is None else str(array.shape)
                    raise DataError(
                        f"{path}: member {trajectory.member} segment {index} has {count} action tokens; "
                        f"the {name} log-probs file has {found} for it"
                    )
                extra[name] = array
        out.append(
            Row(
                key=(*key, index),
                ids=segment.ids,
                at=at,
                rollout=segment.logprobs[at],
                versions=segment.versions[at],
                advantage=advantage,
                weight=weight[aggregation],
                **extra,
            )
        )
    return out
