"""The seam between rollout and environments: what a client opens and what a session answers.

Implemented by `env.inprocess` (this process) and `env.local` (worker processes); both pass one contract suite.
Invariants: deadlines run only inside a call, so pausing an episode costs its environment nothing; a session lives
while its lease is renewed; only the worker scores; gold and judges never leave the worker except through
`Session.gold()`, which answers on `train` tasks only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from springtide.trace import Cause, Message, Outcome, TaskRef, ToolCall
from springtide.wire import record

FinishReason = Literal["done", "turn_limit", "context_limit", "time_limit", "cancelled"]


class EnvironmentUnavailable(Exception):
    """A session could not be opened or was lost. `cause` is the outcome's cause (see `trace.Cause`)."""

    def __init__(self, cause: Cause, detail: str) -> None:
        super().__init__(f"{cause}: {detail}")
        self.cause, self.detail = cause, detail


@record
@dataclass(frozen=True, slots=True)
class Observation:
    """What an action led to: the new messages (tool replies in call order, then user text), and whether it ended.

    `step_reward` is what this turn added. `times` maps a part's name to seconds (at least `env_s`).
    """

    messages: tuple[Message, ...]
    step_reward: float = 0.0
    ended: bool = False
    times: dict[str, float] = field(default_factory=dict)


class Session(Protocol):
    """One episode of one environment. Every method raises EnvironmentUnavailable when the worker is lost."""

    id: str
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...]
    max_turns: int

    async def act(self, message: Message, request_id: int) -> Observation:
        """Play one assistant message. The same `request_id` again returns the same observation, without effect."""
        ...

    async def renew(self) -> None:
        """Keep the lease alive while nothing is asked of the session."""
        ...

    async def finish(self, reason: FinishReason) -> Outcome:
        """Settle, judge and end. Idempotent: a second call returns the first outcome."""
        ...

    async def gold(self) -> tuple[ToolCall, ...] | None:
        """The calls of a correct solution, one turn each; None where there is none. `train` tasks only."""
        ...

    async def close(self) -> None:
        """Release the session whatever its state. Never raises."""
        ...


class EnvClient(Protocol):
    """Opens sessions."""

    async def catalog(self, suite: str, split: str, level: str | None) -> tuple[TaskRef, ...]:
        """Every task of a split and level (None: the suite's default), in index order."""
        ...

    async def open(self, task: TaskRef, visit: int, member: int, retry: int, deadline_s: float) -> Session:
        """Start a fresh environment. Raises: EnvironmentUnavailable (cause `setup` if `start` failed)."""
        ...
