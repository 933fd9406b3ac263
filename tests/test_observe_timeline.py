"""What ranks did, from events: followed, read on from a growing file, shown and drawn."""

from __future__ import annotations

import json
import math
import random
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.schedule_world import Faults, World

from springtide.observe import ranks
from springtide.observe.eventlog import EventLog
from springtide.observe.markup import join
from springtide.observe.timeline import _BINS, DOES, Timeline, draw, read
from springtide.schedule.events import (
    Admitted,
    Began,
    Event,
    Fed,
    Held,
    Paused,
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
    event_from_json,
    event_to_json,
)
from springtide.schedule.policy import Bounds, Cluster
from springtide.simulate.run import Setup, Simulation

EVENTS = {kind.__name__ for kind in Event.__args__}
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


def spans(timeline: Timeline, rank: str) -> dict[str, float]:
    return {what: pytest.approx(sum(row)) for what, row in timeline.lanes[rank].items()}  # type: ignore[misc]


def write(path: Path, events: list[Any]) -> Path:
    path.write_text("".join(json.dumps(event_to_json(e)) + "\n" for e in events))
    return path


def test_a_ranks_seconds_are_counted_by_what_it_did_and_why_it_did_nothing() -> None:
    timeline = read(RUN)
    assert spans(timeline, "rollout-0") == {
        "nothing to admit": 1.0 + 6.0 + 3.0, "episodes wait for a place": 1.0, "decodes": 4.0, "waits for tools": 3.0,
        "waits for weights": 1.0,
    }  # fmt: skip
    assert spans(timeline, "trainer-0") == {
        "waits for groups": 10.0, "trains": 5.0, "publishes weights": 1.0, "changes its role": 2.0,
        "nothing to admit": 2.0,
    }  # fmt: skip
    assert timeline.staleness == {0: 1} and timeline.end == 20.0
    assert sum(timeline.kv["rollout-0"]) == pytest.approx(100 * 2 + 150 * 3 + 170 * 2)
    assert sum(timeline.playing["trainer-0"]) == pytest.approx(2.0)
    assert [sum(row) for row in timeline.groups.values()] == pytest.approx([8.0, 1.0, 6.0])
    assert [text for _, text in timeline.marks] == ["trainer-0 is now of role rollout", "rollout-0 left"]


def test_it_is_counted_in_the_bins_of_its_time() -> None:
    timeline = read(RUN)
    starts, decodes = timeline.starts(), timeline.shares("rollout-0")["decodes"]
    assert timeline.bins.width == 1 / 16 and len(starts) == 320
    for start, share in zip(starts, decodes, strict=True):
        assert share == pytest.approx(float(2 <= start < 4 or 7 <= start < 9))
    assert timeline.shares("rollout-0", 4)["decodes"] == pytest.approx(decodes[::4])


def test_held_and_paused_ranks_say_so() -> None:
    timeline = read(
        [*RUN[:3], Held(1.0, True), Held(3.0, False), *(replace(e, t=e.t + 3) for e in RUN[3:6]), Paused(9.0, 0, 0),
         Held(11.0, False)]
    )  # fmt: skip
    assert spans(timeline, "rollout-0")["drawing is held"] == 2.0 == spans(timeline, "trainer-0")["drawing is held"]
    assert spans(timeline, "rollout-0")["all its episodes are paused"] == 2.0


def test_a_run_that_began_again_goes_on_where_it_stopped() -> None:
    """The time without a driver is left out, and so are steps that no checkpoint held."""
    again = [Began(1e6, 0, {"a": 1.0}, {}), RankJoined(1e6 + 1, "rollout-0", "rollout", 1000), Held(1e6 + 5, True)]
    timeline = read([*RUN, *again])
    assert timeline.end == 25.0 and timeline.staleness == {}
    assert sum(map(sum, timeline.lanes["rollout-0"].values())) == pytest.approx(19.0 + 4.0)
    assert timeline.marks[-1] == (20.0, "began again at step 0")
    assert read([*RUN, replace(again[0], step=1)]).staleness == {0: 1}


@pytest.mark.parametrize(
    "bad",
    [Ready(21.0, 77), StepEnded(21.0, -5), Admitted(21.0, 5, "a", 0, 10**9), RankJoined(21.0, "x", "rollout", -1),
     Began(21.0, 0, {"a": 0.0}, {}), Placed(math.nan, 0, 0, "rollout-0", 1),
     Ready(1e13, 1)],
    ids=str,
)  # fmt: skip
def test_an_event_that_cannot_be_is_counted_and_costs_only_itself(bad: Any) -> None:
    timeline = read([*RUN, bad, Held(22.0, True)])
    assert timeline.refused == 1 and timeline.end == 22.0
    assert "1 event contradicts what came before" in join(ranks.section(timeline))


