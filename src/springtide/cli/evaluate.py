"""`springtide eval RUN|CHECKPOINT|URL --suite S --split P`."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from springtide.cli.train import Json, Set
from springtide.config import ConfigError
from springtide.observe.sinks import plain
from springtide.rollout.feeder import BrokenRun
from springtide.trace import atomic_write


def command(
    target: Annotated[
        str, typer.Argument(help="a run, a Hugging Face directory, a shipped model, or an endpoint's URL")
    ],
    suite: Annotated[str, typer.Option(help="a registered suite, FILE.py:Class, or a file of data")],
    split: Annotated[str, typer.Option(help="train, test or ood")] = "test",
    level: Annotated[
        str | None, typer.Option(help="of the suite; default: the run's, else quick if there is one, else the first")
    ] = None,
    tasks: Annotated[int, typer.Option(min=1, help="the first N tasks")] = 64,
    samples: Annotated[int, typer.Option(min=1, help="episodes a task; pass@k is given for k up to this")] = 1,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy")] = 1.0,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="a turn; default: the run's, or 64")] = None,
    dev: Annotated[bool, typer.Option("--dev", help="only the dev tenth (split train)")] = False,
    model: Annotated[str, typer.Option(help="the model's name at an endpoint")] = "default",
    concurrency: Annotated[int, typer.Option(min=1, help="episodes, and an endpoint's requests, at once")] = 64,
    budget: Annotated[int | None, typer.Option(min=1, help="tokens an endpoint may be asked to read and write")] = None,
    set_: Set = None,
    out: Annotated[Path | None, typer.Option(help="also write the figures and every episode to this JSON file")] = None,
    json_: Json = False,
) -> None:
    """How often a policy succeeds, with a 95% interval."""
    from springtide.api import default_level, evaluate

    if out is not None:
        _check_out(out)
    level = level or default_level(target, suite)
    result = evaluate(
        target,
        suite,
        split=split,
        level=level,
        tasks=tasks,
        samples=samples,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        dev=dev,
        model=model,
        concurrency=concurrency,
        budget=budget,
        sets=tuple(set_ or ()),
    )
    figures = {name: asdict(r) for name, r in result.suites.items()}
    said = {"target": target, "split": split, "level": level, "temperature": temperature, "suites": figures}
    text = json.dumps(plain(said))
    if out is not None:
        episodes = [asdict(e) for e in result.episodes]
        atomic_write(out, (json.dumps(plain({**said, "episodes": episodes})) + "\n").encode())
    if not any(r.episodes for r in result.suites.values()):
        raise BrokenRun(_all_failed(suite, next((r.first_error for r in result.suites.values()), "")))
    if json_:
        print(text)
        return
    for name, r in result.suites.items():
        print(f"{name}: success {r.success:.1%} [{r.low:.1%}, {r.high:.1%}] over {r.episodes} episodes")
        if samples > 1:
            print("  " + "  ".join(f"pass@{k} {v:.1%}" for k, v in r.pass_at.items()))
        print("  " + "  ".join(f"{status} {share:.1%}" for status, share in r.status.items()))
        print(f"  {r.turns:.1f} turns, {r.tokens:.0f} tokens an episode; {r.env_errors} environment errors")
        if r.first_error:
            print(f"  the first: {r.first_error}")


def _check_out(out: Path) -> None:
    """What would be said after the episodes is said before them. Raises: ConfigError."""
    try:
        parent, taken = out.parent.is_dir(), out.is_dir()
    except OSError as error:  # too long a name
        raise ConfigError(f"--out: {out}: {error.strerror}") from None
    if not parent:
        raise ConfigError(f"--out: there is no directory {out.parent}; make it, or name another file")
    if taken:
        raise ConfigError(f"--out: {out} is a directory; name a file in it, as {out / 'figures.json'}")
    if not os.access(out.parent, os.W_OK):
        raise ConfigError(f"--out: {out.parent} cannot be written; name a file elsewhere")


def _all_failed(suite: str, error: str) -> str:
    """The suite is suspected of what its own code did, not of an endpoint or an engine that failed it."""
    theirs = error.startswith(("setup:", "tool:", "judge:"))
    return f"every episode failed ({error})" + (f"; try: springtide doctor env {suite}" if theirs else "")
