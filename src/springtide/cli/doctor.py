"""`springtide doctor`: says in plain words what is wrong with something one wrote or brought.

Called by: `cli.main`, which mounts `app`.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from springtide.env.check import Verdict

app = typer.Typer(help="Check an environment before it costs a run.", no_args_is_help=True)


@app.callback()
def doctor() -> None:
    """Check what you wrote before it costs a run."""


@app.command()
def env(
    name: Annotated[str, typer.Argument(help="a registered suite, or FILE.py:Class")],
    level: Annotated[str | None, typer.Option(help="the level to check; default: every level")] = None,
    split: Annotated[str | None, typer.Option(help="train, test or ood; default: all three")] = None,
    tasks: Annotated[int, typer.Option(min=1, help="tasks of every split that are played")] = 8,
    deadline: Annotated[
        float, typer.Option(min=0.1, help="seconds that one call of the environment may block the process")
    ] = 600.0,
    log: Annotated[Path | None, typer.Option(help="write what the environment prints, and tracebacks, here")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the reports as JSON")] = False,
) -> None:
    """Play an environment as a run would: schemas, gold, doing nothing, determinism, deadlines, leaks, splits.

    It runs in a process of its own. Exits with 0 if nothing failed, 1 if something did, 2 if it cannot be loaded.
    """
    from springtide.env.examine import examine
    from springtide.env.suite import SPLITS, SuiteError

    if split is not None and split not in SPLITS:
        typer.echo(f"there is no split {split!r}; there are {', '.join(SPLITS)}", err=True)
        raise typer.Exit(2)

    def show(suite: str, version: str, level: str, verdict: Verdict | None) -> None:
        if as_json:
            return
        if verdict is None:
            typer.echo(f"{suite}, version {version}, level {level}")
        else:
            typer.echo(f"  {verdict.verdict:8}{verdict.check:12}  {verdict.detail}")

    splits = SPLITS if split is None else (split,)
    try:
        reports = asyncio.run(
            examine(name, level=level, splits=splits, tasks=tasks, call_s=deadline, log=log, told=show)
        )
    except SuiteError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    verdicts = [verdict.verdict for report in reports for verdict in report.verdicts]
    if as_json:
        typer.echo(json.dumps([report.to_json() for report in reports], indent=1))
    else:
        counts = [f"{verdicts.count(kind)} {kind}" for kind in ("failed", "warning", "skipped") if kind in verdicts]
        typer.echo(f"{len(verdicts)} checks: {', '.join(counts) or 'all ok'}")
    if "failed" in verdicts:
        raise typer.Exit(1)