def test_a_clock_that_was_set_ahead_stretches_nothing() -> None:
    timeline = read([*RUN, Held(9e8, True), Held(9e8 + 5, False)])
    assert timeline.end == 25.0


@settings(deadline=None, max_examples=6)
@given(st.integers(0, 10_000), st.sampled_from(["springtide", "hybrid_ranks", "kv_aimd"]))
def test_whatever_goes_wrong_seconds_add_up_to_the_ranks_lives(seed: int, policy: str) -> None:
    faults = Faults(fail=0.1, hang=0.02, reject=0.2, deaths_s=40.0, clock=True, evaluations_s=60.0)
    world = World(policy, Bounds(4, 12, 2, members=4), Cluster(6), seed=seed, faults=faults)
    world.run(2)
    timeline, joined, lives = Timeline(), dict[str, float](), dict[str, float]()
    for line in world.log:
        data = json.loads(line)
        if data["kind"] not in EVENTS:
            continue
        timeline.feed(event := event_from_json(data))
        if isinstance(event, RankJoined):
            joined[event.rank] = timeline.end
        elif isinstance(event, RankLeft):
            lives[event.rank] = lives.get(event.rank, 0.0) + timeline.end - joined.pop(event.rank)
    timeline.settle()
    for rank, since in joined.items():
        lives[rank] = lives.get(rank, 0.0) + timeline.end - since
    assert timeline.refused == 0
    for rank, life in lives.items():
        if life > 0:
            assert sum(map(sum, timeline.lanes[rank].values())) == pytest.approx(life)
            assert max(map(sum, zip(*timeline.shares(rank).values(), strict=True))) <= 1 + 1e-6
    assert sum(timeline.seen) == pytest.approx(timeline.end)


@pytest.mark.parametrize("policy", ["fixed_split", "springtide"])
def test_a_simulated_run_is_read_and_drawn(policy: str, tmp_path: Path) -> None:
    events: list[Any] = []
    Simulation(Setup(groups=4, members=4, warm=1, steps=2)).run(policy, 0, record=events.append)
    timeline = read(events)
    assert len(timeline.lanes) == 8 and timeline.refused == 0
    assert {what for lane in timeline.lanes.values() for what in lane} <= set(DOES)
    ended = max(i for i, e in enumerate(events) if isinstance(e, StepEnded))
    taken = sum(len(e.visits) if isinstance(e, StepStarted) else isinstance(e, Fed) for e in events[:ended])
    assert timeline.staleness.total() == taken > 0
    draw(events, tmp_path / "out.png")
    assert (tmp_path / "out.png").stat().st_size > 20_000


# --- a file that grows ------------------------------------------------------------------------------------------------


def test_a_file_is_read_on_from_where_it_was_left(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    with log.read() as timeline:
        assert timeline.end == 0.0 and log.unread == 0.0
    write(path, RUN[:6])
    with log.read() as timeline:
        assert timeline.end == 4.0
    first = timeline
    with open(path, "a") as file:
        for event in RUN[6:]:
            line = json.dumps(event_to_json(event)) + "\n"
            file.write(line[:20])  # a line that is being written is no error, and read when it is whole
            file.flush()
            with log.read() as timeline:
                pass
            file.write(line[20:])
    with log.read() as timeline:
        assert timeline is first and log.skipped == 0 == log.unread
        assert spans(timeline, "rollout-0") == spans(read(RUN), "rollout-0")


def test_nothing_is_read_twice_and_no_more_at_once_than_there_is_time_for(tmp_path: Path, monkeypatch: Any) -> None:
    path = write(tmp_path / "events.jsonl", [*RUN, *(Held(20.0 + i, True) for i in range(20_000))])
    fed: list[Any] = []
    monkeypatch.setattr(Timeline, "feed", lambda self, event: fed.append(event))
    log = EventLog(path)
    left = []
    while not left or left[-1]:
        with log.read(0.0):
            left.append(log.unread)
    assert len(left) > 3 and left == sorted(left, reverse=True)
    assert len(fed) == len(RUN) - 1 + 20_000  # Sync is a wish
    with log.read():
        pass
    assert len(fed) == len(RUN) - 1 + 20_000


def test_lines_that_are_no_event_are_left_out_and_said(tmp_path: Path) -> None:
    path = write(tmp_path / "events.jsonl", RUN[:8])
    damage = b'{"kind": "Ready", "t": 9\n3\n[]\n{"kind": "Party", "t": 1}\n\xff\n{"kind": "Ready"}\n' + b"[" * 100_000
    path.write_bytes(path.read_bytes() + damage + b"\n" + b"x" * 600_000 + b"\n")
    with open(path, "a") as file:
        file.write("".join(json.dumps(event_to_json(e)) + "\n" for e in RUN[8:]))
    log = EventLog(path)
    with log.read() as timeline:
        assert spans(timeline, "trainer-0") == spans(read(RUN), "trainer-0")
        assert log.skipped >= 8 and timeline.refused == 0
        page = join(ranks.section(timeline, skipped=log.skipped))
    assert f"{log.skipped} lines of events.jsonl are no event" in page


_JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)


