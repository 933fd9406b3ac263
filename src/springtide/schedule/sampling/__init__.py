"""Which task is drawn next: one file a sampler, all of them pure.

Owns: the choice of a sampler by name. Called by: `rollout.draws`, which builds them from the configuration.
"""

from __future__ import annotations

from springtide.schedule.sampling.difficulty import DifficultySampler
from springtide.schedule.sampling.frontier import FrontierSampler
from springtide.schedule.sampling.thompson import ThompsonSampler
from springtide.schedule.sampling.tracked import Rules, Sampler, updated
from springtide.schedule.sampling.uniform import UniformSampler

SAMPLERS: dict[str, type[Sampler]] = {
    "uniform": UniformSampler,
    "frontier": FrontierSampler,
    "difficulty": DifficultySampler,
    "thompson": ThompsonSampler,
}

__all__ = [
    "SAMPLERS",
    "DifficultySampler",
    "FrontierSampler",
    "Rules",
    "Sampler",
    "ThompsonSampler",
    "UniformSampler",
    "updated",
]
