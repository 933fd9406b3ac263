"""`Environment`: what an author writes to give the policy something to do.

Owns: the author's class, its step rewards and its end. Invariants: an instance plays one episode and no second; its
randomness comes from `task.seed` alone; a class that cannot work (a tool without hints, two turn limits) fails when it
is created, with the remedy.
Called by: suites and users (subclass it), `env.runner` (plays it), `env.check` (examines it).
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, overload

from springtide.env.tools import Tool, collect_tools
from springtide.trace import Check, Limits, Message, Outcome, Task, as_reward

_DEV = ("dev",)


@dataclass(frozen=True)
class Requires:
    """What one episode needs from the worker that runs it.

    `isolated`: a child process of its own (it may crash, leak or block). `max_episodes`: a child is replaced after this
    many. `start_s`: seconds that `start` may take, if not 60. `memory_mb` and `sandbox` guide placement.
    """

    isolated: bool = False
    max_episodes: int | None = None
    start_s: float | None = None
    memory_mb: int = 50
    sandbox: str | None = None


class TaskList(Sequence[Task]):
    """`size` tasks made on demand by `make(index)`: sized and lazy, as `Environment.tasks` must be."""

    def __init__(self, size: int, make: Callable[[int], Task]) -> None:
        self._size, self._make = size, make

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> TaskList: ...
    def __getitem__(self, index: int | slice) -> Task | TaskList:
        if isinstance(index, slice):
            chosen = range(*index.indices(self._size))
            return TaskList(len(chosen), lambda i: self._make(chosen[i]))
        if not -self._size <= index < self._size:
            raise IndexError(f"task {index} of {self._size}")
        return self._make(index % self._size)


class Environment:
    """One episode of one task. Subclass it, write `tasks`, `start`, at least one `@tool`, and `score` or step rewards.

    Every method may be `async def` (runs in the worker's event loop; must not block it) or `def` (runs in a thread).
    Each is bounded by `limits`; time between calls is free. Any exception but `ToolError` makes the episode an
    environment error, which is never a reward.
    """

    name: ClassVar[str] = ""  # the suite's name; default: the class's, in lower case
    version: ClassVar[str] = "1"
    levels: ClassVar[tuple[str, ...]] = ("default",)
    max_turns: ClassVar[int] = 10
    limits: ClassVar[Limits] = Limits()
    requires: ClassVar[Requires] = Requires()
    plain_answer: ClassVar[bool] = False  # an assistant text without a call ends the episode; it is `self.answer`
    noop_score: ClassVar[float] = 0.0  # what doing nothing scores
    tools: ClassVar[dict[str, Tool]] = {}

    task: Task
    rng: random.Random
    answer: str | None
    if TYPE_CHECKING:
        shared: Any  # on an instance: the value of the class's `shared` context

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own = vars(cls)
        if not own.get("name"):
            cls.name = cls.__name__.lower()
        if "limits" in own and "max_turns" in own and cls.limits.max_turns not in (cls.max_turns, Limits().max_turns):
            both = f"max_turns is {cls.max_turns}, limits.max_turns {cls.limits.max_turns}"
            raise TypeError(f"{cls.__name__}: {both}; set one of them")
        if "limits" in own and "max_turns" not in own:
            cls.max_turns = cls.limits.max_turns
        cls.limits = replace(cls.limits, max_turns=cls.max_turns)
        if cls.requires.start_s is not None and "requires" in own:
            cls.limits = replace(cls.limits, start_s=cls.requires.start_s)
        cls.tools = collect_tools(cls)

    def __init__(self, task: Task, shared: Any = None) -> None:
        self.task = task
        self.shared = shared
        self.rng = random.Random(task.seed)
        self.answer = None
        self._claimed = False
        self._ended = False
        self._infeasible = False
        self._end_reason = ""
        self._rewards: list[Check] = []

    # --- what an author writes ---------------------------------------------------------------------------------------

    @classmethod
    def tasks(cls, split: str, level: str) -> Sequence[Task]:
        """The tasks of a split (`train`, `test`, `ood`) and a level; index i is task i, the same in every process."""
        raise NotImplementedError(f"{cls.__name__} has no tasks; define the class method tasks(cls, split, level)")

    if not TYPE_CHECKING:

        @classmethod
        @contextlib.asynccontextmanager
        async def shared(cls) -> AsyncIterator[Any]:
            """What all episodes of a worker process share (an index, a server, a graph): opened once, `self.shared`."""
            yield None

    async def start(self) -> str | list[Message]:
        """Prepare the episode; the returned text becomes the user's message."""
        raise NotImplementedError(f"{type(self).__name__} has no start; define start(self) -> str")

    def offered(self) -> Sequence[str]:
        """The names of the tools this task offers, asked once after `start`. Default: all, in order of definition."""
        return tuple(self.tools)

    async def reply(self, text: str) -> str | list[Message] | None:
        """Answer an assistant text that calls no tool (a user simulator). Default: a reminder to call one."""
        raise NotImplementedError

    async def settle(self) -> None:
        """Bring the world to rest before judging (flush, save)."""

    async def score(self) -> float | Outcome:
        """What the episode was worth; success is 1.0 or more. Default: the sum of the step rewards."""
        return math.fsum(check.value for check in self._rewards)

    async def gold(self) -> list[tuple[str, dict[str, Any]]] | None:
        """The calls of a correct solution, one turn each: (tool, arguments); plain text is ("", {"text": answer})."""
        return None

    async def close(self) -> None:
        """Release what `start` took. Always runs, also after an error and after a `start` that failed."""

    # --- what an author calls ----------------------------------------------------------------------------------------

    def reward(self, amount: float, why: str = "") -> None:
        """Add a step reward to the current turn. Raises: TypeError, ValueError for what no reward can be."""
        value = as_reward(amount, f"{type(self).__name__}: the step reward {why!r} is")
        self._rewards.append(Check(why or "step", value))

    def end(self, reason: str = "", infeasible: bool = False) -> None:
        """End the episode after the running call. `infeasible`: the policy declared that the task cannot be done."""
        self._ended, self._infeasible, self._end_reason = True, self._infeasible or infeasible, reason

    @classmethod
    def make_task(cls, split: str, level: str, index: int, payload: dict[str, Any], **fields: Any) -> Task:
        """A `Task` of this environment with the usual id and seed; a tenth of `train` (index % 10 == 9) is tagged dev.

        `fields` are further fields of `Task`; extra `tags` are kept beside `dev`.
        """
        task_id = f"{cls.name}/{level}/{split}/{index}"
        seed = int.from_bytes(hashlib.blake2b(task_id.encode(), digest_size=8).digest(), "little") >> 1
        tags = tuple(fields.pop("tags", ())) + (_DEV if split == "train" and index % 10 == 9 else ())
        fields = {"seed": seed, **fields}
        return Task(task_id, cls.name, cls.version, split, level, index, tags=tags, payload=payload, **fields)

    def _claim(self) -> None:
        if self._claimed:
            raise RuntimeError(f"this {type(self).__name__} has played its episode; make a new one (single use)")
        self._claimed = True
