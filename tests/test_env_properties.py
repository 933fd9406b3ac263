"""What holds for every sequence of turns and every argument a model can write."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

from hypothesis import given, settings
from hypothesis import strategies as st

from springtide.env import Environment, EpisodeRunner, Limits, Message, TaskList, ToolError, tool
from springtide.env.tools import BadArguments
from springtide.trace import ToolCall
from springtide.wire import pack, unpack


class Recorder(Environment):
    limits = Limits(max_turns=5)

    @classmethod
    def tasks(cls, split, level):
        return TaskList(1, lambda i: cls.make_task(split, level, i, {}))

    async def start(self):
        self.executed = []
        return "go"

    @tool
    async def keep(self, key: str) -> str:
        """Keep a key."""
        self.executed.append(key)
        self.reward(0.125)
        return f"kept {key}"

    @tool
    async def refuse(self, key: str) -> str:
        """Refuse a key."""
        self.executed.append(key)
        raise ToolError("refused")

    @tool(final=True)
    async def stop(self, key: str) -> str:
        """Stop."""
        self.executed.append(key)
        return "stopped"


PLAYED = ("keep", "refuse", "stop")
KINDS = (*PLAYED, "malformed", "unknown", "cut", "misfit", "extra")


def make_call(kind: str, key: str) -> ToolCall:
    arguments = json.dumps({"key": key})
    return {
        "malformed": ToolCall(key, "keep", arguments[:-1]),
        "unknown": ToolCall(key, "keeper", arguments),
        "cut": ToolCall(key, "keep", arguments, error="cut by the token limit"),
        "misfit": ToolCall(key, "keep", '{"key": ["a"]}'),
        "extra": ToolCall(key, "keep", json.dumps({"key": key, "more": 1})),
    }.get(kind) or ToolCall(key, kind, arguments)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.lists(st.sampled_from(KINDS), max_size=4), max_size=8))
def test_every_call_is_answered_once_in_order_and_only_fitting_calls_are_executed(plan: list[list[str]]) -> None:
    async def main() -> None:
        environment = Recorder(Recorder.tasks("train", "default")[0])
        runner = await EpisodeRunner.open(environment)
        expected: list[str] = []
        rejected = turns = 0
        status = None
        for number, kinds in enumerate(plan):
            keys = [f"{number}.{i}" for i in range(len(kinds))]
            calls = tuple(make_call(kind, key) for kind, key in zip(kinds, keys))
            observation = await runner.act(Message("assistant", tool_calls=calls), number)
            assert unpack(pack(observation)) == observation
            if kinds:
                assert [m.tool_call_id for m in observation.messages] == keys
                assert all(m.role == "tool" and m.text for m in observation.messages)
            earned = 0.0
            if status is None:
                turns += 1
                fitting = False
                for kind, key, answer in zip(kinds, keys, observation.messages):
                    if status == "completed":
                        assert answer.text.startswith("not executed")
                    elif kind in PLAYED:
                        fitting = True
                        expected.append(key)
                        earned += 0.125 * (kind == "keep")
                        status = "completed" if kind == "stop" else None
                    else:
                        assert answer.text.startswith("Error: ")
                rejected = 0 if fitting else rejected + 1
                if status is None and rejected == 3:
                    status = "invalid_action"
                elif status is None and turns == 5:
                    status = "turn_limit"
            assert observation.ended == (status is not None)
            assert observation.step_reward == earned
        assert environment.executed == expected
        outcome = await runner.finish("done")
        assert outcome.status == (status or "completed")
        assert outcome.reward == sum(check.value for check in outcome.checks)
        await runner.close()

    asyncio.run(main())


class Typed(Environment):
    async def start(self):
        return "go"

    @tool
    async def take(
        self,
        text: str = "",
        whole: int = 0,
        real: float = 0.0,
        flag: bool = False,
        choice: Literal["a", "b"] = "a",
        number: Literal[1, 2] = 1,
        maybe: int | None = None,
        words: list[str] = [],  # noqa: B006
        scores: dict[str, float] = {},  # noqa: B006
        anything: dict = {},  # noqa: B006
    ) -> str:
        """Take anything."""
        return "taken"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["3", "true", "a", 1, 2.0]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
NAMES = tuple(Typed.tools["take"].parameters)
TYPES: dict[str, Any] = {"text": str, "whole": int, "real": float, "flag": bool, "choice": str, "number": int}


@settings(max_examples=250, deadline=None)
@given(st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=5), JSON, max_size=3))
def test_arguments_are_of_their_declared_types_or_rejected_in_one_line(arguments: dict[str, Any]) -> None:
    try:
        given_arguments = Typed.tools["take"].arguments(json.dumps(arguments))
    except BadArguments as rejection:
        assert str(rejection) and "\n" not in str(rejection)
        str(rejection).encode()
        return
    pack(given_arguments)  # whatever is accepted can be sent and stored
    for name, value in given_arguments.items():
        original = arguments[name]
        if name in TYPES:
            assert type(value) is TYPES[name]
            assert value == original or json.dumps(value) == original or float(value) == float(original)
        if name == "choice":
            assert value in ("a", "b")
        if name == "number":
            assert value in (1, 2)
        if name == "maybe":
            assert value is None or type(value) is int
        if name == "words":
            assert all(type(word) is str for word in value)
        if name == "scores":
            assert all(type(score) is float for score in value.values())


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=40) | st.text(alphabet='{}[]":,0123456789eE+-. \\utrnaNIfily', max_size=40))
def test_no_text_in_place_of_arguments_breaks_the_parser(text: str) -> None:
    try:
        Typed.tools["take"].arguments(text)
    except BadArguments as rejection:
        assert "\n" not in str(rejection)


def test_deeply_nested_and_huge_arguments_are_rejected() -> None:
    for text in ("[" * 100_000, '{"whole": ' + "9" * 5000 + "}", '{"real": 1e999}', '{"text": "\\ud800"}'):
        try:
            Typed.tools["take"].arguments(text)
        except BadArguments as rejection:
            assert len(str(rejection)) < 300
        else:
            raise AssertionError(f"{text[:20]} was accepted")
