"""What every benchmark shares: rows and their verdicts, the machine and its load, intervals, cells that can be resumed.

Owns: the JSON of a result (`report`), where results and cells are kept, and `RESULTS.md`, which is rendered from them.
Invariants: a `--quick` result never counts as met and is never stored; a row whose requirement is for every seed is
judged by its worst; a cell is used again only if its configuration and every source it imports are what they were.
Called by: the benchmarks beside it, as `from common import ...`, and as a command: `--render` writes the page.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from springtide.config import Config

HERE = Path(__file__).resolve().parent
REPO = HERE.parent
SOURCES = REPO / "src" / "springtide"
CELLS = HERE / "cells"
RESULTS = HERE / "results"
PAGE = HERE / "RESULTS.md"

Json = dict[str, Any]
# Two-sided 95% quantiles of Student's t by degrees of freedom; beyond the table the normal one is within 2%.
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120)
_MEMORY_SAMPLE_S = 2.0
_QUIET_CORES = 0.1  # other work that uses more of the machine than this leaves no timing to be trusted


# --- rows and results -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Row:
    """One target. `required` is compared with `judged`: the value, its ratio to the baseline, or the worst seed.

    value: what was measured, None where it could not be. worst: the seed furthest from the requirement.
    ci_low, ci_high: 95% interval of the value (of the ratio, where the ratio is judged). extra: more figures, by name.
    """

    target: str
    value: float | None
    unit: str
    baseline: str | None = None
    baseline_value: float | None = None
    required: float | None = None
    at_most: bool = False
    judged: Literal["value", "ratio", "worst"] = "value"
    worst: float | None = None
    seeds: int = 1
    ci_low: float | None = None
    ci_high: float | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ratio(self) -> float | None:
        """value / baseline_value."""
        return self.value / self.baseline_value if self.value is not None and self.baseline_value else None

    def met(self, *, quick: bool) -> bool | None:
        """None without a requirement; False where it was not measured, or was measured with `--quick`."""
        if self.required is None:
            return None
        judged = getattr(self, self.judged)
        if quick or judged is None or math.isnan(judged):
            return False
        return judged <= self.required if self.at_most else judged >= self.required

    def to_json(self, *, quick: bool) -> Json:
        data = asdict(self)
        extra = data.pop("extra")
        return _plain({**data, "ratio": self.ratio, "met": self.met(quick=quick), **extra})


def report(name: str, rows: Sequence[Row], load: Load, *, quick: bool, **extra: Any) -> Json:
    """The result of a benchmark: `{name, machine, commit, load, seconds, quick, rows, ...}`."""
    return _plain(
        {
            "name": name,
            "machine": machine(),
            "commit": commit(),
            "load": load.to_json(),
            "seconds": load.seconds,
            "quick": quick,
            "rows": [row.to_json(quick=quick) for row in rows],
            **extra,
        }
    )


def report_cells(name: str, rows: Sequence[Row], cells: Sequence[Json], *, quick: bool, **extra: Any) -> Json:
    """A result made from cells: measured where and when they were, beside the worst load that any of them met."""
    worst = max((c["load"] for c in cells), key=lambda load: load["other_cores"] + load["stolen_cores"])
    return _plain(
        {
            "name": name,
            "machine": cells[0]["machine"],
            "commit": " ".join(sorted({c["commit"] for c in cells if c["commit"]})),
            "load": {**worst, "quiet": all(c["load"]["quiet"] for c in cells)},
            "seconds": sum(c["seconds"] for c in cells),
            "quick": quick,
            "rows": [row.to_json(quick=quick) for row in rows],
            **extra,
        }
    )


def emit(result: Json, *, as_json: bool, store: bool = True) -> None:
    """Print a result; store it (unless it is a quick one) and render the page."""
    if store and not result["quick"]:
        RESULTS.mkdir(exist_ok=True)
        write_json(RESULTS / f"{result['name']}.json", result)
        PAGE.write_text(render())
    print(json.dumps(result) if as_json else table(result), flush=True)


def arguments(doc: str | None, *, runs: bool = False, cells: bool = False) -> argparse.ArgumentParser:
    """The options that every benchmark takes; `runs` for one that trains, `cells` for one that keeps cells."""
    text = doc or ""
    parser = argparse.ArgumentParser(description=text.partition("\n")[0], epilog=text.partition("\n")[2])
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--quick", action="store_true", help="about a minute; never counts as met, never stored")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    if runs:
        text = "with --quick: change one key of the preset"
        parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=text)
    if cells:
        parser.add_argument("--missing", action="store_true", help="run only the cells that are missing or out of date")
    return parser


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """The options of a program that trains: its figures are of the preset as shipped, unless they count for nothing."""
    args = parser.parse_args(argv)
    if args.set and not args.quick:
        parser.error("--set changes the preset, so it needs --quick: the figures are of the preset as shipped")
    return args


def preset(*sets: str) -> Config:
    """The quickstart's configuration as shipped, with `sets` applied."""
    from springtide.config import load_config

    return load_config(SOURCES / "cli" / "quickstart.toml", sets)


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A directory that goes with the block."""
    with tempfile.TemporaryDirectory(prefix="springtide-bench-") as directory:
        yield Path(directory)


def read_lines(path: Path) -> list[Json]:
    """The records of a `.jsonl` file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_json(path: Path, data: Any) -> None:
    scratch = path.with_suffix(".tmp")
    scratch.write_text(json.dumps(data, indent=1, sort_keys=True) + "\n")
    scratch.replace(path)


