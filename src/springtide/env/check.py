"""The author's checker: plays a suite as a run would and says what is wrong with it.

Owns: the checks behind `springtide doctor env NAME`. Invariants: gold of `test` and `ood` is read inside this process
only (the author's scope) and is printed nowhere; a check that cannot be made says so instead of passing.
Called by: `env.examine` (in a child process of the doctor's), tests.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import math
import os
import random
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from springtide.env.environment import Environment
from springtide.env.guard import authored
from springtide.env.inprocess import InProcessClient
from springtide.env.local import LocalClient, LocalRunner
from springtide.env.runner import EpisodeRunner, Note, describe
from springtide.env.session import EnvironmentUnavailable, Observation
from springtide.env.suite import SPLITS, Suite
from springtide.trace import Message, Outcome, Task, ToolCall
from springtide.wire import pack

_COMPARED = 2000  # tasks a split whose contents are compared between splits
_STARTED = 60  # tasks a split that are started, where the contents are made at the start
_TASKS_S = 600.0  # for making the tasks of a split, which has no deadline of its own
_LARGE = 100_000  # bytes of one reply: some 25,000 tokens, more than most runs give a whole episode
_LONGEST_S = 3600.0  # a deadline beyond an hour stops a run as surely as none
_WORDS = ("", "a", "42", "x" * 2000, "Robert'); DROP TABLE students;--", "naïve café 東京 🚲", "a\x00b", "%s {0} \\")


Kind = Literal["ok", "warning", "failed", "skipped"]


@dataclass(frozen=True)
class Verdict:
    """One check: `ok`, `warning`, `failed`, or `skipped` where it cannot be made. `detail` is one line."""

    check: str
    verdict: Kind
    detail: str


@dataclass(frozen=True)
class Report:
    suite: str
    version: str
    level: str
    tasks: dict[str, int]
    verdicts: tuple[Verdict, ...]

    @property
    def ok(self) -> bool:
        return all(verdict.verdict != "failed" for verdict in self.verdicts)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "ok": self.ok}


class _Failed(Exception):
    """A check that failed; the text is its detail."""


class _Warned(Exception):
    """What works, but should be seen to."""


class _Skipped(Exception):
    """A check that cannot be made; the text says why."""


@dataclass
class _Played:
    """One episode as it went."""

    opening: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...]
    observations: list[Observation]
    outcome: Outcome
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def visible(self) -> tuple[Any, ...]:
        """What the policy saw and got; equal for equal episodes."""
        seen = [(o.messages, o.step_reward, o.ended) for o in self.observations]
        return (self.opening, self.tools, tuple(seen), self.outcome.reward, self.outcome.success)


class Checker:
    """The checks of one level, by name, to be run in order: later ones use what earlier ones played.

    They run in this process: what ends or blocks it ends the examination. `use`: the name `suite` was loaded by.
    """

    def __init__(
        self,
        use: str,
        suite: Suite,
        level: str,
        tasks: int = 8,
        splits: Sequence[str] = SPLITS,
        note: Note | None = None,
    ) -> None:
        self._use, self._suite, self._level, self._count, self._splits_used = use, suite, level, tasks, splits
        self._class = suite.environment.__name__
        self._note: Note = note or (lambda what, seconds: None)
        self._client = InProcessClient([suite], note=note)
        self._lists: dict[str, Sequence[Task]] = {}
        self._gold: list[tuple[Task, _Played]] = []
        self._largest: dict[str, tuple[int, str]] = {}  # by tool: bytes of its largest reply, and the task
        self.checks: dict[str, Callable[[], Awaitable[str]]] = {
            "schemas": self._schemas,
            "tasks": self._tasks,
            "splits": self._splits,
            "gold": self._gold_scores,
            "noop": self._noop,
            "single use": self._single_use,
            "determinism": self._determinism,
            "worker": self._worker,
            "deadlines": self._deadlines,
            "robustness": self._robustness,
            "replies": self._replies,
            "leaks": self._leaks,
            "shared": self._shared,
        }

    @property
    def sizes(self) -> dict[str, int]:
        """The number of tasks of every split."""
        return {split: len(self._lists.get(split, ())) for split in SPLITS}

    async def run(self, name: str) -> Verdict:
        """Make one check. Never raises for what the author's code does."""
        kind, detail = await self._judge(name)
        detail = detail.encode(errors="replace").decode()  # half a surrogate pair could not be sent
        return Verdict(name, kind, " ".join(detail.split()))

    async def _judge(self, name: str) -> tuple[Kind, str]:
        if name not in ("schemas", "tasks") and not any(self.sizes.values()):
            return "skipped", "there are no tasks"
        try:
            with authored(name):
                return "ok", await self.checks[name]()
        except (_Failed, EnvironmentUnavailable) as failure:
            return "failed", str(failure)
        except _Warned as warning:
            return "warning", str(warning)
        except _Skipped as reason:
            return "skipped", str(reason)
        except Exception as error:  # the author's code raised where no rule catches it: that is a finding
            return "failed", describe(error)

    async def _schemas(self) -> str:
        tools = self._suite.environment.tools.values()
        pairs = [(tool.name, name, p) for tool in tools for name, p in tool.parameters.items()]
        silent = [f"{tool}.{name}" for tool, name, p in pairs if "description" not in p.schema]
        listed = ", ".join(f"{tool.name}({', '.join(tool.parameters)})" for tool in tools)
        note = f"; not described in the docstrings: {', '.join(silent)}" if silent else ""
        return (listed or "plain answers only") + note

    async def _tasks(self) -> str:
        for split in self._splits_used:
            with self._noted(split):
                self._lists[split] = self._suite.select(split, self._level)
            if not len(self._lists[split]) and (split == "train" or len(self._splits_used) == 1):
                raise _Failed(f"{split}/{self._level} is empty; there is nothing to learn from or to measure")
        seen: set[str] = set()
        for split, tasks in self._lists.items():
            again = self._suite.select(split, self._level)
            for task in self._sample(split, 200):
                where = f"{split}/{self._level}[{task.index}]"
                expected = f"{self._suite.name}/{self._level}/{split}/{task.index}"
                if (task.id, task.suite, task.version) != (expected, self._suite.name, self._suite.version):
                    raise _Failed(f"{where} calls itself {task.id} (version {task.version}); it must be {expected}")
                if task.id in seen:
                    raise _Failed(f"two tasks are called {task.id}")
                seen.add(task.id)
                if pack(again[task.index]) != pack(task):
                    raise _Failed(f"{where} differs when it is asked for again; index i must always be the same task")
                if split == "train" and (task.index % 10 == 9) != ("dev" in task.tags):
                    raise _Failed(f"{where}: in train, exactly the indices with index % 10 == 9 are tagged dev")
            if len(again) != len(tasks):
                raise _Failed(f"{split}/{self._level} has {len(tasks)} tasks, then {len(again)}")
        return ", ".join(f"{split} {len(tasks)}" for split, tasks in self._lists.items())

    async def _splits(self) -> str:
        """What a policy could memorise (not indices and seeds, which differ by nature) must differ between splits."""
        if len(self._splits_used) < 2:
            raise _Skipped(f"only {self._splits_used[0]} is examined")
        seen: dict[bytes, str] = {}
        empty = all(
            _contents(task) == _NOTHING for split in self._splits_used for task in self._sample(split, self._count)
        )
        for split in self._splits_used:
            for task in self._sample(split, _STARTED if empty else _COMPARED):
                content = pack(await self._opening(task)) if empty else _contents(task)
                other = seen.setdefault(content, f"{split}/{task.index}")
                if other.startswith(f"{split}/"):
                    continue
                if empty or await self._draws(task):
                    raise _Skipped(
                        f"{split}/{task.index} opens like {other}, and what else is in them cannot be compared here: "
                        "see to it that their worlds differ"
                    )
                raise _Failed(f"{split}/{task.index} has the contents of {other}: what is measured was trained on")
        most, total = _STARTED if empty else _COMPARED, sum(self.sizes[split] for split in self._splits_used)
        capped = f" of {total}, at most {most} a split" if any(n > most for n in self.sizes.values()) else ""
        return f"no {'openings' if empty else 'contents'} shared between splits ({len(seen)}{capped} compared)"

    async def _gold_scores(self) -> str:
        without = 0
        for split in self._splits_used:
            for task in self._sample(split, self._count):
                played = await self._play_gold(task)
                if played is None:
                    without += 1
                    continue
                self._gold.append((task, played))
                if not played.outcome.success:
                    raise _Failed(f"the gold of {task.id} does not succeed: {_how_it_went(played)}")
        if not self._gold:
            raise _Skipped("no task has gold; without gold() nobody knows that the tasks can be done")
        turns = sorted({len(played.observations) for _, played in self._gold})
        took = f"{turns[0]} to {turns[-1]} turns" if len(turns) > 1 else f"{turns[0]} turn{'s' * (turns[0] != 1)}"
        more = f"; {without} tasks without gold" if without else ""
        return f"succeeds on {len(self._gold)} tasks, {took}{more}"

    async def _noop(self) -> str:
        expected = self._suite.environment.noop_score
        for split in self._splits_used:
            for task in self._sample(split, self._count):
                outcome = (await self._play(task, [])).outcome
                if outcome.failed_environment:
                    raise _Failed(f"{task.id} breaks when nothing is done ({outcome.cause}): {outcome.detail}")
                if outcome.reward is None or not math.isclose(outcome.reward, expected, abs_tol=1e-9):
                    raise _Failed(f"doing nothing in {task.id} scores {outcome.reward}; noop_score says {expected}")
                if outcome.success:
                    raise _Failed(f"doing nothing in {task.id} counts as success")
        return f"doing nothing scores {expected:g}"

    async def _single_use(self) -> str:
        task = self._first(1)[0]
        environment = self._suite.environment(task, await self._client.shared(self._suite.environment))
        first = await EpisodeRunner.open(environment, note=self._note)
        await first.close()
        try:
            second = await EpisodeRunner.open(environment, note=self._note)
        except RuntimeError:
            return "an instance refuses a second episode"
        await second.close()
        raise _Failed("an instance plays twice; do not override _claim")

    async def _determinism(self) -> str:
        for task, played in self._gold or [(t, await self._play(t, [])) for t in self._first(self._count)]:
            again = await self._play_gold(task) or await self._play(task, [])
            if again.visible != played.visible:
                raise _Failed(f"{task.id} went differently the second time; draw randomness from self.rng only")
        return "the same task and calls give the same messages" + ("" if self._gold else " (openings only: no gold)")

    async def _worker(self) -> str:
        """What a worker process shows must equal what this one shows: sets and hashes differ between processes."""
        with tempfile.TemporaryDirectory() as directory:
            async with LocalRunner((self._use,), 1, Path(directory)) as runner, LocalClient(runner.addresses) as client:
                for split in self._splits_used:
                    for task in self._sample(split, max(self._count // 2, 1)):
                        session = await client.open(task.ref, 0, 0, 0, self._suite.environment.limits.start_s + 60)
                        calls = (await session.gold() or ()) if split == "train" else ()
                        observations = [await session.act(_as_message(call), i) for i, call in enumerate(calls)]
                        outcome = await session.finish("done")
                        await session.close()
                        there = _Played(session.messages, session.tools, observations, outcome)
                        here = await self._play(task, calls)
                        if pack(there.visible) != pack(here.visible):
                            raise _Failed(
                                f"{task.id} differs between processes; look for sets, hash() and global state"
                            )
        return "a worker process shows the same"

    async def _deadlines(self) -> str:
        limits = self._suite.environment.limits
        for name in ("start_s", "act_s", "settle_s", "score_s"):
            seconds = getattr(limits, name)
            if not 0 < seconds <= _LONGEST_S:
                raise _Failed(f"limits.{name} is {seconds:g}; it must be above 0 and at most {_LONGEST_S:g} s")
        if limits.max_turns < 1:
            raise _Failed(f"max_turns is {limits.max_turns}; it must be at least 1")
        for task, played in self._gold:
            turns, most = len(played.observations), (task.limits or limits).max_turns  # a level may have its own
            if turns > most:
                raise _Failed(f"a gold solution takes {turns} turns, max_turns is {most}")
        slowest = {"start_s": 0.0, "act_s": 0.0, "score_s": 0.0}
        for _, played in self._gold:
            for name, seconds in played.seconds.items():
                slowest[name] = max(slowest[name], seconds)
        for name, seconds in slowest.items():
            if seconds > getattr(limits, name) / 2:
                raise _Failed(
                    f"{name[:-2]} took {seconds:.2g} s here; limits.{name} = {getattr(limits, name):g} is tight"
                )
        return "slowest " + ", ".join(f"{name[:-2]} {seconds * 1e3:.1f} ms" for name, seconds in slowest.items())

    async def _robustness(self) -> str:
        """Calls drawn at random from the schemas: an environment may refuse them with ToolError, never break."""
        succeeded = episodes = 0
        for task in self._first(self._count * 2):
            rng = random.Random(task.seed)
            async with _opened(self._client, task) as runner:
                ended = False
                turn = 0
                while not ended:
                    ended = (await self._act(runner, _random_turn(runner, rng), turn)).ended
                    turn += 1
                outcome = await runner.finish("done")
            if outcome.failed_environment:
                raise _Failed(f"{task.id} broke under schema-valid calls ({outcome.cause}): {outcome.detail}")
            episodes += 1
            succeeded += bool(outcome.success)
        return f"random schema-valid calls break nothing and succeed in {succeeded} of {episodes} episodes"

    async def _replies(self) -> str:
        """What the environment said so far: a policy has to read all of it."""
        large = [
            f"{self._class}.{name} gave {size / 1e3:,.0f} kB of text ({task})"
            for name, (size, task) in self._largest.items()
            if size > _LARGE
        ]
        if large:
            raise _Warned("; ".join(large) + "; a policy reads all of it: show less and say what was left out")
        if not self._largest:
            raise _Skipped("nothing was said")
        name, (size, _) = max(self._largest.items(), key=lambda item: item[1][0])
        return f"the largest is {size:,} bytes, of {name}"

    async def _leaks(self) -> str:
        tasks = self._first(self._count)
        await self._play(tasks[0], [])
        before = _resources()
        for task in tasks:
            await self._play(task, [])
            async with _opened(self._client, task) as runner:
                await self._act(runner, _random_turn(runner, random.Random(0)), 0)
        after = _resources()
        if after["threads"] > before["threads"]:
            await asyncio.sleep(0.2)  # a finished thread may still be on its way out
            after = _resources()
        for name, count in after.items():
            if count > before[name]:
                raise _Failed(
                    f"{2 * len(tasks)} episodes left {count - before[name]} more {name}; free them in close()"
                )
        return (
            ", ".join(f"{name} {count}" for name, count in after.items())
            + f" before and after {2 * len(tasks)} episodes"
        )

    async def _shared(self) -> str:
        """Comes last: leaves what the episodes shared."""
        await self._client.close()
        shares = any("shared" in vars(o) for o in self._suite.environment.__mro__ if o is not Environment)
        return "opens and closes in good order" if shares else "episodes share nothing"

    # --- playing -----------------------------------------------------------------------------------------------------

    def _sample(self, split: str, count: int) -> list[Task]:
        """`count` tasks spread evenly over a split, the first and the last among them."""
        tasks = self._lists.get(split, ())
        count = min(count, len(tasks))
        with self._noted(split):  # they are made on demand
            return [tasks[i * (len(tasks) - 1) // max(count - 1, 1)] for i in range(count)]

    @contextlib.contextmanager
    def _noted(self, split: str) -> Iterator[None]:
        what = f"{self._class}.tasks({split!r}, {self._level!r})"
        self._note(f"in {what}", _TASKS_S)
        yield
        self._note(f"after {what}", None)

    def _first(self, count: int) -> list[Task]:
        """A sample of the first split that is examined and has tasks: `train`, unless others were asked for."""
        split = next(split for split in self._splits_used if len(self._lists.get(split, ())))
        return self._sample(split, count)

    async def _act(self, runner: EpisodeRunner, message: Message, turn: int) -> Observation:
        observation = await runner.act(message, turn)
        for reply in observation.messages:
            self._measure(reply.name or "reply", reply, runner)
        return observation

    def _measure(self, name: str, message: Message, runner: EpisodeRunner) -> None:
        size = len(message.text.encode())
        if size > self._largest.get(name, (-1, ""))[0]:
            self._largest[name] = (size, runner.environment.task.id)

    async def _opening(self, task: Task) -> tuple[Message, ...]:
        async with _opened(self._client, task) as runner:
            return runner.messages

    async def _draws(self, task: Task) -> bool:
        """Whether the environment's start draws from the task's seed."""
        async with _opened(self._client, task) as runner:
            return runner.environment.rng.getstate() != random.Random(task.seed).getstate()

    async def _play_gold(self, task: Task) -> _Played | None:
        async with _opened(self._client, task) as runner:
            calls = await runner.author_gold()
        return None if calls is None else await self._play(task, calls)

    async def _play(self, task: Task, calls: Sequence[ToolCall]) -> _Played:
        started = time.monotonic()
        async with _opened(self._client, task) as runner:
            seconds = {"start_s": time.monotonic() - started}
            for opening in runner.messages:
                self._measure("start", opening, runner)
            observations = [await self._act(runner, _as_message(call), turn) for turn, call in enumerate(calls)]
            seconds["act_s"] = max((o.times["env_s"] for o in observations if o.times), default=0.0)
            started = time.monotonic()
            outcome = await runner.finish("done")
            seconds["score_s"] = time.monotonic() - started
            return _Played(runner.messages, runner.tools, observations, outcome, seconds)


@contextlib.asynccontextmanager
async def _opened(client: InProcessClient, task: Task) -> AsyncIterator[EpisodeRunner]:
    """A runner over a fresh environment, closed at the end of the block."""
    runner = await client.open(task.ref, 0, 0, 0, 600.0)
    try:
        yield runner
    finally:
        await runner.close()


def _how_it_went(played: _Played) -> str:
    """An episode without success in one line: the environment's error, or a call that was refused, or the reward."""
    outcome = played.outcome
    if outcome.failed_environment:
        return f"environment error ({outcome.cause}): {outcome.detail}"
    ended = f"it ends as {outcome.status} with reward {outcome.reward}"
    for turn, observation in enumerate(played.observations, 1):
        for message in observation.messages:
            if message.role == "tool" and message.text.startswith("Error: "):
                return f"{ended}; turn {turn}, {message.name}, was answered {message.text[:200]!r}"
    return ended


def _contents(task: Task) -> bytes:
    return pack((task.payload, task.setup, task.judge))


_NOTHING = pack(({}, (), None))


def _as_message(call: ToolCall) -> Message:
    """A gold call as the policy's turn; the empty name is a plain text."""
    if call.name:
        return Message("assistant", tool_calls=(call,))
    return Message("assistant", _text(call))


def _text(call: ToolCall) -> str:
    return json.loads(call.arguments)["text"]


def _random_turn(runner: EpisodeRunner, rng: random.Random) -> Message:
    talks = type(runner.environment).reply is not Environment.reply
    if not runner.tools or (talks and rng.random() < 0.2):
        return Message("assistant", rng.choice(_WORDS))
    functions = [schema["function"] for schema in runner.tools]
    going_on = [function for function in functions if not runner.environment.tools[function["name"]].final]
    # Final tools come rarely, so that an episode reaches the others in many states.
    function = rng.choice(going_on if going_on and rng.random() < 0.9 else functions)
    schema = function["parameters"]
    arguments = {
        name: _random_value(part, rng)
        for name, part in schema["properties"].items()
        if name in schema["required"] or rng.random() < 0.5
    }
    return Message("assistant", tool_calls=(ToolCall("random", function["name"], json.dumps(arguments)),))


def _random_value(schema: dict[str, Any], rng: random.Random) -> Any:
    if "enum" in schema:
        return rng.choice(schema["enum"])
    match schema.get("type"):
        case "integer":
            return rng.choice((0, 1, -1, 7, 2**53))
        case "number":
            return rng.choice((0.0, 0.5, -1.0, 1e300))
        case "boolean":
            return rng.random() < 0.5
        case "array":
            return [_random_value(schema.get("items", {}), rng) for _ in range(rng.randrange(3))]
        case "object":
            return {word: _random_value(schema.get("additionalProperties", {}), rng) for word in ("a", "b")}
    return rng.choice(_WORDS)


def _resources() -> dict[str, int]:
    gc.collect()
    children = 0
    for path in Path("/proc/self/task").glob("*/children"):
        children += len(path.read_text().split())
    return {
        "open files": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "child processes": children,
    }
