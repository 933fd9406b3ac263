"""What an author's judge, start and tools may return: anything else is one line that names it, and no reward."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from springtide.env import (
    Check,
    Environment,
    EnvironmentUnavailable,
    InProcessClient,
    Message,
    Outcome,
    Suite,
    TaskList,
    load_suite,
    tool,
)
from springtide.env.session import Observation
from springtide.env.suite import SuiteError
from springtide.trace import ToolCall


class Judged(Environment):
    """Opens, answers, rewards and judges as a test says."""

    opening: Any = "Go."
    reply_text: Any = "fine"
    earned: Any = None
    verdict: Callable[[], Any] = staticmethod(lambda: 1.0)

    @classmethod
    def tasks(cls, split, level):
        return TaskList(10, lambda i: cls.make_task(split, level, i, {}))

    async def start(self):
        return self.opening

    @tool
    async def look(self) -> str:
        """Look."""
        if self.earned is not None:
            self.reward(self.earned)
        return self.reply_text

    @tool(final=True)
    async def leave(self) -> str:
        """Leave."""
        return self.reply_text

    async def score(self):
        return type(self).verdict()


def play(*calls: str, **members: Any) -> tuple[list[Observation], Outcome]:
    """One turn of calls, and the outcome."""
    kind = type("Judged", (Judged,), {k: staticmethod(v) if k == "verdict" else v for k, v in members.items()})

    async def main() -> tuple[list[Observation], Outcome]:
        async with asyncio.timeout(20), InProcessClient([Suite.of(kind)]) as client:
            session = await client.open(kind.tasks("train", "default")[0].ref, 0, 0, 0, 10.0)
            seen = []
            if calls:
                made = tuple(ToolCall(f"c{i}", name, "{}") for i, name in enumerate(calls))
                seen.append(await session.act(Message("assistant", "", made), 0))
            outcome = await session.finish("done")
            await session.close()
            return seen, outcome

    return asyncio.run(main())


@pytest.mark.parametrize(
    "value", [1e308, -1e308, 1_000_001, math.inf, math.nan, np.float64(1e7), pytest.param(10**400, id="digits")]
)
@pytest.mark.parametrize("whole", [False, True])
def test_a_reward_beyond_any_sum_is_the_judges_error(value: Any, whole: bool) -> None:
    """1e308 twice in one step was an OverflowError of the driver's mean, and the end of the run."""
    _, outcome = play(verdict=lambda: Outcome("completed", value) if whole else value)
    assert (outcome.status, outcome.cause, outcome.reward) == ("environment_error", "judge", None)
    assert "finite" in outcome.detail and "\n" not in outcome.detail


