"""The shipped suites, played differently: with tools that take their time, and for a single turn.

Owns: the law of latency, written down before anything was measured with it, and the reward of a one-turn completion.
Invariants: names, tasks, seeds, prompts and tools are the shipped suites' own; a call's latency is decided by the task,
by how many calls came before it and by the call itself, never by the clock or a run's mode; only training is slow.
Called by: runs of `latency.py` (`wrapped.py:SlowDb`, `:SlowKg`, `:SlowHousehold`) and `goodput.py` (`:OneTurnDb`, ...),
by path, in environment workers: this file imports nothing from beside it.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import inspect
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import NormalDist
from typing import Any

from springtide.env import Environment, Message, Task, TaskList, load_suite

# A tool's latency is lognormal: half of the calls take less than 0.25 s, one in a hundred more than 4.6 s, the mean is
# 0.55 s. Cut at 30 s, as a service's time-out would. Chosen before any run with it.
MEDIAN_S, SIGMA, MOST_S = 0.25, 1.25, 30.0
LATENCY_SEED = 20261201
ONE_TURN_TASKS = 300  # of each suite's training tasks; a tenth of them is dev and never trained on
_ACT_S = 4 * MOST_S  # a turn may make several calls
_SPECIAL = re.compile(r"</?tool_call>|<\|\w+\|>")  # TRL's rewards see no special tokens


def latency_s(task_id: str, before: int, name: str, arguments: dict[str, Any]) -> float:
    """Seconds of the call `name(**arguments)` that comes after `before` others of its episode."""
    call = json.dumps([LATENCY_SEED, task_id, before, name, arguments], sort_keys=True)
    number = int.from_bytes(hashlib.blake2b(call.encode(), digest_size=7).digest(), "little")
    return min(MOST_S, MEDIAN_S * math.exp(SIGMA * NormalDist().inv_cdf((number + 0.5) / 2**56)))


def reward(text: str, gold: str) -> float:
    """What a one-turn completion is worth, 0 to 1: half for the gold's first call, character by character, and half for
    not repeating itself. Cheap, and seldom the same twice. (`peer_trl.py` has the same.)"""
    text = _SPECIAL.sub("", text)
    lines = text.split("\n")
    return 0.5 * sum(a == b for a, b in zip(text, gold)) / len(gold) + 0.5 * len(set(lines)) / len(lines)


class _Slow(Environment):
    """Tools that answer late."""

    name = "slow"
    _calls = 0

    @classmethod
    def tasks(cls, split: str, level: str) -> Sequence[Task]:
        return _limited(cls, super().tasks(split, level), act_s=_ACT_S)

    async def called(self, method: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        before, self._calls = self._calls, self._calls + 1
        if self.task.split == "train":
            await asyncio.sleep(latency_s(self.task.id, before, method.__name__, arguments))
        if inspect.iscoroutinefunction(method):
            return await method(self, **arguments)
        return await asyncio.to_thread(method, self, **arguments)


class _OneTurn(Environment):
    """An episode is one completion of the task's prompt, whatever it says. Its tools stand in the prompt as text."""

    name = "one turn"
    _text = ""

    @classmethod
    def tasks(cls, split: str, level: str) -> Sequence[Task]:
        return _limited(cls, super().tasks(split, level)[:ONE_TURN_TASKS], max_turns=1)

    async def start(self) -> list[Message]:
        text = str(await _awaited(super().start()))
        names = super().offered() or tuple(self.inner.tools)  # of a suite that offers them all, none are left here
        signatures = [f"{name}({', '.join(self.inner.tools[name].parameters)})" for name in names]
        return [Message("system", "\n".join(signatures)), Message("user", text)]

    def offered(self) -> Sequence[str]:
        return ()

    async def reply(self, text: str) -> None:
        self._text = text
        self.end("one turn")

    async def score(self) -> float:
        return reward(self._text, await self.gold_text())

    async def gold_text(self) -> str:
        """The gold's first call, as springtide-nano writes it."""
        calls = await _awaited(self.gold())
        assert calls is not None
        name, arguments = calls[0]
        return f'\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n'

    inner: type[Environment]


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def _limited(cls: type[Environment], tasks: Sequence[Task], **limits: Any) -> TaskList:
    def make(index: int) -> Task:
        task = tasks[index]
        return replace(task, limits=replace(task.limits or cls.limits, **limits))

    return TaskList(len(tasks), make)


def wrap(how: type[Environment], suite: str) -> type[Environment]:
    """A shipped suite's environment whose tools go through `how.called`, or are withdrawn. Raises: SuiteError."""
    inner = load_suite(suite).environment
    body: dict[str, Any] = {"name": inner.name, "__module__": __name__, "__doc__": inner.__doc__}
    body |= {"max_turns": inner.max_turns, "requires": inner.requires, "inner": inner}
    slow = hasattr(how, "called")
    body |= {name: _through(getattr(inner, name)) if slow else None for name in inner.tools}
    return type(f"{how.__name__.strip('_')}{suite.capitalize()}", (how, inner), body)


def _through(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)  # the tool's mark, signature and description with it
    async def call(self: Any, **arguments: Any) -> Any:
        return await self.called(method, arguments)

    return call


SlowDb, SlowKg, SlowHousehold = (wrap(_Slow, suite) for suite in ("db", "kg", "household"))
OneTurnDb, OneTurnKg, OneTurnHousehold = (wrap(_OneTurn, suite) for suite in ("db", "kg", "household"))
