"""The question writer of `hard` and `expert`: compositions over three and four relations.

A template is a row of moves drawn at random (`_choose`), one a letter of its shape; `_apply` plays it on new entities,
so a template is asked of many. Letters: `h` follow a relation; `a`, `A` meet what one or two relations from a second
entity lead to; `e` argmax or argmin; `g`, `G` compare with an entity, or with what one relation from it leads to; `c`
count. Shapes of `hard` have three relations over all their branches, those of `expert` four and at least two other
moves. Invariants: as in `generate`, and `shortcuts.shortcut` finds no smaller way to any answer; every end is
unique, every candidate has the number it is judged by; each noun phrase closes before the next one opens, so a text has
one reading. Deterministic. Run by `scripts/build_kg_data.py`, once.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from springtide.suites.kg.generate import (
    OOD_NAMES,
    SIZES,
    STARTS,
    Names,
    Row,
    bucket,
    held_out,
    is_sayable,
    names_of,
    pack,
    parts,
)
from springtide.suites.kg.graph import Entities, Graph
from springtide.suites.kg.programs import Program, Value, evaluate
from springtide.suites.kg.schema import ATTRIBUTES, COUNTS, RELATIONS, Attribute, plural
from springtide.suites.kg.shortcuts import shortcut
from springtide.suites.kg.spread import apart, flat, glance

SHAPES: dict[str, dict[str, tuple[str, ...]]] = {
    "hard": {
        "seen": ("hhhe", "hheh", "hehh", "hhhc", "hehhc", "hhae", "haeh", "hhac", "hAe", "hhgh", "hhGe", "hghhc"),
        "new": ("hhGc", "hgehh"),
    },
    "expert": {
        "seen": ("hhehhe", "hhehhc", "hehehh", "hehhhc", "hAeh", "hhhae", "hhAe", "hhhac", "hhGehc", "hhgahc",
                 "hhGhe", "hghhhc", "hhhGe", "hhhGc", "hhhehc"),
        "new": ("hehhehc", "hAghc", "hhghhe"),
    },
}  # fmt: skip
_TEMPLATES, _NEW_TEMPLATES = {"hard": 480, "expert": 400}, 10  # of a shape that are looked for
_A_START, _A_NEW_START = {"hard": 48, "expert": 32}, 3  # with a first entity of one type; twice as many for words
_TRAIN, _TEST = (2, 4), (1, 3)  # questions a template must have, and those that are looked for
_TRIES = 40  # for each question looked for
_DRAWS = 120_000  # of a shape, at most
# Of the questions, what a plan for every value of one, of two visible features is right for; templates of a kind left
_FLAT = {"hard": (0.06, 0.088, 20), "expert": (0.06, 0.085, 15)}
_LARGEST = 300  # a set that is asked about
_ASKS = ("What {is_} {x}?", "Find {x}.", "Name {x}.")
_NEW_ASKS = ("Please tell me {x}.", "I would like to know {x}.")
_COUNT_ASKS = ("How many {bare} are there?", "Count {x}.")
_NEW_COUNT_ASKS = ("What is the number of {bare}?",)
_COMPARED = {"highest": "higher", "lowest": "lower", "largest": "larger", "smallest": "smaller", "longest": "longer",
             "shortest": "shorter", "northernmost": "more northern", "southernmost": "more southern",
             "easternmost": "more eastern", "westernmost": "more western", "latest": "later", "earliest": "earlier",
             "greatest": "greater", "deepest": "deeper", "least": "less", "most": "more",
             "fewest": "fewer"}  # fmt: skip
_PEOPLE = ("artist", "composer", "customer", "employee", "discoverer")

Move = tuple[Any, ...]  # a letter and what it uses


@dataclass
class _State:
    """A question so far: its program, what that finds, and its words."""

    program: Program
    value: Value
    kind: str
    text: str
    single: bool = True
    entities: list[str] = field(default_factory=list)


Template = tuple[_State, dict[str, list[tuple[str, ...]]]]  # one question of it; part -> entities of all its questions


def generate_deep(only: Sequence[str] = tuple(SHAPES)) -> dict[str, Any]:
    """All questions of the deep levels."""
    graph = Graph()
    names = names_of(graph)
    return {level: pack(_level(level, graph, names)) for level in only}


def _level(level: str, graph: Graph, names: Names) -> dict[str, list[Row]]:
    return chosen(level, *drawn(level, graph, names), graph)


def drawn(level: str, graph: Graph, names: Names) -> tuple[list[Template], dict[str, list[Template]]]:
    """All templates of a level that were found: those of train and test, and by shape those of `ood` alone."""
    seen: list[Template] = []
    new: dict[str, list[Template]] = {}
    for shape in (*SHAPES[level]["seen"], *SHAPES[level]["new"]):
        rng = random.Random(f"{level}/{shape}")
        whole = shape in SHAPES[level]["new"]
        starts: Counter[tuple[bool, str]] = Counter()
        tried: set[str] = set()
        room = {False: 0 if whole else _TEMPLATES[level], True: _NEW_TEMPLATES}
        for _ in range(_DRAWS):
            if not any(room.values()):
                break
            found = _draw(shape, "test", names, graph, rng)
            if found is None or found[1].text in tried:
                continue
            moves, state = found
            fresh = whole or held_out(state.program) or _counts_new(state.program)
            place = (fresh, moves[0][1])
            most = (_A_NEW_START if fresh else _A_START[level]) * (1 + (moves[0][1] == "word"))
            if not room[fresh] or starts[place] == most:
                continue
            tried.add(state.text)
            if not _good(state, graph):
                continue
            pools = {"test": _pool(moves, "test", _TEST, names, graph, rng)}
            if pools["test"] and not fresh:
                pools["train"] = _pool(moves, "train", _TRAIN, names, graph, rng)
            if all(pools.values()):
                starts[place] += 1
                room[fresh] -= 1
                (new.setdefault(shape, []) if fresh else seen).append((state, pools))
    return seen, new


def _counts_new(program: Program) -> bool:
    """Whether it counts, as an attribute, what train never follows."""
    own = program[0] not in ("entity", "hop", "and", "count") and program[2].removesuffix(" count") in OOD_NAMES
    return own or any(_counts_new(part) for part in program[1:] if isinstance(part, list))


def chosen(level: str, seen: list[Template], new: dict[str, list[Template]], graph: Graph) -> dict[str, list[Row]]:
    """The questions of each split. Train and test are spread evenly over their templates."""
    rng = random.Random(level)
    seen = apart([(state, state.program, pools) for state, pools in rng.sample(seen, len(seen))], graph)
    glances = []
    for state, pools in seen:
        entities = list(pools["test"][0])
        glances.append(glance(state.program, state.text, entities, evaluate(state.program, entities, graph), graph))
    even = [seen[i] for i in flat(glances, [repr(state.program) for state, _ in seen], *_FLAT[level])]
    rng.shuffle(even)
    even = even[: SIZES["train"]]
    ways = {state.text: rng.sample(range(len(_ASKS)), len(_ASKS)) for state, _ in even}
    rows: dict[str, list[Row]] = {}
    for split in ("train", "test"):
        rng.shuffle(even)  # which templates are asked once more in train says nothing about those of test
        orders = [rng.sample(pools[split], len(pools[split])) for _, pools in even]
        rows[split] = [
            _row(state, order[again], ways[state.text][again % len(_ASKS)], False)
            for again in range(max(map(len, orders)))
            for (state, _), order in zip(even, orders, strict=True)
            if again < len(order)
        ][: SIZES[split]]
        rng.shuffle(rows[split])
    odd: dict[tuple[str, tuple[str, ...]], Row] = {}
    for _ in range(_TRIES * SIZES["ood"]):
        if len(odd) == SIZES["ood"]:
            break
        fresh = rng.random() < 0.6
        state, pools = rng.choice(new[rng.choice(sorted(new))] if fresh else even)
        row = _row(state, rng.choice(pools["test"]), rng.randrange(len(_ASKS)), not fresh)
        odd.setdefault((row[0], row[2]), row)
    if len(odd) < SIZES["ood"]:
        raise ValueError(f"{level}: {len(odd)} of {SIZES['ood']} questions of ood were found; look for more templates")
    return {**rows, "ood": list(odd.values())}


def _row(state: _State, entities: tuple[str, ...], way: int, reworded: bool) -> Row:
    """A question in one of the ways to ask."""
    asks: tuple[str, ...] = _NEW_ASKS if reworded else _ASKS
    if state.kind == "number":
        asks = _NEW_COUNT_ASKS if reworded else _COUNT_ASKS
    bare = state.text.removeprefix("the ")
    text = asks[way % len(asks)].format(x=state.text, bare=bare, is_="is" if state.single else "are")
    return text, state.program, entities


# --- drawing ---------------------------------------------------------------------------------------------------------


def _draw(shape: str, part: str, names: Names, graph: Graph, rng: random.Random) -> tuple[list[Move], _State] | None:
    """A random row of moves of a shape with one question, or None."""
    moves: list[Move] = [("start", rng.choice(STARTS))]
    state = _apply(None, moves[0], part, names, graph, rng)
    for letter in shape:
        move = _choose(letter, state, moves, graph, rng) if state else None
        state = _apply(state, move, part, names, graph, rng) if state and move else None
        if state is None or move is None:
            return None
        moves.append(move)
    return (moves, state) if state else None


def _pool(
    moves: list[Move], part: str, size: tuple[int, int], names: Names, graph: Graph, rng: random.Random
) -> list[tuple[str, ...]]:
    """The entities of a template's questions in a part; empty if there are too few."""
    least, most = size
    found: set[tuple[str, ...]] = set()
    for tried in range(_TRIES * most):
        hopeless = tried in (60, _TRIES * least) and len(found) <= least * tried // (2 * _TRIES * least)
        if len(found) == most or hopeless:
            break
        state: _State | None = None
        for move in moves:
            state = _apply(state, move, part, names, graph, rng)
            if state is None:
                break
        if state is not None and tuple(state.entities) not in found and _good(state, graph):
            found.add(tuple(state.entities))
    return sorted(found) if len(found) >= least else []


