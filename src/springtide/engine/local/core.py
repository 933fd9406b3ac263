"""Continuous batching: admit turns, run one forward a version over a mixed batch, sample, finish turns.

Owns: the running turns, the waiting ones, and the loaded weights; `step()` is *admit, forward, sample, finish*.
Invariants: a turn runs under one version; nothing it returns depends on what runs beside it (beyond rounding of a
batched product); KV use never exceeds the capacity (a turn reserves all it can need when admitted); a batch of
`submit_many` runs alone and in order, so equal histories give equal bits. Single-threaded, no I/O, no clock but `now`.
Called by: `engine.local.engine` (the asynchronous face), benchmarks.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from numbers import Integral
from typing import Literal

import numpy as np
import torch

from springtide.engine.local.kernels import PagedKernels, Pass, sample_rows, target_logprobs
from springtide.engine.local.kv import BLOCK, Admission, KVCache
from springtide.engine.local.sampling import uniforms
from springtide.engine.protocol import EngineError, Generation, Sampling
from springtide.models.decoder import Decoder
from springtide.schedule.roofline import causal_pairs
from springtide.trace import common_start

Done = Callable[[Generation | EngineError], None]


@dataclass(slots=True, eq=False)
class Request:
    """A turn asked for. ids: int32 [P]. `batch` numbers the exclusive batch it belongs to, if any.

    Of waiting turns the one of highest `priority` starts first; an exclusive batch stands where it was asked for.
    """

    session: str
    ids: np.ndarray
    sampling: Sampling
    done: Done
    version: int | None = None
    prefix: str | None = None
    forced: np.ndarray | None = None
    priority: int = 0
    batch: int | None = None
    arrived: float = field(default_factory=time.monotonic)
    paused_before: float = 0.0  # seconds the engine had stood still when it arrived

    @property
    def new_tokens(self) -> int:
        return self.sampling.max_new_tokens if self.forced is None else len(self.forced)


@dataclass(slots=True, eq=False)
class Turn:
    """A request that runs, in `slot`. `tokens` int32: what its prefill computes, from position `start` on."""

    request: Request
    admission: Admission
    slot: int
    version: int
    tokens: np.ndarray
    leads: tuple[str, int] | None
    admitted: float
    paused_before: float
    prefilled: int = 0
    forced_logprobs: list[np.ndarray] = field(default_factory=list)


class Slots:
    """Per-slot arrays, so that a decode step touches no Python object a sequence."""

    def __init__(self, count: int, blocks: int) -> None:
        self.tables = np.zeros((count, blocks), np.int32)
        self.kv = np.zeros(count, np.int32)  # tokens with KV = position of the next token fed
        self.last = np.zeros(count, np.int32)
        self.made = np.zeros(count, np.int32)
        self.limit = np.zeros(count, np.int32)
        self.inverse_temperature = np.ones(count, np.float32)
        self.stop = np.full((count, 1), -1, np.int32)
        self.uniform = np.zeros((count, 64), np.float64)  # -1: greedy
        self.ids = np.zeros((count, 64), np.int32)
        self.logprobs = np.zeros((count, 64), np.float32)
        self.free = list(range(count - 1, -1, -1))

    def open(self, slot: int, turn: Request, blocks: list[int]) -> None:
        sampling, limit = turn.sampling, turn.new_tokens
        self._widen(limit, len(sampling.stop_ids))
        greedy = sampling.temperature == 0
        self.tables[slot, : len(blocks)] = blocks
        self.made[slot], self.limit[slot] = 0, limit
        self.inverse_temperature[slot] = 1.0 if greedy else 1.0 / sampling.temperature
        self.stop[slot] = -1
        self.stop[slot, : len(sampling.stop_ids)] = sampling.stop_ids
        self.uniform[slot, :limit] = -1.0 if greedy else uniforms(sampling.seed, sampling.turn, limit)

    def _widen(self, limit: int, stops: int) -> None:
        if limit > self.ids.shape[1]:
            more = ((0, 0), (0, limit - self.ids.shape[1]))
            self.uniform, self.ids = np.pad(self.uniform, more), np.pad(self.ids, more)
            self.logprobs = np.pad(self.logprobs, more)
        if stops > self.stop.shape[1]:
            self.stop = np.pad(self.stop, ((0, 0), (0, stops - self.stop.shape[1])), constant_values=-1)


class EngineCore:
    """The engine without its process: `submit`, `step` until False, read results in `done`."""

    def __init__(
        self,
        kernels: PagedKernels,
        *,
        vocab_size: int,
        positions: int,
        kv_tokens: int,
        max_batch: int,
        prefill_chunk: int,
    ) -> None:
        """positions: tokens a turn may reach, prompt and new ones together; at most `kv_tokens`."""
        self.kernels, self.vocab_size, self.positions, self.prefill_chunk = (
            kernels,
            vocab_size,
            positions,
            prefill_chunk,
        )
        self.cache = KVCache(kv_tokens)
        self.slots = Slots(max_batch, -(-positions // BLOCK))
        self.decoders: OrderedDict[int, Decoder] = OrderedDict()  # oldest load first
        self.draining: set[int] = set()
        self.newest = -1
        self.counts: Counter[str] = Counter()
        self.paused_s: Callable[[], float] = lambda: 0.0  # seconds stood still so far; its owner, who pauses it, knows
        self.paced: Callable[[int, float, int, int], None] | None = None  # in each forward; see `Pace.engine_step`
        self.waiting: list[Request] = []
        self._turns: dict[int, Turn] = {}  # by slot
        self._decoding: dict[int, np.ndarray] = {}  # version -> slots that decode
        self._filling: dict[int, list[Turn]] = {}  # version -> turns with prompt left to compute
        self._leaders: dict[tuple[str, int], np.ndarray] = {}  # prefixes being computed -> their ids
        self._sessions: set[str] = set()  # with a turn asked for or running
        self._batches = 0
        self._changed = False

    # --- requests ---------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a turn. Raises: EngineError if it can never run."""
        self._check(request)
        self._sessions.add(request.session)
        request.paused_before = self.paused_s()
        at = len(self.waiting)
        if request.batch is None:
            while at and self.waiting[at - 1].batch is None and self.waiting[at - 1].priority < request.priority:
                at -= 1
        # The first that finds no room holds back all behind it, so what stands first starts as soon as room is free.
        self.waiting.insert(at, request)
        self._changed = True

    def submit_many(self, requests: list[Request]) -> None:
        """Queue turns that run together, in order, alone; one that can never run is refused by itself."""
        self._batches += 1
        for request in requests:
            request.batch = self._batches
            try:
                self.submit(request)
            except EngineError as error:
                request.done(error)

    def abort(self, session: str, reason: str = "") -> None:
        """End the session's turn, if any; what it computed stays. With a reason its caller gets an EngineError."""
        for request in [r for r in self.waiting if r.session == session]:
            self.waiting.remove(request)
            self._sessions.discard(session)
            if reason:
                request.done(EngineError(reason))
        for turn in [t for t in self._turns.values() if t.request.session == session]:
            self._close(turn)
            if reason:
                turn.request.done(EngineError(reason))
        self._changed = True

    def abort_all(self, reason: str) -> None:
        for session in sorted(self._sessions):
            self.abort(session, reason)

    def release(self, session: str) -> None:
        """Forget a session: its turn is aborted, its KV freed."""
        if session in self._sessions:
            self.abort(session, f"session {session} was released")
        self.cache.release(session)
        self._changed = True

    def _check(self, request: Request) -> None:
        length, new = len(request.ids), request.new_tokens
        if length < 1 or new < 1:
            raise EngineError(
                f"session {request.session}: {length} prompt tokens and {new} new ones; both must be >= 1"
            )
        if length + new > self.positions:
            raise EngineError(
                f"session {request.session}: {length} prompt + {new} new tokens exceed the engine's {self.positions} "
                "(the smaller of engine.kv_tokens and the model's positions)"
            )
        sampling = request.sampling
        for value in (sampling.seed, sampling.turn, *sampling.stop_ids):
            if not isinstance(value, Integral):  # a bad request is its caller's fault, never the engine's end
                raise EngineError(f"session {request.session}: {value!r} in {sampling} is not an integer")
        if not 0 <= sampling.temperature < float("inf"):
            raise EngineError(f"session {request.session}: temperature {sampling.temperature} is not >= 0")
        if request.session in self._sessions:
            raise EngineError(f"session {request.session} has a turn in flight; one at a time")
        ids = request.ids if request.forced is None else np.concatenate((request.ids, request.forced))
        if ids.min() < 0 or ids.max() >= self.vocab_size:
            raise EngineError(
                f"session {request.session}: token ids from {ids.min()} to {ids.max()}; the model knows 0 to "
                f"{self.vocab_size - 1}: tokenizer and model disagree"
            )
        wanted = request.version
        if wanted is not None and wanted not in self.decoders and wanted > self.newest >= 0:
            raise EngineError(f"version {wanted} is unknown; loaded: {list(self.decoders)}")

    # --- versions ---------------------------------------------------------------------------------------------

    def add_version(self, version: int, decoder: Decoder) -> None:
        self.decoders[version] = decoder
        # Not the one loaded last: a restarted engine also loads the older versions that are pinned.
        self.newest = max(self.newest, version)
        self._changed = True

    def remove_version(self, version: int) -> None:
        """Free a version that no turn runs under; KV made by it goes too."""
        del self.decoders[version]
        self.draining.discard(version)
        self.cache.drop_version(version)
        if version == self.newest:
            self.newest = max(self.decoders, default=-1)

    def turns_of(self, version: int) -> int:
        return sum(t.version == version for t in self._turns.values())

    @property
    def running(self) -> int:
        return len(self._turns)

    @property
    def filling(self) -> int:
        """Running turns whose prompts are not yet computed."""
        return sum(map(len, self._filling.values()))

    def _version_for(self, request: Request) -> int | None:
        """The version a turn runs under: the one asked for while it has its slot, else the newest; None: none yet."""
        for version in (request.version, self.newest):
            if version in self.decoders and version not in self.draining:
                return version
        return None

    # --- one step ---------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Admit what fits, then one forward for every version with work. False: there was nothing to do."""
        if self._changed:
            self._changed = False
            self._admit()
        versions = [v for v in self.decoders if v in self._decoding or v in self._filling]
        for version in versions:
            self._forward(version)
        return bool(versions)

    def _admit(self) -> None:
        left: list[Request] = []
        waiting, self.waiting = self.waiting, left
        blocked = False
        exclusive = next((t.request.batch for t in self._turns.values()), None)
        for request in waiting:
            # An exclusive batch starts on an idle engine, and nothing joins it; order is never changed around one.
            if blocked or not self.slots.free or (self._turns and request.batch != exclusive):
                blocked = True
                left.append(request)
                continue
            version = self._version_for(request)
            if version is None or self._awaits_leader(request, version):
                left.append(request)
                continue
            admission = self.cache.admit(
                request.session,
                request.ids,
                request.new_tokens,
                version,
                request.prefix,
                share_last=request.forced is None,
            )
            if admission is None:
                blocked = True
                left.append(request)
                continue
            exclusive = request.batch
            self._open(request, admission, version)

    def _awaits_leader(self, request: Request, version: int) -> bool:
        """A member whose group's common start is being computed right now waits for it, to not compute it again."""
        if request.prefix is None:
            return False
        ids = self._leaders.get((request.prefix, version))
        if ids is None:
            return False
        return common_start(ids, request.ids) > self.cache.cached_start(request.session, request.ids, version)

    def _open(self, request: Request, admission: Admission, version: int) -> None:
        slot = self.slots.free.pop()
        for source, target in admission.copies:
            self.kernels.copy_block(source, target)
        self.slots.open(slot, request, admission.record.blocks)
        leads = None
        if request.prefix is not None and request.forced is None and admission.start == 0:
            key = (request.prefix, version)
            if key not in self._leaders:
                leads = key
                self._leaders[key] = request.ids
        tokens = request.ids[admission.start :] if admission.hidden is None else request.ids[:0]
        if request.forced is not None:
            tokens = np.concatenate((request.ids[admission.start :], request.forced[:-1]))
        turn = Turn(request, admission, slot, version, tokens, leads, time.monotonic(), self.paused_s())
        self._turns[slot] = turn
        self._filling.setdefault(version, []).append(turn)
        self.counts["cached"] += admission.cached
        self.counts["computed"] += admission.computed
        self.counts["recomputed"] += admission.recomputed
        if admission.recomputed:
            self.counts[f"recomputed_{admission.cause or 'repeated'}"] += admission.recomputed

    @torch.inference_mode()
    def _forward(self, version: int) -> None:
        decoder, slots = self.decoders[version], self.slots
        decoding = self._decoding.get(version, _NONE)
        count = len(decoding)
        ids, at, positions = [slots.last[decoding]], [decoding], [slots.kv[decoding]]
        runs: list[tuple[int, int]] = []
        sampled: list[Turn] = []  # the next token is drawn from this pass
        shared: list[Turn] = []  # it is drawn from the group's stored hidden state
        filled: list[Turn] = []
        rows = [np.arange(count)]
        forced: list[tuple[Turn, int, int, int]] = []  # turn, first row, rows, first target
        budget, row = self.prefill_chunk, count
        for turn in self._filling.get(version, ()):
            size = min(budget, len(turn.tokens) - turn.prefilled)
            first = turn.admission.start + turn.prefilled
            if size:
                ids.append(turn.tokens[turn.prefilled : turn.prefilled + size])
                at.append(np.full(size, turn.slot, np.int32))
                positions.append(np.arange(first, first + size, dtype=np.int32))
                runs.append((row, size))
            turn.prefilled += size
            budget -= size
            whole = turn.prefilled == len(turn.tokens)
            if whole:
                filled.append(turn)
            if turn.request.forced is not None:
                begin = max(first, len(turn.request.ids) - 1)
                if begin < first + size:
                    forced.append((turn, row + begin - first, first + size - begin, begin - len(turn.request.ids) + 1))
            elif whole and turn.admission.hidden is not None:
                shared.append(turn)
            elif whole:
                sampled.append(turn)
                rows.append(np.array([row + size - 1]))
            row += size
            if budget == 0:
                break
        hidden_rows = rows + [np.arange(first, first + n) for _, first, n, _ in forced]
        hidden = None
        if row:
            tokens, where = np.concatenate(ids), np.concatenate(positions)
            wanted = None if row == count else np.concatenate(hidden_rows)
            self.kernels.begin(Pass(tokens, np.concatenate(at), where, count, tuple(runs), slots.tables, wanted))
            fed = torch.from_numpy(tokens).to(decoder.device)
            rows_read = None if wanted is None else torch.from_numpy(wanted).to(decoder.device)
            hidden = decoder.forward(fed, self.kernels, rows_read)
        slots.kv[decoding] += 1
        drawn = self._draw(decoder, hidden, decoding, sampled, shared)
        offset = count + len(sampled)
        for turn, _, n, first_target in forced:
            assert hidden is not None and turn.request.forced is not None
            inverse = 1.0 / (turn.request.sampling.temperature or 1.0)
            targets = turn.request.forced[first_target : first_target + n]
            turn.forced_logprobs.append(target_logprobs(decoder, hidden[offset : offset + n], targets, inverse))
            offset += n
        if self.paced is not None:  # before anyone gets what this step made
            context = int(slots.kv[decoding].sum()) + sum(len(t.request.ids) for t in shared)
            pairs = sum(causal_pairs(n, int(where[first])) for first, n in runs)
            self.paced(row - count, pairs, count + len(shared), context)
        if drawn is not None:
            self._advance(version, *drawn)
        self._end_filling(version, filled)

    def _draw(
        self,
        decoder: Decoder,
        hidden: torch.Tensor | None,
        decoding: np.ndarray,
        sampled: list[Turn],
        shared: list[Turn],
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """Draw the next token of every slot that has its state: slots int32 [R], ids int32 [R], log-probs [R]."""
        slots = self.slots
        new = sampled + shared
        drawn = np.concatenate((decoding, np.array([t.slot for t in new], np.int32))) if new else decoding
        if not len(drawn):
            return None
        parts = [] if hidden is None else [hidden[: len(decoding) + len(sampled)]]
        parts += [t.admission.hidden[None] for t in shared]  # type: ignore[index]
        states = parts[0] if len(parts) == 1 else torch.cat(parts)
        for index, turn in enumerate(sampled):
            if turn.leads is not None:
                state = states[len(decoding) + index].clone()
                self.cache.add_prefix(
                    turn.leads[0], turn.admission.record, turn.request.ids, state, self.kernels.copy_block
                )
        made = slots.made[drawn]
        ids, logprobs = sample_rows(
            decoder, self.kernels, states, slots.inverse_temperature[drawn], slots.uniform[drawn, made]
        )
        slots.ids[drawn, made], slots.logprobs[drawn, made] = ids, logprobs
        slots.last[drawn] = ids
        slots.made[drawn] = made + 1
        for turn in new:
            slots.kv[turn.slot] = len(turn.request.ids)
        self.counts["generated"] += len(drawn)
        return drawn, ids, logprobs

    def _advance(self, version: int, drawn: np.ndarray, ids: np.ndarray, logprobs: np.ndarray) -> None:
        """Finish the turns that `ids` end; the others decode on."""
        slots = self.slots
        stopped = (ids[:, None] == slots.stop[drawn]).any(1)
        ended = stopped | (slots.made[drawn] >= slots.limit[drawn])
        bad = ~np.isfinite(logprobs)
        if bad.any():
            ended |= bad
        going = drawn[~ended]
        if len(going):
            self._decoding[version] = going
        else:
            self._decoding.pop(version, None)
        for slot, by_stop, broken in zip(drawn[ended].tolist(), stopped[ended].tolist(), bad[ended].tolist()):
            self._finish(self._turns[slot], "stop" if by_stop else "length", broken)

    def _end_filling(self, version: int, filled: list[Turn]) -> None:
        if not filled:
            return
        left = [t for t in self._filling[version] if t not in filled]
        if left:
            self._filling[version] = left
        else:
            del self._filling[version]
        for turn in filled:
            if turn.leads is not None:
                del self._leaders[turn.leads]
                self._changed = True
            if turn.request.forced is not None:
                self._finish_forced(turn)

    # --- ends -------------------------------------------------------------------------------------------------

    def _finish_forced(self, turn: Turn) -> None:
        forced = turn.request.forced
        assert forced is not None
        logprobs = np.concatenate(turn.forced_logprobs).astype(np.float32)
        finish: Literal["stop", "length"] = "stop" if int(forced[-1]) in turn.request.sampling.stop_ids else "length"
        self.counts["forced"] += len(forced)
        self._deliver(turn, forced.astype(np.int32), logprobs, finish, not np.isfinite(logprobs).all())

    def _finish(self, turn: Turn, finish: Literal["stop", "length"], broken: bool) -> None:
        made = int(self.slots.made[turn.slot])
        ids = self.slots.ids[turn.slot, :made].copy()
        self._deliver(turn, ids, self.slots.logprobs[turn.slot, :made].copy(), finish, broken)

    def _deliver(
        self, turn: Turn, ids: np.ndarray, logprobs: np.ndarray, finish: Literal["stop", "length"], broken: bool
    ) -> None:
        request, admission = turn.request, turn.admission
        known = np.concatenate((request.ids, ids))
        self.cache.finish(admission.record, known, len(known) - 1, pending=True)
        self._vacate(turn)
        if broken:
            self.cache.pool.clear = self.kernels.clear_blocks
            self.counts["aborted"] += 0 if request.forced is not None else len(ids)
            request.done(
                EngineError(f"version {turn.version} gives scores that are not finite (session {request.session})")
            )
            return
        paused = self.paused_s()
        request.done(
            Generation(
                ids,
                logprobs,
                turn.version,
                finish,
                cached_tokens=admission.cached,
                computed_tokens=admission.computed,
                recomputed_tokens=admission.recomputed,
                queue_s=turn.admitted - request.arrived - (turn.paused_before - request.paused_before),
                decode_s=time.monotonic() - turn.admitted - (paused - turn.paused_before),
                paused_s=paused - request.paused_before,
            )
        )

    def _close(self, turn: Turn) -> None:
        """End a turn early; the session keeps the KV of what was computed."""
        self.counts["aborted"] += int(self.slots.made[turn.slot])
        version, slot = turn.version, turn.slot
        if turn in self._filling.get(version, ()):
            self._filling[version].remove(turn)
            if not self._filling[version]:
                del self._filling[version]
            kv = turn.admission.start + turn.prefilled
            known = np.concatenate((turn.request.ids[: turn.admission.start], turn.tokens))[:kv]
            if turn.leads is not None:
                del self._leaders[turn.leads]
        else:
            kv = int(self.slots.kv[slot])
            known = np.concatenate((turn.request.ids, self.slots.ids[slot, : self.slots.made[slot]]))[:kv]
            decoding = self._decoding[version]
            self._decoding[version] = decoding[decoding != slot]
            if not len(self._decoding[version]):
                del self._decoding[version]
        self.cache.finish(turn.admission.record, known, len(known), pending=False)
        self._vacate(turn)

    def _vacate(self, turn: Turn) -> None:
        del self._turns[turn.slot]
        self.slots.free.append(turn.slot)
        self._sessions.discard(turn.request.session)
        self._changed = True


_NONE = np.empty(0, np.int32)
