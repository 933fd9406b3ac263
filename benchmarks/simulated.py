"""Scheduling policies on simulated clusters: presets, and workloads drawn at random that nothing was tuned on.

  presets  webshop and alfworld with Qwen2.5-7B and 14B, osworld with Qwen3-4B and 8B (whose shapes are nearest to the
           paper's), on 8 and 32 H100; `SEEDS` seeds each, every policy, `oracle_split` at its best share of a sweep
  draws    40 workloads of `random_workload`, by seeds that no trial used, each on 8 H100 with a model that fits; one
           seed each. They are for one run of each version, not for tuning
Every policy meets the same episodes. "peer" is the best of the asynchronous policies whose rules and constants are
published (docs/scheduling.md). Published figures are TideRL's (2608.10402, as the reference summarises it): of another
cluster, and goodput there is tokens into the trainer, ours tokens that were learned from.
Cells (a setup each) are kept as they finish: `--missing`, `--only PREFIX`. On one quiet core a cell on 8 GPUs takes 5
minutes, on 32 GPUs 20, a draw 1.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from common import CELLS, Cell, Json, Row, arguments, emit, fingerprint, ratio_interval, report_cells, scratch

from springtide.schedule.registry import POLICIES
from springtide.simulate.run import Setup, Simulation
from springtide.simulate.workload import random_workload

SEEDS = 5
DRAWS = 40
_HELD_OUT = 20_261_201  # the first seed of the draws
PEERS = ("one_step_off", "fixed_split", "streaming", "kv_aimd", "program_aware", "hybrid_ranks")
PRESETS = (
    ("webshop", "qwen2.5-7b"),
    ("webshop", "qwen2.5-14b"),
    ("alfworld", "qwen2.5-7b"),
    ("alfworld", "qwen2.5-14b"),
    ("osworld", "qwen3-4b"),
    ("osworld", "qwen3-8b"),
)
FIGURES = ("goodput_tokens_per_s", "step_s", "time_to_equal_learning_s", "kv_hit_rate", "staleness")
FIGURES += ("rollout_wait_share", "train_wait_share")


def setups(quick: bool) -> dict[str, tuple[Setup, int]]:
    """Name -> what is simulated, and seeds."""
    found: dict[str, tuple[Setup, int]] = {}
    if quick:
        small = Setup("webshop", groups=4, members=4, warm=1, steps=2)
        return {"webshop-qwen2.5-7b-8": (small, 2), "draw-00": (small, 1), "draw-01": (small, 1)}
    for gpus in (8, 32):
        for workload, model in PRESETS:
            found[f"{workload}-{model}-{gpus}"] = Setup(workload, model=model, gpus=gpus), SEEDS
    for i in range(DRAWS):
        found[f"draw-{i:02d}"] = Setup(random_workload(random.Random(_HELD_OUT + i)), model="qwen2.5-7b", gpus=8), 1
    return found


def compute(setup: Setup, seeds: int, draw: int | None) -> Json:
    """Policy -> its rows, a seed each."""
    simulation = Simulation(setup)
    first = 0 if draw is None else _HELD_OUT + draw
    found: Json = {}
    for name in POLICIES:
        rows = [asdict(row) for row in simulation.rows(name, range(first, first + seeds))]
        found[name] = [{key: row[key] for key in (*FIGURES, "recomputed", "layout")} for row in rows]
    return found


def run_cells(quick: bool, directory: Path, *, missing: bool, only: str) -> dict[str, Json]:
    sources = fingerprint(["springtide.simulate.run"])
    cells: dict[str, Json] = {}
    for name, (setup, seeds) in setups(quick).items():
        config = {**asdict(setup), "source": None, "seeds": seeds, "policies": sorted(POLICIES)}
        cell = Cell(f"simulated-{name}", config, sources)
        draw = int(name[5:]) if name.startswith("draw-") else None
        if not name.startswith(only):
            if (stored := cell.stored(directory)) is not None:
                cells[name] = stored
            continue

        def work(setup: Setup = setup, seeds: int = seeds, draw: int | None = draw) -> Json:
            return compute(setup, seeds, draw)

        cells[name] = cell.run(work, missing=missing, directory=directory)
        print(f"{name}: {cells[name]['seconds']:.0f} s", file=sys.stderr, flush=True)
    return cells


def make_rows(cells: dict[str, Json], draws: int) -> list[Row]:
    results = {name: cell["result"] for name, cell in cells.items()}
    presets = [name for name in results if not name.startswith("draw-")]
    held = [name for name in results if name.startswith("draw-")]
    rows: list[Row] = []

    def ratios(names: Sequence[str], other: Callable[[Json], str], what: str) -> tuple[list[float], list[float]]:
        ours, theirs = [], []
        for name in names:
            found = results[name]
            ours += [row[what] for row in found["springtide"]]
            theirs += [row[what] for row in found[other(found)]]
        return ours, theirs

    def against(target: str, names: Sequence[str], other: Callable[[Json], str], required: float | None) -> None:
        for what, unit, sign in (("goodput_tokens_per_s", "tokens/s", 1), ("time_to_equal_learning_s", "s", -1)):
            ours, theirs = ratios(names, other, what)
            if not ours:
                continue
            low, high = ratio_interval(ours, theirs)
            chosen = sorted({other(results[name]) for name in names})
            rows.append(
                Row(
                    f"{target}: {'goodput' if sign > 0 else 'time to equal learning'}",
                    _geometric(ours), unit, ", ".join(chosen), _geometric(theirs),
                    required=required if sign > 0 else None, judged="ratio", seeds=len(ours), ci_low=low, ci_high=high,
                )
            )  # fmt: skip

    if len(held) == draws:
        against("held-out draws, against tiderl", held, lambda _: "tiderl", 1.10)
        against("held-out draws, against the best peer", held, _peer, None)
        against("held-out draws, against the best static split", held, lambda _: "oracle_split", 0.97)
    for name in presets:
        against(f"{name}, against tiderl", [name], lambda _: "tiderl", None)
        against(f"{name}, against the best peer", [name], _peer, None)
        against(f"{name}, against the best static split", [name], lambda _: "oracle_split", 0.97)
        against(f"{name}, against synchronous (published for TideRL: 5.6x; in wall time 2.04x)", [name], _first, None)
    return rows


def _first(_: Json) -> str:
    return "synchronous"


def _peer(found: Json) -> str:
    return max(PEERS, key=lambda name: _geometric([row["goodput_tokens_per_s"] for row in found[name]]))


def _geometric(values: Sequence[float]) -> float:
    product = 1.0
    for value in values:
        product *= value ** (1 / len(values))
    return product


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__, cells=True)
    parser.add_argument(
        "--only", default="", metavar="PREFIX", help="run the cells whose names begin so; show all stored"
    )
    args = parser.parse_args(argv)
    with scratch() as place:
        directory = place if args.quick else CELLS
        cells = run_cells(args.quick, directory, missing=args.missing, only=args.only)
    rows = make_rows(cells, 2 if args.quick else DRAWS)
    emit(report_cells("simulated", rows, list(cells.values()), quick=args.quick), as_json=args.json)


if __name__ == "__main__":
    main()
