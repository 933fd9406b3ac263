"""Asynchronous against synchronous training where tools answer late, by a law of heavy tail written down before.

The quickstart's preset, its three suites played through tools that sleep (`wrapped.py`: lognormal, median 0.25 s, one
call in a hundred over 4.6 s; a call's latency depends on the task and the call alone, so every mode meets the same).
Speed, in rounds that each run every mode for a fixed time, one after the other:
  asynchronous   as shipped: play and train side by side, at most two steps of staleness
  synchronous    `schedule.policy = "synchronous"`: bit-reproducible, so every turn waits for all episodes of its wave
  step barrier   `staleness.bound = 0`: on policy too, but only the step waits, for its last group. Nothing is
                 reproducible then, and the tail is paid once a step: the harder comparison, with the same target
Held-out success at equal steps: `STEPS` optimiser steps, asynchronous and synchronous, on five seeds, evaluated before
and after on the test split, which is never slow. What a synchronous run learns does not depend on time (it repeats bit
for bit), so its cells do not sleep. "Equal" is a mean difference within its own 95% interval around 0; the half width
says what difference would have been seen.
On two quiet cores: a round 10 minutes, two rounds; a cell 3 to 4, ten cells. `--cells` runs the cells alone,
`--missing` only those that are missing, `--speed` the rounds alone, beside whatever cells are stored.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import NormalDist, fmean
from typing import Any

import common
import wrapped
from common import (
    CELLS,
    REPO,
    Cell,
    Json,
    Load,
    Row,
    arguments,
    emit,
    interval,
    parse,
    preset,
    ratio_interval,
    report,
    scratch,
)
from goodput import Figures, play
from runs import evaluations, make_cell

from springtide.config import Config, ConfigError
from springtide.rundir import RunDirectory

SHIPPED = ("db", "kg", "household")
SLOW = tuple(f"benchmarks/wrapped.py:Slow{suite.capitalize()}" for suite in SHIPPED)  # from the repository's root
SLOW_SUITES = "suites=[{}]".format(", ".join(f'{{use="{use}"}}' for use in SLOW))
MODES = {
    "asynchronous": (),
    "synchronous": ("schedule.policy=synchronous",),
    "step barrier": ("staleness.bound=0",),
}
SECONDS = {"asynchronous": 120.0, "synchronous": 300.0, "step barrier": 180.0}  # a synchronous step takes 40
ROUNDS = 2
TARGET = 1.33
SEEDS, STEPS = (0, 1, 2, 3, 4), 30
QUIET = ("observe.report=false", "observe.progress=false")
QUICK_SECONDS = {"asynchronous": 25.0, "synchronous": 90.0, "step barrier": 50.0}
QUICK_SPEED = ("trainer.groups=2", "rollout.group.n=4", "rollout.concurrency=6")
QUICK_CELL = (*QUICK_SPEED, "eval.tasks=4", "run.steps=3")


# --- cells ------------------------------------------------------------------------------------------------------------


def make_config(mode: str, seed: int, sets: Sequence[str]) -> Config:
    """Only the asynchronous arm sleeps: what the other learns does not depend on time."""
    slow = (SLOW_SUITES,) if mode == "asynchronous" else ()
    return preset(*slow, *MODES[mode], f"run.seed={seed}", f"run.steps={STEPS}", "run.minutes=60", *QUIET, *sets)


def cell(mode: str, seed: int, sets: Sequence[str] = ()) -> Cell:
    config = make_config(mode, seed, sets)
    return make_cell(
        f"latency-{mode}-{seed}", config, [train], suites=(*SHIPPED, *(SLOW if mode == "asynchronous" else ()))
    )


def train(config: Config) -> Json:
    """Returns `{start, end, steps, train_s, staleness}`. Raises: SystemExit if it ended before its last step."""
    common.train(config)
    run = RunDirectory(config.run_dir)
    summary = json.loads(run.summary.read_text())
    if summary["steps"] != config.run.steps:
        raise SystemExit(f"{summary['steps']} of {config.run.steps} steps within {config.run.minutes:g} minutes")
    return {
        **evaluations(run),
        "steps": summary["steps"],
        "train_s": summary["wall_s"],
        "staleness": summary["staleness_mean"],
    }


def run_cells(seeds: Sequence[int], sets: Sequence[str], *, missing: bool, directory: Path) -> dict[str, list[Json]]:
    """Mode -> its cells, in the order of seeds."""
    cells: dict[str, list[Json]] = {"asynchronous": [], "synchronous": []}
    for seed in seeds:
        for mode, found in cells.items():

            def compute(mode: str = mode, seed: int = seed) -> Json:
                with scratch() as place:
                    return train(make_config(mode, seed, (*sets, f"run.dir={place}", "run.name=cell")))

            found.append(cell(mode, seed, sets).run(compute, missing=missing, directory=directory))
        print(f"seed {seed} done", file=sys.stderr, flush=True)
    return cells


def stored_cells() -> dict[str, list[Json]] | None:
    """As `run_cells`, of what is stored; None if any is missing."""
    cells = {mode: [cell(mode, seed).stored() for seed in SEEDS] for mode in ("asynchronous", "synchronous")}
    found = {mode: [c for c in of if c is not None] for mode, of in cells.items()}
    return found if found == cells else None


# --- the table --------------------------------------------------------------------------------------------------------


def speed_rows(rounds: dict[str, list[Figures]]) -> list[Row]:
    ours = rounds["asynchronous"]
    rows = []
    for mode in ("synchronous", "step barrier"):
        theirs = rounds[mode]
        a, b = ([f.loss_tokens_per_s for f in arm] for arm in (ours, theirs))
        low, high = ratio_interval(a, b)
        target = f"slow tools: loss tokens, asynchronous against {mode}"
        row = Row(
            target, fmean(a), "tokens/s", mode, fmean(b), TARGET, judged="ratio", seeds=len(a), ci_low=low, ci_high=high
        )
        rows.append(row)
    for target, unit, read in (
        ("seconds a step", "s", lambda f: f.step_s),
        ("trainer outside its step", "%", lambda f: 100 * sum(f.trainer.values())),
        ("engine idle", "%", lambda f: 100 * sum(f.engine.values())),
        ("staleness, mean", "steps", lambda f: f.staleness),
    ):
        values = {mode: fmean(map(read, arm)) for mode, arm in rounds.items()}
        rows += [
            Row(f"slow tools: {target} ({mode})", value, unit, "asynchronous", values["asynchronous"], seeds=len(ours))
            for mode, value in values.items()
        ]
    return rows


def success_rows(ours: Sequence[Json], theirs: Sequence[Json]) -> list[Row]:
    """Held-out success at equal steps, from the results of the arms' seeds in the same order."""
    ends = [[_success(r, "end") for r in arm] for arm in (ours, theirs)]
    differences = [a - b for a, b in zip(*ends, strict=True)]
    low, high = interval(differences)
    half = None if low is None or high is None else (high - low) / 2
    mean = fmean(differences)
    what = f"held-out success after {ours[0]['steps']} steps"
    return [
        _equal_row(ours[0]["steps"], abs(mean) / half if half else None, len(differences)),
        Row(
            f"{what}: asynchronous less synchronous",
            mean,
            "points",
            seeds=len(differences),
            ci_low=low,
            ci_high=high,
            extra={"by_seed": differences},
        ),
        Row(f"{what}: a difference that would have been seen", half, "points", seeds=len(differences)),
        *(_gain_row(f"{what}: gain, {mode}", arm) for mode, arm in (("asynchronous", ours), ("synchronous", theirs))),
    ]


