"""Where episodes play: what the policy decides of each, told to their rollout workers, and what these tell of turns.

Owns: the waits of attempts for a place, and which live attempt a worker's news belongs to (its ticket). Invariants:
news of an attempt that is over is counted and changes nothing; news that comes before its episode has a place again (it
went on while it was to be paused, or its rank died meanwhile) is taken once it has one, so the state always hears an
episode's turns in their order; nothing here waits for a worker.
Called by: the feeder, which applies every event; the driver, for evaluations.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from springtide.process import CONTROL_S
from springtide.rollout.episode import EpisodeSpec, EpisodeSummary
from springtide.schedule.events import (
    Action,
    Admitted,
    Dropped,
    Finished,
    Pause,
    Paused,
    Placed,
    Resume,
    Resumed,
    Returned,
    Route,
    TurnEnded,
)
from springtide.schedule.parts import Key
from springtide.schedule.readiness import InvalidEvent, Readiness
from springtide.wire import ConnectionLost, DeadlineExceeded

# What a rollout worker tells of an attempt: its ticket, what happened, when (its clock), tokens of context.
Told = tuple[int, Literal["turn", "returned"], float, int]
_NEEDS = {"turn": "decoding", "returned": "acting"}  # the phase in which an episode's news is taken


class Worker(Protocol):
    async def call(self, method: str, *, deadline_s: float, **payload: Any) -> Any: ...


@dataclass(slots=True, eq=False)
class Attempt:
    """One attempt of an episode, from its place to its end."""

    key: Key
    ticket: int
    worker: Worker
    untaken: deque[Told] = field(default_factory=deque)


class Places:
    """apply: the one way in for events. ignored: what was not taken, by why."""

    def __init__(self, state: Readiness, apply: Callable[..., None]) -> None:
        self._state, self._apply = state, apply
        self._numbers = itertools.count()
        self._live: dict[int, Attempt] = {}
        self._of: dict[Key, Attempt] = {}
        self._placed: dict[Key, asyncio.Event] = {}  # of the attempts that wait for a place
        self._moves: dict[Worker, dict[int, str | None]] = {}
        self._sending: set[asyncio.Task[None]] = set()
        self._evaluated = 0
        self.ignored: Counter[str] = Counter()

    # --- attempts -----------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def attempt(self, visit: int, member: int, worker: Worker) -> AsyncIterator[Attempt]:
        """An attempt that has a place: waits until the policy gives it one."""
        key = (visit, member)
        while (episode := self._state.episode(visit, member)) is None or episode.phase == "waiting":
            self._placed[key] = placed = asyncio.Event()
            try:
                await placed.wait()
            finally:
                if self._placed.get(key) is placed:
                    del self._placed[key]
        attempt = Attempt(key, next(self._numbers), worker)
        self._live[attempt.ticket] = self._of[key] = attempt
        try:
            yield attempt
        finally:
            del self._live[attempt.ticket]
            if self._of.get(key) is attempt:
                del self._of[key]

    @contextlib.asynccontextmanager
    async def evaluation(self, suite: str, worker: Worker) -> AsyncIterator[Attempt]:
        """An attempt of an evaluation: a group of its own, numbered below 0, that no step trains."""
        self._evaluated += 1
        visit = -self._evaluated
        self._apply(Admitted(time.time(), visit, suite, self._state.step, evaluation=True))
        try:
            async with self.attempt(visit, 0, worker) as attempt:
                yield attempt
        finally:
            self._apply(Dropped(time.time(), visit, "evaluated"))

    async def play(self, attempt: Attempt, spec: EpisodeSpec, *, deadline_s: float) -> EpisodeSummary:
        """Let the attempt's worker play it from the place that it has. Raises as the call."""
        episode = self._state.episode(*attempt.key)
        placed = {"rank": episode.rank, "parked": episode.parked} if episode is not None else {}
        summary: EpisodeSummary
        summary, news = await attempt.worker.call(
            "episode", deadline_s=deadline_s, spec=spec, ticket=attempt.ticket, **placed
        )
        self.heard(news)
        if summary.cause is None:
            self.finished(*attempt.key, True)
        return summary

    def finished(self, visit: int, member: int, played: bool) -> None:
        """An attempt is over; nothing, where its group was given up while its answer was on the way."""
        if self._state.episode(visit, member) is not None:
            self._apply(Finished(time.time(), visit, member, played))

    # --- what the policy decides --------------------------------------------------------------------------------------

    def carry_out(self, action: Action) -> None:
        """Answer a `Route`, `Pause` or `Resume` at once, and tell the episode's worker."""
        now = time.time()
        match action:
            case Route(visit, member, rank):
                episode = self._state.episode(visit, member)
                assert episode is not None
                attempt = self._of.get((visit, member))
                self._apply(Placed(now, visit, member, rank, episode.context))
                if attempt is not None:
                    self._move(attempt, rank)
                    return
                self._apply(TurnEnded(now, visit, member, 0))  # its environment opens
                if (placed := self._placed.get((visit, member))) is not None:
                    placed.set()
            case Pause(visit, member):
                self._apply(Paused(now, visit, member))
                if (attempt := self._of.get((visit, member))) is not None:
                    self._move(attempt, None)
            case Resume(visit, member, rank):
                self._apply(Resumed(now, visit, member, rank))
                if (attempt := self._of.get((visit, member))) is not None:
                    self._move(attempt, rank)

    def _move(self, attempt: Attempt, rank: str | None) -> None:
        if not self._moves:
            asyncio.get_running_loop().call_soon(self._send)
        self._moves.setdefault(attempt.worker, {})[attempt.ticket] = rank
        if rank is not None:
            self._take(attempt)

    def _send(self) -> None:
        moves, self._moves = self._moves, {}
        for worker, of_it in moves.items():
            task = asyncio.create_task(_tell(worker, tuple(of_it.items())))
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)

    # --- what workers tell --------------------------------------------------------------------------------------------

    def heard(self, news: Iterable[Told]) -> None:
        """Take a worker's news, in its order."""
        for told in news:
            attempt = self._live.get(told[0])
            if attempt is None:
                self.ignored["late"] += 1
                continue
            attempt.untaken.append(told)
            self._take(attempt)

    def _take(self, attempt: Attempt) -> None:
        untaken = attempt.untaken
        while untaken:
            episode = self._state.episode(*attempt.key)
            _, what, t, context = untaken[0]
            if episode is None or episode.phase != _NEEDS[what]:
                return
            untaken.popleft()
            event = (TurnEnded if what == "turn" else Returned)(t, *attempt.key, context)
            try:
                self._apply(event)
            except InvalidEvent:  # a number that cannot be: what happened did happen
                self.ignored["nonsense"] += 1
                self._apply(replace(event, context=episode.context))


async def _tell(worker: Worker, moves: tuple[tuple[int, str | None], ...]) -> None:
    # A worker that died lost the episodes with it; one that is silent hears when it goes on.
    with contextlib.suppress(ConnectionLost, DeadlineExceeded):
        await worker.call("move", deadline_s=CONTROL_S, moves=moves)
