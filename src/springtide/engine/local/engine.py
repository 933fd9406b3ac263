"""The local engine: continuous batching behind the Engine protocol, on one event loop.

Owns: the stepping loop, weight slots (load, pin, drop, drain), pausing, and the clock of busy, idle and paused time.
Invariants: between two steps the event loop runs, so any call is answered within about one step; a fault in a step
ends the engine (and with it its process) instead of leaving callers to wait; KV never crosses versions.
Called by: `engine.server` (a process of its own), tests, `LocalEngine` users in one process.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Unpack

import numpy as np
import torch

from springtide.engine.clock import Clock
from springtide.engine.local.core import EngineCore, Request
from springtide.engine.local.kernels import PagedKernels, TorchPaged
from springtide.engine.local.kv import BLOCK
from springtide.engine.local.native import NativePaged, library, supports
from springtide.engine.protocol import EngineError, EngineStats, Generation, Options, Sampling
from springtide.models.decoder import Decoder, DecoderConfig, sequence_logprobs
from springtide.pace import Pace
from springtide.weights.store import FingerprintMismatch, WeightStore

# Replies leave and requests arrive in a few turns of the event loop; without these a request waits several steps.
_LOOP_TURNS = 4
# A canary computed in bfloat16 against a publisher in float32: 8 bits of mantissa over a model's depth.
_BFLOAT16_TOLERANCE = 0.5


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What a local engine is made of; sizes are those of the configuration's `engine` table."""

    model: str
    store: str
    max_batch: int = 128
    kv_tokens: int = 65536
    prefill_chunk: int = 2048
    weight_slots: int = 4
    device: str = "cpu"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # auto: float32 on a CPU, bfloat16 elsewhere
    kernels: Literal["auto", "torch"] = "auto"

    @classmethod
    def of(cls, model: str, store: str, table: Mapping[str, Any]) -> EngineSettings:
        """From the `engine` table of a run's resolved configuration."""
        names = ("max_batch", "kv_tokens", "prefill_chunk", "weight_slots", "device")
        return cls(model, store, **{name: table[name] for name in names})

    @property
    def torch_dtype(self) -> torch.dtype:
        name = self.dtype
        if name == "auto":
            name = "float32" if self.device == "cpu" else "bfloat16"
        return torch.float32 if name == "float32" else torch.bfloat16


