"""`RemoteSession`: a session that lives in another process, seen through a `wire.Client`.

Owns: the calls of the session protocol and how failures of the connection read. Invariants: whatever goes wrong below
is an `EnvironmentUnavailable` with a cause; every call has a deadline, the environment's own plus `grace_s`.
Called by: `env.local.LocalClient`, and `env.worker` for isolated episodes.
"""

from __future__ import annotations

import contextlib
from typing import Any, cast

from springtide.env.session import EnvironmentUnavailable, FinishReason, Observation
from springtide.trace import Cause, Limits, Message, Outcome, TaskRef, ToolCall
from springtide.wire import Client, ConnectionLost, DeadlineExceeded, RemoteError

_RENEW_S = 30.0


class RemoteSession:
    """A `Session` in the process behind `client`."""

    def __init__(self, client: Client, opened: dict[str, Any], grace_s: float) -> None:
        self.client, self._grace_s = client, grace_s
        self.id: str = opened["id"]
        self.messages: tuple[Message, ...] = opened["messages"]
        self.tools: tuple[dict[str, Any], ...] = opened["tools"]
        self.max_turns: int = opened["max_turns"]
        self.limits: Limits = opened["limits"]
        self.lease_s: float = opened["lease_s"]
        self.closed = False

    async def act(self, message: Message, request_id: int) -> Observation:
        return await self._call("act", self.limits.act_s, message=message, request_id=request_id)

    async def renew(self) -> None:
        await self._call("renew", _RENEW_S)

    async def finish(self, reason: FinishReason) -> Outcome:
        # A turn still running is waited for, then the world settles and is judged.
        seconds = self.limits.act_s + self.limits.settle_s + self.limits.score_s
        return await self._call("finish", seconds, late="judge", reason=reason)

    async def gold(self) -> tuple[ToolCall, ...] | None:
        return await self._call("gold", self.limits.act_s + self.limits.start_s)

    async def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        # A session that cannot be reached is gone with its process, or dropped when its lease ends.
        with contextlib.suppress(ConnectionLost, DeadlineExceeded, RemoteError):
            await self.client.call("close", deadline_s=self.limits.settle_s + self._grace_s, session=self.id)

    async def _call(self, method: str, seconds: float, late: Cause = "tool", **payload: Any) -> Any:
        try:
            return await self.client.call(method, deadline_s=seconds + self._grace_s, session=self.id, **payload)
        except (ConnectionLost, DeadlineExceeded, RemoteError) as error:
            raise unavailable(error, late=late) from error


async def open_remote(
    client: Client, task: TaskRef, visit: int, member: int, retry: int, deadline_s: float, *, grace_s: float
) -> RemoteSession:
    """Open a session behind `client`. Raises: ConnectionLost, DeadlineExceeded, RemoteError (see `unavailable`)."""
    opened = await client.call(
        "open",
        deadline_s=deadline_s + grace_s,
        task=task,
        visit=visit,
        member=member,
        retry=retry,
        start_deadline_s=deadline_s,
    )
    return RemoteSession(client, opened, grace_s)


def unavailable(error: ConnectionLost | DeadlineExceeded | RemoteError, *, late: Cause) -> Exception:
    """What a caller of the session protocol sees instead of `error`; `late` is the cause of a passed deadline."""
    if isinstance(error, ConnectionLost):
        return EnvironmentUnavailable("worker_lost", str(error))
    if isinstance(error, DeadlineExceeded):
        return EnvironmentUnavailable(late, str(error))
    if error.kind == "EnvironmentUnavailable":
        cause, _, detail = error.message.partition(": ")
        return EnvironmentUnavailable(cast(Cause, cause), detail)
    if error.kind == "PermissionError":
        return PermissionError(error.message)
    return EnvironmentUnavailable("infrastructure", str(error))
