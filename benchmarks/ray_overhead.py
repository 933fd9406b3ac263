"""What Ray costs: the quickstart's load under `runtime.kind = "ray"` and `"local"`, with equal processes.

Each round trains the quickstart preset for a fixed number of steps twice, once on each runtime, in an order that
alternates, so that drift of the machine meets both. Ray is one that the run starts itself and ends.
  wall          the whole command, from its start to its end: Ray's start and stop, the processes' start, all steps.
                The quickstart trains for nine minutes; a load this short lets what Ray costs once weigh more
  loss tokens   tokens learned from a second, without the start, from the first step's end on (as in `goodput.py`)
  memory        the largest sum of PSS over the run's processes, Ray's own included
Needs the extra: pip install "springtide[ray]". On two quiet cores about 20 minutes.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from statistics import fmean

from common import Load, Row, arguments, emit, parse, preset, ratio_interval, read_lines, report, scratch, train
from goodput import figures

from springtide.config import ConfigError
from springtide.rundir import RunDirectory

KINDS = ("local", "ray")
ROUNDS, STEPS = 3, 60
QUICK = ("trainer.groups=4", "rollout.concurrency=8")
QUICK_STEPS = 6


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(arguments(__doc__, runs=True), argv)
    if importlib.util.find_spec("ray") is None:
        sys.exit('ray_overhead: Ray is not installed; pip install "springtide[ray]"')
    rounds, steps = (1, QUICK_STEPS) if args.quick else (ROUNDS, STEPS)
    wall: dict[str, list[float]] = {kind: [] for kind in KINDS}
    start: dict[str, list[float]] = {kind: [] for kind in KINDS}
    speed: dict[str, list[float]] = {kind: [] for kind in KINDS}
    memory: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with scratch() as directory, Load() as load:
        for number in range(rounds):
            for kind in KINDS if number % 2 == 0 else reversed(KINDS):
                try:
                    config = preset(
                        *(QUICK if args.quick else ()),
                        *args.set,
                        f"runtime.kind={kind}",
                        f"run.dir={directory}",
                        f"run.name={kind}-{number}",
                        f"run.seed={number}",
                        f"run.steps={steps}",
                        "eval.at_ends=false",
                        "observe.report=false",
                        "observe.progress=false",
                    )
                except ConfigError as error:
                    sys.exit(f"ray_overhead: {error}")
                done = train(config)
                run = RunDirectory(config.run_dir)
                metrics = read_lines(run.metrics)
                loop = sum(record["step_s"] for record in metrics if record["kind"] == "step")
                wall[kind].append(done.wall_s)
                start[kind].append(done.wall_s - loop)
                memory[kind].append(done.peak_pss_mib)
                speed[kind].append(figures(metrics, read_lines(run.events), done.peak_pss_mib).loss_tokens_per_s)
                print(f"{kind}, round {number}: {done.wall_s:.1f} s, of it {loop:.1f} s in steps", file=sys.stderr)
    low, high = ratio_interval(wall["ray"], wall["local"])
    rows = [
        Row(
            f"wall time of {steps} steps on ray, start and end included",
            fmean(wall["ray"]),
            "s",
            "local",
            fmean(wall["local"]),
            required=1.15,
            at_most=True,
            judged="ratio",
            seeds=rounds,
            ci_low=low,
            ci_high=high,
        ),
        *(
            Row(target, fmean(of["ray"]), unit, "local", fmean(of["local"]), seeds=rounds)
            for target, unit, of in (
                ("of it outside the steps", "s", start),
                ("loss tokens a second on ray", "tokens/s", speed),
                ("peak memory on ray", "MiB", memory),
            )
        ),
    ]
    notes = ["Ray's processes end as nobody's children, so what they used counts as other work above."]
    emit(report("ray_overhead", rows, load, quick=args.quick, notes=notes), as_json=args.json)


if __name__ == "__main__":
    main()
