"""The quickstart's claim: reinforcement learning beats its start, and more supervised training for the same seconds.

Two arms, three seeds each, on the `test` split, both evaluated as the preset says (sampled as in training, greedy
beside it, the same tasks and the same seeds, before and after):
  rl          `springtide quickstart --seed N` as shipped, in a process of its own, its memory watched from outside
  supervised  the same model, processes and optimiser, but every step is a supervised one on the gold of the first
              `trainer.cold_start.tasks` training tasks a suite, for as many seconds as `rl` trains (playing the gold
              is not charged to them). Its learning rate is the best of four, chosen on the dev tasks by `--tune`.
A requirement must hold for each seed, and is judged by the worst. Wall time is the whole command's: start, both
evaluations, training, report. Gains are in points of success; a seed's gain has sampling noise of its own.
On two quiet cores: a cell takes 10 minutes, a trial of `--tune` 1.5; six cells and four trials. Cells resume:
`--missing`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from common import (
    CELLS,
    Cell,
    Json,
    Row,
    arguments,
    emit,
    interval,
    parse,
    preset,
    report_cells,
    scratch,
    springtide,
)
from runs import evaluate, evaluations, make_cell, play, publish

from springtide.config import Config, ConfigError
from springtide.rollout.episode import EpisodeSpec
from springtide.rollout.pool import play_once
from springtide.rundir import RunDirectory
from springtide.runtime.local import Runtime, open_runtime
from springtide.trace import TaskRef, make_version
from springtide.trainer.start import check

SEEDS = (0, 1, 2)
LR_FACTORS = (0.0625, 0.25, 1.0, 4.0)  # of the preset's trainer.lr; its grid must not end where the best is
TRIAL_MINUTES = 1.0  # gold is learned by heart within it at every rate but the smallest
_GOLD_EPISODES = 64
QUICK = ("run.minutes=0.2", "eval.tasks=8", "trainer.cold_start.tasks=16")


# --- the arms ---------------------------------------------------------------------------------------------------------


def train_rl(config: Config, directory: Path, sets: Sequence[str]) -> Json:
    """The quickstart as a user runs it. Returns `{start, end, steps, train_s, wall_s, peak_pss_mib}`."""
    given = (*sets, f"run.dir={directory}", "run.name=rl", "observe.progress=false")
    args = [part for item in given for part in ("--set", item)]
    done = springtide("quickstart", "--seed", str(config.run.seed), *args, log=directory / "rl.log")
    run = RunDirectory(directory / "rl")
    summary = json.loads(run.summary.read_text())
    return {
        **evaluations(run),
        "steps": summary["steps"],
        "train_s": summary["wall_s"],
        "wall_s": done.wall_s,
        "peak_pss_mib": done.peak_pss_mib,
    }


async def train_supervised(config: Config, directory: Path, lr: float) -> Json:
    """Supervised steps on gold for `run.minutes`, in the run's own processes. Returns `{start, end, steps, ...}`."""
    assert config.run.minutes is not None
    rng = np.random.default_rng(config.run.seed)
    async with open_runtime(config, directory, await check(config), checkpoint=None) as runtime:
        await publish(runtime, make_version(0, 0))
        start = await evaluate(config, runtime, make_version(0, 0))
        gold = await _play_gold(config, runtime, directory)
        batch = min(config.trainer.cold_start.batch, len(gold))
        queue: list[str] = []
        losses: list[float] = []
        begun = time.monotonic()
        while time.monotonic() - begun < config.run.minutes * 60:
            if len(queue) < batch:  # a new epoch, in a new order
                queue += rng.permutation(np.array(sorted(set(gold) - set(queue)))).tolist()
            paths, queue = tuple(queue[:batch]), queue[batch:]
            learned = await runtime.trainer.call("supervised", deadline_s=600, paths=paths, lr=lr)
            losses.append(learned["loss"])
        seconds = time.monotonic() - begun
        await publish(runtime, make_version(0, 1))
        end = await evaluate(config, runtime, make_version(0, 1))
    return {
        "start": start,
        "end": end,
        "lr": lr,
        "steps": len(losses),
        "epochs": len(losses) * batch / len(gold),
        "train_s": seconds,
        "loss_start": losses[0],
        "loss_end": losses[-1],
    }


