"""The feeder: it carries out what the policy decides, and turns draws into groups that are ready to train.

Owns: every group between its draw and its readiness, retries of lost members, and the record of events: each is
applied here, and the policy asked at once. Invariants: a visit ends in the ledger exactly once; its file is durable
before it is ready; a member lost to a killed process is played again without using up a retry; a group never outlives
its deadline, which stands still during evaluations and while the policy keeps one of its episodes waiting; a run whose
groups all fail, all miss their deadline or all carry no signal ends and says so.
Called by: the driver, as one long task beside the training loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from springtide.algorithms.advantages import GroupRewards, Member, advantages, effective_reward
from springtide.config import Config
from springtide.ledger import Ledger, Outcome
from springtide.process import CONTROL_S, task_group
from springtide.rollout.episode import EpisodeSpec, EpisodeSummary
from springtide.rollout.places import Attempt, Places
from springtide.rollout.playtime import PlayTime
from springtide.rollout.pool import RolloutWorker, WorkerPool
from springtide.schedule.events import (
    Abort,
    Action,
    Admit,
    Admitted,
    Dropped,
    Evaluation,
    Event,
    Finished,
    Held,
    Measured,
    Pause,
    Paused,
    Placed,
    Ready,
    Restarted,
    Resume,
    Resumed,
    Returned,
    Route,
    SwitchRole,
    Sync,
    TurnEnded,
)
from springtide.schedule.policy import Policy
from springtide.schedule.readiness import Readiness
from springtide.schedule.sampling import Sampler
from springtide.trace import TaskRef, version_step
from springtide.wire import ConnectionLost, DeadlineExceeded, RemoteError

_BROKEN_AFTER = 64  # episodes of a suite that failed in a row: the environment is broken, not unlucky
_EPISODE_S = 86400.0  # only a bound: the group's deadline ends its episodes
_LEAVE_S = 5.0  # deadline of a short call to a rollout worker about a group that is given up
_PAUSE_S = 2.0  # at most, before a member whose retries are used up is replaced: the trainer may be waiting for it
_NO_SIGNAL_STEPS = 20  # steps' worth of groups in a row with equal rewards: nothing is left to learn from
_LISTEN_S = 10.0  # a worker that has nothing to tell answers after it
_AGAIN_S = 0.2
OF_EPISODES = (Placed, TurnEnded, Returned, Paused, Resumed, Finished, Measured)  # no batch depends on these
# So often, and for so long, all groups that play at once missed their deadline, and no other group ended in between: an
# engine that was silent and is replaced delays for less.
_LATE_WAVES, _LATE_S = 4, CONTROL_S


class BrokenRun(Exception):
    """The run cannot go on: an environment always fails, no group carries a signal or is in time. One line: why."""


class InvalidAction(BrokenRun):
    """A policy decided what cannot be done (under `schedule.strict`; else it is refused and counted)."""


@dataclass(slots=True)
class Versions:
    """Which weights rollout uses now: `current` the newest published, `stale` the stale pool's (cross-policy)."""

    current: int
    stale: int | None = None


@dataclass(slots=True)
class Counts:
    """What happened since the last `take`: episodes by status, tokens by fate, drops by cause."""

    status: Counter[str] = field(default_factory=Counter)
    success: dict[str, list[bool]] = field(default_factory=dict)
    reward: dict[str, list[float]] = field(default_factory=dict)
    dropped: Counter[str] = field(default_factory=Counter)
    env_errors: Counter[str] = field(default_factory=Counter)
    kept_tokens: list[int] = field(default_factory=list)
    dropped_tokens: list[int] = field(default_factory=list)
    discarded: Counter[str] = field(default_factory=Counter)  # sampled tokens by the cause they were discarded for
    refused: Counter[str] = field(default_factory=Counter)  # invalid actions of the policy, by kind
    ignored: Counter[str] = field(default_factory=Counter)  # news of turns that was not taken, by cause
    turns: int = 0
    cut_turns: int = 0  # ended by the token limit
    env_s: float = 0.0
    queue_s: float = 0.0
    decode_s: float = 0.0


