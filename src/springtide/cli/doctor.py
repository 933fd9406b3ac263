"""`springtide doctor`: says in plain words what is wrong with something one wrote or brought.

Called by: `cli.main`, which mounts `app`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Protocol

import typer

from springtide.cli.train import Set

if TYPE_CHECKING:
    from springtide.env.check import Verdict

app = typer.Typer(
    help="Check an environment, a model or a whole configuration before it costs a run.", no_args_is_help=True
)


@app.callback()
def doctor() -> None:
    """Check what you wrote before it costs a run."""


@app.command()
def env(
    name: Annotated[str, typer.Argument(help="a registered suite, FILE.py:Class, or a file of data")],
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
        typer.echo(_counted(verdicts))
    if "failed" in verdicts:
        raise typer.Exit(1)


@app.command()
def model(
    path: Annotated[str, typer.Argument(help="a Hugging Face directory, or a shipped model")],
    env: Annotated[str | None, typer.Option(help="a suite whose solutions are played in the model's tokens")] = None,
    level: Annotated[str | None, typer.Option(help="of that suite; default: its first")] = None,
    tool_format: Annotated[str, typer.Option(help="how it writes calls; auto finds out from the template")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="print the verdicts as JSON")] = False,
) -> None:
    """Put a model through what a run does with it: files, template, tool calls, log-probs, seeds, gradients, weights.

    Takes some forward and two backward passes. Exits with 0 if nothing failed, 1 if something did, 2 if there is none.
    """
    from springtide.cli.model_checks import ModelChecker
    from springtide.models.presets import resolve_model

    directory = resolve_model(path, key="PATH")

    async def examine() -> list[Verdict]:
        async with ModelChecker(directory, env, level, tool_format) as checker:
            return await _made(checker, quiet=as_json)

    _tell(str(directory), examine, as_json)


@app.command()
def cluster(
    config: Annotated[Path, typer.Argument(help="a run's TOML file")],
    set_: Set = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the verdicts as JSON")] = False,
) -> None:
    """Try a configuration on the machines it names: versions, memory, devices, ports, one publication, one generation.

    Starts all processes of the run, and ends them. Exits with 0 if nothing failed, 1 if something did.
    """
    from springtide.cli.cluster_checks import ClusterChecker
    from springtide.rundir import load_run

    async def examine() -> list[Verdict]:
        return await _made(ClusterChecker(load_run(config, tuple(set_ or ()))), quiet=as_json)

    _tell(str(config), examine, as_json)


class _Checker(Protocol):
    @property
    def checks(self) -> Mapping[str, object]: ...

    async def run(self, name: str) -> Verdict: ...


async def _made(checker: _Checker, *, quiet: bool) -> list[Verdict]:
    """All its checks, in order, a line each."""
    found = []
    for name in checker.checks:
        found.append(verdict := await checker.run(name))
        if not quiet:
            typer.echo(f"  {verdict.verdict:8}{verdict.check:14}  {verdict.detail}")
    return found


def _tell(title: str, examine: Callable[[], Coroutine[None, None, list[Verdict]]], as_json: bool) -> None:
    """Make checks and say what they found. Exits with 1 if one failed."""
    if not as_json:
        typer.echo(title)
    verdicts = asyncio.run(examine())
    if as_json:
        typer.echo(json.dumps([asdict(verdict) for verdict in verdicts], indent=1))
    else:
        typer.echo(_counted([verdict.verdict for verdict in verdicts]))
    if any(verdict.verdict == "failed" for verdict in verdicts):
        raise typer.Exit(1)


def _counted(verdicts: Sequence[str]) -> str:
    counts = [f"{verdicts.count(kind)} {kind}" for kind in ("failed", "warning", "skipped") if kind in verdicts]
    return f"{len(verdicts)} checks: {', '.join(counts) or 'all ok'}"