async def _play_gold(config: Config, runtime: Runtime, directory: Path) -> list[str]:
    """The files of the gold trajectories: of the first trainable tasks a suite, as the cold start plays them."""
    tasks: list[TaskRef] = []
    for entry in config.suites:
        catalog = await runtime.catalog.catalog(entry.use, entry.split, entry.level)
        tasks += [t for t in catalog if "dev" not in t.tags][: config.trainer.cold_start.tasks]
    gate, paths = asyncio.Semaphore(_GOLD_EPISODES), list[str]()

    async def play(visit: int, task: TaskRef) -> None:
        path = directory / f"gold-{visit:06d}.msgpack"
        async with gate:
            summary = await play_once(runtime.pool, EpisodeSpec.of(config, "gold", task, visit, 0, 0), keep=path)
        if summary.cause is not None or not summary.success:
            raise SystemExit(f"the gold of {task.id} does not succeed ({summary.status}: {summary.detail})")
        paths.append(str(path))

    async with asyncio.TaskGroup() as group:
        for visit, task in enumerate(tasks):
            group.create_task(play(visit, task))
    return paths


# --- cells ------------------------------------------------------------------------------------------------------------


def rl_cell(seed: int, sets: Sequence[str]) -> Cell:
    config = preset(*sets, f"run.seed={seed}")
    return make_cell(f"learning-rl-{seed}", config, [train_rl])


def supervised_cell(name: str, seed: int, factor: float, sets: Sequence[str]) -> Cell:
    """factor: learning rate, as a multiple of the preset's trainer.lr."""
    config = preset(*sets, f"run.seed={seed}")
    program: list[Callable[..., Any]] = [train_supervised, _play_gold, evaluate, play]
    return make_cell(name, config, program, supervised_lr=factor * config.trainer.lr)


def run_rl(cell: Cell, seed: int, sets: Sequence[str], *, missing: bool, directory: Path) -> Json:
    def compute() -> Json:
        with scratch() as place:
            return train_rl(preset(*sets, f"run.seed={seed}"), place, sets)

    return cell.run(compute, missing=missing, directory=directory)


def run_supervised(cell: Cell, seed: int, sets: Sequence[str], *, missing: bool, directory: Path) -> Json:
    def compute() -> Json:
        with scratch() as place:
            config = preset(*sets, f"run.seed={seed}")
            return asyncio.run(train_supervised(config, place, cell.config["supervised_lr"]))

    return cell.run(compute, missing=missing, directory=directory)


def tune_cells(sets: Sequence[str]) -> dict[float, Cell]:
    """Learning rate factor -> the cell that tries it, on the dev tasks."""
    return {f: supervised_cell(f"learning-tune-{f:g}", 0, f, tuning(sets)) for f in LR_FACTORS}


def tuning(sets: Sequence[str]) -> tuple[str, ...]:
    """A trial is on the dev tasks, and shorter than the arm."""
    minutes = preset(*sets).run.minutes
    assert minutes is not None
    return (*sets, "eval.dev=true", f"run.minutes={min(minutes, TRIAL_MINUTES)}")


# --- the table --------------------------------------------------------------------------------------------------------


def make_rows(rl: Sequence[Json], supervised: Sequence[Json]) -> list[Row]:
    """One row a target, from the results of the arms' seeds, in the same order."""
    suites = sorted(rl[0]["start"])
    sampled = [_gain(r, "sampled", suites) for r in rl]
    by_suite = {s: [_gain(r, "sampled", [s]) for r in rl] for s in suites}
    ahead = [
        100 * (_mean(a, "end", "sampled", suites) - _mean(b, "end", "sampled", suites)) for a, b in zip(rl, supervised)
    ]
    return [
        _row("mean sampled success, gain", sampled, "points", 20),
        *(_row(f"{s}: sampled success, gain", values, "points", 10) for s, values in by_suite.items()),
        _row("mean greedy success, gain", [_gain(r, "greedy", suites) for r in rl], "points", 5),
        _row("mean sampled success, rl ahead of supervised", ahead, "points", 10),
        _row("goal: mean sampled success, gain", sampled, "points", 30),
        *(_row(f"goal: {s}: sampled success, gain", values, "points", 15) for s, values in by_suite.items()),
        _row("supervised: mean sampled success, gain", [_gain(r, "sampled", suites) for r in supervised], "points"),
        _row("evaluated episodes a suite, at least", [_episodes(r) for r in (*rl, *supervised)], "episodes", 192),
        _row("peak memory, PSS of all processes", [r["peak_pss_mib"] for r in rl], "MiB", 4096, at_most=True),
        _row("wall time of the quickstart", [r["wall_s"] / 60 for r in rl], "min", 12, at_most=True),
    ]