def _plain(value: Any) -> Any:
    """JSON has no NaN: a figure that does not exist is null."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# --- the machine ------------------------------------------------------------------------------------------------------


def machine() -> Json:
    """What the figures were measured on."""
    cpu = "unknown"
    with contextlib.suppress(OSError):
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        cpu = found[1] if found else platform.machine()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **{name: version for name in ("torch", "transformers", "numpy") if (version := _version(name))},
    }


@functools.cache
def commit() -> str:
    """The repository's commit, "-dirty" appended where a source differs from it; empty outside a checkout."""
    try:
        head = _git("rev-parse", "--short=12", "HEAD").strip()
        # Cells and results written by this very program are not sources.
        changed = [f for f in _git("status", "--porcelain", "--", "src", "benchmarks/*.py").splitlines() if f.strip()]
        return f"{head}-dirty" if changed else head
    except (OSError, subprocess.SubprocessError):
        return ""


class Load:
    """How much of the machine other work used while a block ran: a timing beside another job is no timing.

    `other_cores`: cores that were busy with processes that are neither this one nor its (ended) children, on average.
    """

    def __enter__(self) -> Load:
        self.seconds, self.other_cores, self.stolen_cores = 0.0, 0.0, 0.0
        self._before = os.getloadavg()[0]
        self._started, self._machine, self._own = time.monotonic(), _machine_seconds(), _own_seconds()
        return self

    def __exit__(self, *error: object) -> None:
        self.seconds = max(1e-9, time.monotonic() - self._started)
        busy, stolen = (after - before for after, before in zip(_machine_seconds(), self._machine))
        self.other_cores = max(0.0, busy - (_own_seconds() - self._own)) / self.seconds
        self.stolen_cores = stolen / self.seconds

    def to_json(self) -> Json:
        return {
            "load_before": self._before,
            "other_cores": round(self.other_cores, 3),
            "stolen_cores": round(self.stolen_cores, 3),
            "quiet": self.other_cores + self.stolen_cores <= _QUIET_CORES,
        }


def _machine_seconds() -> tuple[float, float]:
    """Seconds since start that all cores together were busy, and were taken by the host."""
    try:
        user, nice, system, _idle, _wait, irq, soft, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    except (OSError, ValueError):
        return 0.0, 0.0
    tick = os.sysconf("SC_CLK_TCK")
    return (user + nice + system + irq + soft) / tick, steal / tick


