"""`springtide train CONFIG`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from springtide.config import Config
from springtide.observe.metrics import Summary
from springtide.observe.pace import describe
from springtide.observe.plots import label_of
from springtide.rundir import RunDirectory, load_run

Set = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="change one key, as trainer.lr=1e-4")]
Json = Annotated[bool, typer.Option("--json", help="print the summary as JSON")]


def command(
    config: Annotated[Path, typer.Argument(help="a TOML file; with --resume also a run's directory")],
    set_: Set = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="continue the run of this name, or in this directory")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="check everything cheap, print the resolved tree, stop")
    ] = False,
    json_: Json = False,
) -> None:
    """Train as CONFIG says."""
    checked = load_run(config, tuple(set_ or ()), resume=resume)
    if dry_run:
        from springtide.trainer.start import check_run

        check_run(checked)
        print(checked.to_toml(), end="")
        return
    run(checked, resume=resume, as_json=json_)


def run(config: Config, *, resume: bool = False, as_json: bool = False) -> None:
    """Train and print the summary; Ctrl-C says how to go on, and from which step."""
    from springtide.api import train

    try:
        show(train(config, resume=resume), config, as_json=as_json)
    except KeyboardInterrupt:
        if (config.run_dir / "config.toml").exists():
            print(_how_to_go_on(config.run_dir), file=sys.stderr)
        raise


def _how_to_go_on(run_dir: Path) -> str:
    saved = RunDirectory(run_dir).saved()
    if not saved:
        return "stopped before the first checkpoint: nothing is trained yet, start it again"
    step = int(saved[0].name.removeprefix("step-"))
    return f"stopped; go on from step {step} with: springtide train {run_dir} --resume"


def show(summary: Summary, config: Config, *, as_json: bool) -> None:
    """Print a finished run's summary."""
    if as_json:
        print(json.dumps(summary.to_json()))
        return
    print(f"{summary.steps} steps in {summary.wall_s / 60:.1f} min")
    if summary.success_start is not None and summary.success_end is not None:
        start = label_of("start", config.trainer.cold_start.steps)
        print(f"success {summary.success_start:.1%} ({start}) -> {summary.success_end:.1%}")
        for suite, row in summary.per_suite.items():
            print(f"  {suite}: {_percent(row['success_start'])} -> {_percent(row['success_end'])}")
    if summary.greedy_start is not None and summary.greedy_end is not None:
        print(f"greedy {summary.greedy_start:.1%} -> {summary.greedy_end:.1%}")
    if summary.pace is not None:
        print(describe(summary.pace))
        if summary.pace["void"]:
            print(summary.pace["void"])
    print(f"{config.run_dir}/report.html, or: springtide view {config.run_dir}")


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