def _row(
    target: str, values: Sequence[float], unit: str, required: float | None = None, *, at_most: bool = False
) -> Row:
    low, high = interval(values)
    return Row(
        target,
        fmean(values),
        unit,
        required=required,
        at_most=at_most,
        judged="worst",
        worst=max(values) if at_most else min(values),
        seeds=len(values),
        ci_low=low,
        ci_high=high,
        extra={"by_seed": list(values)},
    )


def _mean(result: Json, when: str, key: str, suites: Sequence[str]) -> float:
    return fmean(result[when][s][key] for s in suites)


def _gain(result: Json, key: str, suites: Sequence[str]) -> float:
    return 100 * (_mean(result, "end", key, suites) - _mean(result, "start", key, suites))


def _episodes(result: Json) -> float:
    return min(s["episodes"] for when in ("start", "end") for s in result[when].values())


def make_notes(arms: dict[str, Sequence[Json]]) -> list[str]:
    """Before and after, every arm, seed and suite, as a table."""
    lines = ["| arm | seed | suite | sampled | greedy | steps | trained, min |", "|---|---|---|---|---|---|---|"]
    for arm, cells in arms.items():
        for cell in cells:
            r, seed = cell["result"], cell["config"]["run"]["seed"]
            suites = sorted(r["start"])
            for name, group in (*((s, [s]) for s in suites), ("mean", suites)):
                pair = {
                    k: " -> ".join(f"{100 * _mean(r, when, k, group):.1f}" for when in ("start", "end"))
                    for k in ("sampled", "greedy")
                }
                lines.append(
                    f"| {arm} | {seed} | {name} | {pair['sampled']} | {pair['greedy']} | {r['steps']} "
                    f"| {r['train_s'] / 60:.1f} |"
                )
    return lines


# --- the command ------------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__, runs=True, cells=True)
    parser.add_argument("--tune", action="store_true", help="choose the supervised learning rate, on dev tasks")
    args = parse(parser, argv)
    try:
        _main(args, parser)
    except ConfigError as error:
        parser.error(str(error))


def _main(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    sets = (*QUICK, *args.set) if args.quick else ()
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(scratch()) if args.quick else CELLS
        if args.tune:
            _tune(args, sets, directory)
            return
        seeds, factor = (SEEDS[:1], 1.0) if args.quick else (SEEDS, _chosen(parser, directory))
        options = {"missing": args.missing, "directory": directory}
        rl, supervised = [], []
        for seed in seeds:
            rl.append(run_rl(rl_cell(seed, sets), seed, sets, **options))
            cell = supervised_cell(f"learning-supervised-{seed}", seed, factor, sets)
            supervised.append(run_supervised(cell, seed, sets, **options))
            print(f"seed {seed} done", file=sys.stderr, flush=True)
        rows = make_rows([c["result"] for c in rl], [c["result"] for c in supervised])
        notes = make_notes({"rl": rl, "supervised": supervised})
        emit(report_cells("learning", rows, [*rl, *supervised], quick=args.quick, notes=notes), as_json=args.json)


def best(cells: dict[float, Json]) -> float:
    """The learning rate factor with the highest mean sampled success at the end."""
    return max(cells, key=lambda f: _mean(cells[f]["result"], "end", "sampled", sorted(cells[f]["result"]["end"])))


def _chosen(parser: argparse.ArgumentParser, directory: Path) -> float:
    """The factor that `--tune` found, if what it ran is what would run now."""
    stored = {f: data for f, cell in tune_cells(()).items() if (data := cell.stored(directory)) is not None}
    if len(stored) < len(LR_FACTORS):
        parser.error("the supervised arm's learning rate is not chosen yet; first run --tune --missing")
    return best(stored)


def _tune(args: argparse.Namespace, sets: Sequence[str], directory: Path) -> None:
    cells = {
        factor: run_supervised(cell, 0, tuning(sets), missing=args.missing, directory=directory)
        for factor, cell in tune_cells(sets).items()
    }
    rows = [
        _row(
            f"supervised at {factor:g} x trainer.lr: mean sampled success on dev, gain",
            [_gain(c["result"], "sampled", sorted(c["result"]["end"]))],
            "points",
        )
        for factor, c in cells.items()
    ]
    result = report_cells("learning-tune", rows, list(cells.values()), quick=args.quick, best=best(cells))
    emit(result, as_json=args.json, store=False)


if __name__ == "__main__":
    main()
