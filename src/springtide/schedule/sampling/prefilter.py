"""The offline prefilter: tasks that a policy sometimes solves, by pass rates measured before the run.

Owns: which tasks stay (reference scalecua_glm5v 2.1: a rate in [0.1, 0.9]). Called by: `rollout.draws`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from springtide.trace import TaskRef


def keep(tasks: Sequence[TaskRef], rates: Mapping[str, float], low: float, high: float) -> tuple[TaskRef, ...]:
    """The tasks whose rate is in [low, high], both included. A task that was not measured is left out."""
    return tuple(t for t in tasks if t.id in rates and low <= rates[t.id] <= high)
