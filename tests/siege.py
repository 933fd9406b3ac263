"""A run under siege: its processes are killed and stopped at random moments, and it is taken up again when it ends.

Owns: what is struck when, and the audit afterwards, which does not believe the ledger alone: what each step learned
from is read from the record of events, and every member from its group's file.
Called by: the tests of kills, three blows long and twenty.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.run_support import alive, descendants, program, start_run, wait_for

from springtide.config import Config
from springtide.ledger import Ledger
from springtide.observe.sinks import read_records
from springtide.trace import Group

VICTIMS = ("driver", "engine", "rollout", "env", "trainer")
KILL, STOP = signal.SIGKILL, signal.SIGSTOP
DRIVER_STOPPED_S = 20.0  # then it goes on
_STEP_S, _END_S = 300.0, 150.0  # until a blow's step comes, until a run that was struck has ended: never short of it


@dataclass(frozen=True, slots=True)
class Blow:
    """`number` to `victim`, at a random moment after `step` steps are trained; 0: while the run starts or resumes."""

    victim: str
    number: signal.Signals
    step: int


class Siege:
    """One run and all that is done to it. `told` is what happened, a line a blow."""

    def __init__(self, config: Config, seed: int) -> None:
        self.config, self._random = config, random.Random(seed)
        self.scratch = Path(tempfile.mkdtemp(prefix="siege-"))  # a short name: sockets lie below it
        self.output = config.run_dir.with_suffix(".out")
        self.told: list[str] = []
        self._pids: set[int] = set()
        self._run: subprocess.Popen[str] | None = None
        self._began = time.monotonic()

    def endure(self, blows: list[Blow]) -> None:
        """Strike them all, in this order, and let the run come to its end."""
        for blow in blows:
            self._strike(blow)
        run = self._up()
        wait_for("the run's end", lambda: run.poll() is not None, 2 * _STEP_S)
        assert run.returncode == 0, self._said()
        self._tell(f"ended by itself after {self._trained()} steps")

    def _up(self) -> subprocess.Popen[str]:
        """The run, taken up again if it has ended."""
        if self._run is None or self._run.poll() is not None:
            self.output.parent.mkdir(parents=True, exist_ok=True)
            resume = any(self.config.run_dir.glob("checkpoints/step-*"))
            self._run = start_run(self.config, resume=resume, output=self.output, scratch=self.scratch)
        return self._run

    def _strike(self, blow: Blow) -> None:
        run = self._up()
        if blow.step:
            wait_for(
                f"step {blow.step}", lambda: self._trained() >= blow.step or run.poll() is not None, within_s=_STEP_S
            )
            time.sleep(self._random.uniform(0, 1.5))
        else:
            time.sleep(self._random.uniform(0, 6.0))
        pid = wait_for(f"a running {blow.victim}", lambda: self._find(run, blow.victim), within_s=_END_S)
        below = descendants(run.pid)
        self._pids |= {run.pid, *below}
        name, step = "driver" if pid == run.pid else program(pid), self._trained()
        os.kill(pid, blow.number)
        self._tell(f"{blow.number.name} to {name} at step {step}")
        if blow.victim == "driver" and blow.number == STOP:
            time.sleep(DRIVER_STOPPED_S)
            os.kill(run.pid, signal.SIGCONT)
        elif blow.victim in ("driver", "trainer"):  # with these the run ends, and may be resumed
            run.wait(_END_S)
            if blow.victim == "driver":
                assert run.returncode == -KILL
            else:
                cause = "trainer ended with status -9" if blow.number == KILL else "trainer answered nothing"
                assert run.returncode == 1 and cause in self._said(), self._said()
            wait_for("the end of its processes", lambda: not alive(below), within_s=15)

    def _find(self, run: subprocess.Popen[str], victim: str) -> int | None:
        """A process of that kind that runs: not one that is stopped or on its way back."""
        assert run.poll() is None, f"the run ended by itself before {victim} was struck: {self._said()}"
        if victim == "driver":
            return run.pid
        found = [p for p in sorted(descendants(run.pid)) if program(p).startswith(victim) and _state(p) in "RSD"]
        return self._random.choice(found) if found else None

    def _trained(self) -> int:
        """The newest step of the surviving lineage."""
        records = read_records(self.config.run_dir / "metrics.jsonl")
        return max((r["step"] for r in records if r["kind"] in ("step", "resume")), default=0)

    def _said(self) -> str:
        """The end of what the run printed."""
        return self.output.read_text()[-4000:] if self.output.exists() else ""

    def _scratch_files(self) -> list[Path]:
        """Without the empty directory that PyTorch makes for its compiler as it is imported, one a user, and keeps."""
        return [path for path in self.scratch.iterdir() if not path.name.startswith("torchinductor_")]

    def _tell(self, what: str) -> None:
        self.told.append(f"{time.monotonic() - self._began:6.1f} s  {what}")
        print(self.told[-1], flush=True)

    def check_nothing_is_left(self) -> None:
        """No process, no temporary file or socket, no published weights, nothing half-written."""
        name = self.config.run_dir.name
        wait_for("the end of every process", lambda: not alive(self._pids), within_s=10)
        wait_for("an empty temporary directory", lambda: not self._scratch_files(), within_s=10)
        assert [path for path in Path("/dev/shm").iterdir() if path.name.startswith(f"springtide-{name}-")] == []
        assert [path for path in self.config.run_dir.rglob(".*") if path.name != ".lock"] == []
        shutil.rmtree(self.scratch)


def audit(config: Config) -> dict[str, Any]:
    """The ledger's, of a run that ended under equal_rewards = keep: every drawn member was found to have one end."""
    directory, n = config.run_dir, config.rollout.group.n
    ledger = Ledger(directory / "ledger.sqlite", read_only=True)
    audit, trained = ledger.audit(), {row.visit: row for row in ledger.visits("trained")}
    ledger.close()
    assert audit["open"] == audit["ready"] == 0, audit
    assert audit["drawn"] == audit["trained"] + sum(audit["dropped"].values()), audit
    assert set(audit["dropped"]) <= {"run_ended"}, audit  # all others are trained
    assert audit["attempts_failed"] == 0, audit  # what a fault of ours costs is never the environment's
    members = Counter(
        (visit, t.member)
        for visit, row in trained.items()
        for t in Group.load(directory / "trajectories" / str(row.path)).trajectories
    )
    assert members == {(visit, member): 1 for visit in trained for member in range(n)}
    assert len(members) == audit["trained"]
    learned = _learned(config)
    assert sorted(learned) == list(range(1, config.run.steps + 1))
    assert sum(map(len, learned.values())) == len(trained), "no visit in two steps"
    assert {visit: step for step, visits in learned.items() for visit in visits} == {
        v: r.step for v, r in trained.items()
    }
    newest = max(directory.glob("checkpoints/step-*[0-9]"))
    assert json.loads((newest / "state.json").read_text())["steps"] == config.run.steps
    return audit


def _learned(config: Config) -> dict[int, list[int]]:
    """Step -> the visits it learned from, along the surviving lineage, as the events tell it."""
    learned: dict[int, list[int]] = {}
    running: list[int] = []
    for line in (config.run_dir / "events.jsonl").read_text().splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue  # torn by a kill or a full disk
        match event["kind"]:
            case "Began":
                learned = {step: visits for step, visits in learned.items() if step <= event["step"]}
            case "StepStarted":
                running = event["visits"]
            case "StepEnded":
                learned[event["step"]] = running
    return learned


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0]
    except OSError:
        return "X"
