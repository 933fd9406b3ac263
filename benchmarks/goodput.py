"""Goodput: tokens learned from a second, where engine and trainer wait and why, and how far the trainer is from its own
ceiling.

Each round runs the quickstart preset for a fixed time in both modes, one after the other so that drift of the machine
meets both, then lets a trainer alone replay the asynchronous run's own groups, step by step, with nothing else running
and never waiting: the ceiling. Rounds repeat; a figure is the mean over rounds.
  window        from the end of the first step to the end of the last: filling the pipeline is not counted
  loss tokens   action tokens that entered a step's loss; all tokens: those of the trained segments, prompts included
  trainer       its wall time outside the step, by cause, as the driver measured it
  engine        its idle time; of it "nothing in flight" is the time without a single admitted group, the rest is spent
                in environments, on the way, and in taking new weights
  synchronous   `schedule.policy = "synchronous"`: one step's groups, in lockstep, then one step, bit-reproducible
  one turn      ours and TRL's GRPOTrainer in the same rounds, on work that is equal: how, `one_turn.py` says
TRL lives in an environment of its own, whose interpreter `--trl` names; without it those rows say "not installed" and
are not met. Its settings are tuned first: `--tune --trl PYTHON`. To install it (1.5 GB):

    python -m venv VENV && VENV/bin/pip install torch==2.13.0 trl==1.16.* transformers==5.24.*

Tools of heavy-tailed latency are `latency.py`. On two quiet cores about 9 minutes, 16 with TRL; `--tune` 10.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import one_turn
from common import (
    Json,
    Load,
    Row,
    arguments,
    emit,
    interval,
    parse,
    preset,
    ratio_interval,
    read_lines,
    report,
    report_cells,
    scratch,
    train,
)

from springtide.algorithms.advantages import GroupRewards, RunningMoments, advantages, consumed
from springtide.config import Config, ConfigError
from springtide.models.presets import resolve_model
from springtide.process import start_process
from springtide.rundir import RunDirectory
from springtide.trace import Group, make_version

MODES = {"asynchronous": (), "synchronous": ("schedule.policy=synchronous",)}
ROUNDS, SECONDS, CEILING_S = 2, 90.0, 45.0
QUICK_ROUNDS, QUICK_SECONDS, QUICK_CEILING_S = 1, 30.0, 8.0
QUICK_GROUPS = 4  # of a step, so that a busy machine has three of them too


@dataclass(frozen=True, slots=True)
class Figures:
    """One run's figures, over its window. Shares are of the window's wall time, by cause."""

    loss_tokens_per_s: float
    all_tokens_per_s: float
    generated_tokens_per_s: float
    step_s: float
    steps: int
    trainer: dict[str, float]
    engine: dict[str, float]
    driver_lag_p99_s: float
    staleness: float
    peak_pss_mib: float


def play(name: str, seconds: float, directory: Path, sets: Sequence[str]) -> tuple[Figures, Config]:
    """Run the preset with `sets` for `seconds`, as `directory/name`, in processes of its own."""
    config = preset(
        *sets,
        f"run.dir={directory}",
        f"run.name={name}",
        f"run.minutes={seconds / 60}",
        "run.steps=1000000",
        "eval.at_ends=false",
        "observe.report=false",
        "observe.progress=false",
    )
    done = train(config)
    run = RunDirectory(config.run_dir)
    return figures(read_lines(run.metrics), read_lines(run.events), done.peak_pss_mib), config


def figures(metrics: Sequence[Json], events: Sequence[Json], peak_pss_mib: float) -> Figures:
    """What `metrics.jsonl` and `events.jsonl` say of a run. Raises: SystemExit if it is too short to have a window."""
    steps = [r for r in metrics if r["kind"] == "step"][1:]
    if len(steps) < 2:
        raise SystemExit(f"only {len(steps) + 1} steps: too short to measure; give it more seconds")
    wall = sum(r["step_s"] for r in steps)
    spent: Counter[str] = Counter()
    for r in steps:
        spent.update(r["seconds"])
    outside = {cause.removeprefix("wait_"): s / wall for cause, s in sorted(spent.items()) if cause != "train"}
    idle = sum((1 - r["engine"]["busy_share"]) * r["step_s"] for r in steps) / wall
    empty = min(idle, empty_share(events))
    return Figures(
        loss_tokens_per_s=sum(r["loss_tokens"] for r in steps) / wall,
        all_tokens_per_s=sum(r["trainer"]["tokens"] for r in steps) / wall,
        generated_tokens_per_s=sum(r["engine"]["generated_tokens"] for r in steps) / wall,
        step_s=wall / len(steps),
        steps=len(steps),
        trainer={**outside, "driver": max(0.0, 1 - sum(spent.values()) / wall)},
        engine={"nothing in flight": empty, "groups in flight": idle - empty},
        driver_lag_p99_s=steps[-1]["driver_lag_p99_s"],
        staleness=fmean(r["staleness"]["mean"] for r in steps),
        peak_pss_mib=peak_pss_mib,
    )


def empty_share(events: Sequence[Json]) -> float:
    """Share of the time between the first and the last StepEnded in which no group was in flight."""
    ends = [e["t"] for e in events if e["kind"] == "StepEnded"]
    first, last = ends[0], ends[-1]
    flying: set[int] = set()
    empty, since = 0.0, first
    for event in events:
        if event["kind"] not in ("Admitted", "Ready", "Dropped"):
            continue
        now = min(max(event["t"], first), last)
        if not flying:
            empty += max(0.0, now - since)
        flying.add(event["visit"]) if event["kind"] == "Admitted" else flying.discard(event["visit"])
        since = max(since, now)
    return (empty + (0.0 if flying else last - since)) / max(1e-9, last - first)


async def replay(config: Config, seconds: float) -> float:
    """Loss tokens a second of a trainer that never waits: the run's steps in its order, for at most `seconds`."""
    run = RunDirectory(config.run_dir)
    batches = [e["visits"] for e in read_lines(run.events) if e["kind"] == "StepStarted"]
    running, tokens, spent = RunningMoments.from_json({}), 0, 0.0
    args = {"config": config.model_dump(mode="json"), "model": str(resolve_model(config.model.path))}
    log = run.logs / "ceiling.log"
    async with start_process("ceiling", "springtide.trainer.rank:main", args, log_path=log) as trainer:
        for step, visits in enumerate(batches):
            paths = {visit: run.trajectories / f"{visit:08d}.msgpack" for visit in visits}
            groups = [GroupRewards.of(Group.load(path)) for path in paths.values()]
            results = advantages(groups, config.algorithm, running)
            running = running.after(consumed(results))
            items = tuple(
                {"path": str(paths[r.visit]), "member": member, "advantage": value, "suite": r.suite}
                for r in results
                for member, value in sorted(r.values.items())
            )
            begun = time.monotonic()
            learned = await trainer.client.call("train", deadline_s=600, items=items, version=make_version(1, step))
            if step:  # the first step also warms up
                spent += time.monotonic() - begun
                tokens += learned["loss_tokens"]
            if spent >= seconds:
                break
    return tokens / spent