def make_core(config: DecoderConfig, settings: EngineSettings) -> EngineCore:
    """Kernels and scheduler for a model, without weights."""
    positions = min(config.max_positions, settings.kv_tokens // BLOCK * BLOCK)
    kernels = make_kernels(config, settings, positions)
    return EngineCore(
        kernels,
        vocab_size=config.vocab_size,
        positions=positions,
        kv_tokens=settings.kv_tokens,
        max_batch=settings.max_batch,
        prefill_chunk=settings.prefill_chunk,
    )


def make_kernels(config: DecoderConfig, settings: EngineSettings, positions: int) -> PagedKernels:
    """The compiled kernels where they can run, else PyTorch's."""
    blocks = settings.kv_tokens // BLOCK
    native = settings.kernels == "auto" and settings.device == "cpu" and settings.torch_dtype == torch.float32
    if native and supports(config) and (loaded := library()) is not None:
        return NativePaged(config, blocks, positions, loaded)
    return TorchPaged(config, blocks, positions, settings.torch_dtype, settings.device)


class LocalEngine:
    """Implements `engine.protocol.Engine`. Use `async with LocalEngine.open(settings) as engine`."""

    def __init__(self, settings: EngineSettings, pace: Pace | None = None) -> None:
        self.settings, self._pace = settings, pace
        self.config = DecoderConfig.read(Path(settings.model))
        self.core = make_core(self.config, settings)
        self.store = WeightStore(Path(settings.store))
        self.clock = Clock()
        self.core.paused_s = self.clock.paused
        self.core.paced = pace.engine_step if pace else None
        self._pinned: set[int] = set()
        self._paused = False
        self._wake = asyncio.Event()
        self._drained = asyncio.Condition()
        self._loading = asyncio.Lock()

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, settings: EngineSettings, pace: Pace | None = None) -> AsyncIterator[LocalEngine]:
        engine = cls(settings, pace)
        async with asyncio.TaskGroup() as tasks:
            loop = tasks.create_task(engine._run(), name="engine steps")
            try:
                yield engine
            finally:
                loop.cancel()

    async def _run(self) -> None:
        while True:
            async with self._drained:
                self._drained.notify_all()
            if self._paused:
                self.clock.switch("paused")
                await self._sleep()
                continue
            self.clock.switch("busy")
            if self.core.step():
                for _ in range(_LOOP_TURNS):
                    await asyncio.sleep(0)
                continue
            self.clock.switch("idle_no_weights" if self.core.waiting else "idle_no_requests")
            await self._sleep()

    async def _sleep(self) -> None:
        self._wake.clear()
        await self._wake.wait()
        if self._pace:
            self._pace.begin()

    # --- turns ------------------------------------------------------------------------------------------------

    async def generate(
        self, session: str, ids: np.ndarray, sampling: Sampling, **options: Unpack[Options]
    ) -> Generation:
        """See `Engine.generate`. A cancelled call ends its turn; the session keeps what was computed."""
        future, request = self._request(session, ids, sampling, **options)
        self.core.submit(request)
        return (await self._results([session], [future]))[0]

    async def generate_many(self, requests: tuple[dict[str, Any], ...]) -> tuple[Generation | str, ...]:
        """Run turns together, in order, on an engine that does nothing else meanwhile.

        Each request holds the arguments of `generate` by name. Given equal earlier calls the batches are composed
        equally, so results are equal bit for bit. A refused request's result is the refusal's text.
        """
        pairs = [self._request(**request) for request in requests]
        self.core.submit_many([request for _, request in pairs])
        results = await self._results([r.session for _, r in pairs], [f for f, _ in pairs], refusals=True)
        return tuple(str(r) if isinstance(r, EngineError) else r for r in results)

    def _request(
        self, session: str, ids: np.ndarray, sampling: Sampling, **options: Unpack[Options]
    ) -> tuple[asyncio.Future[Generation], Request]:
        future: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        forced = None if (given := options.get("forced_ids")) is None else np.asarray(given, np.int32)

        def done(result: Generation | EngineError) -> None:
            if future.done():  # its caller gave up in this very step
                if isinstance(result, Generation) and forced is None:
                    self.core.counts["aborted"] += len(result.ids)
                return
            if isinstance(result, EngineError):
                future.set_exception(result)
            else:
                future.set_result(result)

        version, prefix, priority = options.get("version"), options.get("prefix"), options.get("priority", 0)
        return future, Request(session, np.asarray(ids, np.int32), sampling, done, version, prefix, forced, priority)

    async def _results(
        self, sessions: list[str], futures: list[asyncio.Future[Generation]], *, refusals: bool = False
    ) -> list[Any]:
        self._wake.set()
        try:
            return await asyncio.gather(*futures, return_exceptions=refusals)
        except asyncio.CancelledError:
            for session in sessions:
                self.core.abort(session)
            raise

    async def release(self, session: str) -> None:
        self.forget(session)

    def forget(self, session: str) -> None:
        """`release`, for callers that cannot wait: the session's turn ends with an EngineError, its KV is free."""
        self.core.release(session)
        self._wake.set()

    async def pause(self, mode: Literal["keep", "abort"]) -> None:
        """Stop stepping. keep: running turns go on at `resume`. abort: every turn ends with an EngineError."""
        if mode not in ("keep", "abort"):
            raise EngineError(f"pause mode {mode!r}; it is keep or abort")
        self._paused = True
        if mode == "abort":
            self.core.abort_all("aborted: the engine was paused with mode abort")
        self._wake.set()
        await asyncio.sleep(0)

    async def resume(self) -> None:
        self._paused = False
        self._wake.set()

    # --- weights ----------------------------------------------------------------------------------------------

    async def load(self, version: int) -> None:
        """See `Engine.load`. Raises: StoreError, FingerprintMismatch; EngineError if every slot is pinned or a weight
        is not finite."""
        async with self._loading:
            if version not in self.core.decoders:
                await self._make_slot()
                self.core.add_version(version, await asyncio.to_thread(self._read, version))
            else:
                self.core.newest = max(self.core.newest, version)
            self._wake.set()

    def _read(self, version: int) -> Decoder:
        torch.set_num_threads(1 if self.settings.device == "cpu" else torch.get_num_threads())
        decoder = Decoder(
            self.config, self.store.load(version), dtype=self.settings.torch_dtype, device=self.settings.device
        )
        fingerprint = self.store.fingerprint(version)
        canary = fingerprint.canary
        broken = fingerprint.not_finite()
        if broken or (canary is not None and not np.isfinite(canary.logprobs).all()):
            what = f"{broken} holds values" if broken else "the publisher's own log-probs of the canary are values"
            raise EngineError(f"version {version}: {what} that are not finite: training broke its weights")
        if canary is not None:
            found = sequence_logprobs(decoder, torch.tensor(canary.ids))
            gap = (found.cpu() - torch.tensor(canary.logprobs)).abs().max().item()
            tolerance = canary.tolerance
            if self.settings.torch_dtype == torch.bfloat16:
                tolerance = max(tolerance, _BFLOAT16_TOLERANCE)
            if not gap <= tolerance:
                raise FingerprintMismatch(
                    f"version {version}: the canary's log-probs differ by {gap:.3g} from the publisher's "
                    f"(tolerance {tolerance:g}): engine and trainer do not compute the same model"
                )
        return decoder

    async def _make_slot(self) -> None:
        core = self.core
        while len(core.decoders) >= self.settings.weight_slots:
            free = [v for v in core.decoders if v not in self._pinned]
            if not free:
                raise EngineError(
                    f"all {self.settings.weight_slots} weight slots are pinned ({sorted(core.decoders)}); drop one, "
                    "or raise engine.weight_slots"
                )
            # The newest goes only if there is but one slot; a version that nothing runs under goes before a busy one.
            free.sort(key=lambda v: (v == core.newest, core.turns_of(v) > 0))
            await self._free(free[0])

    async def _free(self, version: int) -> None:
        self.core.draining.add(version)
        if self.core.turns_of(version):
            if self._paused:
                self.core.draining.discard(version)
                raise EngineError(
                    f"no weight slot is free: version {version} has turns that a pause keeps from ending; resume "
                    "first, pause with abort, or raise engine.weight_slots"
                )
            async with self._drained:
                await self._drained.wait_for(lambda: not self.core.turns_of(version))
        if version in self.core.decoders:
            self.core.remove_version(version)

    async def drop(self, version: int) -> None:
        """Unpin `version` and free its slot; the newest is only unpinned. Unknown versions are gone already."""
        self._pinned.discard(version)
        async with self._loading:
            if version in self.core.decoders and version != self.core.newest:
                await self._free(version)

    async def pin(self, version: int) -> None:
        if version not in self.core.decoders or version in self.core.draining:
            raise EngineError(
                f"version {version} is not loaded, so it cannot be pinned; loaded: {list(self.core.decoders)}"
            )
        self._pinned.add(version)

    async def stats(self) -> EngineStats:
        core, counts = self.core, self.core.counts
        self.clock.tick()
        extra: dict[str, Any] = {
            "idle_causes": self.clock.causes("idle_"),
            "recomputed_causes": {
                k.removeprefix("recomputed_"): v for k, v in counts.items() if k.startswith("recomputed_")
            },
            "kv_evictable_tokens": core.cache.pool.evictable() * BLOCK,
            "evicted_tokens": core.cache.evicted_tokens,
            "forced_tokens": counts["forced"],
            "prefixes": len(core.cache.prefixes),
            "pinned": sorted(self._pinned),
            "kernels": type(core.kernels).__name__,
            **({"pace": self._pace.counts} if self._pace else {}),
        }
        return EngineStats(
            versions=tuple(core.decoders),
            newest=core.newest,
            waiting=len(core.waiting),
            running=core.running,
            sessions=len(core.cache.sessions),
            kv_tokens=core.cache.used_tokens,
            kv_capacity=core.cache.pool.total * BLOCK,
            generated_tokens=counts["generated"],
            aborted_tokens=counts["aborted"],
            computed_tokens=counts["computed"],
            cached_tokens=counts["cached"],
            recomputed_tokens=counts["recomputed"],
            busy_s=self.clock.total("busy"),
            idle_s=self.clock.total("idle"),
            paused_s=self.clock.total("paused"),
            extra=extra,
        )
