"""Whole runs under faults: killed processes, broken environments, Ctrl-C. Nothing hangs, nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from pathlib import Path

import pytest
from tests.run_support import alive, descendants, program, records, run_config, start_run, wait_for
from tests.siege import KILL, STOP, Blow, Siege, audit

import springtide
from springtide.ledger import Ledger
from springtide.observe import progress
from springtide.rollout.feeder import BrokenRun
from springtide.trainer.driver import Driver
from springtide.trainer.loop import train
from springtide.trainer.start import open_run


def test_three_blows_at_random_moments_lose_nothing(tiny_model: Path, tmp_path: Path) -> None:
    """NeMo-RL#3599, trl#5863: nothing skipped, nothing trained twice along the surviving lineage. Twenty are slow."""
    config = run_config(
        tiny_model, tmp_path, f"three-{os.getpid()}", run={"steps": 24}, algorithm={"equal_rewards": "keep"},
        rollout={"group": {"n": 4, "retries": 0}}, trainer={"checkpoint_every": 3}, runtime={"silent_s": 2},
    )  # fmt: skip
    siege = Siege(config, seed=7)
    siege.endure([Blow("driver", KILL, 4), Blow("engine", STOP, 9), Blow("rollout", KILL, 16)])
    assert audit(config)["attempts_killed"] > 0
    siege.check_nothing_is_left()


@pytest.mark.parametrize("victim", ["engine-0", "rollout-0", "env"])
def test_a_killed_worker_is_replaced_and_the_run_goes_on(tiny_model: Path, tmp_path: Path, victim: str) -> None:
    config = run_config(tiny_model, tmp_path, run={"steps": 12}, algorithm={"equal_rewards": "keep"})
    run = start_run(config)
    wait_for("two steps", lambda: (config.run_dir / "metrics.jsonl").exists() and len(records(config)) >= 2)
    pid = next(p for p in descendants(run.pid) if program(p).startswith(victim))
    os.kill(pid, signal.SIGKILL)
    assert run.wait(120) == 0, run.stdout.read() if run.stdout else ""
    assert sum(records(config)[-1]["restarts"].values()) >= 1
    audit = Ledger(config.run_dir / "ledger.sqlite").audit()
    assert audit["drawn"] == audit["trained"] + audit["dropped"].get("run_ended", 0)


def test_a_stopped_engine_is_named_while_it_is_silent_and_then_replaced(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It was waited for ten minutes a turn, past `run.minutes`, and the run said nothing meanwhile."""
    monkeypatch.setattr(progress, "_SAY_S", 0.2)
    config = run_config(
        tiny_model, tmp_path, run={"steps": 8}, algorithm={"equal_rewards": "keep"}, runtime={"silent_s": 2}
    )

    async def stop_its_engine(run: Driver) -> None:
        while run.step == 0:
            await asyncio.sleep(0.01)
        process = run._runtime.engines[0].process
        assert process is not None
        os.kill(process.pid, signal.SIGSTOP)

    async def main() -> None:
        async with open_run(config) as run, asyncio.TaskGroup() as tasks:
            tasks.create_task(stop_its_engine(run))
            await train(run)

    asyncio.run(main())
    last = records(config)[-1]
    assert (last["step"], last["restarts"]) == (8, {"engine-0": 1})
    shown = capfd.readouterr().err
    assert re.search(r"waiting for: .*engine-0 has answered nothing for \d s", shown), shown


def test_a_killed_trainer_stops_the_run_with_its_cause(tiny_model: Path, tmp_path: Path) -> None:
    """verl#6583: a dead process reported as success while the others wait for ever."""
    config = run_config(tiny_model, tmp_path, run={"steps": 1000})
    run = start_run(config)
    wait_for("a step", lambda: (config.run_dir / "metrics.jsonl").exists() and records(config))
    children = descendants(run.pid)
    os.kill(next(p for p in children if program(p) == "trainer"), signal.SIGKILL)
    assert run.wait(20) == 1
    assert run.stdout is not None
    assert "trainer ended with status -9" in run.stdout.read()
    assert not alive(children)


def test_ctrl_c_leaves_no_process_and_says_how_to_go_on(tiny_model: Path, tmp_path: Path) -> None:
    config = run_config(tiny_model, tmp_path, run={"steps": 1000})
    run = start_run(config)
    wait_for("a step", lambda: (config.run_dir / "metrics.jsonl").exists() and records(config))
    children = descendants(run.pid)
    os.kill(run.pid, signal.SIGINT)
    assert run.wait(20) == 130
    assert run.stdout is not None
    assert "--resume" in run.stdout.read()
    assert not alive(children)


def test_an_environment_that_always_fails_stops_the_run_by_name(tiny_model: Path, tmp_path: Path) -> None:
    """NeMo-Gym#1351, verl#5635: a failing judge must not become reward 0."""
    config = run_config(tiny_model, tmp_path, suite="Broken")
    text = r"suite broken: the last 64 episodes failed \(judge.*the judge has no data"
    with pytest.raises(BrokenRun, match=text) as raised:
        springtide.train(config)
    use = config.suites[0].use
    assert use.endswith(".py:Broken") and f"`springtide doctor env {use}`" in str(raised.value)


def test_groups_without_signal_stop_the_run_by_name(tiny_model: Path, tmp_path: Path) -> None:
    """prime-rl aborts after ten empty batches; a run that draws for ever without a step is worse."""
    config = run_config(tiny_model, tmp_path, suite="Flat", trainer={"groups": 1}, algorithm={"incomplete_reward": 0.5})
    with pytest.raises(BrokenRun, match=r"carried no signal.*\(trainer\.cold_start\.steps, where"):
        springtide.train(config)


def test_an_image_for_a_text_model_is_an_environment_error_and_no_reward(tiny_model: Path) -> None:
    suite = f"{Path(__file__).parent / 'letters.py'}:Pictures"
    figures = springtide.evaluate(tiny_model, suite, tasks=4, max_new_tokens=4).suites["pictures"]
    assert (figures.episodes, figures.env_errors) == (0, 4)
    assert "content of type 'image_url', and the model reads text only" in figures.first_error


def test_environment_errors_are_counted_and_never_a_reward(tiny_model: Path, tmp_path: Path) -> None:
    config = run_config(tiny_model, tmp_path, suite="Flaky", rollout={"group": {"n": 4, "retries": 6}})
    summary = springtide.train(config)
    assert summary.env_errors > 0
    assert summary.ledger["attempts_failed"] >= summary.env_errors
    assert all("environment_error" in r["status"] for r in records(config) if r["env_errors"])
    assert summary.ledger["trained"] == 4 * sum(r["groups"] for r in records(config))


def test_resume_refuses_what_would_change_the_past(tiny_model: Path, tmp_path: Path) -> None:
    springtide.train(run_config(tiny_model, tmp_path, run={"steps": 1}))
    with pytest.raises(springtide.config.ConfigError, match=r"--resume cannot change trainer\.lr"):
        springtide.train(run_config(tiny_model, tmp_path, trainer={"lr": 1.0}), resume=True)
    assert springtide.train(run_config(tiny_model, tmp_path, run={"steps": 2}), resume=True).steps == 2
