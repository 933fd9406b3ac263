"""One policy for three suites: against specialists, without its two devices, and crossed with another policy.

All arms train springtide-nano as the quickstart does, for a fixed number of optimiser steps instead of minutes, so that
a busy machine changes no arm's share. Every evaluation is on the preset's `test` tasks, four sampled episodes a task
and a greedy one, with tasks and seeds that all arms of a seed share; the start is evaluated once a seed.
  multi, only-SUITE       3 seeds: one policy, 144 steps on the three suites, against three specialists of 48 steps on
                          their own: 768 groups a suite each. Specialists are evaluated on all suites
  full, nocross, nonorm   8 paired seeds of 64 steps (what two quiet cores take in four minutes): as shipped, without
                          cross-policy sampling, without normalisation of advantages by suite
  passk-PAIR              pass@k of two policies alone, of half the samples from each, and of episodes whose every turn
                          is drawn from one of the two: 48 tasks a suite, 32 episodes of each
Cells are kept as they finish and resume: `--missing`. Minutes a cell on two quiet cores: start 1, full and its like 5,
multi 10, a specialist 4, passk 4; in all about three and a half hours.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import common
from common import CELLS, SOURCES, Cell, Json, arguments, emit, parse, preset, read_lines, report_cells, scratch
from multitask_table import make_notes, make_rows
from runs import choose_tasks, evaluate, make_cell, play, publish

import springtide as package
from springtide.config import Config, ConfigError
from springtide.models.presets import resolve_model
from springtide.rollout.evaluate import EvalResult
from springtide.rundir import RunDirectory
from springtide.runtime.local import open_runtime
from springtide.trace import make_version

BASE = (
    "run.minutes=100000",  # the number of steps ends a run
    "eval.at_ends=false",  # evaluated here, on all suites
    "eval.samples=4",
    "trainer.checkpoint_keep=1",
    "observe.report=false",
    "observe.progress=false",
)
ABLATIONS: dict[str, tuple[str, ...]] = {
    "full": (),
    "nocross": ("rollout.stale_probability=0",),
    "nonorm": ("algorithm.task_norm=none",),
}
# Pair -> two policies: None is the shipped model, else (arm, seed).
Policy = tuple[str, int] | None
PAIRS: dict[str, tuple[Policy, Policy]] = {
    "start-end": (None, ("multi", 0)),
    "seeds": (("multi", 0), ("multi", 1)),
}
_MINUTES = {"start": 1.0, "multi": 11.0, "only": 5.0, "full": 6.0, "nocross": 6.0, "nonorm": 6.0, "passk": 5.0}


@dataclass(frozen=True, slots=True)
class Size:
    """How much is run. steps: of `multi`; short: of an ablation; tasks, samples: of pass@k."""

    steps: int = 144
    short: int = 64
    seeds: int = 3
    paired: int = 8
    tasks: int = 48
    samples: int = 32
    sets: tuple[str, ...] = ()


QUICK = Size(3, 2, 1, 1, 4, 4, ("eval.tasks=8", "trainer.groups=2", "rollout.group.n=4", "rollout.concurrency=4"))


@dataclass(frozen=True, slots=True)
class Job:
    """A cell, how to compute it (given where cells are kept), and its minutes, until one of its kind is stored."""

    cell: Cell
    compute: Callable[[Path], Json]
    minutes: float


# --- the arms ---------------------------------------------------------------------------------------------------------


def train(config: Config) -> tuple[Json, Path]:
    """A run in processes of its own. Returns its figures, and the directory of the model it ends with."""
    done = common.train(config)
    run = RunDirectory(config.run_dir)
    summary = json.loads(run.summary.read_text())
    steps = [r for r in read_lines(run.metrics) if r["kind"] == "step"]
    dropped: Counter[str] = Counter()
    for record in steps:
        dropped.update(record["dropped"])
    events = read_lines(run.events)
    suites = {e["visit"]: e["suite"] for e in events if e["kind"] == "Admitted"}
    groups = Counter(suites[visit] for e in events if e["kind"] == "StepStarted" for visit in e["visits"])
    model = run.saved()[0]
    return {
        "steps": summary["steps"],
        "groups": dict(groups),
        "dropped_groups": dict(dropped),
        "loss_tokens": summary["loss_tokens"],
        "generated_tokens": summary["tokens"]["generated"],
        "staleness_mean": summary["staleness_mean"],
        "stale_turn_share": sum(r["staleness"]["stale_turns"] for r in steps)
        / max(1, sum(r["staleness"]["turns"] for r in steps)),
        "train_s": summary["wall_s"],
        "peak_pss_mib": done.peak_pss_mib,
        "model": _fingerprint(model),
    }, model


def _fingerprint(model: Path) -> str:
    """Tells one trained model from another: a repeated cell ends with the same, or it did not repeat."""
    return hashlib.sha256((model / "model.safetensors").read_bytes()).hexdigest()[:16]


async def evaluate_model(config: Config, model: Path, directory: Path) -> Json:
    """Suite -> figures of the model, under `config`, on all its suites."""
    version = make_version(0, 0)
    async with open_runtime(config, directory, model, checkpoint=None) as runtime:
        await publish(runtime, version)
        return await evaluate(config, runtime, version)


async def count_wins(config: Config, models: tuple[Path, Path], directory: Path) -> Json:
    """Arm -> suite -> `[successes, episodes]` a task: of each policy, and of turns drawn from either by a coin."""
    first, second = make_version(0, 1), make_version(0, 2)
    async with open_runtime(config, directory, models[0], checkpoint=None) as runtime:
        tasks = await choose_tasks(config, runtime)
        await publish(runtime, first)
        await runtime.pin(first)
        again = {"config": config.model_dump(mode="json"), "model": str(models[1]), "store": str(runtime.weights)}
        await runtime.trainer.call("init", deadline_s=config.runtime.start_s, **again)
        await publish(runtime, second)
        arms: dict[str, Json] = {
            "first": {"version": first},
            "second": {"version": second},
            "cross": {"version": second, "stale": first},
        }
        samples = config.eval.samples
        wins = {}
        for number, (arm, versions) in enumerate(arms.items()):
            result = await play(config, runtime, tasks, samples=samples, first=number * samples, **versions)
            wins[arm] = _by_task(result)
    return {
        "wins": wins,
        "models": [_fingerprint(model) for model in models],
    }


def _by_task(result: EvalResult) -> dict[str, list[list[int]]]:
    counts: dict[str, dict[str, list[int]]] = {suite: {} for suite in result.suites}
    for episode in result.episodes:
        count = counts[episode.suite].setdefault(episode.task, [0, 0])
        if episode.success is not None:
            count[0] += episode.success
            count[1] += 1
    return {suite: [tasks[task] for task in sorted(tasks)] for suite, tasks in counts.items()}


# --- the cells, in their order ----------------------------------------------------------------------------------------


def plan(size: Size) -> list[Job]:
    """Seed by seed, so that a program that is interrupted leaves whole pairs."""
    jobs: list[Job] = []
    for seed in range(max(size.seeds, size.paired)):
        jobs.append(_start(size, seed))
        if seed < size.paired:
            jobs += [_training(size, arm, seed) for arm in ABLATIONS]
        if seed < size.seeds:
            jobs += [_training(size, arm, seed) for arm in ("multi", *_specialists(size))]
            jobs += [_passk(size, pair) for pair, of in PAIRS.items() if _complete_with(of) == seed]
    return jobs


def _complete_with(policies: tuple[Policy, Policy]) -> int:
    """The seed whose cells train the last policy of a pair."""
    return max(p[1] for p in policies if p is not None)


def configure(size: Size, seed: int, *sets: str) -> Config:
    return preset(*BASE, *size.sets, f"run.seed={seed}", *sets)


def _specialists(size: Size) -> dict[str, str]:
    """Arm -> the suite it trains on."""
    return {f"only-{s.use.rpartition(':')[2].lower()}": s.use for s in configure(size, 0).suites}


def _settings(size: Size, arm: str) -> tuple[str, ...]:
    """What an arm's training changes of `configure`."""
    if arm in ABLATIONS:
        return (*ABLATIONS[arm], f"run.steps={size.short}")
    if arm == "multi":
        return (f"run.steps={size.steps}",)
    suites = _specialists(size)
    return (f"suites=[{{use={json.dumps(suites[arm])}}}]", f"run.steps={size.steps // len(suites)}")


