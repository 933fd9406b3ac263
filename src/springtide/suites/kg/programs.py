"""Query programs: what a question means, in a form that yields both the answer and the calls that find it.

A program is a nested list, as stored in the data: `["entity", i]` (the i-th named entity), `["hop", p, relation]`,
`["and", p, q]`, `["count", p]`, `["max", p, attribute]`, `["min", p, attribute]`, `["above", p, attribute, q]`,
`["below", p, attribute, q]` (what of p has a higher, a lower value than the one entity q). Invariant: playing `calls`
makes the variable that `evaluate` computes, so gold is right by construction.
Called by: the environment (judge, gold) and the question writers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a worker that only lists tasks needs no graph
    from springtide.suites.kg.graph import Graph

Program = list[Any]
Value = frozenset[Any]  # names of entities, or one number


def evaluate(program: Program, entities: list[str], graph: Graph) -> Value:
    """The answer: a set of names, or of one number."""
    match program:
        case ["entity", i]:
            return frozenset([entities[i]])
        case ["hop", inner, relation]:
            return graph.follow(evaluate(inner, entities, graph), relation)
        case ["and", left, right]:
            return evaluate(left, entities, graph) & evaluate(right, entities, graph)
        case ["count", inner]:
            return frozenset([len(evaluate(inner, entities, graph))])
        case ["max" | "min" as end, inner, attribute]:
            return graph.extreme(evaluate(inner, entities, graph), attribute, end == "max")
        case ["above" | "below" as side, inner, attribute, other]:
            than = evaluate(other, entities, graph)
            among = evaluate(inner, entities, graph)
            return graph.beyond(among, attribute, than, side == "above") if len(than) == 1 else frozenset()
    raise ValueError(f"no such program: {program}")


def calls(program: Program, entities: list[str]) -> list[tuple[str, dict[str, Any]]]:
    """The tool calls that answer it, one a turn, and the final text."""
    made: list[tuple[str, dict[str, Any]]] = []
    variables = 0

    def look(tool: str, variable: str) -> None:
        if (tool, {"variable": variable}) not in made:
            made.append((tool, {"variable": variable}))

    def play(part: Program) -> str:
        nonlocal variables
        match part:
            case ["entity", i]:
                return entities[i]
            case ["hop", inner, relation]:
                at = play(inner)
                look("get_relations", at)
                made.append(("get_neighbors", {"variable": at, "relation": relation}))
            case ["and", left, right]:
                a, b = play(left), play(right)
                made.append(("intersection", {"a": a, "b": b}))
            case ["count", inner]:
                made.append(("count", {"variable": play(inner)}))
            case ["max" | "min" as end, inner, attribute]:
                at = play(inner)
                look("get_attributes", at)
                made.append((f"arg{end}", {"variable": at, "attribute": attribute}))
            case ["above" | "below" as side, inner, attribute, other]:
                at, than = play(inner), play(other)
                look("get_attributes", at)
                made.append((side, {"variable": at, "attribute": attribute, "than": than}))
            case _:
                raise ValueError(f"no such program: {part}")
        variables += 1
        return f"#{variables - 1}"

    answer = play(program)
    made.append(("", {"text": f"Final Answer: {answer}"}))
    return made


def steps(program: Program) -> list[str]:
    """The relations and attributes a program uses, in order."""
    match program:
        case ["entity", _]:
            return []
        case ["and", left, right]:
            return steps(left) + steps(right)
        case [_, inner]:
            return steps(inner)
        case [_, inner, name]:
            return [*steps(inner), name]
        case [_, inner, name, other]:
            return [*steps(inner), name, *steps(other)]
    raise ValueError(f"no such program: {program}")


def hops(program: Program) -> int:
    """How many relations it follows, over all its branches."""
    return (program[0] == "hop") + sum(hops(part) for part in program[1:] if isinstance(part, list))