# --- the table --------------------------------------------------------------------------------------------------------


def make_rows(rounds: dict[str, list[Figures]], ceilings: Sequence[float]) -> list[Row]:
    """One row a target; the baseline of most is the synchronous mode."""
    ours, theirs = rounds["asynchronous"], rounds["synchronous"]

    def both(target: str, unit: str, read: Any, factor: float = 1.0) -> Row:
        a, b = ([factor * read(f) for f in figures] for figures in (ours, theirs))
        low, high = interval(a)
        return Row(target, fmean(a), unit, "synchronous", fmean(b), seeds=len(a), ci_low=low, ci_high=high)

    loss = [f.loss_tokens_per_s for f in ours]
    low, high = ratio_interval(loss, ceilings)
    causes = {role: sorted({c for f in (*ours, *theirs) for c in getattr(f, role)}) for role in ("trainer", "engine")}
    peak = max(f.peak_pss_mib for f in (*ours, *theirs))
    return [
        both("loss tokens", "tokens/s", lambda f: f.loss_tokens_per_s),
        both("all tokens", "tokens/s", lambda f: f.all_tokens_per_s),
        both("generated tokens, trained or not", "tokens/s", lambda f: f.generated_tokens_per_s),
        Row(
            "loss tokens, against the trainer that never waits",
            fmean(loss),
            "tokens/s",
            "trainer's ceiling",
            fmean(ceilings),
            required=0.6,
            judged="ratio",
            seeds=len(loss),
            ci_low=low,
            ci_high=high,
        ),
        both("seconds a step", "s", lambda f: f.step_s),
        both("trainer outside its step", "%", lambda f: sum(f.trainer.values()), 100),
        *(
            both(f"trainer outside its step: {cause}", "%", lambda f, c=cause: f.trainer.get(c, 0.0), 100)
            for cause in causes["trainer"]
        ),
        both("engine idle", "%", lambda f: sum(f.engine.values()), 100),
        *(
            both(f"engine idle: {cause}", "%", lambda f, c=cause: f.engine.get(c, 0.0), 100)
            for cause in causes["engine"]
        ),
        both("driver's loop late, 99th percentile", "ms", lambda f: f.driver_lag_p99_s, 1000),
        both("staleness, mean", "steps", lambda f: f.staleness),
        Row("peak memory, PSS of all processes", peak, "MiB", required=4096, at_most=True, seeds=len(loss)),
    ]


