"""What a run looks like: `report.html`, one self-contained page, and `curve.png`.

Owns: what is said of a run, in which order. Invariants: the page is made of what is on disk, at any moment: before the
first step, in a run that goes on, after a kill; it needs no network; every figure is one of `docs/metrics.md`.
Called by: `springtide.api`, `observe.view`.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from springtide.ledger import VisitRow
from springtide.observe import capability, charts, ranks, spent, transcripts
from springtide.observe.charts import Line, Mark
from springtide.observe.eventlog import EventLog
from springtide.observe.markup import Html, join, page, tag, wide_table
from springtide.observe.pace import describe, summarise_pace
from springtide.observe.plots import label_of, number, smooth, success_of, window, write_curve
from springtide.observe.runview import RunView
from springtide.rollout.evaluate import wilson
from springtide.rundir import RunDirectory
from springtide.trace import Group, atomic_write

_SHOWN = 4  # pairs of episodes a suite, before and after
_START = "#98a3b1"  # the colour of what was before training
_READ_S, _READ_ON_S = 60.0, 1.0  # for events, at most: of a page that is made once, and of one made again and again
_STATUS = {
    "completed": "#4459c9",
    "turn_limit": "#eeb73e",
    "context_limit": "#dd7430",
    "time_limit": "#b5533c",
    "invalid_action": "#a64ac9",
    "cancelled": "#9aa5b1",
    "environment_error": "#d1495b",
}


def write_report(run_dir: Path) -> Path:
    """Write `report.html` and `curve.png` of a run, whole or not; the report's path. Raises: ConfigError."""
    run = RunView.open(run_dir)
    write_curve(run.records, run_dir / "curve.png")
    path = run_dir / "report.html"
    atomic_write(path, render(run).encode())
    return path


def render(run: RunView, *, live_s: float = 0.0, served: bool = False, events: EventLog | None = None) -> str:
    """The report as one HTML page.

    live_s: seconds between refreshes; served: link to pages that `view` serves. events: where a page that is made again
    and again reads on; else they are read from the beginning.
    """
    sections = [
        ("result", "Result", _result(run)),
        ("curves", "Learning", _curves(run)),
        ("time", "Where the time went", spent.section(run)),
        ("ranks", "Ranks and groups", _ranks(run, events)),
        ("losses", "What was lost", _losses(run)),
        ("episodes", "Before and after", _episodes(run)),
        ("capability", "Capability", capability.section(run)),
        ("groups", "Training groups", _groups(run)),
        ("run", "The run", _run(run)),
    ]
    body = [_head(run)] + [[tag("h2", title, id=key), content] for key, title, content in sections]
    links: list[tuple[str, str]] = [(f"#{key}", title) for key, title, _ in sections]
    return page(run.path.name, body, links + ([("/groups", "All episodes →")] if served else []), live_s=live_s)


# --- sections ---------------------------------------------------------------------------------------------------------


def _head(run: RunView) -> Html:
    last = run.steps[-1] if run.steps else None
    steps, minutes = run.config["run"]["steps"], run.config["run"].get("minutes")
    done, trained = (last["step"], f"{last['t'] / 60:.1f}") if last else (0, "0.0")
    if run.summary is not None:
        state = tag("span", "finished", class_="badge good")
    else:
        age = time.time() - max((p.stat().st_mtime for p in run.path.glob("*.jsonl")), default=time.time())
        state = tag("span", f"not finished; last sign of life {_ago(age)} ago", class_="badge error")
    parts = [
        f"step {done}" if minutes else f"step {done} of {steps}",
        f"{trained} of {minutes:.1f} min" if minutes else f"{trained} min",
        str(run.config["model"]["path"]),
        f"seed {run.config['run']['seed']}",
        *([f"commit {run.summary['commit']}"] if run.summary and run.summary["commit"] else []),
    ]
    notes = Counter((r["text"]) for r in run.records if r["kind"] == "note")
    if run.skipped:
        lines = "1 line" if run.skipped == 1 else f"{run.skipped:,} lines"
        notes[f"{lines} of metrics.jsonl could not be read and are left out: torn, or not written by the run."] += 1
    return join(
        [
            tag("h1", run.path.name),
            tag("div", state, tag("span", " · ".join(parts), class_="muted"), class_="line"),
            [tag("div", text + (f" ({n} times)" if n > 1 else ""), class_="callout") for text, n in notes.items()],
        ]
    )


