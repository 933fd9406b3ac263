"""The trainer ranks of a run as one: every call goes to all of them, and rank 0's answer counts.

Owns: what a call on several ranks means. Invariants: all ranks get the same calls in the same order; a rank that died
or failed alone ends the call in seconds, for the others may wait for it in a collective for ever, and so the run (a
world is the unit of failure; its state is the last checkpoint's).
Called by: the driver, through `runtime.local`, with `Rank.call`'s signature.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

from springtide.runtime.ranks import Rank
from springtide.wire import ConnectionLost

_ALONE_S = 5.0  # after one rank failed, until the others that have not are taken to wait for it


def _cause(error: BaseException | None) -> int:
    """0 for a death, 2 for what gloo or NCCL says of a connection that another rank closed, else 1."""
    if isinstance(error, ConnectionLost):
        return 0
    return 2 if re.search(r"Connection (closed|reset) by|ncclRemoteError", str(error)) else 1


class World:
    """A fixed set of trainer ranks, rank 0 first."""

    def __init__(self, ranks: list[Rank]) -> None:
        self.ranks = ranks

    @property
    def name(self) -> str:
        """Of the rank that has been silent for longest."""
        return max(self.ranks, key=lambda r: r.silence_s).name

    @property
    def silence_s(self) -> float:
        return max(r.silence_s for r in self.ranks)

    async def call_again(self, method: str, *, deadline_s: float, **payload: Any) -> Any:
        """As `call`: a world that lost a rank is not replaced."""
        return await self.call(method, deadline_s=deadline_s, **payload)

    async def call(self, method: str, *, deadline_s: float, **payload: Any) -> Any:
        """Call every rank now; rank 0's answer. Raises: ConnectionLost, DeadlineExceeded, RemoteError, of the first
        that failed. ConnectionLost comes before others, for it is a death and they may follow from it; what says only
        that another rank left the collective comes last."""
        calls = [asyncio.ensure_future(r.call(method, deadline_s=deadline_s, **payload)) for r in self.ranks]
        try:
            done, pending = await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
            first = [c for c in calls if c in done and c.exception() is not None]
            if first and pending:
                await asyncio.wait(pending, timeout=_ALONE_S)
            failed = [*first, *(c for c in calls if c.done() and c not in done and c.exception() is not None)]
            return min(failed, key=lambda c: _cause(c.exception()), default=calls[0]).result()
        finally:
            for c in calls:
                if not c.cancel() and not c.cancelled():
                    c.exception()  # told by the first, or not at all: the log need not say it was never looked at
