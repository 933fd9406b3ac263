"""`springtide compare A B`: do two policies differ on the same tasks?"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from springtide.cli.train import Json
from springtide.observe.sinks import plain


def command(
    a: Annotated[Path, typer.Argument(help="a run, or a file of springtide eval --out")],
    b: Annotated[Path, typer.Argument(help="another")],
    label: Annotated[str, typer.Option(help="which evaluation of a run: start, end, step-20")] = "end",
    label_a: Annotated[str | None, typer.Option(help="which of A, if another")] = None,
    json_: Json = False,
) -> None:
    """Success of B against A on the tasks both played: the difference, its 95% interval, and a paired p-value."""
    from springtide.observe.compare import compare, read_scores

    rows = compare(read_scores(a, label_a or label), read_scores(b, label))
    if json_:
        print(json.dumps(plain({"a": str(a), "b": str(b), "rows": [asdict(r) for r in rows]})))
        return
    width = max(len(r.suite) for r in rows)
    for r in rows:
        print(
            f"{r.suite:{width}}  {r.how:7}  {r.a:6.1%} -> {r.b:6.1%}  {100 * r.difference:+5.1f} points "
            f"[{100 * r.low:+.1f}, {100 * r.high:+.1f}]  p {r.p:.2g}  {r.tasks} tasks"
            + (f" ({r.only_a} only in A, {r.only_b} only in B, left out)" if r.only_a or r.only_b else "")
        )