class Feeder:
    """See the module. `record` gets every event and action, `note` what a person should see, `switch` the changes of
    role that the policy asks for."""

    def __init__(
        self,
        config: Config,
        *,
        ledger: Ledger,
        state: Readiness,
        policy: Policy,
        samplers: Mapping[str, Sampler],
        pool: WorkerPool,
        versions: Versions,
        directory: Path,
        record: Callable[[Event | Action], None],
        note: Callable[[str], None],
        switch: Callable[[SwitchRole], None] = lambda action: None,
    ) -> None:
        self._config, self._ledger, self._state, self._policy = config, ledger, state, policy
        self._samplers, self._pool, self._versions, self._directory = samplers, pool, versions, directory
        self._uses = dict(zip(samplers, (entry.use for entry in config.suites), strict=True))  # in one order
        self._record, self._note, self._switch = record, note, switch
        self._groups: dict[int, asyncio.Task[None]] = {}
        self._given_up: dict[int, str] = {}  # groups that are being cancelled, and why
        self._draws = ledger.draws()
        self._playing: dict[int, tuple[TaskRef, int]] = {}  # visit -> its task, its draw
        self._next_visit = ledger.next_visit()
        self._play_times: dict[int, PlayTime] = {}  # of the groups in flight
        self.places = Places(state, self.apply)
        self._started: list[tuple[int, TaskRef]] = []  # drawn, and their task not yet begun
        self._begin = asyncio.Event()
        self._deciding = False
        self.events = 0  # so many were applied
        self._changed = asyncio.Event()
        self._synced = asyncio.Event()
        self._failed_in_a_row: Counter[str] = Counter()
        self._late, self._late_since = 0, 0.0  # groups in a row that missed their deadline
        self._without_signal = 0
        self._statuses: Counter[str] = Counter()  # of the members of groups without signal
        self.summaries: dict[int, dict[str, Any]] = {}  # of ready visits: what advantages are computed from
        self.counts = Counts()

    # --- the loop ---------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Play what is drawn until cancelled. Raises: BrokenRun."""
        async with task_group() as tasks:
            while True:
                await self._begin.wait()
                self._begin.clear()
                started, self._started = self._started, []
                if started and self._config.schedule.policy == "synchronous":
                    await self._announce([visit for visit, _ in started])
                for visit, task in started:
                    if visit in self._state.playing:  # else the run ended meanwhile
                        self._groups[visit] = tasks.create_task(self._group(visit, task), name=f"group {visit}")

    async def listen(self, worker: RolloutWorker) -> None:
        """Hear what the worker tells of its episodes, until cancelled."""
        while True:
            try:
                self.places.heard(await worker.call("turns", deadline_s=_LISTEN_S + CONTROL_S, wait_s=_LISTEN_S))
            except (ConnectionLost, DeadlineExceeded):  # dead, and replaced; or silent, and killed or back
                await asyncio.sleep(_AGAIN_S)

    def apply(self, *events: Event) -> None:
        """The one way in for events: state, record, and at once what the policy decides then. Raises: InvalidAction,
        InvalidEvent."""
        for event in events:
            self._take(event)
        if not self._deciding:
            self._deciding = True
            try:
                self._decide()
            finally:
                self._deciding = False

    def _take(self, event: Event) -> None:
        self._state.apply(event)
        self._record(event)
        self.events += 1
        visit = getattr(event, "visit", None)
        if isinstance(event, Evaluation):
            for waits in self._play_times:
                self._stand(waits)
        elif visit in self._play_times:
            self._stand(visit)
        if not isinstance(event, OF_EPISODES):
            self._changed.set()

    def _stand(self, visit: int) -> None:
        """A group's clock stands still during evaluations, and while the policy keeps one of its episodes waiting."""
        group = self._state.playing.get(visit)
        waits = group is not None and any(e.phase in ("waiting", "returned") for e in group.episodes.values())
        self._play_times[visit].stand_still(self._state.evaluating or waits)

    async def changed(self, timeout_s: float) -> None:
        """Wait for the next event on which a batch may depend, for `timeout_s` at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        self._changed.clear()

    def hold(self, holding: bool) -> None:
        """Draw nothing while held (an evaluation of a synchronous run, the end of a run)."""
        if holding != self._state.held:
            self.apply(Held(time.time(), holding))

    async def synced(self) -> None:
        """Until the policy asked for the publication of the update that is done."""
        try:
            async with asyncio.timeout(CONTROL_S):
                await self._synced.wait()
        except TimeoutError:
            raise BrokenRun(f"schedule.policy {self._config.schedule.policy} asked for no publication") from None
        self._synced.clear()

    async def end(self, cause: str) -> None:
        """Drop all that is pending, with `cause`: the run is over and every drawn member must have its end."""
        groups = list(self._groups.values())
        for visit in (*self._state.playing, *self._state.buffer):
            self._drop(visit, cause)
        await asyncio.gather(*groups, return_exceptions=True)

    def take_counts(self) -> Counts:
        counts, self.counts = self.counts, Counts()
        counts.ignored, self.places.ignored = self.places.ignored, counts.ignored
        return counts

    def _decide(self) -> None:
        name = self._config.schedule.policy
        while actions := self._policy.decide(self._state):
            refused = 0
            for action in actions:
                if (why := self._state.invalid(action)) is not None:
                    if self._config.schedule.strict:
                        raise InvalidAction(f"schedule.policy {name}: {action} is invalid: {why}")
                    self.counts.refused[type(action).__name__] += 1
                    refused += 1
                    continue
                self._record(action)
                self._carry_out(action)
            if refused == len(actions):
                break  # asked again now, it would only repeat itself

    def _carry_out(self, action: Action) -> None:
        match action:
            case Admit(suite):
                self._started.append(self._draw(suite))
                self._begin.set()
            case Abort(visit, cause):
                self._drop(visit, cause)
            case Route() | Pause() | Resume():
                self.places.carry_out(action)
            case SwitchRole():
                self._switch(action)
            case Sync():
                self._synced.set()

    async def _announce(self, visits: list[int]) -> None:
        """Tell the worker of a synchronous run whom its barrier waits for."""
        worker = await self._pool.acquire()
        with contextlib.suppress(ConnectionLost):  # its successor expects nothing, so nothing waits for it
            members = self._config.rollout.group.n
            await worker.call("expect", deadline_s=CONTROL_S, purpose="train", visits=tuple(visits), members=members)

    def _draw(self, suite: str) -> tuple[int, TaskRef]:
        draw, visit = self._draws[suite], self._next_visit
        task = self._samplers[suite].task(draw)
        self._draws[suite] += 1
        self._next_visit += 1
        self._playing[visit] = task, draw
        birth = self._versions.current
        self._ledger.draw(visit, task, draw, self._config.rollout.group.n, birth)
        self.apply(self._admitted(visit, suite, birth))
        return visit, task

    def _admitted(self, visit: int, suite: str, birth: int) -> Admitted:
        return Admitted(time.time(), visit, suite, version_step(birth), self._config.rollout.group.n)

    def resume(self) -> None:
        """Take up what an incarnation before left ready or in flight."""
        for row in self._ledger.visits("ready", "open"):
            if row.state == "ready":
                assert row.summary is not None
                self.summaries[row.visit] = row.summary
                ready = Ready(time.time(), row.visit, row.summary.get("tokens", 0))
                self.apply(self._admitted(row.visit, row.task.suite, row.birth), ready)
            else:
                self._samplers[row.task.suite].resume(row.draw, row.task.id)
                self._playing[row.visit] = row.task, row.draw
                self.apply(self._admitted(row.visit, row.task.suite, row.birth))
                self._started.append((row.visit, row.task))
        self._begin.set()

    # --- one group --------------------------------------------------------------------------------------------------

    async def _group(self, visit: int, task: TaskRef) -> None:
        clock = self._play_times[visit] = PlayTime()
        self._stand(visit)
        deadline = clock.now() + self._config.rollout.group.deadline_s
        try:
            while True:
                worker = await self._pool.acquire()
                present: dict[int, EpisodeSummary] = {}
                worker.live += self._config.rollout.group.n
                try:
                    await self._members(worker, visit, task, deadline, present)
                    await self._finish(worker, visit, task, present)
                    return
                except ConnectionLost:
                    # The worker died and all it held with it: play the group again on another.
                    self.counts.discarded["worker_lost"] += sum(s.generated for s in present.values())
                    if visit in self._state.playing:  # else it was given up meanwhile
                        self.apply(Restarted(time.time(), visit))
                except asyncio.CancelledError:
                    cause = self._given_up.pop(visit, "run_ended")
                    self.counts.discarded[cause] += sum(s.generated for s in present.values())
                    with contextlib.suppress(DeadlineExceeded):  # a stopped worker must not hold up the run's end
                        await self._discard(worker, visit, present, cause, deadline_s=_LEAVE_S)
                    raise
                finally:
                    worker.live -= self._config.rollout.group.n
        finally:
            self._groups.pop(visit, None)
            del self._play_times[visit]

    async def _members(
        self, worker: RolloutWorker, visit: int, task: TaskRef, deadline: float, present: dict[int, EpisodeSummary]
    ) -> None:
        """Play every member until it is in `present` or the deadline passes. Raises: ConnectionLost."""
        used = self._ledger.retries_used(visit)

        async def member(number: int) -> None:
            retry, failures = used.get(number, (0, 0))
            while True:
                summary = await self._episode(worker, task, visit, number, retry)
                if summary.cause is None:
                    present[number] = summary
                    return
                retry += 1
                failures += not summary.killed
                if failures > self._config.rollout.group.retries:  # the budget is used up: replace it, but not at once
                    await asyncio.sleep(min(_PAUSE_S, 0.1 * 2 ** (failures - self._config.rollout.group.retries)))
                self.places.finished(visit, number, False)

        with contextlib.suppress(TimeoutError):  # what is present at the deadline is what the group has
            async with self._play_times[visit].timeout_at(deadline), task_group() as tasks:
                for number in range(self._config.rollout.group.n):
                    tasks.create_task(member(number))

    async def _episode(
        self, worker: RolloutWorker, task: TaskRef, visit: int, member: int, retry: int
    ) -> EpisodeSummary:
        async with self.places.attempt(visit, member, worker) as attempt:
            return await self._attempt(attempt, worker, task, visit, member, retry)

    async def _attempt(
        self, attempt: Attempt, worker: RolloutWorker, task: TaskRef, visit: int, member: int, retry: int
    ) -> EpisodeSummary:
        config = self._config
        pinned = self._versions.current if config.weights.update_at == "episode" else None
        spec = EpisodeSpec.of(
            config, "train", task, visit, member, retry, version=pinned, stale_version=self._versions.stale
        )
        try:
            summary = await self.places.play(attempt, spec, deadline_s=_EPISODE_S)
        except ConnectionLost as error:
            self._ledger.attempt(
                visit, member, retry, status="environment_error", cause="worker_lost", detail=str(error), killed=True
            )
            raise
        except asyncio.CancelledError:  # the group's deadline passed, or it was given up
            self._ledger.attempt(visit, member, retry, status="cancelled")
            raise
        except RemoteError as error:  # a fault of ours, not of the environment: never hide it behind a retry
            raise BrokenRun(f"rollout of {task.id} failed: {error}\n{error.remote_traceback}") from error
        self._ledger.attempt(
            visit,
            member,
            retry,
            status=summary.status,
            cause=summary.cause,
            detail=summary.detail,
            reward=summary.reward,
            success=summary.success,
            tokens=summary.generated,
            killed=summary.killed,
        )
        self._count(task.suite, summary)
        return summary

    async def _finish(
        self, worker: RolloutWorker, visit: int, task: TaskRef, members: dict[int, EpisodeSummary]
    ) -> None:
        scored = tuple(Member(m, s.status, s.reward, s.success, s.loss_tokens) for m, s in sorted(members.items()))
        tokens = sum(s.generated for s in members.values())
        rewards = GroupRewards(task.id, visit, task.suite, scored)
        if len(members) < self._config.min_members:
            await asyncio.sleep(min(_PAUSE_S, 0.01 * self._late))  # if it goes on like this, it need not go on fast
            await self._forget(worker, visit, "deadline", members)
            self._count_late()
            return
        self._late = 0
        if (cause := advantages([rewards], self._config.algorithm)[0].dropped) is not None:
            await self._forget(worker, visit, cause, members)
            self._count_no_signal(cause, members)
        else:
            self._without_signal = 0
            self._statuses.clear()
            path = self._directory / f"{visit:08d}.msgpack"
            try:
                await worker.call(
                    "seal", deadline_s=CONTROL_S, purpose="train", visit=visit, members=tuple(members), path=str(path)
                )
            except RemoteError as error:
                raise BrokenRun(
                    f"cannot write {path}: {error.message}; make room there and continue with --resume"
                ) from error
            if len(members) < self._config.rollout.group.n:
                await self._discard(worker, visit, members, "deadline")  # what a missing member still plays
            trained = sum(s.tokens for s in members.values())  # all that a trainer computes
            summary = {
                "task": task.id,
                "suite": task.suite,
                "members": [[m.member, m.status, m.reward, m.success, m.loss_tokens] for m in scored],
                "turns": sum(s.turns for s in members.values()),
                "tokens": trained,
                "stale_steps": [step for _, s in sorted(members.items()) for step in s.stale_steps],
                "births": [s.birth for _, s in sorted(members.items())],
            }
            self._played(visit, members)
            self._ledger.ready(visit, path.name, summary)
            self.summaries[visit] = summary
            self.counts.kept_tokens.append(tokens)
            self.apply(Ready(time.time(), visit, trained))

    def _count_late(self) -> None:
        """A group that missed its deadline: said once when it is a step's worth of them, the end when it is many."""
        now, config = time.monotonic(), self._config
        if self._late == 0:
            self._late_since = now
        self._late += 1
        text = f"the last {self._late} groups missed rollout.group.deadline_s = {config.rollout.group.deadline_s:g}"
        if self._late == config.trainer.groups:
            self._note(f"{text} and were dropped")
        enough = _LATE_WAVES * max(config.rollout.concurrency, config.trainer.groups)
        if self._late >= enough and now - self._late_since >= _LATE_S:
            raise BrokenRun(
                f"{text} with fewer than {config.min_members} members: nothing to train; raise it, or let less play at "
                "once (rollout.concurrency) or for less long (rollout.max_turns, rollout.max_new_tokens)"
            )

    def _count_no_signal(self, cause: str, members: dict[int, EpisodeSummary]) -> None:
        """A group that teaches nothing: said once when it is a step's worth of them, the end when it is many."""
        self._without_signal += 1
        self._statuses.update("a reply cut at its limit" if s.cut_turns else s.status for s in members.values())
        total = self._statuses.total()
        ends = ", ".join(f"{status} {n / total:.0%}" for status, n in self._statuses.most_common())
        text = f"the last {self._without_signal} groups carried no signal ({cause}; episodes ended as: {ends})"
        if self._without_signal == self._config.trainer.groups:
            self._note(text)
        if self._without_signal >= _NO_SIGNAL_STEPS * self._config.trainer.groups:
            raise BrokenRun(
                f"{text}: nothing to learn from; use easier or harder tasks (suites.level), a better start "
                "(trainer.cold_start.steps, where the environment has gold), higher "
                'limits if replies are cut (rollout.max_new_tokens), or algorithm.equal_rewards = "keep"'
            )

    def _played(self, visit: int, members: Mapping[int, EpisodeSummary]) -> None:
        """The visit plays no more: its sampler and the ledger learn, once, what came of it."""
        if (playing := self._playing.pop(visit, None)) is None:
            return
        task, draw = playing
        scored = () if self._ledger.knows(visit) else tuple(s for s in members.values() if s.cause is None)
        wins = sum(bool(s.success) for s in scored)
        if (p := self._samplers[task.suite].ended(draw, wins, len(scored))) is not None:
            self._ledger.learned(Outcome(visit, task.suite, task.id, wins, len(scored), p))

    async def _forget(self, worker: RolloutWorker, visit: int, cause: str, members: dict[int, EpisodeSummary]) -> None:
        self._played(visit, members)
        self._drop(visit, cause)
        tokens = sum(s.generated for s in members.values())
        self.counts.dropped_tokens.append(tokens)
        self.counts.discarded[cause] += tokens
        await self._discard(worker, visit, members, cause)

    async def _discard(
        self,
        worker: RolloutWorker,
        visit: int,
        present: dict[int, EpisodeSummary],
        cause: str,
        *,
        deadline_s: float = CONTROL_S,
    ) -> None:
        """Let the worker forget the visit and end what still plays of it; count the tokens beside the `present`'s."""
        with contextlib.suppress(ConnectionLost):  # then they are gone with it
            tokens = await worker.call(
                "discard", deadline_s=deadline_s, purpose="train", visit=visit, known=tuple(present)
            )
            self.counts.discarded[cause] += tokens  # in a step of its own: others count while we wait

    def _drop(self, visit: int, cause: str) -> None:
        """End the visit without training; what of it is in flight or ready is given up and counted."""
        self._played(visit, {})
        self._ledger.drop(visit, cause)
        self.counts.dropped[cause] += 1
        if (summary := self.summaries.pop(visit, None)) is not None:
            self.counts.discarded[cause] += sum(tokens for *_, tokens in summary["members"])
        task = self._groups.get(visit)
        if task is not None and task is not asyncio.current_task():
            self._given_up[visit] = cause
            task.cancel()
        self.apply(Dropped(time.time(), visit, cause))

    def _count(self, suite: str, summary: EpisodeSummary) -> None:
        counts = self.counts
        counts.status[summary.status] += 1
        counts.turns += summary.turns
        counts.cut_turns += summary.cut_turns
        counts.env_s += summary.env_s
        counts.queue_s += summary.queue_s
        counts.decode_s += summary.decode_s
        if summary.cause is not None:
            counts.env_errors[f"{suite}/{summary.cause}"] += 1
            counts.discarded["environment_error"] += summary.generated
            self._failed_in_a_row[suite] += not summary.killed
            if self._failed_in_a_row[suite] >= _BROKEN_AFTER:
                raise BrokenRun(
                    f"suite {suite}: the last {_BROKEN_AFTER} episodes failed ({summary.cause}: {summary.detail}); "
                    f"try `springtide doctor env {self._uses[suite]}`"
                )
            return
        self._failed_in_a_row[suite] = 0
        counts.success.setdefault(suite, []).append(bool(summary.success))
        member = Member(summary.member, summary.status, summary.reward, summary.success, summary.loss_tokens)
        reward = effective_reward(member, self._config.algorithm.incomplete_reward)
        if reward is not None:
            counts.reward.setdefault(suite, []).append(reward)
