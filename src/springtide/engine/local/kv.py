"""KV bookkeeping: blocks with reference counts, what every session still has, and what may be evicted.

Owns: which block holds which tokens' KV (the numbers themselves live in the kernels' pool). Invariants: blocks in use
never exceed the capacity; a block that several own is never written; KV is used only with the version that made it;
what runs is never evicted; eviction order is a logical clock, so equal call sequences evict equally.
Called by: `engine.local.core` only. No torch here.

A session's record outlives its KV: the ids stay, so what is computed a second time is counted as such, with its cause.
The common start of a group (`prefix`) is a record of its own that shares its full blocks with the members.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from springtide.trace import common_start

_STARTS = 4096  # group starts remembered for counting; far more than groups in flight
BLOCK = 16  # tokens a block: one cache line of float32 a row, and at most 15 tokens copied for a shared start


@dataclass(slots=True, eq=False)
class Record:
    """What is known of a session: `ids` int32 [n], of which the first `kv` have KV in `blocks`, made by `version`."""

    ids: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    kv: int = 0
    blocks: list[int] = field(default_factory=list)
    version: int = -1
    pending: bool = False  # the last id was sampled and never computed
    lost: str = ""  # why KV that once was is gone
    busy: bool = False
    hidden: object = None  # of a prefix: the final hidden state of its last token


@dataclass(frozen=True, slots=True)
class Admission:
    """A turn's place in the cache: it computes its prompt from `start` on.

    `copies` are (from, to) blocks to copy before; `hidden` is set where even the last token needs no computing.
    cached + computed = prompt length; recomputed is part of computed, and `cause` says why.
    """

    record: Record
    start: int
    copies: tuple[tuple[int, int], ...]
    hidden: object
    cached: int
    computed: int
    recomputed: int
    cause: str


class BlockPool:
    """Free blocks and reference counts. `idle_refs` counts the references whose owners could be evicted."""

    def __init__(self, blocks: int) -> None:
        self.total = blocks
        self.refs = np.zeros(blocks, np.int32)
        self.idle_refs = np.zeros(blocks, np.int32)
        self._free = list(range(blocks - 1, -1, -1))
        # For blocks that are taken, once KV that is not finite was seen: what a mask hides is multiplied with 0, and
        # 0 times a NaN that another sequence left behind is NaN.
        self.clear: Callable[[list[int]], None] | None = None

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self.total - len(self._free)

    def take(self, count: int) -> list[int]:
        if count > len(self._free):
            raise AssertionError(f"{count} blocks asked of {len(self._free)} free ones; callers make room first")
        taken = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        if self.clear is not None:
            self.clear(taken)
        self.refs[taken] = 1
        return taken[::-1]

    def share(self, blocks: list[int]) -> None:
        self.refs[blocks] += 1

    def give(self, blocks: list[int]) -> None:
        if not blocks:
            return
        self.refs[blocks] -= 1
        self._free.extend(b for b in reversed(blocks) if self.refs[b] == 0)

    def evictable(self) -> int:
        return int(np.count_nonzero((self.refs > 0) & (self.refs == self.idle_refs)))


class KVCache:
    """Sessions and group prefixes over one block pool."""

    def __init__(self, capacity_tokens: int) -> None:
        self.pool = BlockPool(capacity_tokens // BLOCK)
        self.sessions: dict[str, Record] = {}
        self.prefixes: dict[tuple[str, int], Record] = {}
        # Every group's start that was ever computed, with the version: computing it again is counted as that.
        self._starts: OrderedDict[str, tuple[np.ndarray, int]] = OrderedDict()
        self._idle: OrderedDict[Record, None] = OrderedDict()  # least recently used first
        self.evicted_tokens = 0

    @property
    def used_tokens(self) -> int:
        return self.pool.used * BLOCK

    def cached_start(self, session: str, ids: np.ndarray, version: int) -> int:
        """How many tokens of `ids` the session itself has KV for, under `version`."""
        record = self.sessions.get(session)
        if record is None or record.version != version:
            return 0
        return min(record.kv, common_start(record.ids, ids))

    def admit(
        self,
        session: str,
        ids: np.ndarray,
        new_tokens: int,
        version: int,
        prefix: str | None,
        *,
        share_last: bool = True,
    ) -> Admission | None:
        """Reserve KV for a prompt and `new_tokens` more (the last of them needs none). None: no room yet.

        share_last: where a group's start is the whole prompt, even its last token need not be computed.
        """
        record = self.sessions.get(session) or Record()
        length = len(ids)
        known = common_start(record.ids, ids)
        start = min(record.kv, known, length - 1) if record.version == version else 0
        entry = self.prefixes.get((prefix, version)) if prefix is not None else None
        hidden = None
        if entry is not None:
            shared = common_start(entry.ids, ids)
            if share_last and shared == length == len(entry.ids) and entry.hidden is not None:
                hidden = entry.hidden
            else:
                shared = min(shared, length - 1)
            if shared > start:
                start = shared
            else:
                entry, hidden = None, None
        source = record if entry is None else entry
        whole, rest = divmod(start, BLOCK)
        total = -(-(length + new_tokens - 1) // BLOCK)
        # A partly used block is written next: one that others read must be copied.
        copy = rest > 0 and (entry is not None or self.pool.refs[record.blocks[whole]] > 1)
        keep = source.blocks[: whole + (1 if rest and not copy else 0)]
        self._busy(record)
        if entry is not None:
            self._busy(entry)
        try:
            # What the record holds and this turn does not keep comes back to the pool before the turn takes its own.
            kept, refs = set(keep), self.pool.refs[record.blocks].tolist()
            returned = sum(n == 1 and b not in kept for b, n in zip(record.blocks, refs))
            need = total - len(keep) - returned
            if self.pool.free < need and self.pool.free + self.pool.evictable() < need:
                self._settle(record)
                return None
            self._make_room(need)
        finally:
            if entry is not None:
                self._settle(entry)
        moved = record.version != version and record.kv > 0
        cause = "version" if moved else record.lost
        copied_from = source.blocks[whole] if copy else -1
        self.pool.share(keep)
        if copy:
            self.pool.share([copied_from])
        self.pool.give(record.blocks)
        fresh = self.pool.take(total - len(keep))
        if copy:
            # Given back now, copied by the caller before anything is written: nothing runs in between.
            self.pool.give([copied_from])
        computed, recomputed = self._count(record, known, start, length)
        if prefix is not None and prefix in self._starts:
            group_ids, group_version = self._starts[prefix]
            again = max(0, common_start(group_ids, ids) - start)
            if again > recomputed:
                recomputed, cause = again, cause or ("version" if group_version != version else "evicted")
        record.ids, record.kv, record.blocks, record.version = ids, start, keep + fresh, version
        record.pending, record.lost, record.busy = False, "", True
        self.sessions[session] = record
        copies = ((copied_from, fresh[0]),) if copy else ()
        return Admission(record, start, copies, hidden, length - computed, computed, recomputed, cause)

    @staticmethod
    def _count(record: Record, known: int, start: int, length: int) -> tuple[int, int]:
        # A sampled token's KV, computed with the prompt that follows it, is a first computation of no prompt token.
        pending = record.pending and known == len(record.ids) and start < known
        return length - start - pending, max(0, known - start - pending)

    def finish(self, record: Record, ids: np.ndarray, kv: int, *, pending: bool) -> None:
        """A turn ended: `ids` are known, the first `kv` have KV. Blocks beyond go back; the session is idle."""
        keep = -(-kv // BLOCK)
        self.pool.give(record.blocks[keep:])
        del record.blocks[keep:]
        record.ids, record.kv, record.pending = ids, kv, pending
        self._settle(record)

    def add_prefix(
        self, prefix: str, record: Record, ids: np.ndarray, hidden: object, copy: Callable[[int, int], None]
    ) -> None:
        """Keep the KV of `ids`, which `record` has just computed, for the other members of the group."""
        self._starts[prefix] = (ids, record.version)
        self._starts.move_to_end(prefix)
        if len(self._starts) > _STARTS:
            self._starts.popitem(last=False)
        whole, rest = divmod(len(ids), BLOCK)
        blocks = record.blocks[:whole]
        self.pool.share(blocks)
        if rest and self.pool.free + self.pool.evictable() > 0:
            self._make_room(1)
            blocks = blocks + self.pool.take(1)
            copy(record.blocks[whole], blocks[-1])
        else:
            ids, hidden = ids[: whole * BLOCK], hidden if rest == 0 else None
        entry = Record(ids=ids, kv=len(ids), blocks=blocks, version=record.version, hidden=hidden)
        old = self.prefixes.pop((prefix, record.version), None)
        if old is not None:
            self._lose(old, "replaced")
        self.prefixes[(prefix, record.version)] = entry
        self._settle(entry)

    def release(self, session: str) -> None:
        """Forget a session that is not running."""
        record = self.sessions.pop(session, None)
        if record is not None:
            self._lose(record, "released")

    def drop_version(self, version: int) -> None:
        """KV of a version whose weights are gone is of no use."""
        for record in self.sessions.values():
            if record.version == version and record.kv:
                self._lose(record, "version")
        for key in [k for k in self.prefixes if k[1] == version]:
            self._lose(self.prefixes.pop(key), "version")

    # An idle record's references are marked in the pool, so that what eviction could free is known without trying.

    def _busy(self, record: Record) -> None:
        record.busy = True
        if self._idle.pop(record, self) is None:
            self.pool.idle_refs[record.blocks] -= 1

    def _settle(self, record: Record) -> None:
        record.busy = False
        if record.blocks:
            self._idle[record] = None
            self.pool.idle_refs[record.blocks] += 1

    def _lose(self, record: Record, cause: str) -> None:
        self._busy(record)
        self.pool.give(record.blocks)
        record.blocks, record.kv, record.lost, record.busy, record.hidden = [], 0, cause, False, None

    def _make_room(self, need: int) -> None:
        while self.pool.free < need:
            record = next(iter(self._idle))
            self.evicted_tokens += record.kv
            self._lose(record, "evicted")
            for key in [k for k, entry in self.prefixes.items() if entry is record]:
                del self.prefixes[key]