@settings(deadline=None, max_examples=25)
@given(st.lists(st.tuples(st.integers(0, len(RUN) - 1), st.integers(0, 8), _JUNK), min_size=1, max_size=6))
def test_whatever_a_field_holds_the_page_is_made(damage: list[tuple[int, int, Any]]) -> None:
    lines = [event_to_json(event) for event in RUN]
    for at, field, value in damage:
        lines[at] = {**lines[at], list(lines[at])[field % len(lines[at])]: value}
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "events.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        log = EventLog(path)
        with log.read() as timeline:
            join(ranks.section(timeline, skipped=log.skipped))


def test_a_file_that_was_begun_anew_is_read_anew(tmp_path: Path) -> None:
    path = write(tmp_path / "events.jsonl", RUN)
    log = EventLog(path)
    with log.read():
        pass
    path.unlink()
    write(path, RUN[:6])
    with log.read() as timeline:
        assert timeline.end == 4.0


# --- the page ---------------------------------------------------------------------------------------------------------


def test_a_record_without_ranks_still_shows_groups_and_staleness() -> None:
    """What runs before ranks were recorded left behind."""
    groups = [e for e in RUN if type(e) in (Began, Admitted, Ready, StepStarted, StepEnded)]
    page = join(ranks.section(read(groups)))
    assert "does not tell of ranks" in page and "Rank timeline" not in page and "KV of each" not in page
    assert "Mean 0.00 over 1 groups" in page and "<b>Groups</b>" in page


def test_a_record_without_episodes_does_not_call_its_ranks_idle() -> None:
    groups = [e for e in RUN if type(e) not in (Placed, TurnEnded, Returned)]
    page = join(ranks.section(read(groups)))
    assert "does not tell of episodes" in page and "rollout-0:" not in page and "trainer-0:" in page


def test_a_state_is_told_in_words_and_by_pattern_as_well_as_by_colour() -> None:
    page = join(ranks.section(read(RUN)))
    assert "<title>rollout-0: decodes 21%, waits for tools 16%, waits for weights 5%" in page
    assert "<title>trainer-0: trains</title>" in page
    filled = set(part.split(")")[0] for part in page.split('fill="url(#')[1:])
    assert filled and all(page.count(f'<pattern id="{name}"') == 1 for name in filled)
    angles = [part.split(")")[0] for part in page.split('patternTransform="rotate(')[1:]]
    assert len(set(angles)) == len(angles) == sum(not busy for _, busy in DOES.values())


def test_every_state_is_defined_in_the_docs() -> None:
    text = (Path(__file__).parents[1] / "docs" / "metrics.md").read_text().partition("## What ranks did")[2]
    named = [name for row in text.split("\n") if row.startswith("| ") for name in row.split("|")[1].strip().split(", ")]
    assert set(DOES) <= set(named)


def test_the_page_stays_small_however_many_ranks_and_events_there_are() -> None:
    rng = random.Random(0)
    events: list[Any] = [Began(0.0, 0, {"a": 1.0}, {})]
    names = [f"rollout-{i}" for i in range(150)]
    events += [RankJoined(0.0, name, "rollout", 1000) for name in names]
    t = 0.0
    for visit in range(1000):
        t += rng.expovariate(1.0)
        events += [Admitted(t, visit, "a", 0), Placed(t, visit, 0, rng.choice(names), 100)]
        events += [TurnEnded(t + 0.1, visit, 0, 150)]
        if visit >= 60:
            events.append(Ready(t + 0.2, visit - 60, 10))
    timeline = read(events)
    page = join(ranks.section(timeline))
    assert "64 of 150 ranks are drawn" in page and len(page) < 600_000
    assert all(len(row) == _BINS for row in timeline.lanes["rollout-3"].values())


def test_an_absurd_birth_makes_no_endless_histogram() -> None:
    page = join(ranks.section(read([replace(e, birth=-(10**9)) if type(e) is Admitted else e for e in RUN])))
    assert "The last bar is 50 steps and more" in page