def _name(arm: str, seed: int | str) -> str:
    return f"multitask-{arm}-{seed}"


def _start(size: Size, seed: int) -> Job:
    config = configure(size, seed)

    def compute(_: Path) -> Json:
        with scratch() as place:
            return {"end": asyncio.run(evaluate_model(config, resolve_model(config.model.path), place))}

    return Job(make_cell(_name("start", seed), config, [evaluate_model, evaluate, play]), compute, _MINUTES["start"])


def _training(size: Size, arm: str, seed: int) -> Job:
    settings = _settings(size, arm)
    evaluation = configure(size, seed)
    program: list[Callable[..., Any]] = [train, evaluate_model, evaluate, play]
    suites = [s.use for s in evaluation.suites]
    cell = make_cell(_name(arm, seed), configure(size, seed, *settings), program, suites=suites, evaluated=suites)

    def compute(directory: Path) -> Json:
        with scratch() as place:
            figures, model = train(configure(size, seed, *settings, f"run.dir={place}", "run.name=run"))
            end = asyncio.run(evaluate_model(evaluation, model, place / "evaluation"))
            if arm not in ABLATIONS:
                _keep(model, directory, cell)
        return {**figures, "end": end}

    return Job(cell, compute, _MINUTES[arm.partition("-")[0]])


