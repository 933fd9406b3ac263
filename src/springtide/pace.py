"""Paced devices: real processes, tokens and gradients, in the time a chosen GPU would take for a chosen model.

Owns: the clock that holds a rank's work back, and what it counts. Invariants: work ends no earlier than its roofline
time (`schedule.roofline`) times the scale; the rest of that time is slept, not spun; work that took longer is counted
as an overrun and not made up for; a rank without a pace has None and pays nothing.
Called by: the local engine (a step of each version), the trainer and reference ranks (`trainer.step`), and
`trainer.start` (`check`). A rank stands for `runtime.pace.tensor_parallel` devices, a trainer for `trainer_devices`.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from springtide.config import Config, ConfigError, PaceTable
from springtide.schedule.roofline import DEVICES, Roofline, Shape, UnknownHardware, causal_pairs

KINDS = ("engine", "logprobs", "forward", "backward")


class Pace:
    """One rank's device. Counts are totals since start, by `KIND/steps`, `overran`, `target_s`, `took_s`, `spread/K`.

    spread: how many steps took up to exp(K / 100) times their target. Under the scale "auto" nothing is held back and
    the target is the roofline time itself: this is how a calibration measures.
    """

    def __init__(self, roofline: Roofline, scale: float | Literal["auto"], *, recompute: bool, adapter: bool) -> None:
        self._roofline, self._recompute, self._adapter = roofline, recompute, adapter
        self._scale, self._holds = (1.0, False) if scale == "auto" else (scale, True)
        self._since = time.monotonic()
        self._counts: Counter[str] = Counter()

    @classmethod
    def of(cls, config: Config, role: Literal["engine", "reference", "trainer"]) -> Pace | None:
        """The pace of a rank of this role, None where the run has none."""
        table = config.runtime.pace
        if table.device == "none":
            return None
        adapter = role == "trainer" and config.trainer.lora.rank > 0
        roofline = _roofline(table, trainer=role == "trainer")
        return cls(roofline, table.scale, recompute=table.recompute, adapter=adapter)

    @property
    def counts(self) -> dict[str, float]:
        return dict(self._counts)

    def begin(self) -> None:
        """Work begins now, after the rank had nothing to do."""
        self._since = time.monotonic()

    def engine_step(self, prefill: int, pairs: float, decode: int, context: int) -> None:
        """See `Roofline.engine_step_s`."""
        step_s = self._roofline.engine_step_s(prefill=prefill, pairs=pairs, decode=decode, context=context)
        self._hold("engine", step_s)

    def micro_batch(self, kind: Literal["logprobs", "forward", "backward"], tokens: int, rows: Sequence[int]) -> None:
        """A pass over `tokens` computed tokens, whose attention spans segments of these lengths."""
        pairs = sum(map(causal_pairs, rows))
        if kind == "logprobs":
            seconds = self._roofline.logprobs_s(tokens, pairs)
        elif kind == "forward":
            seconds = self._roofline.forward_s(tokens, pairs)
        else:
            seconds = self._roofline.backward_s(tokens, pairs, recompute=self._recompute, adapter=self._adapter)
        self._hold(kind, seconds)

    def _hold(self, kind: str, seconds: float) -> None:
        """Sleep until `seconds`, scaled, have passed since the work before it was due to end."""
        target, due = seconds * self._scale, self._since + seconds * self._scale
        now = time.monotonic()
        overran = now > due
        if self._holds and not overran:
            time.sleep(due - now)
            now = time.monotonic()
        took = now - self._since
        # What sleeps too long by a timer's slack does not push back all that follows; what overran does.
        self._since = due if self._holds and not overran else now
        self._counts.update(
            {
                f"{kind}/steps": 1,
                f"{kind}/overran": overran,
                f"{kind}/target_s": target,
                f"{kind}/took_s": took,
                f"{kind}/spread/{math.ceil(100 * math.log(max(took, 1e-9) / target))}": 1,
            }
        )


def check(config: Config) -> None:
    """Whether the chosen devices hold the chosen model and what the run asks of it. Raises: ConfigError."""
    table = config.runtime.pace
    if table.device == "none":
        return
    if (config.engine.kind, config.runtime.kind) != ("local", "local"):
        raise ConfigError(
            'runtime.pace.device: only engine.kind = "local" on runtime.kind = "local" is held to a pace; set it to '
            '"none" elsewhere'
        )
    engine, trainer = _roofline(table, trainer=False), _roofline(table, trainer=True)
    heads, count = engine.shape.heads, table.tensor_parallel
    if heads % count:
        raise ConfigError(f"runtime.pace.tensor_parallel: {count} does not divide {table.model}'s {heads} heads")
    room, weights = engine.kv_capacity(), f"{2 * engine.shape.parameters / 1e9:.1f} GB"
    where = f"{count} x {table.device}"
    if room < 1:
        raise ConfigError(
            f"runtime.pace.tensor_parallel: {table.model} ({weights} of weights) does not fit {where}; raise it, or "
            "take another runtime.pace.device"
        )
    if room < config.engine.kv_tokens:
        raise ConfigError(
            f"engine.kv_tokens: {config.engine.kv_tokens} is more than the {room} tokens of KV that {where} hold "
            f"beside {table.model} ({weights}); lower it, or raise runtime.pace.tensor_parallel"
        )
    if config.trainer.sharding == "fsdp":
        trainer = replace(trainer, devices=table.trainer_devices * config.trainer.ranks)
    if not trainer.trains(adapter=config.trainer.lora.rank > 0):
        raise ConfigError(
            f"runtime.pace.trainer_devices: {trainer.devices} x {table.device} cannot hold {table.model} with "
            "gradients and optimiser state; raise it"
        )


def _roofline(table: PaceTable, *, trainer: bool) -> Roofline:
    """Raises: ConfigError."""
    try:
        shape = Shape.of(table.model)
    except UnknownHardware as error:
        raise ConfigError(f"runtime.pace.model: {error}") from None
    return Roofline(DEVICES[table.device], shape, table.trainer_devices if trainer else table.tensor_parallel)
