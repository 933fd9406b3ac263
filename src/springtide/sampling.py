"""The table `rollout.sampling`: which task is drawn next (docs/sampling.md).

Owns: its options. Called by: `config`.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from springtide.tables import Natural, Positive, Share, Table


class SamplingTable(Table):
    kind: Literal["uniform", "frontier", "difficulty", "thompson"] = Field(
        "uniform", description="every task in turn; or those that the policy wins about half the time, three ways"
    )
    ema: float = Field(0.2, gt=0, le=1, description="weight of the newest group in a task's capability")
    centre: float = Field(0.5, gt=0, lt=1, description="frontier, thompson: the capability that is sought")
    width: float = Field(0.25, ge=0.01, le=10, description="frontier: standard deviation of the weight around it")
    candidates: Positive = Field(3, description="frontier: tasks it holds, in steps' worth of the suite's groups")
    explore: Share = Field(
        0.2, description="share of draws from outside the frontier; difficulty, thompson: uniform from all tasks"
    )
    cooldown: Natural = Field(0, description="draws of its suite before a task may come again; not uniform")
    retire_after: Natural = Field(
        0, description="visits in a row all won, or all failed, after which a task comes no more; 0: never; not uniform"
    )
    pass_rates: str | None = Field(
        None, description="prefilter: a file of pass rates measured before; tasks outside the bounds are left out"
    )
    pass_low: Share = Field(0.1, description="prefilter: the lowest rate that stays")
    pass_high: Share = Field(0.9, description="prefilter: the highest rate that stays")

    @model_validator(mode="after")
    def _consistent(self) -> SamplingTable:
        readers = {
            "centre": ("frontier", "thompson"),
            "width": ("frontier",),
            "candidates": ("frontier",),
            **dict.fromkeys(("explore", "cooldown", "retire_after"), ("frontier", "difficulty", "thompson")),
        }
        for name, kinds in readers.items():
            if self.kind not in kinds and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} is read with kind = {' or '.join(map(repr, kinds))} only, not {self.kind!r}")
        for name in ("pass_low", "pass_high"):
            if self.pass_rates is None and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} bounds the rates of pass_rates, which names no file")
        if self.pass_low > self.pass_high:
            raise ValueError(f"pass_low {self.pass_low} is above pass_high {self.pass_high}")
        return self
