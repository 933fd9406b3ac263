"""The contract of sessions, held by every implementation: in this process, and behind worker processes."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from env_probe import BEHAVIOURS
from springtide.env import EnvironmentUnavailable, InProcessClient, Message, Observation, Outcome
from springtide.env.local import LocalClient, LocalRunner
from springtide.trace import TaskRef, ToolCall

PROBE = str(Path(__file__).with_name("env_probe.py"))
SUITES = tuple(f"{PROBE}:{name}" for name in ("Probe", "Talk", "Quiz", "Alone"))


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, ...]]:
    """The addresses of two worker processes, supervised from a thread of their own."""
    directory = tmp_path_factory.mktemp("workers")
    os.environ["SPRINGTIDE_PROBE"] = str(directory / "trace")
    (directory / "trace").touch()
    addresses: list[tuple[str, ...]] = []
    ready, loop = threading.Event(), asyncio.new_event_loop()
    leave = asyncio.Event()

    async def supervise() -> None:
        async with LocalRunner(SUITES, 2, directory / "logs", lease_s=30.0) as runner:
            addresses.append(runner.addresses)
            ready.set()
            await leave.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(supervise(),), daemon=True)
    thread.start()
    assert ready.wait(60)
    yield addresses[0]
    loop.call_soon_threadsafe(leave.set)
    thread.join(30)
    assert not thread.is_alive()


class Probe:
    """Opens sessions of the probe's tasks by behaviour, and reads what happened inside."""

    def __init__(self, client: InProcessClient | LocalClient, suite: str = "probe", split: str = "train") -> None:
        self.client, self.suite, self.split = client, suite, split
        self._trace = Path(os.environ["SPRINGTIDE_PROBE"])
        self._skip = len(self._trace.read_text().splitlines())

    async def open(self, behaviour: str = "plain", deadline_s: float = 30.0) -> Any:
        index = BEHAVIOURS.index(behaviour)
        refs = await self.client.catalog(self.suite, self.split, "default")
        return await self.client.open(refs[index], 0, 0, 0, deadline_s)

    @property
    def events(self) -> list[str]:
        return self._trace.read_text().splitlines()[self._skip :]


Play = Callable[[Callable[[Probe], Awaitable[None]]], None]


@pytest.fixture(params=["in process", "workers"])
def play(request: pytest.FixtureRequest, workers: tuple[str, ...]) -> Play:
    """Runs a test's coroutine against a fresh client of each kind."""

    def run(body: Callable[[Probe], Awaitable[None]]) -> None:
        async def main() -> None:
            client = InProcessClient(SUITES) if request.param == "in process" else LocalClient(workers)
            async with asyncio.timeout(60), client:
                await body(Probe(client))

        asyncio.run(main())

    return run


def say(*calls: tuple[str, str] | ToolCall, text: str = "") -> Message:
    made = tuple(c if isinstance(c, ToolCall) else ToolCall(f"c{i}", c[0], c[1]) for i, c in enumerate(calls))
    return Message("assistant", text, tool_calls=made)


def texts(observation: Observation) -> list[str]:
    return [message.text for message in observation.messages]


async def outcome_of(session: Any, *turns: Message) -> Outcome:
    for number, turn in enumerate(turns):
        await session.act(turn, number)
    outcome = await session.finish("done")
    await session.close()
    return outcome


# --- calls and answers ---------------------------------------------------------------------------------------------


def test_calls_of_a_turn_run_in_order_and_each_is_answered(play: Play) -> None:
    async def body(probe: Probe) -> None:
        session = await probe.open()
        turn = say(("note", '{"text": "a"}'), ("earn", '{"amount": 0.25}'), ("note", '{"text": "b", "times": 2}'))
        observation = await session.act(turn, 0)
        assert texts(observation) == ["1 notes", '{"earned": 0.25}', "3 notes"]
        assert [m.tool_call_id for m in observation.messages] == ["c0", "c1", "c2"]
        assert (observation.step_reward, observation.ended) == (0.25, False)
        assert observation.times["env_s"] > 0
        assert probe.events == ["start", "note a", "note b"]
        await session.close()

    play(body)


def test_calls_after_a_final_one_are_answered_and_not_executed(play: Play) -> None:
    async def body(probe: Probe) -> None:
        session = await probe.open()
        observation = await session.act(say(("done", "{}"), ("note", '{"text": "late"}'), ("nonsense", "{")), 0)
        assert texts(observation) == ["ended"] + ["not executed: the episode has ended"] * 2
        assert observation.ended
        assert probe.events == ["start", "done"]
        after = await session.act(say(("note", '{"text": "later"}')), 1)
        assert after.ended and texts(after) == ["not executed: the episode has ended"]
        assert (await session.finish("done")).status == "completed"
        await session.close()
        assert "note later" not in probe.events

    play(body)