def _good(state: _State, graph: Graph) -> bool:
    """The gates that need the whole question."""
    if state.program[0] == "count":
        if not 3 <= next(iter(state.value)) <= _LARGEST:
            return False
    elif not len(state.value) <= 60:
        return False
    partial = [evaluate(part, state.entities, graph) for part in parts(state.program)]
    return state.value not in partial and shortcut(state.program, state.entities, graph) is None


def _choose(letter: str, state: _State, moves: list[Move], graph: Graph, rng: random.Random) -> Move | None:
    """What a letter uses, drawn from what fits the question so far."""
    if letter == "c":
        return ("c",)
    if letter == "h":
        options = sorted(graph.relations(state.value))
        if moves[-1][0] == "h":  # not straight back
            came = RELATIONS[moves[-1][2]][moves[-1][1]]
            options = [
                o
                for o in options
                if (RELATIONS[state.kind][o].predicate, RELATIONS[state.kind][o].inverse)
                != (came.predicate, not came.inverse)
            ]
        return ("h", rng.choice(options), state.kind) if options else None
    if letter in "aA":
        ways: list[tuple[Any, ...]] = [
            (kind, name, ()) if letter == "a" else (kind, before, (name,))
            for middle in sorted(RELATIONS)
            for name, relation in RELATIONS[middle].items()
            if relation.target == state.kind
            for kind, before in _into(middle, letter == "A", name)
            if kind in STARTS
        ]
        return (letter, *rng.choice(ways)) if ways else None
    attributes = sorted(graph.attributes(state.value, "hard"))
    if not attributes:
        return None
    if letter == "G":
        ways = [
            (kind, name)
            for kind in sorted(set(STARTS))
            for name, relation in RELATIONS[kind].items()
            if relation.target == state.kind and relation.single
        ]
        return ("G", rng.choice(attributes), rng.random() < 0.5, *rng.choice(ways)) if ways else None
    if letter == "g" and state.kind not in STARTS:
        return None
    return (letter, rng.choice(attributes), rng.random() < 0.5)


