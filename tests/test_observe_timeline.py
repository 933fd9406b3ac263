"""What ranks did, from events."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from springtide.observe.timeline import DOES, draw, read
from springtide.schedule.events import (
    Admitted,
    Began,
    Placed,
    RankJoined,
    RankLeft,
    Ready,
    Returned,
    RoleChanged,
    StepEnded,
    StepStarted,
    SwitchRole,
    Sync,
    TurnEnded,
    Updated,
)
from springtide.simulate.run import Setup, Simulation

RUN: list[Any] = [
    Began(0.0, 0, {"a": 1.0}, {}),
    RankJoined(0.0, "rollout-0", "rollout", 1000),
    RankJoined(0.0, "trainer-0", "trainer", 1000, True),
    Admitted(1.0, 0, "a", 0),
    Placed(2.0, 0, 0, "rollout-0", 100),
    TurnEnded(4.0, 0, 0, 150),
    Returned(7.0, 0, 0, 170),
    Ready(9.0, 0, 200),
    StepStarted(10.0, (0,)),
    Updated(15.0),
    Sync(),
    StepEnded(16.0, 1),
    SwitchRole("trainer-0", "rollout"),
    RoleChanged(18.0, "trainer-0", "rollout"),
    RankLeft(19.0, "rollout-0"),
    Admitted(20.0, 1, "a", 1),
]


def test_spans_say_what_a_rank_did_from_its_first_to_its_last_second() -> None:
    timeline = read(RUN)
    assert timeline.spans["rollout-0"] == [
        (0.0, 2.0, "waits for episodes"), (2.0, 4.0, "decodes"), (4.0, 7.0, "tools act"), (7.0, 9.0, "decodes"),
        (9.0, 19.0, "waits for episodes"),
    ]  # fmt: skip
    assert timeline.spans["trainer-0"][:3] == [
        (0.0, 10.0, "waits for groups"), (10.0, 15.0, "trains"), (15.0, 18.0, "waits for groups"),
    ]  # fmt: skip
    assert timeline.spans["trainer-0"][-1] == (18.0, 20.0, "waits for episodes")
    assert timeline.staleness == {0: 1} and max(v for _, v in timeline.curves["in use"]) == 170


@pytest.mark.parametrize("policy", ["fixed_split", "springtide"])
def test_a_simulated_run_is_read_and_drawn(policy: str, tmp_path: Path) -> None:
    events: list[Any] = []
    Simulation(Setup(groups=4, members=4, warm=1, steps=2)).run(policy, 0, record=events.append)
    timeline = read(events)
    assert len(timeline.spans) == 8
    for spans in timeline.spans.values():
        assert {what for *_, what in spans} <= set(DOES)
        assert all(a[1] == b[0] for a, b in itertools.pairwise(spans))
    draw(events, tmp_path / "out.png")
    assert (tmp_path / "out.png").stat().st_size > 20_000
