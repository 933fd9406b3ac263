"""`springtide doctor`: says in plain words what is wrong with something one wrote or brought.

Called by: `cli.main`, which mounts `app`.
"""

from __future__ import annotations

import asyncio
import json
from typing import Annotated

import typer

app = typer.Typer(help="Check an environment before it costs a run.", no_args_is_help=True)


@app.callback()
def doctor() -> None:
    """Check what you wrote before it costs a run."""


@app.command()
def env(
    name: Annotated[str, typer.Argument(help="a registered suite, or FILE.py:Class")],
    level: Annotated[str | None, typer.Option(help="the level to check; default: every level")] = None,
    tasks: Annotated[int, typer.Option(min=1, help="tasks of every split that are played")] = 8,
    as_json: Annotated[bool, typer.Option("--json", help="print the reports as JSON")] = False,
) -> None:
    """Play an environment as a run would: schemas, gold, doing nothing, determinism, deadlines, leaks, splits."""
    from springtide.env.check import check_suite
    from springtide.env.registry import load_suite
    from springtide.env.suite import SuiteError

    try:
        suite = load_suite(name)
        if level is not None and level not in suite.levels:
            raise SuiteError(f"suite {suite.name} has no level {level!r}; it has {', '.join(suite.levels)}")
    except SuiteError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    levels = [level] if level is not None else list(suite.levels)
    reports = [asyncio.run(check_suite(name, suite, each, tasks)) for each in levels]
    if as_json:
        typer.echo(json.dumps([report.to_json() for report in reports], indent=1))
    else:
        for report in reports:
            typer.echo(f"{report.suite} {report.version}, level {report.level}")
            for verdict in report.verdicts:
                typer.echo(f"  {verdict.verdict:8}{verdict.check:12}  {verdict.detail}")
    if not all(report.ok for report in reports):
        raise typer.Exit(1)
