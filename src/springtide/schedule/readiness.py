"""What is ready: the one state that every scheduling decision reads.

Owns: groups in flight and ready, what was consumed, the step being trained. Pure: events in (each carries its clock),
no I/O, no torch. `apply` is the only way to change it, so a recorded `events.jsonl` replayed through it gives the
same state, and a policy the same actions.
Called by: the driver (live) and the simulator; policies in this package read it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Began:
    """A driver started or resumed the run: nothing is pending, and this is where it stands. The first event of each."""

    t: float
    step: int
    mixture: dict[str, float]
    consumed: dict[str, int]


@dataclass(frozen=True, slots=True)
class Admitted:
    """A group was drawn and its episodes start. `birth` is the optimiser step of the newest weights then."""

    t: float
    visit: int
    suite: str
    birth: int


@dataclass(frozen=True, slots=True)
class Ready:
    """A group is complete, durable, and worth a step."""

    t: float
    visit: int


@dataclass(frozen=True, slots=True)
class Dropped:
    """A group ended without being trained."""

    t: float
    visit: int
    cause: str


@dataclass(frozen=True, slots=True)
class StepStarted:
    """The trainer took `visits` and works on them."""

    t: float
    visits: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepEnded:
    """The weights of optimiser step `step` are published to every engine."""

    t: float
    step: int


@dataclass(frozen=True, slots=True)
class Evaluation:
    """An evaluation began or ended."""

    t: float
    running: bool


Event = Began | Admitted | Ready | Dropped | StepStarted | StepEnded | Evaluation
_EVENTS: dict[str, type] = {
    c.__name__: c for c in (Began, Admitted, Ready, Dropped, StepStarted, StepEnded, Evaluation)
}


@dataclass(frozen=True, slots=True)
class Admit:
    """Draw a task of `suite` and start its group."""

    suite: str


@dataclass(frozen=True, slots=True)
class Abort:
    """Give up a group in flight; `cause` is counted."""

    visit: int
    cause: str


Action = Admit | Abort


@dataclass(frozen=True, slots=True)
class GroupState:
    """A group that is in flight or ready."""

    visit: int
    suite: str
    birth: int
    since: float
    state: Literal["in_flight", "ready"]


class InvalidEvent(Exception):
    """An event that contradicts the state: an unknown visit, a visit twice, a step that falls."""


class Readiness:
    """The state. `weights` is the configured task mixture (suite -> relative share of consumed groups)."""

    def __init__(
        self, weights: Mapping[str, float], *, step: int = 0, consumed: Mapping[str, int] | None = None
    ) -> None:
        total = sum(weights.values())
        self.mixture = {suite: weight / total for suite, weight in weights.items()}
        self.step = step
        self.now = 0.0
        self.groups: dict[int, GroupState] = {}
        self.consumed: Counter[str] = Counter(consumed or {})
        self.training: tuple[str, ...] = ()  # suites of the groups the trainer holds
        self.step_running = False
        self.evaluating = False

    def apply(self, event: Event) -> None:
        """Advance by one event. Raises: InvalidEvent, with the state unchanged."""
        match event:
            case Began(_, step, mixture, consumed):
                self.step, self.mixture, self.consumed = step, dict(mixture), Counter(consumed)
                self.groups, self.training = {}, ()
                self.step_running = self.evaluating = False
            case Admitted(t, visit, suite, birth):
                if visit in self.groups:
                    raise InvalidEvent(f"visit {visit} was admitted twice")
                if suite not in self.mixture:
                    raise InvalidEvent(f"visit {visit} is of suite {suite!r}, which is not in the mixture")
                self.groups[visit] = GroupState(visit, suite, birth, t, "in_flight")
            case Ready(t, visit):
                group = self._group(visit)
                if group.state == "ready":
                    raise InvalidEvent(f"visit {visit} became ready twice")
                self.groups[visit] = GroupState(visit, group.suite, group.birth, t, "ready")
            case Dropped(_, visit, _):
                self._group(visit)
                del self.groups[visit]
            case StepStarted(_, visits):
                for visit in visits:
                    if self._group(visit).state != "ready":
                        raise InvalidEvent(f"visit {visit} is not ready, so it cannot be trained")
                if self.step_running:
                    raise InvalidEvent("a step started while another runs")
                self.training = tuple(self.groups.pop(visit).suite for visit in visits)
                self.step_running = True
            case StepEnded(_, step):
                if step < self.step:
                    raise InvalidEvent(f"the step fell from {self.step} to {step}")
                self.step = step
                self.consumed.update(self.training)
                self.training = ()
                self.step_running = False
            case Evaluation(_, running):
                self.evaluating = running
        # Clocks of different processes may jump back a little; the state's never does.
        self.now = max(self.now, event.t)

    def invalid(self, action: Action) -> str | None:
        """Why `action` cannot be carried out now, or None."""
        match action:
            case Admit(suite) if suite not in self.mixture:
                return f"{suite!r} is not in the mixture ({', '.join(self.mixture)})"
            case Abort(visit) if visit not in self.groups:
                return f"visit {visit} is neither in flight nor ready"
        return None

    def in_flight(self) -> list[GroupState]:
        return [g for g in self.groups.values() if g.state == "in_flight"]

    def ready(self) -> list[GroupState]:
        """Ready groups, in the order in which they became ready."""
        return sorted((g for g in self.groups.values() if g.state == "ready"), key=lambda g: (g.since, g.visit))

    def staleness(self, group: GroupState) -> int:
        """Steps the group lags behind the weights being trained; floored at 0 (after a rollback)."""
        return max(0, self.step - group.birth)

    def next_suite(self) -> str:
        """The suite furthest below its share, counting what was consumed, is being trained, and is pending.

        Groups that end untrained leave the count, so the consumed mixture follows the configured one even when suites
        differ in speed or in how many of their groups are dropped (prime-rl#2072).
        """
        held = Counter(self.consumed)
        held.update(self.training)
        held.update(g.suite for g in self.groups.values())
        total = sum(held.values()) + 1
        return max(self.mixture, key=lambda suite: self.mixture[suite] * total - held[suite])

    def _group(self, visit: int) -> GroupState:
        try:
            return self.groups[visit]
        except KeyError:
            raise InvalidEvent(f"visit {visit} is not pending") from None


def event_to_json(event: Event | Action) -> dict[str, Any]:
    """A plain form for `events.jsonl`."""
    return {"kind": type(event).__name__, **asdict(event)}


def event_from_json(data: dict[str, Any]) -> Event:
    """The inverse of `event_to_json`, for events."""
    fields = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items() if k != "kind"}
    return _EVENTS[data["kind"]](**fields)