def _equal_row(steps: int, distance: float | None, seeds: int) -> Row:
    target = "distance of asynchronous from synchronous, in half widths of its interval"
    what = f"held-out success after {steps} steps: {target}"
    return Row(what, distance, "half widths", required=1.0, at_most=True, seeds=seeds)


def _gain_row(target: str, arm: Sequence[Json]) -> Row:
    gains = [_success(r, "end") - _success(r, "start") for r in arm]
    low, high = interval(gains)
    return Row(target, fmean(gains), "points", seeds=len(gains), ci_low=low, ci_high=high, extra={"by_seed": gains})


def _success(result: Json, when: str) -> float:
    """Mean sampled success over suites, in percent."""
    return 100 * fmean(suite["sampled"] for suite in result[when].values())


def law() -> str:
    """The law of latency, in words."""
    p99 = wrapped.MEDIAN_S * math.exp(wrapped.SIGMA * NormalDist().inv_cdf(0.99))
    return (
        f"Latency of a tool call: lognormal, median {wrapped.MEDIAN_S:g} s, sigma {wrapped.SIGMA:g}, 99th percentile "
        f"{p99:.1f} s, cut at {wrapped.MOST_S:g} s, seed {wrapped.LATENCY_SEED}; a function of the task, of how many "
        "calls came before in the episode, and of the call."
    )


# --- the command ------------------------------------------------------------------------------------------------------


def measure(quick: bool, sets: Sequence[str]) -> tuple[dict[str, list[Figures]], Load]:
    rounds: dict[str, list[Figures]] = {mode: [] for mode in MODES}
    with Load() as load:
        for _ in range(1 if quick else ROUNDS):
            with scratch() as directory:
                for mode, own in MODES.items():
                    seconds = (QUICK_SECONDS if quick else SECONDS)[mode]
                    name = mode.replace(" ", "-")
                    rounds[mode].append(play(name, seconds, directory, (SLOW_SUITES, *own, *sets))[0])
                    print(f"{mode} done", file=sys.stderr, flush=True)
    return rounds, load


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__, runs=True, cells=True)
    part = parser.add_mutually_exclusive_group()
    part.add_argument("--cells", action="store_true", help="only the cells: no timing")
    part.add_argument("--speed", action="store_true", help="only the timing, beside the cells that are stored")
    args = parse(parser, argv)
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.chdir(REPO))  # the suites' file is named from there
            directory, seeds, sets = CELLS, SEEDS, tuple[str, ...]()
            if args.quick:
                directory = stack.enter_context(scratch())
                seeds, sets = SEEDS[:1], (*QUICK_CELL, *args.set)
            played = functools.partial(run_cells, seeds, sets, missing=args.missing, directory=directory)
            cells = (stored_cells() if args.speed else played()) or {}
            results: dict[str, list[Any]] = {mode: [c["result"] for c in found] for mode, found in cells.items()}
            rows = success_rows(*results.values()) if results else [_equal_row(STEPS, None, 0)]
            if args.cells:
                print("\n".join(f"{row.target}: {row.value}" for row in rows))
                return
            rounds, load = measure(args.quick, (*QUICK_SPEED, *args.set) if args.quick else ())
    except ConfigError as error:
        parser.error(str(error))
    keys = [c["key"] for found in cells.values() for c in found]
    result = report("latency", [*speed_rows(rounds), *rows], load, quick=args.quick, notes=[law()], cells=keys)
    emit(result, as_json=args.json)


if __name__ == "__main__":
    main()
