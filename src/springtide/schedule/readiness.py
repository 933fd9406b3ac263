"""What is ready: the one state that every scheduling decision reads.

Owns: episodes, ranks, groups in flight and ready, what was consumed, the step being trained, and smoothed measures of
all of them. Pure: events in (each carries its clock), no I/O, no torch. `apply` is the only way to change it, so a
recorded `events.jsonl` replayed through it gives the same state, and a policy the same actions. Every event costs the
same however much is alive: counts are kept, never summed again.
Called by: the driver (live) and the simulator; policies in this package read it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Literal, Protocol

from springtide.schedule.events import (
    Abort,
    Action,
    Admit,
    Admitted,
    Began,
    ChoosePipeline,
    Dropped,
    Evaluation,
    Event,
    Fed,
    Finished,
    Held,
    Measured,
    Pause,
    Paused,
    Placed,
    RankJoined,
    RankLeft,
    Ready,
    Restarted,
    Resume,
    Resumed,
    Returned,
    Role,
    RoleChanged,
    Route,
    SetFetch,
    StepEnded,
    StepStarted,
    SwitchRole,
    Sync,
    TurnEnded,
    Updated,
)
from springtide.schedule.parts import Episode, GroupState, Key, Line, RankState, Smoothed, SuiteStats

_FAR = 1e12  # seconds; no clock says more
_TOKENS = 1 << 40  # no context has as many
# Clocks of processes differ by less; a longer jump back is a clock that was set, and time goes on from there.
_SKEW_S = 60.0


class InvalidEvent(Exception):
    """An event that contradicts the state: an unknown visit, a visit twice, a step that falls."""


class Follower(Protocol):
    """A policy that keeps indexes of its own."""

    def observe(self, state: Readiness, event: Event, touched: list[Episode]) -> None:
        """`event` was applied; `touched` are the episodes it changed, ended or began. The list is used again."""
        ...


class Readiness:
    """The state. `weights` is the configured task mixture (suite -> relative share of consumed groups).

    playing, buffer: groups in flight, and ready in the order in which they became so; evaluations: those played for an
    evaluation. waiting, parked: episodes without a rank, and those asked to stay out of the engine, in order.
    training: suites of the groups that the trainer holds; still: how many more a streaming step takes.
    edge: an update is done and not yet published. ready_at_start: groups that were ready when the last step started
    (RAS); gap_s: smoothed seconds between two that become ready (TPRM); step_s, train_wait_s, rollout_wait_s: smoothed
    seconds of a step, of the trainer without data in it (TWT), of a rollout rank without an episode in it (RWT).
    """

    def __init__(
        self, weights: Mapping[str, float], *, step: int = 0, consumed: Mapping[str, int] | None = None
    ) -> None:
        total = sum(weights.values())
        self.mixture = {suite: weight / total for suite, weight in weights.items()}
        self.step = step
        self.now = 0.0
        self.playing: dict[int, GroupState] = {}
        self.buffer: dict[int, GroupState] = {}
        self.evaluations: dict[int, GroupState] = {}
        self.births: Counter[int] = Counter()  # of the groups in flight
        self.ready_births: Counter[int] = Counter()  # of those ready
        self.ranks: dict[str, RankState] = {}
        self.roles: Counter[Role] = Counter()  # ranks of each
        self.waiting: dict[Key, Episode] = {}
        self.parked: dict[Key, Episode] = {}
        self.consumed: Counter[str] = Counter(consumed or {})
        self._held: Counter[str] = Counter(self.consumed)  # consumed, being trained, or pending
        self._total = self._held.total()
        self.training: tuple[str, ...] = ()
        self.training_births: tuple[int, ...] = ()
        self.still = 0
        self.step_running = self.edge = self.evaluating = self.held = False
        self.costs: dict[str, Smoothed] = {}
        self.suites = {suite: SuiteStats() for suite in self.mixture}
        self.ready_at_start = 0
        self.gap_s, self.step_s, self.train_wait_s, self.rollout_wait_s = (Smoothed() for _ in range(4))
        self.alive = 0  # episodes in flight: each holds an environment
        self.playing_of: Counter[str] = Counter()  # groups of a suite in flight
        self.decode = Line()  # seconds of a turn for each token sampled, over the episodes that decode on the rank
        self.flying = Smoothed(0.01)  # episodes on ranks, as seen when turns end
        self.group_tokens = Smoothed()  # of a ready group
        self.group_rank_s = Smoothed()  # seconds of a rollout rank, not idle, for each group that became ready
        self.made = 0  # groups that became ready since the last step ended
        self._last_ready: float | None = None
        self._step_from = 0.0  # when the last step ended
        self._train_waited = 0.0
        self._offset = 0.0  # of the state's clock to the events'
        self._touched: list[Episode] = []
        self._follower: Follower | None = getattr(self, "_follower", None)  # `Began` starts all else anew

    def follow(self, follower: Follower) -> None:
        """Let it observe every event from now on, in the place of whoever did."""
        self._follower = follower

    # --- events -------------------------------------------------------------------------------------------------------

    def apply(self, event: Event) -> None:
        """Advance by one event. Raises: InvalidEvent, with the state unchanged."""
        if not -_FAR < event.t < _FAR:
            raise InvalidEvent(f"an event's clock says {event.t}")
        # Clocks of different processes may jump back a little; the state's never does.
        offset = 0.0 if isinstance(event, Began) else self._offset
        if event.t + offset < self.now - _SKEW_S and not isinstance(event, Began):
            offset = self.now - event.t
        now = event.t if isinstance(event, Began) else max(self.now, event.t + offset)
        self._touched.clear()
        self._advance(event, now)
        self.now, self._offset = now, offset
        if self._follower is not None:
            self._follower.observe(self, event, self._touched)

    def _advance(self, event: Event, now: float) -> None:
        match event:
            case TurnEnded(_, visit, member, context):
                episode = self._episode(visit, member, "decoding")
                _plausible(context)
                sampled = context - episode.context
                if sampled > 0 and episode.rank is not None:
                    self.decode.add(len(self.ranks[episode.rank].decoding), (now - episode.since) / sampled)
                    self.flying.add(self.alive - len(self.waiting) - len(self.parked))
                self._leave(episode)
                stats = self.suites.get(episode.group.suite)
                if stats is not None and context:
                    stats.sampled.add(max(0, sampled))
                    if episode.turns:
                        stats.growth.add(max(0, context - episode.turn_context))
                    else:
                        stats.first.add(context)
                episode.turn_context = context
                episode.turns += context > 0  # before the first its environment opens
                self._enter(episode, "acting", context, now)
            case Returned(_, visit, member, context):
                episode = self._episode(visit, member, "acting")
                _plausible(context)
                self._leave(episode)
                stats = self.suites.get(episode.group.suite)
                if stats is not None and episode.context:
                    stats.tool_s.add(now - episode.since)
                if episode.parked or episode.rank is None:
                    episode.phase, episode.context, episode.since = "returned", context, now
                    if not episode.parked:  # its rank is gone
                        self._wait(episode, now)
                    self._touched.append(episode)
                else:
                    self._enter(episode, "decoding", context, now)
            case Placed(_, visit, member, rank, context):
                episode = self._episode(visit, member, "waiting")
                self._playing_rank(rank)
                _plausible(context)
                del self.waiting[episode.key]
                episode.rank = rank
                self._enter(episode, "decoding", context, now)
            case Finished(_, visit, member, played):
                self._finished(self._episode(visit, member), played, now)
            case Paused(_, visit, member):
                episode = self._episode(visit, member, "decoding", "acting")
                if episode.parked:
                    raise InvalidEvent(f"member {member} of visit {visit} is parked already")
                if episode.phase == "acting":
                    self._leave(episode)
                episode.parked, episode.parked_at = True, now
                self.parked[episode.key] = episode
                if episode.rank is not None:
                    self.ranks[episode.rank].parked[episode.key] = episode
                self._rest(episode.rank, now)
                self._touched.append(episode)
            case Resumed(_, visit, member, rank):
                episode = self._episode(visit, member)
                if not episode.parked:
                    raise InvalidEvent(f"member {member} of visit {visit} is not parked")
                self._playing_rank(rank)
                self._resumed(episode, rank, now)
            case Admitted(_, visit, suite, birth, members, evaluation):
                self._admitted(visit, suite, birth, members, evaluation, now)
            case Ready(_, visit, tokens):
                group = self._group(visit)
                if group.state == "ready":
                    raise InvalidEvent(f"visit {visit} became ready twice")
                if group.evaluation:
                    raise InvalidEvent(f"visit {visit} is an evaluation's, which is never trained")
                self._gone(group, now)
                group.state, group.since, group.tokens = "ready", now, tokens
                self.buffer[visit] = group
                self.ready_births[group.birth] += 1
                self.group_tokens.add(tokens)
                self.made += 1
                if self._last_ready is not None:
                    self.gap_s.add(now - self._last_ready)
                self._last_ready = now
            case Dropped(_, visit, _):
                group = self._group(visit)
                self._gone(group, now)
                if self.buffer.pop(visit, None) is not None:
                    _less(self.ready_births, group.birth)
                if not group.evaluation:
                    self._held[group.suite] -= 1
                    self._total -= 1
            case Restarted(_, visit):
                group = self._group(visit)
                if group.state == "ready":
                    raise InvalidEvent(f"visit {visit} is ready, so nothing of it plays")
                for episode in group.episodes.values():
                    self._forget(episode, now)
                group.played = 0
                self._line_up(group, now)
            case StepStarted(_, visits, more):
                self._step_started(visits, more, now)
            case Fed(_, visit):
                if visit not in self.buffer:
                    raise InvalidEvent(f"visit {visit} is not ready, so it cannot be trained")
                if self.still == 0:
                    raise InvalidEvent(f"no step takes visit {visit}")
                self.still -= 1
                self._take((self.buffer[visit],))
            case Updated():
                if not self.step_running or self.still:
                    raise InvalidEvent("an update ended that was not under way, or before it had all its groups")
                self.edge = True
            case StepEnded(_, step):
                self._step_ended(step, now)
            case RoleChanged(_, rank, role):
                state = self._rank(rank)
                if state.role == role:
                    raise InvalidEvent(f"rank {rank} is a {role} already")
                self._strand(state, now)
                self.roles[state.role] -= 1
                self.roles[role] += 1
                state.role = role
                state.waiting_s, state.idle_since = 0.0, now
            case RankJoined(_, rank, _, _, _):
                if rank in self.ranks:
                    raise InvalidEvent(f"rank {rank} joined twice")
                if event.budget < 0:
                    raise InvalidEvent(f"rank {rank} has a budget of {event.budget} tokens")
                self.ranks[rank] = RankState(event)
                self.roles[event.role] += 1
            case RankLeft(_, rank):
                self._strand(self._rank(rank), now)
                self.roles[self.ranks.pop(rank).role] -= 1
            case Measured(_, what, value):
                if not 0 <= value < float("inf"):
                    raise InvalidEvent(f"{what} was measured as {value}")
                self.costs.setdefault(what, Smoothed()).add(value)
            case Evaluation(_, running):
                self.evaluating = running
            case Held(_, on):
                self.held = on
            case Began(_, step, mixture, taken):
                self.__init__(mixture, step=step, consumed=taken)  # type: ignore[misc]
                self._step_from = now

    def invalid(self, action: Action) -> str | None:
        """Why `action` cannot be carried out now, or None."""
        match action:
            case Admit(suite) if suite not in self.mixture:
                return f"{suite!r} is not in the mixture ({', '.join(self.mixture)})"
            case Abort(visit) if not any(visit in held for held in (self.playing, self.buffer, self.evaluations)):
                return f"visit {visit} is neither in flight nor ready"
            case Route(visit, member, rank):
                return self._cannot_play(rank) or (
                    None if (visit, member) in self.waiting else f"member {member} of visit {visit} does not wait"
                )
            case Resume(visit, member, rank):
                return self._cannot_play(rank) or (
                    None if (visit, member) in self.parked else f"member {member} of visit {visit} is not parked"
                )
            case Pause(visit, member):
                episode = self.episode(visit, member)
                if episode is None or episode.parked or episode.phase not in ("decoding", "acting"):
                    return f"member {member} of visit {visit} neither decodes nor acts"
            case SwitchRole(rank, role):
                return self._cannot_switch(rank, role)
            case SetFetch(groups) if groups < 1:
                return f"a step of {groups} groups"
            case Sync() if not self.edge:
                return "no update is done that was not published"
            case ChoosePipeline() if self.step_running and not self.edge:
                return "a step is under way"
        return None

    # --- what policies ask --------------------------------------------------------------------------------------------

    @property
    def pending(self) -> int:
        """Groups that were drawn to be trained and are not yet: in flight, ready, or in the step under way."""
        return len(self.playing) + len(self.buffer) + len(self.training)

    def group(self, visit: int) -> GroupState | None:
        return self.playing.get(visit) or self.buffer.get(visit) or self.evaluations.get(visit)

    def episode(self, visit: int, member: int) -> Episode | None:
        group = self.playing.get(visit) or self.evaluations.get(visit)
        return group.episodes.get(member) if group is not None else None

    def rollout_ranks(self) -> Iterable[RankState]:
        return (rank for rank in self.ranks.values() if rank.role == "rollout")

    def in_flight(self) -> list[GroupState]:
        return list(self.playing.values())

    def ready(self) -> list[GroupState]:
        """Ready groups, in the order in which they became ready."""
        return list(self.buffer.values())

    def staleness(self, group: GroupState) -> int:
        """Steps the group lags behind the weights being trained; floored at 0 (after a rollback)."""
        return max(0, self.step - group.birth)

    def cost(self, what: str, default: float) -> float:
        """The smoothed measure of that name, or `default` before its first value."""
        smoothed = self.costs.get(what)
        return default if smoothed is None or smoothed.value is None else smoothed.value

    def next_suite(self, among: Iterable[str] | None = None) -> str:
        """The suite (of these) furthest below its share, counting what was consumed, is being trained, and is pending.

        Groups that end untrained leave the count, so the consumed mixture follows the configured one even when suites
        differ in speed or in how many of their groups are dropped (prime-rl#2072).
        """
        total = self._total + 1
        return max(among or self.mixture, key=lambda suite: self.mixture[suite] * total - self._held[suite])

    # --- helpers ------------------------------------------------------------------------------------------------------

    def _group(self, visit: int) -> GroupState:
        group = self.group(visit)
        if group is None:
            raise InvalidEvent(f"visit {visit} is not pending")
        return group

    def _rank(self, name: str) -> RankState:
        try:
            return self.ranks[name]
        except KeyError:
            raise InvalidEvent(f"there is no rank {name}") from None

    def _playing_rank(self, name: str) -> RankState:
        rank = self._rank(name)
        if rank.role != "rollout":
            raise InvalidEvent(f"rank {name} is a {rank.role}; no episode runs there")
        return rank

    def _cannot_play(self, name: str) -> str | None:
        rank = self.ranks.get(name)
        if rank is None:
            return f"there is no rank {name}"
        return None if rank.role == "rollout" else f"rank {name} is a {rank.role}; no episode runs there"

    def _cannot_switch(self, name: str, role: Role) -> str | None:
        rank = self.ranks.get(name)
        if rank is None:
            return f"there is no rank {name}"
        if rank.role == role:
            return f"rank {name} is a {role} already"
        lent = rank.origin == "trainer" and not self.step_running  # between steps a trainer may play, and go home
        if not self.edge and not lent:
            return "roles change only between an update and its publication"
        back = lent and role == "trainer"
        if self.evaluating and rank.role == "rollout" and not back:
            return "an evaluation is pinned to its weights"
        if rank.origin == "trainer" and (not rank.lendable or role == "reference"):
            return f"trainer rank {name} may {'only play' if rank.lendable else 'not be lent'}"
        if rank.origin != "trainer" and role == "trainer":
            return f"rank {name} is not of the trainer's world"
        if rank.role == "rollout" and not back and self.roles["rollout"] == 1:
            return f"rank {name} is the only one that plays"
        return None

    def _episode(self, visit: int, member: int, *phases: str) -> Episode:
        episode = self.episode(visit, member)
        if episode is None:
            raise InvalidEvent(f"member {member} of visit {visit} is not in flight")
        if phases and episode.phase not in phases:
            raise InvalidEvent(f"member {member} of visit {visit} is {episode.phase}, not {' or '.join(phases)}")
        return episode

    def _enter(self, episode: Episode, phase: Literal["decoding", "acting"], context: int, now: float) -> None:
        """Of an episode that `_leave` took out of its rank's counts."""
        episode.phase, episode.context, episode.since = phase, context, now
        self._touched.append(episode)
        rank = self.ranks.get(episode.rank) if episode.rank is not None else None
        if rank is None:
            return
        if phase == "decoding":
            rank.decoding[episode.key] = episode
            rank.decoding_tokens += context
        elif not episode.parked:
            rank.acting[episode.key] = episode
            rank.acting_tokens += context
        self._rest(rank.name, now)

    def _leave(self, episode: Episode) -> None:
        rank = self.ranks.get(episode.rank) if episode.rank is not None else None
        if rank is None:
            return
        if rank.decoding.pop(episode.key, None) is not None:
            rank.decoding_tokens -= episode.context
        elif rank.acting.pop(episode.key, None) is not None:
            rank.acting_tokens -= episode.context

    def _rest(self, name: str | None, now: float) -> None:
        """Note whether the rank has anything to do."""
        rank = self.ranks.get(name) if name is not None else None
        if rank is None:
            return
        if rank.live:
            if rank.idle_since is not None:
                rank.waiting_s += now - rank.idle_since
                rank.idle_since = None
        elif rank.idle_since is None:
            rank.idle_since = now

    def _wait(self, episode: Episode, now: float) -> None:
        episode.phase, episode.since = "waiting", now
        self.waiting[episode.key] = episode
        self._touched.append(episode)

    def _admitted(self, visit: int, suite: str, birth: int, members: int, evaluation: bool, now: float) -> None:
        if self.group(visit) is not None:
            raise InvalidEvent(f"visit {visit} was admitted twice")
        if suite not in self.mixture and not evaluation:
            raise InvalidEvent(f"visit {visit} is of suite {suite!r}, which is not in the mixture")
        group = GroupState(visit, suite, birth, now, members, evaluation)
        self._line_up(group, now)
        if evaluation:
            self.evaluations[visit] = group
            return
        self.playing[visit] = group
        self.births[birth] += 1
        self._held[suite] += 1
        self._total += 1
        self.playing_of[suite] += 1

    def _line_up(self, group: GroupState, now: float) -> None:
        """All its members wait for a place."""
        self.alive += group.members
        for member in range(group.members):
            group.episodes[member] = episode = Episode(group, member, now)
            self._wait(episode, now)

    def _gone(self, group: GroupState, now: float) -> None:
        """Out of flight, with all its episodes."""
        for episode in group.episodes.values():
            self._forget(episode, now)
        group.episodes.clear()
        if self.playing.pop(group.visit, None) is not None:
            _less(self.births, group.birth)
            self.playing_of[group.suite] -= 1
        self.evaluations.pop(group.visit, None)

    def _forget(self, episode: Episode, now: float) -> None:
        self._leave(episode)
        self.waiting.pop(episode.key, None)
        self._unpark(episode)
        self._rest(episode.rank, now)
        episode.phase = "done"
        self.alive -= 1
        self._touched.append(episode)

    def _unpark(self, episode: Episode) -> None:
        if self.parked.pop(episode.key, None) is not None and episode.rank in self.ranks:
            self.ranks[episode.rank].parked.pop(episode.key, None)

    def _finished(self, episode: Episode, played: bool, now: float) -> None:
        self._forget(episode, now)
        group = episode.group
        if played:
            del group.episodes[episode.member]
            group.played += 1
            if group.suite in self.suites:
                self.suites[group.suite].final.add(episode.context)
                self.suites[group.suite].turns.add(episode.turns)
            self._touched += group.episodes.values()  # their group is nearer to its end
        else:
            group.episodes[episode.member] = again = Episode(group, episode.member, now)
            self.alive += 1
            self._wait(again, now)

    def _resumed(self, episode: Episode, rank: str, now: float) -> None:
        self._unpark(episode)
        if episode.phase == "decoding":  # it was to be parked, and its turn has not ended
            episode.parked = False
            self._touched.append(episode)
            return
        self._leave(episode)
        episode.parked, episode.rank = False, rank
        self._enter(episode, "acting" if episode.phase == "acting" else "decoding", episode.context, now)

    def _strand(self, rank: RankState, now: float) -> None:
        """The rank no longer plays: what decoded waits for another, what acts will when its tool has answered."""
        for episode in (*rank.decoding.values(), *rank.acting.values()):
            self._leave(episode)
            episode.rank = None
            if episode.phase == "decoding":
                if episode.parked:
                    del self.parked[episode.key], rank.parked[episode.key]
                    episode.parked = False
                self._wait(episode, now)
            else:
                self._touched.append(episode)
        for episode in rank.parked.values():
            episode.rank = None
            self._touched.append(episode)
        rank.parked.clear()
        self._rest(rank.name, now)

    def _step_started(self, visits: tuple[int, ...], more: int, now: float) -> None:
        for visit in visits:
            if self._group(visit).state != "ready":
                raise InvalidEvent(f"visit {visit} is not ready, so it cannot be trained")
        if len(set(visits)) < len(visits):
            raise InvalidEvent(f"a step names a visit twice: {visits}")
        if self.step_running:
            raise InvalidEvent("a step started while another runs")
        self.ready_at_start = len(self.buffer)
        self.training, self.training_births = (), ()
        self._take(tuple(self.buffer[visit] for visit in visits))
        self.still = more
        self.step_running = True
        self._train_waited = now - self._step_from

    def _take(self, groups: Iterable[GroupState]) -> None:
        for group in groups:
            del self.buffer[group.visit]
            _less(self.ready_births, group.birth)
            self.training += (group.suite,)
            self.training_births += (group.birth,)

    def _step_ended(self, step: int, now: float) -> None:
        if step < self.step:
            raise InvalidEvent(f"the step fell from {self.step} to {step}")
        if self.step_running and step == self.step:
            raise InvalidEvent(f"step {step} ended already, and a later one is under way")
        if self.step_running:
            self.step_s.add(now - self._step_from)
            self.train_wait_s.add(self._train_waited)
            playing = list(self.rollout_ranks())
            if playing:
                waited = sum(rank.waited(now) for rank in playing)
                self.rollout_wait_s.add(waited / len(playing))
                if self.made:
                    self.group_rank_s.add(max(0.0, len(playing) * (now - self._step_from) - waited) / self.made)
        for rank in self.ranks.values():
            rank.waiting_s = 0.0
            if rank.idle_since is not None:
                rank.idle_since = now
        self.step, self._step_from = step, now
        self.consumed.update(self.training)
        self.training, self.training_births = (), ()
        self.still = self.made = 0
        self.step_running = self.edge = False


def _plausible(context: int) -> None:
    if not 0 <= context < _TOKENS:
        raise InvalidEvent(f"an engine reported a context of {context} tokens")


def _less(counts: Counter[int], key: int) -> None:
    counts[key] -= 1
    if not counts[key]:
        del counts[key]
