"""Samplers on a pool of mixed levels: share of mixed-outcome groups and held-out success at equal rollouts.

Every arm trains springtide-nano on the three suites as the quickstart does, on a pool of 108 tasks a suite, a quarter
of each level from quick to expert (`mixed.py`), for 64 steps of 16 groups of 8. Groups of equal rewards are kept
(`algorithm.equal_rewards = "keep"`), so that all arms play the same number of rollouts; an arm differs by
`rollout.sampling.kind` alone. Held out: the first 120 `test` tasks of the same mixture, four sampled episodes a task.
A group is mixed if some of its members won and some did not; counted from the ledger, over all groups and over the
second half of them, when capabilities are known. Five seeds; each sampler against uniform, paired by seed.
Cells are kept as they finish and resume: `--missing`. Minutes a cell on two quiet cores: an estimate of 8, 20 cells.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, chdir
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import common
import mixed
from common import CELLS, REPO, Json, Row, arguments, emit, interval, parse, preset, report_cells, scratch
from multitask import Job, evaluate_model, run_jobs, terminable
from runs import evaluate, make_cell, play

from springtide.config import Config, ConfigError
from springtide.ledger import Ledger, Outcome
from springtide.rundir import RunDirectory

KINDS = ("uniform", "frontier", "difficulty", "thompson")
SUITES = tuple(f"benchmarks/mixed.py:{name}" for name in ("DB", "KG", "HOUSE"))  # as seen from the repository
BASE = (
    "suites=[" + ",".join(f'{{use="{use}",level="mixed"}}' for use in SUITES) + "]",
    "run.minutes=100000",  # the number of steps ends a run
    'algorithm.equal_rewards="keep"',
    "eval.at_ends=false",  # evaluated here
    "eval.tasks=120",
    "eval.samples=4",
    "trainer.checkpoint_keep=1",
    "observe.report=false",
    "observe.progress=false",
)


@dataclass(frozen=True, slots=True)
class Size:
    """How much is run."""

    steps: int = 64
    seeds: int = 5
    sets: tuple[str, ...] = ()


QUICK = Size(3, 1, ("eval.tasks=8", "trainer.groups=6", "rollout.group.n=4", "rollout.concurrency=6"))


def train(config: Config) -> tuple[Json, Path]:
    """A run in processes of its own. Returns what its groups came to, and the directory of the model it ends with."""
    done = common.train(config)
    run = RunDirectory(config.run_dir)
    ledger = Ledger(run.ledger, read_only=True)
    try:
        outcomes, audit = ledger.outcomes(), ledger.audit()
    finally:
        ledger.close()
    return {
        "all": summarise(outcomes),
        "later": summarise(outcomes[len(outcomes) // 2 :]),
        "tasks": len({o.task for o in outcomes}),
        "members": audit["drawn"],
        "dropped": audit["dropped"],
        "peak_pss_mib": done.peak_pss_mib,
    }, run.saved()[0]


def summarise(outcomes: Sequence[Outcome]) -> Json:
    """Groups, the share of them that are mixed, and their mean success."""
    return {
        "groups": len(outcomes),
        "mixed": fmean(0 < o.wins < o.played for o in outcomes),
        "success": fmean(o.wins / o.played for o in outcomes),
    }


def plan(size: Size) -> list[Job]:
    """Seed by seed, so that a program that is interrupted leaves whole pairs."""
    return [_job(size, kind, seed) for seed in range(size.seeds) for kind in KINDS]


def _job(size: Size, kind: str, seed: int) -> Job:
    sets = (*BASE, *size.sets, f"run.seed={seed}", f"run.steps={size.steps}", f"rollout.sampling.kind={kind}")
    config = preset(*sets)
    program: list[Callable[..., Any]] = [train, summarise, evaluate_model, evaluate, play]
    pool = {"levels": mixed.LEVELS, "each": mixed.EACH}

    def compute(_: Path) -> Json:
        with scratch() as place:
            figures, model = train(preset(*sets, f"run.dir={place}", "run.name=run"))
            return {**figures, "end": asyncio.run(evaluate_model(config, model, place / "evaluation"))}

    return Job(make_cell(f"frontier-{kind}-{seed}", config, program, pool=pool), compute, 8.0)


FIGURES: Mapping[str, Callable[[Json], float]] = {
    "mixed groups, all": lambda cell: 100 * cell["all"]["mixed"],
    "mixed groups, second half": lambda cell: 100 * cell["later"]["mixed"],
    "held-out success, sampled": lambda cell: 100 * fmean(s["sampled"] for s in cell["end"].values()),
}


def make_rows(cells: Mapping[str, Json]) -> list[Row]:
    """Each sampler against uniform, over the seeds that have both. Nothing is required: the effects are asked for."""
    data = {name.removeprefix("frontier-"): cell["result"] for name, cell in cells.items()}
    rows: list[Row] = []
    for kind in KINDS[1:]:
        seeds = sorted(
            int(s) for k, _, s in (n.rpartition("-") for n in data) if k == kind and f"uniform-{s}" in data
        )  # fmt: skip
        for what, figure in FIGURES.items():
            if not seeds:
                continue
            ours, theirs = ([figure(data[f"{arm}-{s}"]) for s in seeds] for arm in (kind, "uniform"))
            ahead = [a - b for a, b in zip(ours, theirs, strict=True)]
            low, high = interval(ahead)
            extra = {kind: fmean(ours), "uniform": fmean(theirs)}
            rows.append(
                Row(f"{kind} ahead of uniform: {what}", fmean(ahead), "points", seeds=len(seeds), ci_low=low,
                    ci_high=high, extra=extra)
            )  # fmt: skip
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__, runs=True, cells=True)
    parser.add_argument("--minutes", type=float, metavar="M", help="start no cell that would not end within M minutes")
    parser.add_argument("--only", default="", metavar="PREFIX", help="run only cells named so, as frontier-uniform")
    args = parse(parser, argv)
    size = replace(QUICK, sets=(*QUICK.sets, *args.set)) if args.quick else Size()
    try:
        with terminable(), chdir(REPO), ExitStack() as stack:
            directory = stack.enter_context(scratch()) if args.quick else CELLS
            cells, missing = run_jobs(
                plan(size), directory, missing=args.missing, minutes=args.minutes, only=args.only
            )  # fmt: skip
            rows = make_rows(cells)
    except ConfigError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        print("stopped; the cells that were finished are kept, go on with --missing", file=sys.stderr)
        raise SystemExit(130) from None
    if not rows:
        parser.error(f"no comparison is whole yet; missing: {', '.join(missing)}")
    notes = [f"Not run yet: {', '.join(missing)}."] if missing else []
    emit(report_cells("frontier", rows, list(cells.values()), quick=args.quick, notes=notes), as_json=args.json)


if __name__ == "__main__":
    main()