def test_the_largest_reward_counts_and_a_larger_step_reward_is_the_tools_error() -> None:
    assert play(verdict=lambda: -1e6)[1].reward == -1e6
    assert play("look", earned=1e6)[0][0].step_reward == 1e6
    _, outcome = play("look", earned=1e7)
    assert (outcome.cause, outcome.reward) == ("tool", None)
    assert "the step reward '' is 1e+07; it must be finite and at most 1,000,000 in size" in outcome.detail


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Outcome("banana", 1.0), "status is 'banana'; it must be one of completed, turn_limit"),
        (lambda: Outcome(None, 1.0), "status is None"),
        (lambda: Outcome("completed", 1.0, "yes"), "success is 'yes'; it must be True, False or None"),
        (lambda: Outcome("completed", 1.0, 1), "success is 1; "),
        (lambda: Outcome("completed", 1.0, checks="abc"), "checks is 'abc'; it must be a tuple of Check"),
        (lambda: Outcome("completed", 1.0, checks=({"name": "a"},)), "checks is ({'name': 'a'},)"),
        (lambda: Outcome("completed", 1.0, checks=None), "checks is None"),
        (lambda: Outcome("completed", 1.0, checks=(Check("a", 1.0), Check("b", "x"))), "checks[1].value is 'x'"),
        (lambda: Outcome("completed", 1.0, checks=(Check("a", math.nan),)), "checks[0].value is nan"),
        (lambda: Outcome("completed", 1.0, checks=(Check(3, 1.0),)), "checks[0].name is 3; it must be a text"),
        (lambda: Outcome("completed", 1.0, checks=(Check("a", 1.0, weight=None),)), "checks[0].weight is None"),
        (lambda: Outcome("completed", 1.0, checks=(Check("a", 1.0, evidence=b"x"),)), "checks[0].evidence is b'x'"),
        (lambda: Outcome("completed", 1.0, detail=5), "detail is 5; it must be a text"),
        (lambda: Outcome("completed", 1.0, artifacts=[1]), "artifacts is [1]; it must be a dict"),
        (lambda: Outcome("completed", 1.0, artifacts={"f": open}), "artifacts cannot be sent"),
        (lambda: Outcome("completed", 1.0, detail="\ud800"), "detail cannot be sent"),
        (lambda: Outcome("environment_error", cause="banana"), "cause is 'banana'; it must be one of setup, tool"),
        (lambda: Outcome("completed"), "reward is None; it must be a number"),
        (lambda: Outcome("completed", "1.0"), "reward '1.0' is not a finite number"),
    ],
)
def test_an_outcome_with_a_wrong_field_is_the_judges_error_and_names_it(make: Callable[[], Any], says: str) -> None:
    """`success="yes"` was a success, and `checks="abc"` broke the report an hour later."""
    _, outcome = play(verdict=make)
    assert (outcome.status, outcome.cause, outcome.reward) == ("environment_error", "judge", None)
    assert says in outcome.detail and "\n" not in outcome.detail


def test_what_numpy_and_lists_say_is_taken_in_plain_types() -> None:
    verdict = lambda: Outcome("completed", np.float32(0.5), np.bool_(True), [Check("a", np.float64(1))])  # noqa: E731
    _, outcome = play(verdict=verdict)
    assert outcome == Outcome("completed", 0.5, True, (Check("a", 1.0),))
    assert (type(outcome.reward), type(outcome.success), type(outcome.checks)) == (float, bool, tuple)
    assert play(verdict=lambda: Outcome("turn_limit", 1.0))[1] == Outcome("completed", 1.0, True), "how it really ended"


def test_an_opening_that_no_context_holds_is_refused_with_its_size() -> None:
    """80 MB of opening were tokenised for minutes: no step, and no error either."""
    said = r"^setup: ValueError: Judged\.start returned 4,000,001 characters; no context holds more than 4,000,000$"
    with pytest.raises(EnvironmentUnavailable, match=said):
        play(opening="x" * 4_000_001)


def test_answers_that_no_context_holds_end_the_episode_and_leave_a_short_record() -> None:
    (observation,), outcome = play("look", reply_text="x" * 1_000_000)
    assert not observation.ended and outcome.status == "completed"
    (observation,), outcome = play("look", reply_text="x" * 1_000_001)
    assert observation.ended and (outcome.status, outcome.reward) == ("context_limit", 1.0)
    assert len(observation.messages[0].text) < 3000
    assert observation.messages[0].text.endswith("(cut here: 1,000,001 characters, more than a context holds)")
    (observation,), outcome = play("look", "look", reply_text="x" * 600_000)
    assert observation.ended and outcome.status == "context_limit", "all answers of a turn together"
    (observation,), outcome = play("leave", reply_text="x" * 1_000_001)
    assert outcome.status == "completed", "it had ended by itself"
    assert len(observation.messages[0].text) < 3000


def test_a_content_part_whose_text_is_none_is_the_tools_error() -> None:
    _, outcome = play("look", reply_text=[{"type": "text", "text": 5}])
    assert outcome.cause == "tool" and "a content part whose text is not a str" in outcome.detail


def test_a_suite_whose_name_no_path_can_hold_is_one_line() -> None:
    with pytest.raises(SuiteError, match=r"^suite 'a\\x00b\.py:X': its name holds a NUL character"):
        load_suite("a\0b.py:X")
