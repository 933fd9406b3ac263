"""Springtide: online reinforcement learning for agents.

Public names resolve on first use, so that `import springtide` costs next to nothing and needs no torch.
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = False  # type checkers read it as true; importing `typing` for it would cost most of the budget
if TYPE_CHECKING:
    from typing import Any

    from springtide.api import evaluate as evaluate
    from springtide.api import train as train
    from springtide.config import ConfigError as ConfigError
    from springtide.env.environment import Environment as Environment
    from springtide.env.suite import Suite as Suite
    from springtide.env.suite import SuiteError as SuiteError
    from springtide.env.tools import tool as tool
    from springtide.observe.metrics import Summary as Summary
    from springtide.process import ProcessFailed as ProcessFailed
    from springtide.rollout.feeder import BrokenRun as BrokenRun
    from springtide.trace import Task as Task
    from springtide.trainer.driver import StuckRun as StuckRun

__version__ = "0.1.0"
_HOME = {
    "Environment": "springtide.env.environment",
    "tool": "springtide.env.tools",
    "Task": "springtide.trace",
    "Suite": "springtide.env.suite",
    "train": "springtide.api",
    "evaluate": "springtide.api",
    "Summary": "springtide.observe.metrics",
    "ConfigError": "springtide.config",
    "SuiteError": "springtide.env.suite",
    "ProcessFailed": "springtide.process",
    "BrokenRun": "springtide.rollout.feeder",
    "StuckRun": "springtide.trainer.driver",
}
__all__ = [
    "BrokenRun",
    "ConfigError",
    "Environment",
    "ProcessFailed",
    "StuckRun",
    "Suite",
    "SuiteError",
    "Summary",
    "Task",
    "evaluate",
    "tool",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'springtide' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value