def _result(run: RunView) -> list[Any]:
    start = next((r for r in run.evals if r["label"] == "start"), None)
    end = next((r for r in reversed(run.evals) if r["label"] != "start"), None)
    tiles = tag(
        "div", [tag("div", tag("b", v), tag("span", k), class_="card tile") for k, v in _tiles(run)], class_="tiles"
    )
    if start is None and end is None:
        return [tag("p", "No evaluation in this run: the curves below show success in training.", class_="lead"), tiles]
    names = (_label(run, "start"), end["label"] if end else "now")
    return [_hero(start, end, names), _suite_table(run, start, end, names), tiles]


def _label(run: RunView, label: str) -> str:
    return label_of(label, run.config.get("trainer", {}).get("cold_start", {}).get("steps", 0))


def _hero(start: dict[str, Any] | None, end: dict[str, Any] | None, names: tuple[str, str]) -> Html:
    first, last = number(start["success"]) if start else None, number(end["success"]) if end else None
    gain = None
    if first is not None and last is not None:
        gain = tag(
            "span",
            f"{100 * (last - first):+.1f} points",
            class_=f"gain {'up' if last > first else 'down' if last < first else ''}",
        )
    greedy = [number(r["greedy"]) if r else None for r in (start, end)]
    text = f"success on the evaluation tasks, sampled as in training, mean over suites: {' → '.join(names)}"
    if any(g is not None for g in greedy):
        text += f"; greedy {_percent(greedy[0])} → {_percent(greedy[1])}"
    big = tag("span", _percent(first), tag("span", "→", class_="arrow"), _percent(last), class_="big")
    return tag("div", big, gain, tag("p", text), class_="card hero")


def _suite_table(
    run: RunView, start: dict[str, Any] | None, end: dict[str, Any] | None, names: tuple[str, str]
) -> Html:
    first, when = names
    suites = sorted({s for r in (start, end) if r for s in r["suites"]})
    rows = []
    repeated = any(len(r["pass_at"]) > 1 for record in (start, end) if record for r in record["suites"].values())
    for suite in suites:
        a, b = ((r["suites"].get(suite) if r else None) for r in (start, end))
        rows.append(
            tag(
                "tr",
                tag("td", tag("b", suite)),
                tag("td", _interval(a)),
                tag("td", _interval(b)),
                tag("td", charts.dumbbell(_mark(a, first, _START), _mark(b, when, run.colors[suite]))),
                tag("td", _change(a, b)),
                tag("td", _interval(_greedy(a))),
                tag("td", _interval(_greedy(b))),
                tag("td", _pass_at(b or a)) if repeated else None,
                tag("td", f"{(b or a or {})['episodes']}", class_="num"),
            )
        )
    heads = ["suite", first, when, "0 to 100%", "change in points", f"greedy, {first}", f"greedy, {when}"]
    heads += [*(["pass@k"] if repeated else []), "episodes"]
    head = tag("tr", [tag("th", h, class_="num" if h == "episodes" else None) for h in heads])
    note = (
        "Square brackets hold 95% intervals: Wilson's for a rate, Newcombe's for the change (both take episodes as "
        "independent). Episodes whose environment failed are in no rate."
    )
    return tag("div", tag("table", head, rows), tag("p", note, class_="note"), class_="card scroll")


def _tiles(run: RunView) -> list[tuple[str, str]]:
    steps = run.steps
    if not steps:
        return []
    wall = max(1e-9, sum(r["step_s"] for r in steps))
    tokens = sum(r["loss_tokens"] for r in steps)
    trajectories = max(1, sum(r["trajectories"] for r in steps))
    waits = sum(v for r in steps for k, v in r["seconds"].items() if k.startswith("wait_"))
    staleness = sum(r["staleness"]["mean"] * r["trajectories"] for r in steps) / trajectories
    return [
        ("trained tokens a second", f"{tokens / wall:,.0f}"),
        ("tokens trained", f"{tokens:,}"),
        ("mean step", f"{wall / len(steps):.2f} s"),
        ("staleness, mean (max)", f"{staleness:.2f} ({max(r['staleness']['max'] for r in steps)})"),
        ("engine busy", f"{sum(r['engine']['busy_share'] * r['step_s'] for r in steps) / wall:.0%}"),
        ("trainer waits", f"{waits / wall:.0%}"),
        ("environment errors", f"{sum(sum(r['env_errors'].values()) for r in run.counted):,}"),
        ("peak memory (PSS)", f"{max(r['pss_mib'] for r in steps) / 1024:.2f} GiB"),
    ]