def _into(middle: str, two: bool, name: str) -> list[tuple[str, str]]:
    """The (type, relation) pairs that start a branch: one that ends with `name`, or one before it."""
    if not two:
        return [(middle, name)]
    pairs = [(kind, r) for kind in sorted(RELATIONS) for r, rel in RELATIONS[kind].items() if rel.target == middle]
    straight_back = RELATIONS[middle][name]
    return [
        (kind, r)
        for kind, r in pairs
        if (RELATIONS[kind][r].predicate, not RELATIONS[kind][r].inverse)
        != (straight_back.predicate, straight_back.inverse)
    ]


# --- moves -----------------------------------------------------------------------------------------------------------


def _apply(
    state: _State | None, move: Move, part: str, names: Names, graph: Graph, rng: random.Random
) -> _State | None:
    """The question with one more move, on entities of a part; None where it does not go."""
    if state is None:
        pool = names[move[1], part]
        name = rng.choice(pool) if pool else ""
        return _State(["entity", 0], frozenset([name]), move[1], "{0}", True, [name]) if name else None
    match move:
        case ["h", relation, _]:
            return _fits(_hop(state, relation, graph))
        case ["c"]:
            count = frozenset([len(state.value)])
            return replace(state, program=["count", state.program], value=count, kind="number")
        case ["a" | "A", kind, first, rest]:
            return _meet(state, kind, (first, *rest), part, graph, rng)
        case ["e", attribute, highest]:
            return _end(state, attribute, highest, graph)
        case ["g", attribute, above]:
            return _compare(state, attribute, above, state.kind, None, part, names, graph, rng)
        case ["G", attribute, above, kind, relation]:
            return _compare(state, attribute, above, kind, relation, part, names, graph, rng)
    raise ValueError(f"no such move: {move}")


