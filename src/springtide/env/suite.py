"""`Suite`: a named, versioned family of tasks and the environment that plays them.

Owns: nothing but the names. Invariants: a suite's task i of a split and level is the same task in every process; what
does not exist (a level, a split, an index) is one line that lists what does.
Called by: suites (they define one), the registry, workers, the checker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from springtide.env.environment import Environment
from springtide.trace import Task, TaskRef

SPLITS = ("train", "test", "ood")


class SuiteError(Exception):
    """A suite that cannot be used, or was asked for what it lacks. One line, with the remedy."""


@dataclass(frozen=True)
class Suite:
    """`tasks(split, level)` is sized and lazy; a split that a suite lacks is empty."""

    name: str
    version: str
    environment: type[Environment]
    levels: tuple[str, ...]
    tasks: Callable[[str, str], Sequence[Task]]
    _asked: dict[tuple[str, str], Sequence[Task]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        env = self.environment
        if not (isinstance(env, type) and issubclass(env, Environment)):
            raise SuiteError(f"suite {self.name}: {env!r} is not a subclass of springtide.Environment")
        if env.start is Environment.start:
            raise SuiteError(f"suite {self.name}: {env.__name__} has no start; define start(self) -> str")
        if not env.tools and not env.plain_answer and env.reply is Environment.reply:
            raise SuiteError(f"suite {self.name}: {env.__name__} has no tool; put @tool above a method")

    @classmethod
    def of(cls, environment: type[Environment]) -> Suite:
        """The suite of an environment class that lists its own tasks."""
        return cls(environment.name, environment.version, environment, environment.levels, environment.tasks)

    @property
    def default_level(self) -> str:
        """The level where none is named: `quick` if the suite has it, else its first."""
        return "quick" if "quick" in self.levels else next(iter(self.levels), "quick")

    def select(self, split: str, level: str | None) -> Sequence[Task]:
        """The tasks of a split and level (None: the default one). Raises: SuiteError."""
        level = self.default_level if level is None else level
        if level not in self.levels:
            raise SuiteError(f"suite {self.name} has no level {level!r}; it has {', '.join(self.levels)}")
        if split not in SPLITS:
            raise SuiteError(f"there is no split {split!r}; there are {', '.join(SPLITS)}")
        return self.tasks(split, level)

    def task(self, ref: TaskRef) -> Task:
        """The task a reference names. Raises: SuiteError if this suite has another task in its place."""
        tasks = self._asked.get((ref.split, ref.level))
        if tasks is None:  # once: an author's list may read a file
            tasks = self._asked[ref.split, ref.level] = self.select(ref.split, ref.level)
        if not 0 <= ref.index < len(tasks):
            raise SuiteError(
                f"suite {self.name} has {len(tasks)} tasks in {ref.split}/{ref.level}, no index {ref.index}"
            )
        task = tasks[ref.index]
        if (task.id, task.version) != (ref.id, ref.version):
            raise SuiteError(
                f"suite {self.name} has changed: task {ref.index} is {task.id} (version {task.version}), "
                f"but {ref.id} (version {ref.version}) was asked for"
            )
        return task
