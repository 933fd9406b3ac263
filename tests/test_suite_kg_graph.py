"""The graph that kg's questions are asked of, and what writing them does when too few are found."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from springtide.suites.kg import deep
from springtide.suites.kg.graph import Graph
from springtide.suites.kg.schema import ATTRIBUTES, RELATIONS


@functools.cache
def graph() -> Graph:
    return Graph()


def test_graph_holds_what_the_sources_say():
    assert graph().follow(["LHR"], "city") == {"London"}
    assert graph().follow(["Portugal"], "neighbour") == {"Spain"}
    assert graph().follow(["Gold"], "block") == {"d-block"}
    assert graph().follow(["oak"], "kind") == {"wood"}
    assert graph().follow(graph().follow(["AC/DC"], "album"), "genre") == {"Rock"}
    assert graph().value("Gold", "atomic number") == 79


def test_every_declared_relation_and_attribute_has_data_and_reads_the_same_backwards():
    for kind, named in RELATIONS.items():
        entities = graph().entities(kind)
        present = graph().relations(entities)
        assert set(present) == set(named), (kind, set(named) - set(present))
        assert set(graph().attributes(entities)) == set(ATTRIBUTES.get(kind, {})), kind
        for relation in named.values():
            found = next((e, t) for e in entities for t in graph().step(e, relation.predicate, relation.inverse))
            assert graph().kind(found[1]) == relation.target
            assert found[0] in graph().step(found[1], relation.predicate, not relation.inverse)
            assert {graph().kind(t) for t in graph().follow(entities[:50], relation.name)} <= {relation.target}
            if relation.single:
                assert all(len(graph().follow([e], relation.name)) <= 1 for e in entities[:300])


def test_a_split_that_cannot_be_filled_is_said_not_sought_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    state = deep._State(["entity", 0], frozenset({"x"}), "country", "the country of {0}")
    template: Any = (state, {"train": [("a",)], "test": [("b",)]})
    for name in ("glance", "evaluate"):
        monkeypatch.setattr(deep, name, lambda *_: None)
    monkeypatch.setattr(deep, "apart", lambda rows, graph: [template])
    monkeypatch.setattr(deep, "flat", lambda *_: [0])
    nowhere: Any = None
    with pytest.raises(ValueError, match="hard: 5 of 400 questions of ood were found; look for more templates"):
        deep.chosen("hard", [template], {"hhhe": [template]}, nowhere)
