"""Kills under load: each kind of a run's processes is killed fifty times; how soon it goes on, and what was lost.

A run of the quickstart's model and suites plays and trains throughout. In each round every kind is killed once
(SIGKILL), at a random moment, in a random order:
  engine, rollout, env, reference    the program is replaced, the run goes on
  trainer, driver                    the run ends, or is gone, and is taken up again at once with --resume
  actor                              (ray) the Ray actor that supervises one of the first four
  node                               (cluster) a Ray node with all programs that play, all its processes at once; the
                                     programs come up on another, and the node joins again before the next kill
A recovery lasts from the kill until the successor listens and an optimiser step after that has ended. At the end the
driver is killed and the run taken up once more, for its last steps, and audited: every visit that was drawn has one
end, every member of a trained one is in its file once, and no step of the surviving lineage is missing
(`tests/siege.py`).
On two quiet cores about 40 minutes for `local`, 60 for `ray`, 30 for `cluster`; the last two need the extra `ray`.
"""

from __future__ import annotations

import importlib.util
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from common import CELLS, REPO, Json, Row, arguments, emit, parse, preset, report_cells, scratch
from runs import make_cell

sys.path.insert(0, str(REPO))
from tests.ray_nodes import Nodes, open_nodes
from tests.run_support import alive, descendants, listening, program, start_run
from tests.siege import audit

from springtide.config import Config

PROGRAMS = {"engine": "engine-0", "rollout": "rollout-0", "env": "env-w0", "reference": "reference"}
ENDING = ("trainer", "driver")
KINDS = {
    "local": (*PROGRAMS, *ENDING),
    "ray": (*PROGRAMS, *ENDING, "actor"),
    "cluster": ("node",),
}
ROUNDS, LIMIT_S = 50, 30.0  # a recovery "in seconds"
_PATIENCE_S = 300.0
_PLAY, _LEARN = {"pool": "play"}, {"pool": "learn"}


def configure(runtime: str, directory: Path, sets: Sequence[str], address: str | None = None) -> Config:
    """The quickstart's model and suites in small steps, with a reference, so that every kind of process is there."""
    config = preset(
        "trainer.groups=4",
        "rollout.group.n=4",
        "rollout.concurrency=8",
        "rollout.group.retries=0",
        "rollout.stale_probability=0",
        "algorithm.equal_rewards=keep",
        "algorithm.kl_coef=0.001",
        "trainer.checkpoint_every=5",
        "eval.at_ends=false",
        "observe.report=false",
        "run.steps=1000000",
        "run.minutes=100000",
        f"runtime.kind={'local' if runtime == 'local' else 'ray'}",
        f"run.dir={directory}",
        f"run.name={runtime}",
        *sets,
    )
    if address is None:
        return config
    labels: Any = {"trainer": _LEARN, **{kind: _PLAY for kind in ("rollout", "worker", "env", "reference")}}
    ray = config.runtime.ray.model_copy(update={"address": address, "labels": labels})
    return config.model_copy(update={"runtime": config.runtime.model_copy(update={"ray": ray})})


class Besieged:
    """A run that is taken up again whenever it has ended."""

    def __init__(self, config: Config, nodes: Nodes | None, rng: random.Random) -> None:
        self.config, self._nodes, self._random = config, nodes, rng
        self.output = config.run_dir.with_suffix(".out")
        self.output.parent.mkdir(parents=True, exist_ok=True)
        self._metrics, self._read, self._steps = config.run_dir / "metrics.jsonl", 0, 0
        self._run = self._up()
        self.wait("the first step", lambda: self.steps() > 0)

    def _up(self, resume: bool = False) -> Any:
        env = self._nodes.env if self._nodes is not None else None
        return start_run(self.config, resume=resume, output=self.output, env=env)

    def steps(self) -> int:
        """How many steps were recorded, those of former incarnations included."""
        if self._metrics.exists():
            with self._metrics.open("rb") as file:
                file.seek(self._read)
                new = file.read()
            whole = new.rpartition(b"\n")[0]
            self._read += len(whole) + 1 if whole else 0
            self._steps += whole.count(b'"kind": "step"')
        return self._steps

    def wait(self, what: str, condition: Any, *, ends: bool = False) -> Any:
        """Poll until `condition()`; its value. A run that ends although it should not is the end of the benchmark."""
        until = time.monotonic() + _PATIENCE_S
        while not (value := condition()):
            if time.monotonic() > until or (not ends and self._run.poll() is not None):
                said = self.output.read_text()[-3000:]
                raise SystemExit(f"kills: {self.config.run.name}: {what}: did not come; the run said:\n{said}")
            time.sleep(0.02)
        return value

    def _pids(self, name: str) -> list[int]:
        below = descendants(self._run.pid)
        if self._nodes is not None:
            below |= self._nodes.pids()
        return [pid for pid in below if program(pid) == name]

    def _listen(self, node: str) -> set[str]:
        """The programs on a node that are up."""
        assert self._nodes is not None
        return {program(pid) for pid in self._nodes.pids(node) if listening({pid})}

    def strike(self, kind: str) -> float:
        """Kill one of that kind, and wait until all is as before; the seconds it took."""
        before = self.steps()
        self.wait("a step", lambda: self.steps() > before)
        time.sleep(self._random.uniform(0.0, 1.0))
        began = time.monotonic()
        if kind in ENDING:
            pid = self._run.pid if kind == "driver" else self.wait("the trainer", lambda: self._pids("trainer"))[0]
            below = descendants(self._run.pid)
            os.kill(pid, signal.SIGKILL)
            self.wait("the run's end", lambda: self._run.poll() is not None, ends=True)
            self.wait("the end of its processes", lambda: not alive(below), ends=True)
            before = self.steps()
            self._run = self._up(resume=True)
        elif kind == "node":
            assert self._nodes is not None
            name = next(n for n in ("first", "second") if "engine-0" in self._nodes.holds(n))
            other = ({"first", "second"} - {name}).pop()
            self._nodes.kill(name)
            wanted = set(PROGRAMS.values())
            self.wait("the programs on another node", lambda: wanted <= self._listen(other))
            before = self.steps()
        else:
            name = PROGRAMS[self._random.choice(sorted(PROGRAMS)) if kind == "actor" else kind]
            pid = self.wait(name, lambda: self._pids(name))[0]
            stat = Path(f"/proc/{pid}/stat").read_text()
            os.kill(int(stat.rpartition(") ")[2].split()[1]) if kind == "actor" else pid, signal.SIGKILL)
            self.wait(f"the successor of {name}", lambda: listening(set(self._pids(name)) - {pid}))
            before = self.steps()
        self.wait("a step after it", lambda: self.steps() > before)
        took = time.monotonic() - began
        if kind == "node":
            assert self._nodes is not None
            self._nodes.add(name, 8, labels=_PLAY)
        print(f"{self.config.run.name}: {kind}: {took:.1f} s", file=sys.stderr, flush=True)
        return took

    def end(self) -> Json:
        """Kill it, take it up again for three steps, and audit what it leaves. Raises: AssertionError."""
        below = descendants(self._run.pid)
        self.close()
        self.wait("the end of its processes", lambda: not alive(below), ends=True)
        newest = int(max((self.config.run_dir / "checkpoints").glob("step-*[0-9]")).name.rpartition("-")[2])
        steps = self.config.run.model_copy(update={"steps": newest + 3})
        self.config = self.config.model_copy(update={"run": steps})
        self._run = self._up(resume=True)
        self.wait("its end", lambda: self._run.poll() is not None, ends=True)
        if self._run.returncode:
            raise SystemExit(f"kills: {self.config.run.name}: it did not end well:\n{self.output.read_text()[-3000:]}")
        return audit(self.config)

    def close(self) -> None:
        if self._run.poll() is None:
            self._run.kill()  # with all its processes
            self._run.wait()