def wait_rows(prefix: str, runs: Sequence[Figures]) -> list[Row]:
    """Who waits, of runs that have no baseline."""
    rows = []
    for what, role in (("trainer outside its step", "trainer"), ("engine idle", "engine")):
        shares = [100 * sum(getattr(f, role).values()) for f in runs]
        low, high = interval(shares)
        rows.append(Row(f"{prefix}: {what}", fmean(shares), "%", seeds=len(shares), ci_low=low, ci_high=high))
    return rows


class Peer:
    """TRL in this benchmark: its setting, and both sides' speeds."""

    def __init__(self, python: Path, setting: one_turn.Setting, steps: int, groups: int) -> None:
        self._python, self.setting, self._steps, self._groups = python, setting, steps, groups
        self.ours: list[one_turn.Speed] = []
        self.figures: list[Figures] = []  # the same runs', for who waits
        self.theirs: list[one_turn.Speed] = []

    def play(self, seconds: float, directory: Path) -> None:
        """One round: ours, then theirs, for about `seconds` each."""
        model, prompts = one_turn.prepare(directory)
        f, _ = play("one_turn", seconds, directory, one_turn.our_sets(model, self._groups))
        completion = f.loss_tokens_per_s * f.step_s / (self._groups * one_turn.MEMBERS)
        self.figures.append(f)
        self.ours.append(one_turn.Speed(f.loss_tokens_per_s, f.all_tokens_per_s, f.step_s, completion))
        result = one_turn.run_trl(self._python, self.setting, model, prompts, groups=self._groups, steps=self._steps)
        self.theirs.append(one_turn.speed_of(result, self._groups))


def _peer(args: argparse.Namespace, parser: argparse.ArgumentParser, seconds: float) -> Peer | None:
    if args.trl is None:
        return None
    installed = one_turn.versions(args.trl)
    if args.quick:
        return Peer(args.trl, one_turn.QUICK, one_turn.TRIAL_STEPS, QUICK_GROUPS)
    cells = one_turn.stored(installed)
    if not cells:
        parser.error("TRL's settings are not chosen yet; first run --tune --trl PYTHON --missing")
    setting = one_turn.best(cells)
    return Peer(args.trl, setting, one_turn.steps_within(seconds, cells[setting], setting.ahead), one_turn.GROUPS)


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__, runs=True, cells=True)
    parser.add_argument("--trl", type=Path, metavar="PYTHON", help="interpreter of an environment that holds TRL")
    parser.add_argument("--tune", action="store_true", help="only choose TRL's settings")
    args = parse(parser, argv)
    if args.tune:
        if args.trl is None or args.quick:
            parser.error("--tune needs --trl PYTHON, and has no --quick")
        cells = one_turn.tune(args.trl, missing=args.missing)
        rows, chosen = one_turn.trial_rows(cells), one_turn.best(cells).label
        result = report_cells("goodput-tune", rows, list(cells.values()), quick=False, best=chosen)
        emit(result, as_json=args.json, store=False)
        return
    count, seconds, ceiling_s = (
        (QUICK_ROUNDS, QUICK_SECONDS, QUICK_CEILING_S) if args.quick else (ROUNDS, SECONDS, CEILING_S)
    )
    peer = _peer(args, parser, seconds)
    sets = (f"trainer.groups={QUICK_GROUPS}", *args.set) if args.quick else ()
    rounds: dict[str, list[Figures]] = {mode: [] for mode in MODES}
    ceilings: list[float] = []
    try:
        with Load() as load:
            for _ in range(count):
                with scratch() as directory:
                    configs = {}
                    for mode, own in MODES.items():
                        result, configs[mode] = play(mode, seconds, directory, (*own, *sets))
                        rounds[mode].append(result)
                    ceilings.append(asyncio.run(replay(configs["asynchronous"], ceiling_s)))
                    if peer is not None:
                        peer.play(seconds, directory)
    except ConfigError as error:
        parser.error(str(error))
    rows = make_rows(rounds, ceilings)
    notes = []
    if peer is None:
        rows += one_turn.make_rows((), (), None)
    else:
        rows += one_turn.make_rows(peer.ours, peer.theirs, peer.setting)
        rows += wait_rows(f"one turn of {one_turn.MAX_TOKENS} tokens", peer.figures)
        notes = one_turn.notes(args.trl) if not args.quick else []
    emit(report("goodput", rows, load, quick=args.quick, notes=notes), as_json=args.json)


if __name__ == "__main__":
    main()
