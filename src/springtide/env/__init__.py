"""Environments: the author's side and the seam to rollout. Public names resolve lazily, so importing this is free."""

from __future__ import annotations

import importlib

TYPE_CHECKING = False  # type checkers read it as true; importing `typing` for it would cost most of the budget
if TYPE_CHECKING:
    from typing import Any

    from springtide.env.environment import Environment as Environment
    from springtide.env.environment import Requires as Requires
    from springtide.env.environment import TaskList as TaskList
    from springtide.env.inprocess import InProcessClient as InProcessClient
    from springtide.env.registry import load_suite as load_suite
    from springtide.env.runner import EpisodeRunner as EpisodeRunner
    from springtide.env.session import EnvClient as EnvClient
    from springtide.env.session import EnvironmentUnavailable as EnvironmentUnavailable
    from springtide.env.session import Observation as Observation
    from springtide.env.session import Session as Session
    from springtide.env.suite import Suite as Suite
    from springtide.env.suite import SuiteError as SuiteError
    from springtide.env.tools import ToolError as ToolError
    from springtide.env.tools import tool as tool
    from springtide.trace import Check as Check
    from springtide.trace import Limits as Limits
    from springtide.trace import Message as Message
    from springtide.trace import Outcome as Outcome
    from springtide.trace import Task as Task

_HOMES = {
    "springtide.env.environment": ("Environment", "Requires", "TaskList"),
    "springtide.env.registry": ("load_suite",),
    "springtide.env.inprocess": ("InProcessClient",),
    "springtide.env.runner": ("EpisodeRunner",),
    "springtide.env.session": ("EnvClient", "EnvironmentUnavailable", "Observation", "Session"),
    "springtide.env.suite": ("Suite", "SuiteError"),
    "springtide.env.tools": ("ToolError", "tool"),
    "springtide.trace": ("Check", "Limits", "Message", "Outcome", "Task"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value
