"""Every policy of the registry, in a small world that carries out what it decides and lets things go wrong."""

from __future__ import annotations

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from schedule_world import Faults, World, replay
from springtide.schedule.policy import Bounds, Cluster
from springtide.schedule.registry import POLICIES

_FAULTS = st.builds(
    Faults,
    fail=st.sampled_from([0.0, 0.1]),
    hang=st.sampled_from([0.0, 0.05]),
    reject=st.sampled_from([0.0, 0.5]),
    deaths_s=st.sampled_from([0.0, 40.0]),
    twice=st.sampled_from([0.0, 0.1]),
    clock=st.booleans(),
    nonsense=st.booleans(),
    evaluations_s=st.sampled_from([0.0, 60.0]),
)
_BOUNDS = st.builds(
    Bounds,
    groups=st.integers(1, 5),
    concurrency=st.integers(2, 12),
    bound=st.integers(0, 3),
    overage=st.sampled_from(["wait", "drop"]),
    members=st.integers(1, 4),
    environments=st.sampled_from([None, 8, 40]),
    fewest=st.sampled_from([None, 1]),
)
_CLUSTERS = st.builds(
    Cluster,
    ranks=st.integers(3, 8),
    reference=st.sampled_from(["none", "resident", "swapped"]),
    sharded=st.booleans(),
    training=st.sampled_from([None, 0.3, 0.8]),
)


# A failure is not shrunk: the seed of what failed is enough, and a world takes a while.
@settings(max_examples=8, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(
    bounds=_BOUNDS,
    cluster=_CLUSTERS,
    faults=_FAULTS,
    budget=st.sampled_from([900, 4000, 10**6]),
    seed=st.integers(0, 10**6),
)
@pytest.mark.parametrize("name", sorted(POLICIES))
def test_whatever_goes_wrong_a_policy_keeps_its_bounds_and_goes_on(
    name: str, bounds: Bounds, cluster: Cluster, faults: Faults, budget: int, seed: int
) -> None:
    """No deadlock, no group staler than the bound, no episode where nobody plays, every visit ends once."""
    world = World(name, bounds, cluster, seed=seed, faults=faults, budget=budget)
    world.run(5)
    world.recount()
    replay(world)