def _fits(state: _State) -> _State | None:
    return state if 0 < len(state.value) <= _LARGEST else None


def _hop(state: _State, name: str, graph: Graph) -> _State:
    relation = RELATIONS[state.kind][name]
    text = f"the {relation.one if state.single and relation.single else relation.many} "
    return _State(
        ["hop", state.program, name],
        graph.follow(state.value, name),
        relation.target,
        text + relation.phrase.format(x=state.text),
        state.single and relation.single,
        state.entities,
    )


def _branch(state: _State, kind: str, relations: Sequence[str], entity: str, graph: Graph) -> _State:
    """A question about one more entity."""
    place = len(state.entities)
    branch = _State(["entity", place], frozenset([entity]), kind, f"{{{place}}}", True, [*state.entities, entity])
    for relation in relations:
        branch = _hop(branch, relation, graph)
    return branch


def _meet(
    state: _State, kind: str, relations: Sequence[str], part: str, graph: Graph, rng: random.Random
) -> _State | None:
    """Meet what the relations lead to from an entity that is chosen so that something is in common."""
    if len(state.value) < 3:
        return None
    kinds = [kind]
    for relation in relations:
        kinds.append(RELATIONS[kinds[-1]][relation].target)
    at: Entities = frozenset([rng.choice(sorted(state.value))])
    for source, name in zip(reversed(kinds[:-1]), reversed(relations), strict=True):
        along = RELATIONS[source][name]
        back = sorted({n for e in at for n in graph.step(e, along.predicate, not along.inverse)})
        at = frozenset(rng.sample(back, min(len(back), 20)))
    near = sorted(n for n in at if bucket(n) == part and is_sayable(n) and n not in state.entities)
    if not near:
        return None
    other = _branch(state, kind, relations, rng.choice(near), graph)
    common = state.value & other.value
    if not common or common in (state.value, other.value) or len(other.value) > _LARGEST:
        return None
    text = f"the {plural(state.kind)} that are both among {state.text} and among {other.text}"
    return _State(["and", state.program, other.program], common, state.kind, text, False, other.entities)


def _superlative(kind: str, attribute: str, highest: bool) -> str:
    words: Attribute = (ATTRIBUTES.get(kind, {}) | COUNTS.get(kind, {}))[attribute]
    said = words.high if highest else words.low
    return re.sub(r"\bit\b", "them", said) if kind in _PEOPLE else said


def _comparative(kind: str, attribute: str, above: bool) -> str:
    first, _, rest = _superlative(kind, attribute, above).partition(" ")
    said = f"{_COMPARED[first]} {rest}"
    if attribute in COUNTS.get(kind, {}):
        return re.sub(r"\bit\b", "them", said)
    return f"{'an' if said[0] in 'aeiou' else 'a'} {said}"


def _end(state: _State, attribute: str, highest: bool, graph: Graph) -> _State | None:
    values = [graph.value(e, attribute) for e in state.value]
    found = graph.extreme(state.value, attribute, highest)
    if len(values) < 3 or None in values or len(found) != 1:
        return None
    text = f"the {state.kind} with the {_superlative(state.kind, attribute, highest)} among {state.text}"
    return replace(
        state, program=["max" if highest else "min", state.program, attribute], value=found, text=text, single=True
    )


def _compare(
    state: _State, attribute: str, above: bool, kind: str, relation: str | None, part: str, names: Names, graph: Graph,
    rng: random.Random,
) -> _State | None:  # fmt: skip
    if len(state.value) < 3 or any(graph.value(e, attribute) is None for e in state.value):
        return None
    pool = [n for n in sorted(state.value) if bucket(n) == part and is_sayable(n)] if relation is None else []
    name = rng.choice(pool if pool and rng.random() < 0.5 else names[kind, part])
    if name in state.entities:
        return None
    other = _branch(state, kind, [] if relation is None else [relation], name, graph)
    if len(other.value) != 1 or graph.value(next(iter(other.value)), attribute) is None:
        return None
    found = graph.beyond(state.value, attribute, other.value, above)
    if not 2 <= len(found) < len(state.value):
        return None
    compared = _comparative(state.kind, attribute, above)
    text = f"the {plural(state.kind)} with {compared} than {other.text} among {state.text}"
    program = ["above" if above else "below", state.program, attribute, other.program]
    return _State(program, found, state.kind, text, False, other.entities)
