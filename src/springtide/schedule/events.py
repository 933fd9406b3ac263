"""What scheduling hears and what it may ask for: events in, actions out, each one a line of `events.jsonl`.

Owns: the two vocabularies and their plain form. An event says what happened, with the clock of whoever saw it (seconds
since the epoch live, since the start in the simulator); an action is a wish of a policy, which the driver or the
simulator carries out and answers with events.
Called by: everything that decides, carries out or replays.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Role = Literal["rollout", "reference", "trainer"]
Pipeline = Literal["none", "resident", "streaming", "aggregate"]


# --- the run ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Began:
    """A driver started or resumed the run: nothing is pending, and this is where it stands. The first event of each."""

    t: float
    step: int
    mixture: dict[str, float]
    consumed: dict[str, int]


@dataclass(frozen=True, slots=True)
class Held:
    """From now on (`on`) no group is drawn, or again: before the first step, and while a run ends."""

    t: float
    on: bool


@dataclass(frozen=True, slots=True)
class Evaluation:
    """An evaluation began or ended; while it runs its version is pinned."""

    t: float
    running: bool


@dataclass(frozen=True, slots=True)
class Measured:
    """A cost was measured. Seconds: `reference_token` and `train_token` (of one token on one rank, forward; forward and
    backward), `swap` (reference weights in or out), `switch` (a change of role), `sync` (a publication). Other units:
    `prefill_rate` (tokens/s of a rollout rank)."""

    t: float
    what: Literal["reference_token", "train_token", "swap", "switch", "sync", "prefill_rate"]
    value: float


# --- groups and steps -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Admitted:
    """A group of `members` was drawn. `birth` is the optimiser step of the newest weights then. `evaluation`: its
    episodes are played at a pinned version and never trained."""

    t: float
    visit: int
    suite: str
    birth: int
    members: int = 1
    evaluation: bool = False


@dataclass(frozen=True, slots=True)
class Ready:
    """A group is complete, durable, and worth a step. tokens: of its episodes, all that a trainer computes."""

    t: float
    visit: int
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Dropped:
    """A group ended without being trained (one of an evaluation: ended)."""

    t: float
    visit: int
    cause: str


@dataclass(frozen=True, slots=True)
class Restarted:
    """A group in flight lost all it had, what was over of it included: its members wait to be placed again."""

    t: float
    visit: int


@dataclass(frozen=True, slots=True)
class StepStarted:
    """The trainer took `visits` and works on them; a step that streams takes `more` as they become ready."""

    t: float
    visits: tuple[int, ...]
    more: int = 0


@dataclass(frozen=True, slots=True)
class Fed:
    """A step under way took one more group that became ready."""

    t: float
    visit: int


@dataclass(frozen=True, slots=True)
class Updated:
    """The optimiser step is done and its weights are not yet published: the one edge where roles may change."""

    t: float


@dataclass(frozen=True, slots=True)
class StepEnded:
    """The weights of optimiser step `step` are published to every engine."""

    t: float
    step: int


# --- episodes ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Placed:
    """An episode decodes on a rank: a new one, or one that is played again. context: tokens of its prompt."""

    t: float
    visit: int
    member: int
    rank: str
    context: int


@dataclass(frozen=True, slots=True)
class TurnEnded:
    """A turn is sampled and its tool acts. context: tokens up to its end; 0 where none was: its environment opens."""

    t: float
    visit: int
    member: int
    context: int


@dataclass(frozen=True, slots=True)
class Returned:
    """A tool answered. context: tokens with the answer. The episode decodes on, unless it is paused."""

    t: float
    visit: int
    member: int
    context: int


@dataclass(frozen=True, slots=True)
class Paused:
    """An episode that acts is parked: its turn that comes waits, and its KV may go. Its environment hears nothing."""

    t: float
    visit: int
    member: int


@dataclass(frozen=True, slots=True)
class Resumed:
    """A parked episode goes on, on this rank."""

    t: float
    visit: int
    member: int
    rank: str


@dataclass(frozen=True, slots=True)
class Finished:
    """An episode is over. played: whether it counts for its group; one that failed is played again (`Placed`)."""

    t: float
    visit: int
    member: int
    played: bool


# --- ranks ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RankJoined:
    """A rank is up. budget: tokens of KV where it plays. lendable: a trainer that may play while it waits for data."""

    t: float
    rank: str
    role: Role
    budget: int
    lendable: bool = False


@dataclass(frozen=True, slots=True)
class RankLeft:
    """A rank died: what it held in memory is gone, and its episodes wait to be placed again."""

    t: float
    rank: str


@dataclass(frozen=True, slots=True)
class RoleChanged:
    """A switch is done: the rank has `role` in memory and nothing of the old one. Its episodes wait to be placed."""

    t: float
    rank: str
    role: Role


Event = (
    Began | Held | Evaluation | Measured | Admitted | Ready | Dropped | Restarted | StepStarted | Fed | Updated
    | StepEnded | Placed | TurnEnded | Returned | Paused | Resumed | Finished | RankJoined | RankLeft | RoleChanged
)  # fmt: skip


# --- actions ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Admit:
    """Draw a task of `suite` and start its group. probe: its first member alone first, to learn the group's size."""

    suite: str
    probe: bool = False


@dataclass(frozen=True, slots=True)
class Route:
    """Place a waiting episode on a rank."""

    visit: int
    member: int
    rank: str


@dataclass(frozen=True, slots=True)
class Pause:
    """Park an episode, at once if it acts, else when its turn ends."""

    visit: int
    member: int


@dataclass(frozen=True, slots=True)
class Resume:
    """Let a parked episode go on, on this rank."""

    visit: int
    member: int
    rank: str


@dataclass(frozen=True, slots=True)
class Abort:
    """Give up a group in flight or ready; `cause` is counted."""

    visit: int
    cause: str


@dataclass(frozen=True, slots=True)
class ChoosePipeline:
    """How the reference's log-probs are computed from the next step on."""

    pipeline: Pipeline


@dataclass(frozen=True, slots=True)
class SwitchRole:
    """Give a rank another role, at the edge between an update and its publication."""

    rank: str
    role: Role


@dataclass(frozen=True, slots=True)
class SetFetch:
    """Groups of a step from the next one on."""

    groups: int


@dataclass(frozen=True, slots=True)
class Sync:
    """Publish the weights of the update that is done."""


Action = Admit | Route | Pause | Resume | Abort | ChoosePipeline | SwitchRole | SetFetch | Sync

_EVENTS: dict[str, type] = {c.__name__: c for c in Event.__args__}


def event_to_json(event: Event | Action) -> dict[str, Any]:
    """A plain form for `events.jsonl`."""
    return {"kind": type(event).__name__, **asdict(event)}


def event_from_json(data: dict[str, Any]) -> Event:
    """The inverse of `event_to_json`, for events. Raises: KeyError, for an action."""
    fields = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items() if k != "kind"}
    return _EVENTS[data["kind"]](**fields)