def _curves(run: RunView) -> list[Any]:
    steps, colors = run.steps, run.colors
    width = window(len(steps))
    success: list[Line] = []
    reward: list[Line] = []
    for suite, color in colors.items():
        for table, lines in (("success", success), ("reward", reward)):
            xs, ys = success_of(steps, suite, table)
            lines.append(Line(suite, color, xs, smooth(ys, width), ys if width > 1 else None))
    marks = [
        mark
        for r in run.evals
        for place, (suite, result) in enumerate(sorted(r["suites"].items()))
        for shift in (12.0 * (place - (len(r["suites"]) - 1) / 2),)
        for name in (f"{suite}, {_label(run, r['label'])}",)
        for mark in (
            _mark(result, f"{name}, sampled", colors[suite], r["step"], shift=shift),
            _mark(_greedy(result), f"{name}, greedy", colors[suite], r["step"], True, shift + 5),
        )
        if mark is not None
    ]
    note = (
        "Lines: episodes that ended since the step before"
        + (f", mean of {width} steps (every step faint)." if width > 1 else ".")
        + (" Points: evaluations with 95% interval, filled sampled, hollow greedy." if marks else "")
    )
    main = charts.line_chart("Success by suite", success, marks, unit="%", width=1080, height=340, note=note)
    xs = [r["step"] for r in steps]

    def series(name: str, color: str, values: list[float | None]) -> Line:
        known = [math.nan if v is None else float(v) for v in values]
        return Line(name, color, xs, smooth(known, width), known if width > 1 else None)

    def learned(key: str) -> list[float | None]:
        return [number(r["trainer"].get(key)) for r in steps]

    stale = [
        series("mean", "#dd7430", [r["staleness"]["mean"] for r in steps]),
        Line("maximum", "#b9a08d", xs, [r["staleness"]["max"] for r in steps]),
    ]
    if any(r["staleness"]["stale_pool_lag"] for r in steps):
        stale.append(series("stale pool's lag", "#a64ac9", [r["staleness"]["stale_pool_lag"] for r in steps]))
    small = [
        charts.line_chart("Reward by suite", reward),
        charts.line_chart(
            "Goodput", [series("tokens/s", "#1f9d72", [r["goodput_tokens_per_s"] for r in steps])], unit=" tokens/s"
        ),
        charts.line_chart("Staleness", stale, unit=" steps"),
        charts.line_chart("Entropy", [series("entropy", "#4459c9", learned("entropy"))], unit=" nats"),
        charts.line_chart("Gradient norm", [series("gradient norm", "#6b7a8f", learned("grad_norm"))]),
        charts.line_chart("Clipped share of tokens", [series("clipped", "#d1495b", learned("clipped"))]),
    ]
    return [tag("div", main, style="margin-bottom:14px"), tag("div", small, class_="grid2")]


def _ranks(run: RunView, events: EventLog | None) -> list[Any]:
    log = events or EventLog(RunDirectory(run.path).events)
    with log.read(_READ_ON_S if events else _READ_S) as timeline:
        return ranks.section(timeline, unread=log.unread, skipped=log.skipped)


def _losses(run: RunView) -> list[Any]:
    totals: dict[str, Counter[str]] = {key: Counter() for key in ("dropped", "env_errors", "discarded_tokens")}
    for r in run.counted:
        for key, counter in totals.items():
            counter.update(r[key])
    kept = [r["tokens_a_group"] for r in run.steps]
    means = {k: _known_mean([m[k] for m in kept if m[k] > 0]) for k in ("kept", "dropped")}
    bias = ""
    if means["dropped"] is not None and means["kept"] is not None:
        bias = f"Sampled tokens of a group: {means['kept']:.0f} where kept, {means['dropped']:.0f} where dropped."
    status = charts.stacked_bars(
        "How episodes ended", [r["step"] for r in run.steps if r["episodes"]],
        [r["status"] for r in run.steps if r["episodes"]], _STATUS, {k: k.replace("_", " ") for k in _STATUS},
        unit="%", share=True,
    )  # fmt: skip
    tables = tag(
        "div",
        _counts("Groups dropped, by cause", totals["dropped"]),
        _counts("Environment errors, by suite and cause", totals["env_errors"]),
        _counts("Sampled tokens discarded, by cause", totals["discarded_tokens"]),
        tag("p", bias, class_="note") if bias else None,
        class_="card",
    )
    return [tag("div", status, tables, class_="grid2")]