def test_a_refusal_is_answered_and_is_no_rejected_turn(play: Play) -> None:
    async def body(probe: Probe) -> None:
        session = await probe.open()
        for turn in range(4):
            observation = await session.act(say(("refuse", "{}")), turn)
            assert texts(observation) == ["no such table: birds"] and not observation.ended
        await session.close()

    play(body)


@pytest.mark.parametrize(
    ("call", "answer"),
    [
        # verifiers#1763: malformed arguments killed a quarter of the rollouts.
        (ToolCall("x", "note", '{"text": "a"'), "Error: the arguments of note are not valid JSON"),
        (ToolCall("x", "note", "[1]"), "Error: the arguments of note must be a JSON object, not a list"),
        (ToolCall("x", "notes", "{}"), "Error: there is no tool 'notes'; the tools are note, earn,"),
        (ToolCall("x", "note", "{}"), "Error: note needs the argument text (a string)"),
        (ToolCall("x", "note", '{"text": 5}'), "Error: note: text must be a string, not 5"),
        (ToolCall("x", "note", '{"text": "a", "size": 5}'), 'Error: note has no argument "size"; it takes text, times'),
        (ToolCall("x", "note", '{"text": "\\ud800"}'), "Error: "),
        # mini-swe-agent#851: a call cut at the token limit was executed.
        (ToolCall("x", "note", '{"text": "a"}', error="cut by the token limit"), "Error: cut by the token limit"),
    ],
)
def test_a_call_that_does_not_fit_is_answered_and_never_executed(play: Play, call: ToolCall, answer: str) -> None:
    async def body(probe: Probe) -> None:
        session = await probe.open()
        observation = await session.act(say(call, ("earn", '{"amount": 1}')), 0)
        assert observation.messages[0].text.startswith(answer) and "\n" not in observation.messages[0].text
        assert observation.messages[1].text == '{"earned": 1.0}', "the turn's other calls are played"
        assert not observation.ended
        await session.close()
        assert probe.events == ["start", "close"]

    play(body)


def test_three_rejected_turns_in_a_row_end_the_episode_and_a_played_one_resets(play: Play) -> None:
    async def body(probe: Probe) -> None:
        session = await probe.open()
        bad, good, words = say(("nonsense", "{}")), say(("note", '{"text": "a"}')), say(text="I think")
        ended = [(await session.act(turn, i)).ended for i, turn in enumerate((bad, words, good, bad, bad))]
        assert ended == [False] * 5
        last = await session.act(words, 5)
        assert last.ended
        assert texts(last)[0].startswith("Call one of the tools: note, earn,")
        outcome = await session.finish("done")
        assert (outcome.status, outcome.reward, outcome.success) == ("invalid_action", 0.0, False)
        await session.close()

    play(body)


def test_a_user_simulator_answers_text_and_may_end(play: Play) -> None:
    async def body(probe: Probe) -> None:
        session = await Probe(probe.client, "talk").open()
        assert session.tools == ()
        assert texts(await session.act(say(text="one"), 0)) == ["You said one"]
        last = await session.act(say(text="two"), 1)
        assert last.ended and last.messages == ()
        assert (await session.finish("done")).success is True
        await session.close()

    play(body)


def test_a_plain_answer_ends_where_the_environment_takes_one(play: Play) -> None:
    async def body(probe: Probe) -> None:
        session = await Probe(probe.client, "quiz").open()
        assert (await session.act(say(text="42"), 0)).ended
        outcome = await session.finish("done")
        assert (outcome.status, outcome.reward) == ("completed", 1.0)
        await session.close()

    play(body)


# --- how episodes end ----------------------------------------------------------------------------------------------


def test_a_turn_limit_ends_the_episode_which_is_still_scored(play: Play) -> None:
    async def body(probe: Probe) -> None:
        session = await probe.open("solved")
        assert session.max_turns == 6
        ended = [(await session.act(say(("note", '{"text": "a"}')), i)).ended for i in range(6)]
        assert ended == [False] * 5 + [True]
        outcome = await session.finish("done")
        assert (outcome.status, outcome.reward, outcome.success) == ("turn_limit", 1.0, True)
        await session.close()

    play(body)


@pytest.mark.parametrize("reason", ["context_limit", "time_limit", "turn_limit"])
def test_a_limit_of_the_caller_is_the_status_of_an_episode_that_is_still_scored(play: Play, reason: Any) -> None:
    async def body(probe: Probe) -> None:
        session = await probe.open()
        await session.act(say(("earn", '{"amount": 0.5}')), 0)
        outcome = await session.finish(reason)
        assert (outcome.status, outcome.reward, outcome.success) == (reason, 0.5, False)
        await session.close()
        assert probe.events == ["start", "settle", "score", "close"]

    play(body)


