"""Rollout workers as their callers see them, and one episode played outside any group.

Owns: nothing; `runtime` implements the protocols. Called by: the feeder, evaluation, the cold start.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from springtide.process import CONTROL_S
from springtide.rollout.episode import EpisodeSpec, EpisodeSummary
from springtide.rollout.places import Places
from springtide.wire import ConnectionLost

_EPISODE_S = 3600.0  # only a bound: every wait inside an episode has a shorter deadline of its own


class RolloutWorker(Protocol):
    """A rollout worker process. `live` counts the episodes it plays."""

    live: int

    async def call(self, method: str, *, deadline_s: float, **payload: Any) -> Any: ...


class WorkerPool(Protocol):
    async def acquire(self) -> RolloutWorker:
        """The least loaded worker that is up; waits for one to come up."""
        ...


async def play_once(
    pool: WorkerPool, spec: EpisodeSpec, *, keep: Path | None = None, places: Places | None = None
) -> EpisodeSummary:
    """Play one episode outside any group (evaluation, gold); `keep` is where its trajectory is written, if anywhere.

    places: by which a policy schedules it; None: it starts at once, at an engine of the worker's choice.
    """
    worker = await pool.acquire()
    worker.live += 1
    try:
        if places is None:
            summary, _ = await worker.call("episode", deadline_s=_EPISODE_S, spec=spec)
        else:
            async with places.evaluation(spec.task.suite, worker) as attempt:
                summary = await places.play(attempt, spec, deadline_s=_EPISODE_S)
        mine = {"purpose": spec.purpose, "visit": spec.visit, "members": (spec.member,)}
        if keep is not None and summary.cause is None:
            await worker.call("seal", deadline_s=CONTROL_S, path=str(keep), **mine)
        else:
            await worker.call("forget", deadline_s=CONTROL_S, **mine)
        return summary
    except ConnectionLost as error:
        return EpisodeSummary.lost(spec, str(error))
    finally:
        worker.live -= 1