def _episodes(run: RunView) -> list[Any]:
    starts = [p for p in run.trajectories("eval-start-*.msgpack") if not p.name.startswith("eval-start-greedy-")]
    greedy = run.trajectories("eval-start-greedy-*.msgpack")
    pairs = _pairs(run, starts, "eval-start-", "eval-end-")
    if not pairs:
        return [tag("p", "No evaluation episodes were kept.", class_="lead")]
    lead = f"The same tasks before and after training: the first {_SHOWN} of each suite's evaluation, not a selection. "
    lead += "One that failed before and succeeds after is chosen beside them, where the kept episodes have one."
    out: list[Any] = [tag("p", lead, class_="lead")]
    for suite, boxes in pairs.items():
        out += [tag("h3", suite), boxes]
    folded = _pairs(run, greedy, "eval-start-greedy-", "eval-end-greedy-")
    if folded:
        inside = [[tag("h3", suite), boxes] for suite, boxes in folded.items()]
        out.append(tag("details", tag("summary", "The same, greedy"), inside, id="greedy-pairs"))
    return out


def _pairs(run: RunView, starts: Sequence[Path], before: str, after: str) -> dict[str, list[Html]]:
    """By suite, the first pairs of episodes, and the first of the others that failed before and succeeds after."""
    out: dict[str, list[Html]] = {}
    kept: dict[str, list[tuple[str, Group, Group | str]]] = {}
    missing = "This evaluation has not run." if run.summary is None else "Not kept: its environment failed."
    for path in starts:
        old = run.group(path)
        if isinstance(old, str):
            out.setdefault("damaged", []).append(tag("p", old, class_="callout"))
            continue
        other = path.with_name(after + path.name.removeprefix(before))
        new = run.group(other) if other.exists() else missing
        kept.setdefault(old.task.suite, []).append((path.stem, old, new))
    for suite, pairs in kept.items():
        chosen = next((key for key, old, new in pairs if _learned(old, new)), None)
        shown = pairs[:_SHOWN] + [pair for pair in pairs[_SHOWN:] if pair[0] == chosen]
        out[suite] = [
            _pair(*pair, chosen=pair[0] == chosen, open_=pair[0] == (chosen or pairs[0][0])) for pair in shown
        ]
    return out


def _learned(old: Group, new: Group | str) -> bool:
    outcome = old.trajectories[0].outcome
    failed = outcome.success is False and not outcome.failed_environment
    return failed and not isinstance(new, str) and new.trajectories[0].outcome.success is True


def _pair(key: str, old: Group, new: Group | str, *, chosen: bool, open_: bool) -> Html:
    sides = [
        tag(
            "div",
            tag("h4", title),
            tag("p", g) if isinstance(g, str) else transcripts.transcript(g.trajectories[0]),
        )
        for title, g in (("before", old), ("after", new))
    ]
    summary = tag(
        "summary",
        tag("b", old.task.id), " ", transcripts.badge(old.trajectories[0].outcome),
        None if isinstance(new, str) else [" → ", transcripts.badge(new.trajectories[0].outcome)],
        [" ", tag("span", "chosen: failed before, succeeds after", class_="badge plain")] if chosen else None,
    )  # fmt: skip
    return tag("details", summary, tag("div", sides, class_="pair"), class_="pairbox", id=key, open=open_)


def _groups(run: RunView) -> list[Any]:
    if isinstance(run.ledger, str):
        return [tag("p", run.ledger.capitalize() + ".", class_="lead")]
    by_suite: dict[str, list[VisitRow]] = {}
    for row in sorted(run.ledger[1], key=lambda row: (row.step or 0, row.visit)):
        by_suite.setdefault(row.task.suite, []).append(row)
    out: list[Any] = []
    for suite, rows in sorted(by_suite.items()):
        telling = [row for row in rows if _spread(row) > 0] or rows
        for chosen in {row.visit: row for row in (telling[0], telling[-1])}.values():
            path = RunDirectory(run.path).trajectories / (chosen.path or "")
            if path.is_file():
                title = join([tag("b", suite), f", trained at step {chosen.step}: {chosen.task.id}"])
                found = run.group(path)
                out.append(
                    tag("p", found, class_="callout")
                    if isinstance(found, str)
                    else transcripts.group(found, title=title, key=f"group-{chosen.visit}")
                )
    if not out:
        return [tag("p", "No group has been trained yet.", class_="lead")]
    lead = "The first and the last trained group of each suite whose members' rewards differ."
    return [tag("p", lead, class_="lead"), out]