def _passk(size: Size, pair: str) -> Job:
    config = configure(
        size, 0, f"eval.tasks={size.tasks}", f"eval.samples={size.samples}", "rollout.stale_probability=0.5"
    )
    needed = [None if policy is None else _training(size, *policy) for policy in PAIRS[pair]]
    program: list[Callable[..., Any]] = [count_wins, _by_task, play]
    keys = [config.model.path if job is None else job.cell.key for job in needed]

    def compute(directory: Path) -> Json:
        with scratch() as place:
            first, second = (
                resolve_model(config.model.path) if policy is None else _trained(size, *policy, directory)
                for policy in PAIRS[pair]
            )
            return asyncio.run(count_wins(config, (first, second), place))

    return Job(make_cell(_name("passk", pair), config, program, policies=keys), compute, _MINUTES["passk"])


def _trained(size: Size, arm: str, seed: int, directory: Path) -> Path:
    """The model that the arm's cell ended with; trained anew where its files are gone (they are not tracked)."""
    cell = _training(size, arm, seed).cell
    if not _kept(directory, cell).is_dir():
        with scratch() as place:
            config = configure(size, seed, *_settings(size, arm), f"run.dir={place}", "run.name=run")
            _keep(train(config)[1], directory, cell)
    return _kept(directory, cell)


def _kept(directory: Path, cell: Cell) -> Path:
    return directory / "models" / f"{cell.name}-{cell.key}"


def _keep(model: Path, directory: Path, cell: Cell) -> None:
    target = _kept(directory, cell)
    half = target.with_suffix(".half")
    shutil.rmtree(half, ignore_errors=True)
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(
        model, half, ignore=shutil.ignore_patterns("optimizer.pt", "manifest.json", "state.json", "extra.json")
    )
    half.rename(target)


# --- the command ------------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__, runs=True, cells=True)
    parser.add_argument("--minutes", type=float, metavar="M", help="start no cell that would not end within M minutes")
    parser.add_argument(
        "--only", default="", metavar="PREFIX", help="run only cells named so, as nocross or passk-seeds"
    )
    args = parse(parser, argv)
    running = Path(package.__file__).resolve().parent
    if running != SOURCES:
        parser.error(f"this would measure {running}, not the sources beside it; set PYTHONPATH={SOURCES.parent}")
    size = replace(QUICK, sets=(*QUICK.sets, *args.set)) if args.quick else Size()
    try:
        with terminable():
            _main(args, parser, size)
    except ConfigError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        print("stopped; the cells that were finished are kept, go on with --missing", file=sys.stderr)
        raise SystemExit(130) from None


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM is as Ctrl-C: the cell under way ends with all its processes, and is not stored."""
    before = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job begins with it ignored
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _main(args: argparse.Namespace, parser: argparse.ArgumentParser, size: Size) -> None:
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(scratch()) if args.quick else CELLS
        cells, missing = run_jobs(plan(size), directory, missing=args.missing, minutes=args.minutes, only=args.only)
    rows = make_rows(cells)
    if not rows:
        parser.error(f"no comparison is whole yet; missing: {', '.join(missing)}")
    notes = make_notes(cells, missing)
    emit(report_cells("multitask", rows, list(cells.values()), quick=args.quick, notes=notes), as_json=args.json)


def run_jobs(
    jobs: Sequence[Job], directory: Path, *, missing: bool, minutes: float | None = None, only: str = ""
) -> tuple[dict[str, Json], list[str]]:
    """Run them in order. Returns the cells that there are, by name, and the names of those there are not.

    missing: not those whose stored cell holds. Once a cell would not fit into `minutes`, none is started any more.
    """
    begun = time.monotonic()
    cells: dict[str, Json] = {}
    lacking: list[str] = []
    full = False
    for job in jobs:
        name = job.cell.name.removeprefix("multitask-")
        wanted = name.startswith(only)
        data = job.cell.stored(directory) if missing or not wanted else None
        left = None if minutes is None else minutes - (time.monotonic() - begun) / 60
        if data is None and wanted and not full and left is not None:
            full = expected_minutes(job, directory) > left
        if data is None and wanted and not full:
            data = job.cell.run(lambda job=job: job.compute(directory), missing=False, directory=directory)
            print(f"{job.cell.name}: {data['seconds'] / 60:.1f} min", file=sys.stderr, flush=True)
        if data is None:
            lacking.append(name)
        else:
            cells[name] = data
    return cells, lacking


def expected_minutes(job: Job, directory: Path) -> float:
    """What the longest stored cell of its kind took, on whatever machine; else the estimate."""
    kind = job.cell.name.rpartition("-")[0] if "passk" not in job.cell.name else _name("passk", "").rstrip("-")
    stored = [json.loads(p.read_text())["seconds"] / 60 for p in directory.glob(f"{kind}-*.json")]
    return max(stored, default=job.minutes)


if __name__ == "__main__":
    main()
