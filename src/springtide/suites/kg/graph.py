"""The graph: public facts as RDF in pyoxigraph, read through the schema.

Owns the store. Invariants: an entity is an IRI made of its name, so a name is an entity; the store is only read, so
one serves all episodes of a worker; what a relation leads to does not depend on who asks or when. Loading takes well
under a second; one step from one entity takes a few microseconds.
Called by: the environment (one graph a worker process), the question writer and the tests.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterable
from functools import cache, lru_cache
from pathlib import Path
from urllib.parse import quote, unquote

from pyoxigraph import Literal, NamedNode, RdfFormat, Store

from springtide.suites.kg.schema import ATTRIBUTES, COUNTS, DEEP, RELATIONS, VIEWS, Attribute, Relation

DATA = Path(__file__).with_name("data")
_PREFIX = "urn:kg:"
_TYPE = NamedNode(_PREFIX + "a")

Entities = frozenset[str]


@cache
def _predicate(name: str) -> NamedNode:
    return NamedNode(_PREFIX + quote(name, safe=""))


def _node(name: str) -> NamedNode:
    return NamedNode(_PREFIX + quote(name, safe=""))


def _name(node: object) -> str:
    assert isinstance(node, NamedNode), node  # the data has no blank nodes, and numbers are read by `value` alone
    return unquote(node.value[len(_PREFIX) :])


class Graph:
    """A read-only graph of named entities. Sets of entities are frozensets of names."""

    def __init__(self, path: Path = DATA / "graph.nt.gz") -> None:
        self._store = Store()
        self._store.bulk_load(gzip.decompress(path.read_bytes()), format=RdfFormat.N_TRIPLES)
        self.step = lru_cache(maxsize=50_000)(self._step)
        self.kind = lru_cache(maxsize=50_000)(self._kind)
        self.own = lru_cache(maxsize=50_000)(self._own)
        self.value = lru_cache(maxsize=50_000)(self._value)

    def __len__(self) -> int:
        return len(self._store)

    def entities(self, kind: str) -> list[str]:
        """The names of all entities of a type, sorted."""
        return sorted(_name(q.subject) for q in self._store.quads_for_pattern(None, _TYPE, _predicate(kind)))

    def _kind(self, entity: str) -> str | None:
        quad = next(self._store.quads_for_pattern(_node(entity), _TYPE, None), None)
        return _name(quad.object) if quad else None

    def _step(self, entity: str, predicate: str, inverse: bool) -> tuple[str, ...]:
        node, along = _node(entity), _predicate(predicate)
        if inverse:
            return tuple(sorted(_name(q.subject) for q in self._store.quads_for_pattern(None, along, node)))
        return tuple(sorted(_name(q.object) for q in self._store.quads_for_pattern(node, along, None)))

    def _own(self, entity: str) -> tuple[Relation, ...]:
        node, found = _node(entity), []
        for relation in RELATIONS.get(self.kind(entity) or "", {}).values():
            along = _predicate(relation.predicate)
            pattern = (None, along, node) if relation.inverse else (node, along, None)
            if next(self._store.quads_for_pattern(*pattern), None) is not None:
                found.append(relation)
        return tuple(found)

    def relations(self, entities: Iterable[str], level: str = "standard") -> dict[str, Relation]:
        """What `level` shows of the relations that at least one of the entities has, by name."""
        view = VIEWS[level]
        found: dict[str, Relation] = {}
        for entity in entities:
            for relation in self.own(entity):
                if relation.name not in found and relation.name in view.get(relation.source, ()):
                    found[relation.name] = relation
            if len(found) == len(view.get(self.kind(entity) or "", ())):  # a set is of one type
                break
        return found

    def follow(self, entities: Iterable[str], name: str) -> Entities:
        """All neighbours of the entities along the relation called `name` (of each one's own type)."""
        reached: set[str] = set()
        for entity in entities:
            relation = RELATIONS.get(self.kind(entity) or "", {}).get(name)
            if relation is not None:
                reached.update(self.step(entity, relation.predicate, relation.inverse))
        return frozenset(reached)

    def _value(self, entity: str, attribute: str) -> float | None:
        """The number an entity carries, or None. A count of neighbours is a number every entity of the type carries."""
        kind = self.kind(entity) or ""
        if attribute in COUNTS.get(kind, ()):
            counted = RELATIONS[kind][attribute.removesuffix(" count")]
            return float(len(self.step(entity, counted.predicate, counted.inverse)))
        quad = next(self._store.quads_for_pattern(_node(entity), _predicate("#" + attribute), None), None)
        return float(quad.object.value) if quad and isinstance(quad.object, Literal) else None

    def attributes(self, entities: Iterable[str], level: str = "standard") -> dict[str, Attribute]:
        """The attributes that at least one of the entities carries, by name; a deep level also counts neighbours."""
        entities = list(entities)
        found: dict[str, Attribute] = {}
        for entity in entities:
            declared = ATTRIBUTES.get(self.kind(entity) or "", {})
            for name, attribute in declared.items():
                if name not in found and self.value(entity, name) is not None:
                    found[name] = attribute
            if len(found) == len(declared):
                break
        if level in DEEP:
            counts = [COUNTS.get(r.source, {}).get(f"{r.name} count") for r in self.relations(entities).values()]
            found |= {attribute.name: attribute for attribute in counts if attribute is not None}
        return found

    def extreme(self, entities: Iterable[str], attribute: str, highest: bool) -> Entities:
        """The entities (several, if equal) with the highest or lowest value; those without a value do not count."""
        values = {e: v for e in entities if (v := self.value(e, attribute)) is not None}
        if not values:
            return frozenset()
        best = (max if highest else min)(values.values())
        return frozenset(e for e, v in values.items() if v == best)

    def beyond(self, entities: Iterable[str], attribute: str, than: Iterable[str], above: bool) -> Entities:
        """The entities with a higher (or a lower) value than the one entity `than`; none if that has no value."""
        (reference,) = than
        limit = self.value(reference, attribute)
        if limit is None:
            return frozenset()
        values = {e: v for e in entities if (v := self.value(e, attribute)) is not None}
        return frozenset(e for e, v in values.items() if (v > limit if above else v < limit))
