"""What nano may see of the real suites: gold of 32 training tasks each, and the words of training prompts.

Owns the choice of tasks: the first `GOLD_TASKS` of level `quick`, split `train`, that are not tagged `dev`. Invariants:
no dev, test or ood task is opened for supervised data; a dialogue is what the environment really answered to its gold.
Called by: the builder, tests.
"""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import dataclass
from typing import Any

from scripts.nano.dialogue import Call, Dialogue, Signatures, Turn

from springtide.env import InProcessClient
from springtide.trace import Message, TaskRef

SUITES = ("db", "kg", "household")
LEVEL = "quick"
GOLD_TASKS = 32
_START_S = 120.0
_NAME = re.compile(r"'([^']+)'|(?<=[a-z,] )([A-Z][\w]*(?: [A-Z][\w]*)*)")


@dataclass(frozen=True)
class Seen:
    """All that training looks at: dialogues by suite, every suite's tools, and proper names of training prompts."""

    gold: dict[str, list[Dialogue]]
    tools: dict[str, Signatures]
    prompts: dict[str, list[str]]

    def names(self) -> list[str]:
        """Names that training prompts utter, sorted."""
        found = {a or b for prompts in self.prompts.values() for text in prompts for a, b in _NAME.findall(text)}
        return sorted(found)


def training_tasks(refs: tuple[TaskRef, ...], most: int = GOLD_TASKS) -> list[TaskRef]:
    """The tasks whose gold may be learned from."""
    return [ref for ref in refs if "dev" not in ref.tags][:most]


def see(most: int = GOLD_TASKS, prompts: int = 1200) -> Seen:
    """Play gold of the training tasks, and read further training prompts for their words. Takes seconds."""
    return asyncio.run(_see(most, prompts))


def dev(tasks: int) -> dict[str, list[Dialogue]]:
    """Solutions of the first dev tasks of each suite: looked at, never learned from."""
    return asyncio.run(_dev(tasks))


async def _dev(tasks: int) -> dict[str, list[Dialogue]]:
    found: dict[str, list[Dialogue]] = {}
    async with InProcessClient(SUITES) as client:
        for suite in SUITES:
            refs = [ref for ref in await client.catalog(suite, "train", LEVEL) if "dev" in ref.tags]
            found[suite] = [await _play(client, ref) for ref in refs[:tasks]]
    return found


async def _see(most: int, prompts: int) -> Seen:
    gold: dict[str, list[Dialogue]] = {}
    tools: dict[str, Signatures] = {}
    read: dict[str, list[str]] = {}
    async with InProcessClient(SUITES) as client:
        for suite in SUITES:
            refs = await client.catalog(suite, "train", LEVEL)
            gold[suite] = [await _play(client, ref) for ref in training_tasks(refs, most)]
            tools[suite] = gold[suite][0].tools
            read[suite] = [await _prompt(client, ref) for ref in training_tasks(refs, prompts)]
    return Seen(gold, tools, read)


async def _prompt(client: InProcessClient, ref: TaskRef) -> str:
    session = await client.open(ref, 0, 0, 0, _START_S)
    try:
        return session.messages[-1].text
    finally:
        await session.close()


async def _play(client: InProcessClient, ref: TaskRef) -> Dialogue:
    session = await client.open(ref, 0, 0, 0, _START_S)
    try:
        gold = await session.gold()
        if gold is None:
            raise ValueError(f"{ref.id} has no gold")
        turns = []
        for i, call in enumerate(gold):
            arguments = json.loads(call.arguments)
            message = Message("assistant", "", (call,)) if call.name else Message("assistant", arguments["text"])
            seen = await session.act(message, i)
            made: Call = (call.name, arguments)
            turns.append(Turn(made, seen.messages[0].text if seen.messages else ""))
        outcome = await session.finish("done")
        if not outcome.success:
            raise ValueError(f"the gold of {ref.id} does not succeed: {outcome}")
        return Dialogue(ref.suite, signatures(session.tools), session.messages[-1].text, tuple(turns))
    finally:
        await session.close()


def signatures(tools: tuple[dict[str, Any], ...]) -> Signatures:
    """Tool schemas as nano's template shows them."""
    functions = [tool["function"] for tool in tools]
    return tuple((f["name"], tuple(f["parameters"].get("properties", {}))) for f in functions)
