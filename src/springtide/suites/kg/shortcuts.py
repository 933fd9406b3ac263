"""Whether a question can be answered with less than it asks for.

`shortcut` looks for a smaller program with the same answer, among: every program left when any of the question's steps
are dropped; every chain of fewer relations from one named entity, alone or closed by an argmax or argmin that the
question uses; every meeting of two such chains from two named entities; and, for a count, every such set of the
counted type that has as many members. Exhaustive within that: sets of any size are followed. What it does not look at:
chance agreement of endings that the question does not speak of, since with enough of those every answer has one.
Called by: the writer of `hard` and `expert`, and the tests.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import combinations

from springtide.suites.kg.graph import Entities, Graph
from springtide.suites.kg.programs import Program, Value, evaluate, hops
from springtide.suites.kg.schema import RELATIONS

Ending = tuple[str, str]  # "max" or "min", and an attribute


def shortcut(program: Program, entities: list[str], graph: Graph) -> str | None:
    """A smaller way to the program's answer, in words, or None."""
    answer = evaluate(program, entities, graph)
    for smaller in reductions(program):
        if evaluate(smaller, entities, graph) == answer:
            return f"{smaller} has the same answer"
    counting = program[0] == "count"
    target: Value = evaluate(program[1], entities, graph) if counting else answer
    kind, fewer = graph.kind(min(target)) or "", hops(program) - 1
    endings = _endings(program)
    reached = [reach(graph, entity, fewer, kind) for entity in entities]
    for name, sets in zip(entities, reached, strict=True):
        for found, used in sets.items():
            if found == target or (counting and frozenset([len(found)]) == answer):
                return f"{used} relations from {name} lead to it"
            if _closed(found, target, endings, graph):
                return f"{used} relations from {name} and an end lead to it"
    for (i, left), (j, right) in combinations(enumerate(reached), 2):
        wide = [(found, used) for found, used in right.items() if target <= found]
        for found, used in left.items():
            if target <= found:
                for other, also in wide:
                    meeting = found & other
                    if used + also <= fewer and (meeting == target or _closed(meeting, target, endings, graph)):
                        return f"{used} relations from {entities[i]} meet {also} from {entities[j]} in it"
    return None


def reductions(program: Program) -> list[Program]:
    """What is left when some steps are dropped, each program once; a count stays one, the whole program is not among
    them, nor is a bare entity's name."""
    kept = {repr(p): p for p in _reduced(program[1] if program[0] == "count" else program)}
    if program[0] == "count":
        kept = {repr(["count", p]): ["count", p] for p in kept.values()}
    kept.pop(repr(program), None)
    return list(kept.values())


def _reduced(program: Program) -> list[Program]:
    match program:
        case ["entity", _]:
            return [program]
        case ["and", left, right]:
            lefts, rights = _reduced(left), _reduced(right)
            return [*lefts, *rights, *(["and", a, b] for a in lefts for b in rights)]
        case [op, inner, *rest]:
            inners = _reduced(inner)
            return [*inners, *([op, p, *rest] for p in inners)]
    raise ValueError(f"no such program: {program}")


def _endings(program: Program) -> set[Ending]:
    own = {(program[0], program[2])} if program[0] in ("max", "min") else set()
    return own.union(*(_endings(part) for part in program[1:] if isinstance(part, list)))


def _closed(found: Entities, target: Value, endings: set[Ending], graph: Graph) -> bool:
    """Whether an ending of the question picks the target out of a set."""
    if len(target) != 1 or not target <= found:
        return False
    (one,) = target
    for op, attribute in endings:
        best = graph.value(one, attribute)
        if best is not None and all(
            (v := graph.value(e, attribute)) is None or e == one or (v < best if op == "max" else v > best)
            for e in found
        ):
            return True
    return False


@lru_cache(maxsize=4000)
def reach(graph: Graph, entity: str, most: int, kind: str) -> dict[Entities, int]:
    """Every set of a type that at most `most` relations in a row lead to from an entity, with the fewest."""
    found: dict[Entities, int] = {}
    level: set[Entities] = {frozenset([entity])}
    seen: set[Entities] = set(level)
    for used in range(1, most + 1):
        after: set[Entities] = set()
        for at in level:
            for name, relation in RELATIONS[graph.kind(min(at)) or ""].items():
                if used == most and relation.target != kind:
                    continue
                reached = graph.follow(at, name)
                if reached and reached not in seen:
                    after.add(reached)
                    if relation.target == kind:
                        found.setdefault(reached, used)
        seen |= after
        level = after
    return found