def test_a_cancelled_episode_is_not_judged(play: Play) -> None:
    async def body(probe: Probe) -> None:
        session = await probe.open()
        outcome = await session.finish("cancelled")
        await session.close()
        assert (outcome.status, outcome.reward, outcome.success) == ("cancelled", None, None)
        assert probe.events == ["start", "close"]

    play(body)


@pytest.mark.parametrize(
    ("tool", "seen"),
    [
        ("crash", "KeyError"),
        ("leave", "leave raised SystemExit(3)"),
        ("give_nothing", "TypeError"),
        ("cancel", "cancel raised CancelledError() (env_probe.py:"),
        ("cancel_in_a_thread", "cancel_in_a_thread raised CancelledError() (env_probe.py:"),
    ],
)
def test_a_tool_that_breaks_makes_an_environment_error_and_never_a_reward(play: Play, tool: str, seen: str) -> None:
    # verl#5635: exceptions were swallowed and every score was 0.
    async def body(probe: Probe) -> None:
        session = await probe.open("solved")
        observation = await session.act(say((tool, "{}"), ("note", '{"text": "a"}')), 0)
        assert observation.ended and len(observation.messages) == 2
        outcome = await session.finish("done")
        assert (outcome.status, outcome.cause) == ("environment_error", "tool")
        assert (outcome.reward, outcome.success) == (None, None)
        assert seen in outcome.detail
        await session.close()
        assert probe.events == ["start", "close"]

    play(body)


@pytest.mark.parametrize(
    ("behaviour", "cause", "seen"),
    [
        ("score raises", "judge", "ZeroDivisionError: judge"),
        ("score is nan", "judge", "nan; it must be finite"),  # trl#5773: a missing score summed to 0
        ("score is text", "judge", "returned str"),
        ("score is cancelled", "judge", "score raised CancelledError()"),
        ("score hangs", "judge", "deadline"),
        ("score fails itself", "judge", "server down"),
        ("settle raises", "tool", "OSError: disk full"),
    ],
)
def test_an_episode_that_cannot_be_judged_has_no_reward(play: Play, behaviour: str, cause: str, seen: str) -> None:
    async def body(probe: Probe) -> None:
        outcome = await outcome_of(await probe.open(behaviour), say(("done", "{}")))
        assert (outcome.status, outcome.cause) == ("environment_error", cause)
        assert (outcome.reward, outcome.success) == (None, None)
        assert seen in outcome.detail
        assert probe.events[-1] == "close"

    play(body)


def test_settling_comes_before_judging_and_closing_comes_last(play: Play) -> None:
    async def body(probe: Probe) -> None:
        outcome = await outcome_of(await probe.open(), say(("earn", '{"amount": 1}')), say(("done", "{}")))
        assert probe.events == ["start", "done", "settle", "score", "close"]
        assert (outcome.status, outcome.reward, outcome.success) == ("completed", 1.0, True)
        assert [(check.name, check.value) for check in outcome.checks] == [("earned", 1.0)]

    play(body)


def test_an_outcome_of_the_judge_is_kept(play: Play) -> None:
    async def body(probe: Probe) -> None:
        outcome = await outcome_of(await probe.open("score is an outcome"), say(("done", "{}")))
        assert (outcome.reward, outcome.success, outcome.artifacts) == (0.5, True, {"sql": "select 1"})
        assert outcome.checks[0].name == "half"

    play(body)


@pytest.mark.parametrize(
    ("behaviour", "tool", "success"),
    [("infeasible", "give_up", True), ("infeasible", "done", False), ("solved", "give_up", False)],
)
def test_giving_up_succeeds_exactly_where_the_task_cannot_be_done(
    play: Play, behaviour: str, tool: str, success: bool
) -> None:
    async def body(probe: Probe) -> None:
        outcome = await outcome_of(await probe.open(behaviour), say((tool, "{}")))
        assert (outcome.status, outcome.reward, outcome.success) == ("completed", float(success), success)

    play(body)


@pytest.mark.parametrize("behaviour", ["start raises", "start hangs", "start returns nothing", "start is cancelled"])
def test_a_start_that_fails_is_unavailable_with_its_cause_and_is_closed(play: Play, behaviour: str) -> None:
    async def body(probe: Probe) -> None:
        with pytest.raises(EnvironmentUnavailable) as caught:
            await probe.open(behaviour)
        assert caught.value.cause == "setup"
        assert probe.events == ["start", "close"]

    play(body)


def test_a_close_that_raises_is_not_the_callers_trouble(play: Play) -> None:
    async def body(probe: Probe) -> None:
        outcome = await outcome_of(await probe.open("close raises"), say(("done", "{}")))
        assert outcome.status == "completed"

    play(body)


