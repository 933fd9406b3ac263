"""The outcome an author's judge returns, checked field by field before anyone reads it.

Invariants: what passes can be sent, written, shown and averaged; what does not is one line that names the field, what
it was and what it may be.
Called by: `env.runner`.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, get_args

import numpy as np

from springtide.trace import Cause, Check, Outcome, Status, as_reward, is_finite
from springtide.wire import WireError, pack

_STATUSES, _CAUSES = get_args(Status), get_args(Cause)


def checked(outcome: Outcome, what: str) -> Outcome:
    """`outcome` in plain types; a success left out is a reward of 1.0 or more. Raises: TypeError, ValueError."""
    what = f"{what} returned an Outcome whose"

    def need(right: bool, field: str, value: Any, allowed: str) -> None:
        if not right:
            raise TypeError(f"{what} {field} is {_shown(value)}; it must be {allowed}")

    status, success, cause = outcome.status, outcome.success, outcome.cause
    need(_is_one_of(status, _STATUSES), "status", status, f"one of {', '.join(_STATUSES)}")
    need(cause is None or _is_one_of(cause, _CAUSES), "cause", cause, f"one of {', '.join(_CAUSES)}")
    need(success is None or isinstance(success, bool | np.bool_), "success", success, "True, False or None")
    need(isinstance(outcome.detail, str), "detail", outcome.detail, "a text")
    need(isinstance(outcome.artifacts, dict), "artifacts", outcome.artifacts, "a dict")
    checks = outcome.checks
    listed = isinstance(checks, list | tuple) and all(isinstance(check, Check) for check in checks)
    need(listed, "checks", checks, "a tuple of Check")
    for i, check in enumerate(checks):
        for name in ("name", "evidence"):
            value = getattr(check, name)
            need(isinstance(value, str), f"checks[{i}].{name}", value, "a text")
        for name in ("value", "weight"):
            value = getattr(check, name)
            need(is_finite(value), f"checks[{i}].{name}", value, "a finite number")
    for field in fields(outcome):
        try:
            pack(getattr(outcome, field.name))
        except WireError as error:
            raise ValueError(f"{what} {field.name} cannot be sent: {error}") from None
    if cause is not None:
        return Outcome("environment_error", None, None, tuple(checks), cause, outcome.detail, outcome.artifacts)
    if outcome.reward is None:
        raise ValueError(f"{what} reward is None; it must be a number")
    reward = as_reward(outcome.reward, f"{what} reward is")
    success = reward >= 1.0 if success is None else bool(success)
    return Outcome(status, reward, success, tuple(checks), None, outcome.detail, outcome.artifacts)


def _is_one_of(value: Any, allowed: tuple[str, ...]) -> bool:
    return isinstance(value, str) and value in allowed


def _shown(value: Any) -> str:
    """A value in one short line; what cannot even be shown is named by its type."""
    try:
        return f"{value!r:.60}"
    except Exception:  # an author's __repr__
        return f"a {type(value).__name__}"
