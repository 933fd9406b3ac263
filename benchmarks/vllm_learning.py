"""Whether the same run learns the same on vLLM: the quickstart on the local engine and on vLLM, at equal steps.

Both arms train the quickstart's preset for `STEPS` optimiser steps instead of minutes, so that neither engine's speed
changes what is learned; without the stale pool, for which vLLM would need a second server. Success is on the preset's
`test` tasks, sampled, the same tasks for both. "Equal" is a paired mean difference within its own 95% interval around
0; the half width says what difference would have been seen. The gap is the mean |log-prob of the engine - of the
trainer| over the tokens that were sampled with the very weights being trained.
vLLM is the one that $SPRINGTIDE_VLLM_PYTHON runs (docs/vllm.md says how to make its environment). On two quiet cores
a local cell takes 5 minutes, one on vLLM 20. Cells resume: `--missing`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import common
from common import CELLS, Cell, Json, Row, arguments, emit, interval, parse, preset, report_cells, scratch
from runs import evaluations, make_cell

from springtide.config import Config, ConfigError
from springtide.observe.compare import compare, read_scores
from springtide.rundir import RunDirectory

SEEDS, STEPS = (0, 1), 60
SETS = (
    "run.minutes=100000",
    "rollout.stale_probability=0",
    "observe.report=false",
    "observe.progress=false",
    "trainer.checkpoint_keep=1",
)
QUICK = ("trainer.groups=2", "rollout.group.n=4", "rollout.concurrency=6", "eval.tasks=4", "run.steps=2")
_PYTHON = "SPRINGTIDE_VLLM_PYTHON"


def make_config(kind: str, seed: int, sets: Sequence[str], python: str | None) -> Config:
    engine = ("engine.kind=vllm", f"engine.vllm.python={python}") if kind == "vllm" else ()
    return preset(f"run.steps={STEPS}", f"run.seed={seed}", *SETS, *engine, *sets)


def cell(kind: str, seed: int, sets: Sequence[str]) -> Cell:
    """Where the interpreter lies changes nothing of what it computes."""
    return make_cell(f"vllm-learning-{kind}-{seed}", make_config(kind, seed, sets, "python"), [train])


def train(config: Config) -> Json:
    """Returns `{start, end, scores, gap, train_s}`. Raises: SystemExit if it ended before its last step."""
    common.train(config)
    run = RunDirectory(config.run_dir)
    summary = json.loads(run.summary.read_text())
    if summary["steps"] != config.run.steps:
        raise SystemExit(f"{summary['steps']} of {config.run.steps} steps")
    scores = {f"{suite}/{how}": of for (suite, how), of in read_scores(run.path, "end").items()}
    return {
        **evaluations(run),
        "scores": scores,
        "gap": summary["logprob_gap_mean"],
        "train_s": summary["wall_s"],
    }


def run_cells(seeds: Sequence[int], sets: Sequence[str], python: str, *, missing: bool, keep: Path) -> list[Json]:
    """The local cells of all seeds, then vLLM's."""
    cells = []
    for kind in ("local", "vllm"):
        for seed in seeds:

            def compute(kind: str = kind, seed: int = seed) -> Json:
                with scratch() as place:
                    return train(make_config(kind, seed, (*sets, f"run.dir={place}", "run.name=cell"), python))

            cells.append(cell(kind, seed, sets).run(compute, missing=missing, directory=keep))
            print(f"{kind} {seed}: {cells[-1]['seconds'] / 60:.1f} min", file=sys.stderr, flush=True)
    return cells


def make_rows(local: Sequence[Json], vllm: Sequence[Json]) -> list[Row]:
    """From the results of the two arms' seeds, in the same order."""
    differences, halves = [], []
    for a, b in zip(local, vllm, strict=True):
        both = [{tuple(k.split("/")): v for k, v in r["scores"].items()} for r in (a, b)]
        mean = next(d for d in reversed(compare(*both)) if d.how == "sampled")
        differences.append(100 * mean.difference)
        halves.append(50 * (mean.high - mean.low))
    half = sum(h * h for h in halves) ** 0.5 / len(halves)
    what = f"held-out success after {STEPS} steps"
    rows = [
        Row(
            f"{what}: distance of vLLM from local, in half widths of its interval",
            abs(fmean(differences)) / half,
            "half widths",
            required=1.0,
            at_most=True,
            seeds=len(differences),
        ),
        Row(
            f"{what}: vLLM less local",
            fmean(differences),
            "points",
            seeds=len(differences),
            ci_low=fmean(differences) - half,
            ci_high=fmean(differences) + half,
            extra={"by_seed": differences},
        ),
    ]
    for kind, arm in (("local", local), ("vLLM", vllm)):
        start, end = ([100 * fmean(s["sampled"] for s in r[when].values()) for r in arm] for when in ("start", "end"))
        gains = [b - a for a, b in zip(start, end, strict=True)]
        low, high = interval(gains)
        rows += [
            Row(f"{what}: {kind}", fmean(end), "%", "its start", fmean(start), seeds=len(arm)),
            Row(f"{what}: gain, {kind}", fmean(gains), "points", seeds=len(arm), ci_low=low, ci_high=high),
            Row(f"log-prob gap, engine and trainer: {kind}", fmean(r["gap"] for r in arm), "nats", seeds=len(arm)),
            Row(f"seconds of {STEPS} steps: {kind}", fmean(r["train_s"] for r in arm), "s", seeds=len(arm)),
        ]
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__, runs=True, cells=True)
    args = parse(parser, argv)
    python = os.environ.get(_PYTHON)
    if python is None:
        parser.error(f"{_PYTHON} must name the interpreter of vLLM's environment (docs/vllm.md)")
    seeds, sets = (SEEDS[:1], (*QUICK, *args.set)) if args.quick else (SEEDS, ())
    try:
        with scratch() as place:
            cells = run_cells(seeds, sets, python, missing=args.missing, keep=place if args.quick else CELLS)
    except ConfigError as error:
        parser.error(str(error))
    results = [c["result"] for c in cells]
    rows = make_rows(results[: len(seeds)], results[len(seeds) :])
    emit(report_cells("vllm_learning", rows, cells, quick=args.quick), as_json=args.json)


if __name__ == "__main__":
    main()
