"""Bad input and faults in whole runs: each is one clear line or a counted state, never a hang, never reward 0."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import sqlite3
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.run_support import TESTS, descendants, program, records, run_config, start_run, wait_for
from tests.test_pitfalls_loop import replayed_actions, talk_config

import springtide
from springtide.chat import Chat, load_chat
from springtide.config import ConfigError
from springtide.engine.protocol import Generation
from springtide.env.inprocess import InProcessClient
from springtide.ledger import Ledger
from springtide.observe.sinks import JsonLines, read_records
from springtide.rollout.episode import EpisodeSpec
from springtide.rollout.feeder import BrokenRun, Feeder, InvalidAction, Versions
from springtide.rollout.pool import play_once
from springtide.rollout.worker import Worker
from springtide.schedule.events import Abort, Action, Admit, Held
from springtide.schedule.readiness import Readiness
from springtide.schedule.sampling import UniformSampler
from springtide.trace import Group, TaskRef
from springtide.trainer import driver
from springtide.trainer.checkpoint import CheckpointError


def test_a_stuck_run_names_the_predicate_that_blocks(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """verl#7155, AReaL#588, SkyRL#1173: waits without end and without a word."""
    monkeypatch.setattr(driver, "_SLACK_S", -298.0)  # two seconds without any event, instead of six minutes
    config = talk_config(tiny_model, tmp_path, "stuck", "HangsAlways", rollout={"concurrency": 3})
    says = r"nothing happened for 2 s: 0 of 4 groups ready, 3 in flight; admission: concurrency: 3 groups in flight"
    with pytest.raises(driver.StuckRun, match=says):
        springtide.train(config)


def test_a_run_whose_minutes_pass_while_it_waits_is_over(tiny_model: Path, tmp_path: Path) -> None:
    """`run.minutes` was looked at between steps only, so a run without a step had no end."""
    config = talk_config(tiny_model, tmp_path, "late", "HangsAlways", run={"minutes": 0.03})
    summary = springtide.train(config)
    assert summary.steps == 0
    assert summary.ledger["drawn"] == summary.ledger["dropped"]["run_ended"] > 0


def test_steps_that_are_not_finite_are_refused_counted_and_end_the_run_by_name(
    tiny_model: Path, tmp_path: Path
) -> None:
    """verl#1581: a run went NaN and went on. A coefficient this large overflows as soon as the policy moves."""
    config = run_config(tiny_model, tmp_path, run={"steps": 20}, algorithm={"kl_coef": 3e38, "equal_rewards": "keep"})
    with pytest.raises(BrokenRun, match=r"5 steps were refused: (loss|gradient) .*not finite at step \d+; lower"):
        springtide.train(config)
    steps = records(config)
    refused = [r for r in steps if r["trainer"]["refused"]]
    assert len(refused) >= 5
    assert all(r["loss_tokens"] == 0 and r["discarded_tokens"]["refused_step"] > 0 for r in refused)
    assert any("was refused" in r["text"] for r in records(config, "note"))
    ledger = Ledger(config.run_dir / "ledger.sqlite")
    assert {row.step for row in ledger.visits("trained")} == {r["step"] for r in steps if not r["trainer"]["refused"]}
    assert ledger.audit()["dropped"]["refused_step"] == sum(r["trajectories"] for r in refused)


def test_replies_that_are_all_cut_are_named_when_nothing_can_be_learned(tiny_model: Path, tmp_path: Path) -> None:
    """trl#6219, prime-rl's ten empty batches: every completion was cut and every group dropped."""
    config = run_config(
        tiny_model, tmp_path, suite="Flat", trainer={"groups": 1}, rollout={"max_new_tokens": 2, "group": {"n": 2}}
    )
    with pytest.raises(
        BrokenRun, match=r"no signal \(equal_rewards; episodes ended as: a reply cut at its limit (9|10)"
    ):
        springtide.train(config)
    assert any("carried no signal" in r["text"] for r in records(config, "note"))