def _own_seconds() -> float:
    t = os.times()
    return t.user + t.system + t.children_user + t.children_system


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(*args: str) -> str:
    done = subprocess.run(["git", *args], cwd=REPO, text=True, capture_output=True, timeout=20, check=True)
    return done.stdout


# --- intervals --------------------------------------------------------------------------------------------------------


def interval(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Student's 95% interval of the mean; (None, None) for fewer than two values."""
    n = len(values)
    if n < 2:
        return None, None
    t = _T95[n - 2] if n - 2 < len(_T95) else 1.96
    half = t * statistics.stdev(values) / math.sqrt(n)
    mean = statistics.fmean(values)
    return mean - half, mean + half


def ratio_interval(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float | None, float | None]:
    """95% interval of the ratio of paired, positive measurements: Student's, of the logarithms."""
    low, high = interval([math.log(a / b) for a, b in zip(ours, theirs, strict=True)])
    return (None, None) if low is None or high is None else (math.exp(low), math.exp(high))


# --- cells ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cell:
    """One (arm, seed) of a long benchmark: its name, and the key of everything that its result depends on."""

    name: str
    config: Json
    sources: str  # `fingerprint` of what it runs

    @property
    def key(self) -> str:
        text = json.dumps({"config": _plain(self.config), "sources": self.sources}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def stored(self, directory: Path = CELLS) -> Json | None:
        """The stored cell, if it is there and still holds."""
        try:
            data: Json = json.loads((directory / f"{self.name}.json").read_text())
        except FileNotFoundError:
            return None
        return data if data["key"] == self.key else None

    def run(self, compute: Callable[[], Json], *, missing: bool, directory: Path = CELLS) -> Json:
        """Compute and store the cell; with `missing`, only where no stored one holds. Returns it whole."""
        if missing and (old := self.stored(directory)) is not None:
            return old
        with Load() as load:
            result = compute()
        data = _plain(
            {
                "name": self.name,
                "key": self.key,
                "config": self.config,
                "commit": commit(),
                "machine": machine(),
                "load": load.to_json(),
                "seconds": load.seconds,
                "result": result,
            }
        )
        directory.mkdir(parents=True, exist_ok=True)
        write_json(directory / f"{self.name}.json", data)
        return data


def fingerprint(entries: Iterable[str], data: Iterable[Path] = (), root: Path = SOURCES) -> str:
    """A hash of the sources that `entries` (modules of the package) import, directly or not, and of `data`.

    Comments, layout and docstrings do not count. data: files, and directories, of whose
    files all but Python's and prose count.
    """
    digest = hashlib.sha256()
    for module, path in sorted(imported(entries, root).items()):
        digest.update(f"{module}\n{_code(path)}\n".encode())
    for given in sorted(data):
        files = sorted(p for p in given.rglob("*") if p.is_file()) if given.is_dir() else [given]
        for path in files:
            if given.is_dir() and path.suffix in (".py", ".pyc", ".md"):
                continue
            content = _code(path).encode() if path.suffix == ".py" else path.read_bytes()
            digest.update(f"{path.relative_to(given.parent)}\n".encode() + hashlib.sha256(content).digest())
    return digest.hexdigest()[:16]


def imported(entries: Iterable[str], root: Path = SOURCES) -> dict[str, Path]:
    """Module -> file, of every module of the package that `entries` import, also inside functions, also as the entry of
    a process ("package.module:function")."""
    package, found, queue = root.name, dict[str, Path](), list(entries)
    while queue:
        module = queue.pop()
        path = root.parent / Path(*module.split("."))
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if module in found or module.split(".")[0] != package or not path.is_file():
            continue
        found[module] = path
        queue += [module.rpartition(".")[0], *_imports(module, path, package)]
    return found


def _imports(module: str, path: Path, package: str) -> Iterator[str]:
    base = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in _walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            source = node.module or ""
            if node.level:
                source = ".".join([*base.split(".")[: len(base.split(".")) - node.level + 1], *filter(None, [source])])
            yield source
            yield from (f"{source}.{name.name}" for name in node.names)
        elif isinstance(node, ast.Constant) and re.fullmatch(rf"{package}(\.\w+)+:\w+", str(node.value)):
            yield str(node.value).partition(":")[0]


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """As ast.walk, but what only a type checker imports is not imported."""
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _walk(child)


def _code(path: Path) -> str:
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and _documented(node):
            node.body = node.body[1:]
    return ast.dump(tree)


def _documented(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return ast.get_docstring(node, clean=False) is not None


# --- a run in a process of its own ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Finished:
    """A command that ended well. peak_pss_mib: the largest sum over its processes, sampled from outside."""

    wall_s: float
    peak_pss_mib: float


def springtide(*args: str, log: Path) -> Finished:
    """Run `springtide ARGS` to its end, and watch its memory. Raises: SystemExit with the end of its log."""
    from springtide.observe.metrics import pss_mib

    peak = [0.0]
    started = time.monotonic()
    with open(log, "wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "springtide.cli.main", *args], stdout=out, stderr=subprocess.STDOUT, cwd=REPO
        )
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(_MEMORY_SAMPLE_S):
                peak[0] = max(peak[0], pss_mib([process.pid]))

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            status = process.wait()
        except BaseException:
            process.terminate()  # its children end with it
            process.wait()
            raise
        finally:
            ended.set()
            watcher.join()
    if status:
        raise SystemExit(f"springtide {' '.join(args)} ended with {status}:\n{log.read_text(errors='replace')[-4000:]}")
    return Finished(time.monotonic() - started, peak[0])


def train(config: Config) -> Finished:
    """Train a configuration in processes of its own; its file and its log lie beside the run directory."""
    config.run_dir.parent.mkdir(parents=True, exist_ok=True)
    file = config.run_dir.with_suffix(".toml")
    file.write_text(config.to_toml())
    return springtide("train", str(file), log=config.run_dir.with_suffix(".log"))


# --- the page ---------------------------------------------------------------------------------------------------------

_PURPOSE = {
    "db": "What policies without a model reach at each level of db, on `test` and `ood`",
    "engine": "The local engine's speed",
    "fsdp": "Two trainer ranks against one",
    "goodput": "Tokens that are learned from, a second",
    "gpu_check": "What needs a GPU: engines, trainers and publication on one, as shares of its own matrix product",
    "household": "What policies without a model reach at each level of household, on `test`",
    "kg": "What policies without a model reach at each level of kg, on `test`",
    "kills": "How soon a run goes on after a process, an actor or a node is killed, and what is lost",
    "latency": "Asynchronous against synchronous, with tools that answer late",
    "learning": "The quickstart's claim",
    "frontier": "Samplers against uniform on a pool of mixed levels, at equal rollouts",
    "multitask": "One policy for three suites, and what its two devices are worth",
    "ray_overhead": "What the Ray runtime costs on one machine",
    "publish": "Publication of weights, fingerprint included, in copies of the same bytes",
    "scheduler_speed": "How fast the scheduler decides",
    "simulated": "Scheduling policies on simulated clusters",
    "simulator_validation": "The simulated cluster against formulas and published figures",
    "vllm_learning": "The quickstart on vLLM and on the local engine, at equal steps",
}


def table(result: Json) -> str:
    """A result as text for a terminal."""
    lines = [f"{result['name']}{' (quick: counts for nothing)' if result['quick'] else ''}: {_circumstances(result)}"]
    cells = [("target", "value", "baseline", "ratio", "95%", "required", "met"), *map(_cells, result["rows"])]
    widths = [max(map(len, column)) for column in zip(*cells)]
    lines += ["  ".join(text.ljust(width) for text, width in zip(row, widths)).rstrip() for row in cells]
    return "\n".join(lines)


def render(results: Path | None = None, cells: Path | None = None) -> str:
    """`RESULTS.md` from what is stored."""
    lines = [
        "# Results",
        "",
        "Written by `python benchmarks/common.py --render` from `results/` and `cells/`; no figure is entered by hand. "
        "A miss is shown as a miss.",
    ]
    stored = {p.stem: json.loads(p.read_text()) for p in sorted((results or RESULTS).glob("*.json"))}
    for name in sorted({*_PURPOSE, *stored}):
        lines += ["", f"## {name}", "", f"{_PURPOSE.get(name, name)}: `python benchmarks/{name}.py`."]
        result = stored.get(name)
        if result is None:
            lines[-1] += " Not run yet."
            continue
        lines += [f"{_circumstances(result)}.", ""]
        lines += [
            "| target | value | baseline | ratio | 95% interval | required | met |",
            "|---|---|---|---|---|---|---|",
        ]
        lines += [f"| {' | '.join(_cells(row))} |" for row in result["rows"]]
        lines += ["", *result.get("notes", ())] if result.get("notes") else []
    kept = [json.loads(p.read_text()) for p in sorted((cells or CELLS).glob("*.json"))]
    if kept:
        lines += ["", "## Cells", "", "What the tables are made from, one file each in `cells/`.", ""]
        lines += [
            "| cell | key | commit | minutes | other work, cores | success, start to end |",
            "|---|---|---|---|---|---|",
        ]
        lines += [
            f"| {c['name']} | {c['key']} | {c['commit'] or '-'} | {c['seconds'] / 60:.1f} "
            f"| {c['load']['other_cores']:.2f} | {_learned(c['result'])} |"
            for c in kept
        ]
    return "\n".join(lines) + "\n"


def _learned(result: Json) -> str:
    """What a cell of a training says, if it is one: sampled success by suite, and both means."""
    if "end" not in result:
        return "-"
    end = result["end"]

    def mean(suites: Json, key: str) -> float:
        return sum(s[key] for s in suites.values()) / len(suites)

    if (start := result.get("start")) is None:
        means = "; ".join(f"{key} to {mean(end, key):.1%}" for key in ("sampled", "greedy"))
        by_suite = ", ".join(f"{s} to {end[s]['sampled']:.0%}" for s in sorted(end))
        return f"{means} ({by_suite})"
    means = "; ".join(f"{key} {mean(start, key):.1%} to {mean(end, key):.1%}" for key in ("sampled", "greedy"))
    by_suite = ", ".join(f"{s} {start[s]['sampled']:.0%} to {end[s]['sampled']:.0%}" for s in sorted(start))
    return f"{means} ({by_suite})"


def _circumstances(result: Json) -> str:
    m, load = result["machine"], result["load"]
    quiet = "" if load["quiet"] else ": not quiet, so no timing here counts"
    versions = ", ".join(f"{k} {m[k]}" for k in ("python", "torch", "transformers") if m.get(k))
    return (
        f"{m['cpu']}, {m['cores']} cores, {m['memory_gib']:g} GiB, {versions}; commit {result['commit'] or 'unknown'}; "
        f"{result['seconds'] / 60:.1f} min; other work used {load['other_cores'] + load['stolen_cores']:.2f} cores"
        f"{quiet}"
    )


def _cells(row: Json) -> tuple[str, ...]:
    bound = "<=" if row["at_most"] else ">="
    judged = {"value": "", "ratio": " of ratio", "worst": " each seed"}[row["judged"]]
    worst = f" (worst {_number(row['worst'])})" if row["worst"] is not None else ""
    base = f"{_number(row['baseline_value'])} ({row['baseline']})" if row["baseline"] else "-"
    ci = f"{_number(row['ci_low'])} to {_number(row['ci_high'])}" if row["ci_low"] is not None else "-"
    return (
        row["target"],
        f"{_number(row['value'])} {row['unit']}{worst}",
        base,
        _number(row["ratio"]),
        ci,
        "-" if row["required"] is None else f"{bound} {_number(row['required'])}{judged}",
        {None: "-", True: "yes", False: "**no**"}[row["met"]],
    )


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Print RESULTS.md from what is stored.")
    parser.add_argument("--render", action="store_true", help="write it")
    if parser.parse_args().render:
        PAGE.write_text(render())
    else:
        print(render(), end="")


if __name__ == "__main__":
    main()