def besiege(runtime: str, rounds: int, kinds: Sequence[str], sets: Sequence[str]) -> Json:
    """Seconds of each recovery by kind, and the audit."""
    rng = random.Random(runtime)
    taken: dict[str, list[float]] = {kind: [] for kind in kinds}

    def run(directory: Path, nodes: Nodes | None) -> Json:
        run = Besieged(configure(runtime, directory, sets, nodes.address if nodes else None), nodes, rng)
        try:
            for _ in range(rounds):
                for kind in rng.sample(list(kinds), len(kinds)):
                    taken[kind].append(run.strike(kind))
            found = run.end()
        finally:
            run.close()
        return {"seconds": taken, "audit": found}

    with scratch() as directory:
        if runtime != "cluster":
            return run(directory, None)
        with open_nodes() as nodes:
            nodes.add("head", 4, labels=_LEARN)
            for name in ("first", "second"):
                nodes.add(name, 8, labels=_PLAY)
            return run(directory, nodes)


def make_rows(runtime: str, result: Json) -> list[Row]:
    rows = []
    for kind, seconds in result["seconds"].items():
        ordered = sorted(seconds)
        rows.append(
            Row(
                f"{runtime}: recovery from a killed {kind}",
                fmean(seconds),
                "s",
                required=LIMIT_S,
                at_most=True,
                judged="worst",
                worst=ordered[-1],
                seeds=len(seconds),
                extra={"median": ordered[len(ordered) // 2]},
            )
        )
    told = result["audit"]
    lost = told["drawn"] - told["trained"] - sum(told["dropped"].values())
    kills = sum(map(len, result["seconds"].values()))
    target = f"{runtime}: visits lost or counted twice, of {told['drawn']}, in {kills} kills"
    return [*rows, Row(target, lost, "visits", required=0, at_most=True)]


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__, runs=True, cells=True)
    parser.add_argument("--runtime", choices=tuple(KINDS), help="this one only; the result is then not stored")
    args = parse(parser, argv)
    runtimes = [args.runtime] if args.runtime else list(KINDS)
    if importlib.util.find_spec("ray") is None:
        print('kills: Ray is not installed, so only local: pip install "springtide[ray]"', file=sys.stderr)
        runtimes = [r for r in runtimes if r == "local"]
    elif args.quick and not args.runtime:
        runtimes.remove("cluster")
    rounds = 1 if args.quick else ROUNDS
    rows, cells = [], []
    for runtime in runtimes:
        kinds = ("engine", "actor", "driver") if args.quick and runtime == "ray" else KINDS[runtime]
        config = configure(runtime, Path(), args.set)
        cell = make_cell(f"kills-{runtime}", config, [besiege, configure, Besieged], rounds=rounds, kinds=kinds)
        with scratch() as directory:
            done = cell.run(
                lambda: besiege(runtime, rounds, kinds, args.set),  # noqa: B023 (called at once)
                missing=args.missing,
                directory=directory if args.quick else CELLS,
            )
        cells.append(done)
        rows += make_rows(runtime, done["result"])
    emit(report_cells("kills", rows, cells, quick=args.quick), as_json=args.json, store=not args.runtime)


if __name__ == "__main__":
    main()