# --- deadlines -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tool", ["sleep", "doze", "stubborn"])
def test_a_hanging_tool_is_an_environment_error_at_its_deadline(play: Play, tool: str) -> None:
    async def body(probe: Probe) -> None:
        session = await probe.open()
        started = time.monotonic()
        observation = await session.act(say((tool, '{"seconds": 2.5}')), 0)
        assert observation.ended and time.monotonic() - started < 2.4
        outcome = await session.finish("done")
        assert (outcome.status, outcome.cause) == ("environment_error", "tool")
        assert "did not end within its deadline" in outcome.detail
        await session.close()
        assert probe.events == ["start", "close"]

    play(body)


def test_time_between_calls_costs_an_episode_nothing(play: Play) -> None:
    async def body(probe: Probe) -> None:
        session = await probe.open()
        await asyncio.sleep(0.8)  # longer than any of its deadlines
        await session.renew()
        observation = await session.act(say(("note", '{"text": "a"}')), 0)
        assert texts(observation) == ["1 notes"] and observation.times["env_s"] < 0.7
        await session.close()

    play(body)


@pytest.mark.parametrize("tool", ["sleep", "doze", "spin"])
def test_a_slow_tool_delays_no_other_sessions_reply(play: Play, tool: str) -> None:
    # prime-rl#1482: environment code blocked the loop.
    async def body(probe: Probe) -> None:
        slow, quick = await probe.open(), await probe.open()
        busy = asyncio.create_task(slow.act(say((tool, '{"seconds": 0.5}')), 0))
        await asyncio.sleep(0.05)
        waits = []
        for turn in range(5):
            started = time.monotonic()
            await quick.act(say(("note", '{"text": "a"}')), turn)
            waits.append(time.monotonic() - started)
        assert not busy.done(), "the slow tool must still have been running"
        assert sorted(waits)[2] < 0.1
        assert not (await busy).ended
        await slow.close()
        await quick.close()

    play(body)


# --- asked twice ---------------------------------------------------------------------------------------------------


def test_an_action_asked_twice_has_its_effect_once(play: Play) -> None:
    async def body(probe: Probe) -> None:
        session = await probe.open()
        turn = say(("earn", '{"amount": 1}'), ("sleep", '{"seconds": 0.2}'), ("note", '{"text": "a"}'))
        first, second = await asyncio.gather(session.act(turn, 7), session.act(turn, 7))
        assert first == second == await session.act(turn, 7)
        outcome, again = await asyncio.gather(session.finish("done"), session.finish("time_limit"))
        assert outcome == again == await session.finish("cancelled")
        assert outcome.reward == 1.0
        await session.close()
        await session.close()
        assert probe.events == ["start", "note a", "settle", "score", "close"]

    play(body)


def test_an_action_goes_on_when_its_caller_leaves_and_is_found_again(play: Play) -> None:
    async def body(probe: Probe) -> None:
        session = await probe.open()
        turn = say(("sleep", '{"seconds": 0.3}'), ("note", '{"text": "a"}'))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await session.act(turn, 0)
        assert texts(await session.act(turn, 0)) == ["awake", "1 notes"]
        await session.close()
        assert probe.events == ["start", "note a", "close"]

    play(body)


def test_a_session_closed_in_the_middle_of_an_action_is_closed_inside_too(play: Play) -> None:
    async def body(probe: Probe) -> None:
        session = await probe.open()
        busy = asyncio.create_task(session.act(say(("sleep", '{"seconds": 0.6}')), 0))
        await asyncio.sleep(0.1)
        await session.close()
        with pytest.raises(EnvironmentUnavailable, match="closed"):
            await busy
        assert probe.events == ["start", "close"]

    play(body)


def test_gold_is_answered_on_train_tasks_only(play: Play) -> None:
    async def body(probe: Probe) -> None:
        session = await probe.open()
        assert [(c.name, c.arguments) for c in await session.gold()] == [("earn", '{"amount": 1.0}'), ("done", "{}")]
        await session.close()
        for split in ("test", "ood"):
            session = await Probe(probe.client, split=split).open()
            with pytest.raises(PermissionError, match="train tasks only"):
                await session.gold()
            await session.close()

    play(body)


def test_the_same_task_opens_the_same_way_every_time(play: Play) -> None:
    async def body(probe: Probe) -> None:
        first, second = await probe.open(), await probe.open()
        assert first.messages == second.messages and first.tools == second.tools
        assert first.id != second.id
        await first.close()
        await second.close()

    play(body)


def test_a_task_the_suite_does_not_have_is_unavailable_with_the_reason(play: Play) -> None:
    async def body(probe: Probe) -> None:
        gone = TaskRef("probe/default/train/0", "probe", "0", "train", "default", 0, 0)
        with pytest.raises(EnvironmentUnavailable, match="has changed") as caught:
            await probe.client.open(gone, 0, 0, 0, 10.0)
        assert caught.value.cause == "setup"

    play(body)