def _run(run: RunView) -> list[Any]:
    resumes = [r for r in run.records if r["kind"] == "resume"]
    restarts = run.steps[-1]["restarts"] if run.steps else {}
    facts = [f"Resumed at step {r['step']} (incarnation {r['incarnation']})." for r in resumes]
    if (paced := summarise_pace(run.steps)) is not None:
        facts.append(f"{describe(paced).capitalize()}.")
    facts += [f"Restarted processes: {name} {n} times." for name, n in sorted(restarts.items()) if n]
    config = tag("details", tag("summary", "config.toml (resolved)"), tag("pre", run.config_text, class_="config"))
    return [_audit(run), [tag("p", fact) for fact in facts], tag("div", config, class_="card")]


def _audit(run: RunView) -> Html:
    if isinstance(run.ledger, str):
        return tag("p", run.ledger.capitalize() + ".", class_="lead")
    audit = run.ledger[0]
    dropped = sum(audit["dropped"].values())
    rest = audit["drawn"] - audit["trained"] - audit["ready"] - audit["open"] - dropped
    verdict = (
        tag("span", "every drawn member is accounted for", class_="badge good")
        if rest == 0
        else tag("span", f"{rest} members are unaccounted for", class_="badge bad")
    )
    rows = [("drawn", audit["drawn"]), ("trained", audit["trained"]), ("ready", audit["ready"])]
    rows += [("still open", audit["open"])]
    rows += [(f"dropped: {cause.replace('_', ' ')}", n) for cause, n in sorted(audit["dropped"].items())]
    rows += [("attempts lost to environment errors", audit["attempts_failed"])]
    rows += [("attempts lost to killed processes", audit["attempts_killed"])]
    table = wide_table([tag("tr", tag("td", k), tag("td", f"{v:,}", class_="num")) for k, v in rows])
    return tag("div", tag("div", tag("b", "Ledger, in members"), verdict, class_="line"), table, class_="card")


# --- helpers ----------------------------------------------------------------------------------------------------------


def _mark(
    result: dict[str, Any] | None, name: str, color: str, x: float = 0.0, hollow: bool = False, shift: float = 0.0
) -> Mark | None:
    y = number(result["success"]) if result else None
    if y is None or result is None:
        return None
    return Mark(name, color, x, y, result.get("low"), result.get("high"), hollow, shift)


def _greedy(result: dict[str, Any] | None) -> dict[str, Any] | None:
    """A suite's greedy result in the form of its sampled one."""
    return result and {"success": result["greedy"], "low": result["greedy_low"], "high": result["greedy_high"]}


def _interval(result: dict[str, Any] | None) -> Html | str:
    if result is None or number(result["success"]) is None:
        return "–"
    bounds = f" [{100 * result['low']:.1f}, {100 * result['high']:.1f}]"
    return join([tag("b", _percent(result["success"])), tag("span", bounds, class_="range")])


def _change(a: dict[str, Any] | None, b: dict[str, Any] | None) -> Html | str:
    """The difference of two rates with Newcombe's interval (1998, method 10), in points."""
    if a is None or b is None or number(a["success"]) is None or number(b["success"]) is None:
        return "–"
    p, q = a["success"], b["success"]
    (low_a, high_a), (low_b, high_b) = (wilson(round(r["success"] * r["episodes"]), r["episodes"]) for r in (a, b))
    low = q - p - math.hypot(q - low_b, high_a - p)
    high = q - p + math.hypot(high_b - q, p - low_a)
    kind = "up" if low > 0 else "down" if high < 0 else ""
    text = tag("b", f"{100 * (q - p):+.1f}", class_=kind)
    return join([text, tag("span", f" [{100 * low:+.0f}, {100 * high:+.0f}]", class_="range")])


def _pass_at(result: dict[str, Any] | None) -> str:
    values = {int(k): number(v) for k, v in (result or {}).get("pass_at", {}).items()}
    return "  ".join(f"{k}: {_percent(v)}" for k, v in sorted(values.items()) if k > 1) or "–"


def _counts(title: str, counts: Counter[str]) -> Html:
    most = max(counts.values(), default=0) or 1
    rows = [
        tag(
            "tr",
            tag("td", name.replace("_", " ")),
            tag("td", tag("i", style=f"width:{100 * n / most:.1f}%"), class_="barcell"),
            tag("td", f"{n:,}", class_="num"),
        )
        for name, n in counts.most_common()
    ]
    return join([tag("h3", title), wide_table(rows) if rows else tag("p", "none", class_="muted")])


def _spread(row: VisitRow) -> float:
    rewards = [m[2] for m in (row.summary or {}).get("members", ()) if m[2] is not None]
    return max(rewards) - min(rewards) if rewards else 0.0


def _known_mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _percent(value: float | None) -> str:
    return "–" if value is None or not math.isfinite(value) else f"{value:.1%}"


def _ago(seconds: float) -> str:
    for size, unit in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
