"""Real runs that obey scheduling policies: what is paused and moved, which rank plays, and a record that replays."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.run_support import alive, records
from tests.siege import audit
from tests.test_pitfalls_loop import replayed_actions, talk_config, trained

import springtide
from springtide.config import Config
from springtide.schedule.events import Event, event_from_json
from springtide.schedule.readiness import Readiness
from springtide.trainer.driver import Driver
from springtide.trainer.loop import train
from springtide.trainer.start import open_run

EVENTS = {kind.__name__ for kind in Event.__args__}


def recorded(config: Config) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (config.run_dir / "events.jsonl").read_text().splitlines()]


def states(config: Config) -> Any:
    """The state after each event of a run, always the same object."""
    state = Readiness({"nothing": 1.0})
    for data in recorded(config):
        if data["kind"] in EVENTS:
            state.apply(event_from_json(data))
            yield data["kind"], state


def accounted(config: Config) -> None:
    """Every member that was drawn was trained, or was in flight at the end."""
    ends = audit(config)
    assert ends["drawn"] == ends["trained"] + sum(ends["dropped"].values()) and set(ends["dropped"]) <= {"run_ended"}


def test_task_batching_keeps_within_tight_kv_by_pausing_at_tools(tiny_model: Path, tmp_path: Path) -> None:
    """Where all contexts at once are five times what an engine holds, all is played, within what it holds."""
    config = talk_config(
        tiny_model, tmp_path, "tight", run={"steps": 4}, schedule={"policy": "springtide"},
        engine={"kv_tokens": 640}, eval={"at_ends": True, "tasks": 4, "greedy": False},
    )  # fmt: skip
    springtide.train(config)
    actions = replayed_actions(config)
    assert actions["Pause"] > 0 and actions["Resume"] > 0, actions
    over = Counter[bool]()
    for kind, state in states(config):
        if kind == "TurnEnded":
            over[state.ranks["engine-0"].tokens > 640] += 1
    assert over[True] < 0.05 * over.total(), "what one turn adds may pass it for a moment"
    accounted(config)
    assert {len(t.turns) for t in trained(config)} == {3}, "no episode was cut by its pauses"


@pytest.mark.parametrize("policy", ["one_step_off", "kv_aimd", "program_aware", "oracle_split"])
def test_every_policy_without_changes_of_role_trains_live_and_replays(
    tiny_model: Path, tmp_path: Path, policy: str
) -> None:
    config = talk_config(
        tiny_model, tmp_path, policy, suite="NoSleepers", run={"steps": 3}, schedule={"policy": policy},
        engine={"kv_tokens": 1024, "ranks": 2},
    )  # fmt: skip
    summary = springtide.train(config)
    actions = replayed_actions(config)
    assert summary.steps == actions["Sync"] == 3
    placed = Counter(data["rank"] for data in recorded(config) if data["kind"] == "Placed")
    assert set(placed) == {"engine-0", "engine-1"}
    accounted(config)
    if policy == "one_step_off":
        assert max(r["staleness"]["max"] for r in records(config)) <= 1


def test_a_killed_engine_costs_its_turns_and_no_episode(tiny_model: Path, tmp_path: Path) -> None:
    config = talk_config(tiny_model, tmp_path, "engine", run={"steps": 8}, engine={"ranks": 2})

    async def kill_one(run: Driver) -> None:
        while run.step < 2:
            await asyncio.sleep(0.01)
        process = run._runtime.engines[1].process
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)

    async def main() -> None:
        async with open_run(config) as run, asyncio.TaskGroup() as tasks:
            tasks.create_task(kill_one(run))
            await train(run)

    asyncio.run(main())
    kinds = Counter(data["kind"] for data in recorded(config))
    assert kinds["RankLeft"] == 1 and kinds["RankJoined"] == 4, kinds  # two engines, one again, the trainer
    replayed_actions(config)
    accounted(config)
    assert audit(config)["attempts_killed"] == 0
    for t in trained(config):
        versions = [int(t.segments[turn.segment].versions[turn.start]) for turn in t.turns]
        assert versions == sorted(versions)


def test_a_trainer_rank_plays_while_it_waits_and_comes_home(tiny_model: Path, tmp_path: Path) -> None:
    """A run begins with nothing to train, so the trainer's rank hosts an engine until a step is nearly there."""
    config = talk_config(
        tiny_model, tmp_path, "lend", suite="Slow", run={"steps": 1}, schedule={"policy": "springtide"},
        trainer={"lend": True}, rollout={"concurrency": 2},
    )  # fmt: skip
    guests: set[int] = set()
    sampled = 0

    async def watch(run: Driver) -> None:
        guest = run._runtime.guests["trainer"]
        while True:
            await asyncio.sleep(0.02)
            if guest.process is not None:
                guests.add(guest.process.pid)
            elif guest.role is None and run._state.roles["trainer"]:
                assert not alive(guests), "its memory is free"

    async def main() -> None:
        nonlocal sampled
        async with open_run(config) as run:
            watching = asyncio.create_task(watch(run))
            await train(run)
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching  # what it asserted
            sampled = sum(stats.generated_tokens for stats in run._runtime._former)

    asyncio.run(main())
    roles = [data["role"] for data in recorded(config) if data["kind"] == "RoleChanged"]
    assert roles[:2] == ["rollout", "trainer"] and guests and sampled > 0
    assert Counter(data["what"] for data in recorded(config) if data["kind"] == "Measured")["switch"] == len(roles)
    for kind, state in states(config):
        if kind == "StepStarted":
            assert state.ranks["trainer"].role == "trainer"
    replayed_actions(config)
    accounted(config)


def test_a_run_opens_no_more_environments_than_it_may(tiny_model: Path, tmp_path: Path) -> None:
    config = talk_config(tiny_model, tmp_path, "few", suite="NoSleepers", run={"steps": 2}, rollout={"environments": 8})
    springtide.train(config)
    most = max(state.alive for _, state in states(config))
    assert most == 8


def test_a_record_of_groups_alone_is_small_and_says_what_was_trained(tiny_model: Path, tmp_path: Path) -> None:
    config = talk_config(
        tiny_model, tmp_path, "small", suite="NoSleepers", run={"steps": 2}, observe={"events": "groups"}
    )
    springtide.train(config)
    kinds = Counter(data["kind"] for data in recorded(config))
    assert kinds["StepStarted"] == 2 and kinds["Ready"] >= 8
    assert not {"Placed", "TurnEnded", "Returned", "Finished", "Route"} & set(kinds), kinds