def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_is_used(
    tiny_model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """open-instruct#1523, prime-rl#832: state that was saved and did not come back."""

    def config(steps: int) -> Any:
        tables = {"trainer": {"checkpoint_every": 1}, "algorithm": {"equal_rewards": "keep"}}
        return run_config(tiny_model, tmp_path, run={"steps": steps}, **tables)

    springtide.train(config(2))
    saved = sorted((tmp_path / "run" / "checkpoints").iterdir())
    assert [p.name for p in saved] == ["step-000001", "step-000002"]
    _flip(saved[1] / "model.safetensors")
    capfd.readouterr()
    summary = springtide.train(config(3), resume=True)
    shown = " ".join(capfd.readouterr().err.split())
    assert "step-000002/model.safetensors is missing or not what was written" in shown
    assert summary.steps == 3
    audit = summary.ledger
    assert audit["drawn"] == audit["trained"] + sum(audit["dropped"].values())
    rolled = sqlite3.connect(tmp_path / "run" / "ledger.sqlite").execute("SELECT to_step, visits FROM rollbacks")
    assert rolled.fetchall() == [(1, 4)]
    assert [r["step"] for r in read_records(tmp_path / "run" / "metrics.jsonl") if r["kind"] == "step"] == [1, 2, 3]
    # What is pending before and after a resume has different states; a replay must know where one ends.
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert kinds.count("Began") == 2
    assert replayed_actions(config(3))["Admit"] >= 12
    for path in (tmp_path / "run" / "checkpoints").iterdir():
        _flip(path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"every checkpoint in .* is damaged; start a new run"):
        springtide.train(config(4), resume=True)


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.slow
def test_a_full_disk_is_one_line_and_loses_nothing(tiny_model: Path, tmp_path: Path) -> None:
    """A limit on the size of files that one process may write stands for a disk without room."""
    config = run_config(tiny_model, tmp_path, run={"steps": 200}, algorithm={"equal_rewards": "keep"})
    run = start_run(config)
    wait_for("a step", lambda: (config.run_dir / "metrics.jsonl").exists() and records(config))
    (worker,) = [p for p in descendants(run.pid) if program(p) == "rollout-0"]
    resource.prlimit(worker, resource.RLIMIT_FSIZE, (600, 600))
    assert run.wait(60) == 1
    assert run.stdout is not None
    (line,) = [text for text in run.stdout.read().splitlines() if text.startswith("springtide:")]
    assert "cannot write" in line and "File too large" in line and "--resume" in line
    done = len(records(config))
    again = start_run(config.model_copy(update={"run": config.run.model_copy(update={"steps": done + 2})}), resume=True)
    assert again.wait(60) == 0, again.stdout and again.stdout.read()
    audit = Ledger(config.run_dir / "ledger.sqlite").audit()
    assert audit["drawn"] == audit["trained"] + sum(audit["dropped"].values())
    assert set(audit["dropped"]) <= {"run_ended"}


@pytest.mark.slow
def test_a_disk_too_full_for_the_drivers_own_files_is_one_line(tiny_model: Path, tmp_path: Path) -> None:
    config = run_config(tiny_model, tmp_path, run={"steps": 200}, algorithm={"equal_rewards": "keep"})
    run = start_run(config)
    wait_for("a step", lambda: (config.run_dir / "metrics.jsonl").exists() and records(config))
    resource.prlimit(run.pid, resource.RLIMIT_FSIZE, (100, 100))
    assert run.wait(60) == 1
    assert run.stdout is not None
    (line,) = [text for text in run.stdout.read().splitlines() if text.startswith("springtide:")]
    assert "cannot write the run's files" in line
    again = start_run(config.model_copy(update={"run": config.run.model_copy(update={"steps": 20})}), resume=True)
    assert again.wait(60) == 0, again.stdout and again.stdout.read()
    audit = Ledger(config.run_dir / "ledger.sqlite").audit()
    assert audit["drawn"] == audit["trained"] + sum(audit["dropped"].values())


@pytest.mark.slow
def test_a_disk_too_full_for_a_checkpoint_keeps_the_one_before(tiny_model: Path, tmp_path: Path) -> None:
    """Weights fit, the optimiser's state does not."""
    config = run_config(tiny_model, tmp_path, run={"steps": 200}, trainer={"checkpoint_every": 2})
    run = start_run(config)
    wait_for("a step", lambda: (config.run_dir / "metrics.jsonl").exists() and records(config))
    (trainer,) = [p for p in descendants(run.pid) if program(p) == "trainer"]
    newest = sorted((config.run_dir / "checkpoints").glob("step-*"))[-1]
    limit = (newest / "model.safetensors").stat().st_size + 1000
    resource.prlimit(trainer, resource.RLIMIT_FSIZE, (limit, limit))
    assert run.wait(60) == 1
    assert run.stdout is not None
    (line,) = [text for text in run.stdout.read().splitlines() if text.startswith("springtide:")]
    assert "cannot write checkpoint" in line and "--resume" in line
    assert not list((config.run_dir / "checkpoints").glob(".*"))
    done = len(records(config))
    again = start_run(config.model_copy(update={"run": config.run.model_copy(update={"steps": done + 2})}), resume=True)
    assert again.wait(60) == 0, again.stdout and again.stdout.read()


def test_a_torn_last_line_does_not_swallow_the_next_record(tmp_path: Path) -> None:
    """A full disk tears a line; what a resumed run appends must not be lost with it (or steps count twice)."""
    path = tmp_path / "metrics.jsonl"
    first = JsonLines(path)
    first.write({"kind": "step", "step": 1})
    first.write({"kind": "step", "step": 2})
    first.close()
    path.write_text(path.read_text()[:-9])
    second = JsonLines(path)
    second.write({"kind": "resume", "step": 1})
    second.write({"kind": "step", "step": 2})
    second.close()
    assert [(r["kind"], r["step"]) for r in read_records(path)] == [("step", 1), ("resume", 1), ("step", 2)]


def test_changed_tasks_are_refused_on_resume(tmp_path: Path) -> None:
    """NeMo-RL#2519: a changed dataset silently skipped rows."""
    ledger = Ledger(tmp_path / "ledger.sqlite")
    assert ledger.same_as_before("tasks of db", "a")
    assert Ledger(tmp_path / "ledger.sqlite").same_as_before("tasks of db", "a")
    assert not Ledger(tmp_path / "ledger.sqlite").same_as_before("tasks of db", "b")
    assert not Ledger(tmp_path / "ledger.sqlite").same_as_before("tasks of db", "b"), "the first stays"


class Wrong:
    """A policy that decides what cannot be done."""

    def __init__(self, action: Action) -> None:
        self.action = action

    def decide(self, state: Readiness) -> list[Action]:
        return [self.action]

    def blocked(self, state: Readiness) -> str:
        return "nothing"


class NoPool:
    async def acquire(self) -> Any:
        raise AssertionError("nothing is played")


@pytest.mark.parametrize(
    ("action", "why"), [(Admit("web"), "'web' is not in the mixture"), (Abort(7, "stale"), "visit 7 is neither")]
)
@pytest.mark.parametrize("strict", [True, False])
def test_an_invalid_action_is_an_error_when_strict_and_counted_when_not(
    tmp_path: Path, action: Action, why: str, strict: bool
) -> None:
    config = run_config(tmp_path, tmp_path, schedule={"strict": strict})
    task = TaskRef("letters/default/train/0", "letters", "1", "train", "default", 0, 0)
    feeder = Feeder(
        config, ledger=Ledger(tmp_path / "ledger.sqlite"), state=Readiness({"letters": 1.0}), policy=Wrong(action),
        samplers={"letters": UniformSampler("letters", (task,), 0)}, pool=NoPool(), versions=Versions(0),
        directory=tmp_path, record=lambda event: None, note=lambda text: None,
    )  # fmt: skip

    async def run() -> None:
        async with asyncio.timeout(0.2):
            feeder.apply(Held(0.0, False))
            await feeder.run()

    if strict:
        with pytest.raises(InvalidAction, match=why):
            asyncio.run(run())
    else:
        with pytest.raises(TimeoutError):
            asyncio.run(run())
        assert feeder.take_counts().refused == {type(action).__name__: 1}


class Forced:
    """An engine of one voice: five tokens a turn."""

    async def generate(self, session: str, ids: np.ndarray, sampling: Any, **_: Any) -> Generation:
        return Generation(np.full(5, 40, np.int32), np.full(5, -1.0, np.float32), version=0, finish="length")

    async def release(self, session: str) -> None: ...

    up = True

    async def client(self) -> Forced:
        return self


def test_a_group_that_is_given_up_stops_playing_is_forgotten_and_its_tokens_are_told(tiny_model: Path) -> None:
    """slime#638: memory crept up; verl PR#4067: what sat in a tool call when its group was given up went on."""
    asyncio.run(_give_up(load_chat(tiny_model)))


async def _give_up(chat: Chat) -> None:
    suite = f"{TESTS / 'talk.py'}:Sleepers"
    async with InProcessClient((suite,)) as env:
        tasks = await env.catalog(suite, "train", "quick")
        worker = Worker(chat, env, {"engine-0": Forced()}, lockstep=False)  # type: ignore[arg-type, dict-item]

        def spec(task: TaskRef, member: int) -> EpisodeSpec:
            return EpisodeSpec(task, 0, member, 0, "train", 0, 1.0, 5, 256)

        slow = asyncio.create_task(worker.episode(spec(tasks[1], 0)))  # sleeps two seconds in its first answer
        first, _ = await worker.episode(spec(tasks[0], 1))
        second, _ = await worker.episode(spec(tasks[0], 2))
        assert (first.generated, second.generated, first.cut_turns) == (15, 15, 3)
        while worker.discard("train", 1, ()) == 0 and not any(c.tokens for c in worker._playing["train", 0].values()):
            await asyncio.sleep(0.01)
        assert worker.discard("train", 0, known=(1,)) == 15 + 5
        with pytest.raises(asyncio.CancelledError):
            await slow
        assert worker._finished == {}
        assert worker._playing == {}


class OneWorker:
    """A pool of a worker in this process."""

    live = 0

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def acquire(self) -> OneWorker:
        return self

    async def call(self, method: str, *, deadline_s: float, **payload: Any) -> Any:
        if "path" in payload:
            payload["path"] = Path(payload["path"])
        answer = getattr(self._worker, method)(**payload)
        return await answer if asyncio.iscoroutine(answer) else answer


def test_each_kept_sample_of_a_task_is_a_file_of_its_own(tiny_model: Path, tmp_path: Path) -> None:
    """A file held whichever members of its visit had finished by then, and forgot those that were not yet kept."""

    async def run() -> Worker:
        suite = f"{TESTS / 'talk.py'}:NoSleepers"
        async with InProcessClient((suite,)) as env:
            ref = (await env.catalog(suite, "train", "quick"))[0]
            worker = Worker(load_chat(tiny_model), env, {"engine-0": Forced()}, lockstep=False)  # type: ignore[arg-type, dict-item]
            specs = [EpisodeSpec(ref, 0, member, 0, "eval", 0, 1.0, 5, 256) for member in range(3)]
            await worker.episode(specs[2])  # finished, and neither kept nor forgotten yet
            pool = OneWorker(worker)
            await asyncio.gather(*(play_once(pool, spec, keep=tmp_path / str(spec.member)) for spec in specs[:2]))
            return worker

    worker = asyncio.run(run())
    for member in range(2):
        assert [t.member for t in Group.load(tmp_path / str(member)).trajectories] == [member]
    assert list(worker._finished["eval", 0]) == [2]


def test_an_environments_error_discards_its_tokens_by_name_and_a_users_directory_is_kept(
    tiny_model: Path, tmp_path: Path
) -> None:
    """NeMo-Gym PR#2307: failures became low rewards. And `weights.dir` may hold other things of its owner's."""
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("do not delete")
    config = run_config(
        tiny_model, tmp_path, suite="Flaky", rollout={"group": {"n": 2, "retries": 6}}, run={"steps": 2},
        weights={"dir": str(mine)},
    )  # fmt: skip
    summary = springtide.train(config)
    assert [p.name for p in mine.iterdir()] == ["thesis.txt"]
    discarded = Counter()
    for r in (*records(config), *records(config, "end")):
        discarded.update(r["discarded_tokens"])
    assert discarded["environment_error"] > 0
    owned = summary.tokens["trained"] + summary.tokens["evaluated"] + summary.tokens["discarded"]
    assert 0 <= summary.tokens["generated"] - owned <= 8 * 2 * config.rollout.max_new_tokens, summary.tokens


def test_a_bad_line_in_a_run_is_not_hidden(tiny_model: Path, tmp_path: Path) -> None:
    """verl#2966: a default picked silently. Here: an empty split, a level that is not there."""
    entry = {"use": f"{TESTS / 'letters.py'}:Letters", "level": "heroic"}
    with pytest.raises(Exception, match="heroic"):
        springtide.train(run_config(tiny_model, tmp_path, suites=[entry]))
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match="no such key in trainer"):
        run_config(tiny_model, tmp_path, trainer={"learning_rate": 1.0})
    suites = [{"use": f"{TESTS / 'letters.py'}:Letters"}, {"use": f"{TESTS / 'talk.py'}:NoDev"}]
    with pytest.raises(ConfigError, match=r"NoDev is called letters, as one before it is"):
        springtide.train(run_config(tiny_model, tmp_path, "two", suites=suites))
    assert not (tmp_path / "two").exists(), "refused before anything started"
    config = run_config(tiny_model, tmp_path, "none", suites=suites[1:], eval={"every": 5, "dev": True})
    with pytest.raises(ConfigError, match=r"eval: suite letters has no dev tasks at level quick"):
        springtide.train(config)


@pytest.mark.slow
def test_an_engine_that_is_restarted_gets_the_stale_pools_old_weights(tiny_model: Path, tmp_path: Path) -> None:
    """verl#6583 and its kin: recovery that needs what was collected long ago. The pool here stays at version 0."""
    config = run_config(
        tiny_model, tmp_path, run={"steps": 40}, algorithm={"equal_rewards": "keep"},
        rollout={"stale_probability": 0.5, "stale_refresh": 1000},
    )  # fmt: skip
    run = start_run(config)
    wait_for("six steps", lambda: (config.run_dir / "metrics.jsonl").exists() and len(records(config)) >= 6)
    (engine,) = [p for p in descendants(run.pid) if program(p) == "engine-0"]
    os.kill(engine, signal.SIGKILL)
    assert run.wait(120) == 0, run.stdout and run.stdout.read()
    steps = records(config)
    assert steps[-1]["restarts"] == {"engine-0": 1}
    assert steps[-1]["staleness"]["stale_turns"] > 0
    assert steps[-1]["staleness"]["stale_pool_lag"] == 39
