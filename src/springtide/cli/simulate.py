"""`springtide simulate`: scheduling policies on a cluster of GPUs that nobody had to rent."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from springtide.config import ConfigError

_COLUMNS = (
    ("goodput_tokens_per_s", "goodput tok/s", "{:,.0f}"),
    ("step_s", "step s", "{:.1f}"),
    ("time_to_equal_learning_s", "equal learning s", "{:,.0f}"),
    ("kv_hit_rate", "KV hits", "{:.1%}"),
    ("rollout_wait_share", "rollout waits", "{:.1%}"),
    ("train_wait_share", "trainer waits", "{:.1%}"),
    ("staleness", "staleness", "{:.2f}"),
)


def command(
    preset: Annotated[str, typer.Argument(help="alfworld, webshop, office, swe, osworld, math, or a trace FILE.jsonl")],
    policy: Annotated[str, typer.Option(help="all, or names with commas between (docs/scheduling.md)")] = "all",
    gpus: Annotated[int, typer.Option(min=2, help="GPUs in all")] = 8,
    seeds: Annotated[int, typer.Option(min=1, help="runs of each policy, for the intervals")] = 5,
    model: Annotated[str, typer.Option(help="a known model, or a directory with its config.json")] = "",
    device: Annotated[str, typer.Option(help="h100, h200, a100 or h20")] = "h100",
    tensor: Annotated[int, typer.Option(min=1, help="GPUs of one rank")] = 1,
    groups: Annotated[int, typer.Option(min=0, help="groups of a step; 0: four for each GPU")] = 0,
    members: Annotated[int, typer.Option(min=1, help="episodes of a group")] = 8,
    bound: Annotated[int, typer.Option(min=0, help="steps of staleness")] = 2,
    reference: Annotated[str, typer.Option(help="of a KL term: none, resident, or swapped")] = "swapped",
    steps: Annotated[int, typer.Option(min=1, help="optimiser steps that are measured, after four of warm-up")] = 12,
    as_json: Annotated[bool, typer.Option("--json", help="print the rows as JSON")] = False,
    plot: Annotated[Path | None, typer.Option(help="a picture of the last policy's first run")] = None,
) -> None:
    """Play a workload on a simulated cluster under scheduling policies, and compare what they make of it."""
    from springtide.schedule.registry import POLICIES
    from springtide.schedule.roofline import UnknownHardware
    from springtide.simulate.run import Setup, Simulation, summarise
    from springtide.simulate.workload import WorkloadError, read_trace

    names = list(POLICIES) if policy == "all" else policy.split(",")
    if unknown := [name for name in names if name not in POLICIES]:
        raise ConfigError(f"--policy: there is no {unknown[0]!r}; there are {', '.join(POLICIES)}")
    if reference not in ("none", "resident", "swapped"):
        raise ConfigError(f"--reference {reference!r}: none, resident or swapped")
    trace = Path(preset) if preset.endswith(".jsonl") else None
    try:
        setup = Setup(
            workload="webshop" if trace else preset,  # a trace has its own lengths and latencies
            source=read_trace(trace) if trace else None,
            model=model,
            device=device,
            gpus=gpus,
            tensor=tensor,
            groups=groups,
            members=members,
            bound=bound,
            reference=reference,  # type: ignore[arg-type]
            steps=steps,
        )
        simulation = Simulation(setup)
    except OSError as error:
        raise ConfigError(f"cannot read {preset}: {error.strerror}") from None
    except (WorkloadError, UnknownHardware) as error:
        raise ConfigError(str(error)) from None
    found: list[dict[str, Any]] = []
    for name in names:
        found.append(summarise(simulation.rows(name, range(seeds))))
        if not as_json:
            print(_line(found[-1]) if len(found) > 1 else f"{_head(simulation.setup)}\n{_line(found[-1])}", flush=True)
    if as_json:
        print(json.dumps({"preset": preset, "gpus": gpus, "seeds": seeds, "rows": found}))
    if plot is not None:
        from springtide.observe.timeline import draw

        events: list[Any] = []
        simulation.run(names[-1], 0, record=events.append)
        try:
            draw(events, plot)
        except (OSError, ValueError) as error:
            raise ConfigError(f"--plot: cannot write {plot}: {error}") from None


def _head(setup: Any) -> str:
    what = f"{setup.model} on {setup.gpus} {setup.device}, {setup.groups} groups of {setup.members} a step"
    titles = "  ".join(f"{title:>22}" for _, title, _ in _COLUMNS)
    return f"{what}, staleness bound {setup.bound}: means, and half of the 95% interval\n{'policy':<15}{titles}"


def _line(row: dict[str, Any]) -> str:
    cells: Sequence[str] = [_cell(row, name, form) for name, _, form in _COLUMNS]
    return f"{row['policy']:<15}" + "  ".join(f"{cell:>22}" for cell in cells)


def _cell(row: dict[str, Any], name: str, form: str) -> str:
    half = (row[f"{name}_high"] - row[f"{name}_low"]) / 2
    return form.format(row[name]) + (f" +- {form.format(half)}" if half == half else "")
