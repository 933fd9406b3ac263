"""The question writer of `quick` and `standard`: draws programs over the graph and words them.

Frozen, since what it wrote is; `deep` writes the later levels. Run by `scripts/build_kg_data.py`, once.

Invariants: an entity named in a `train` question is named in no other split's; a template of `ood` (its wording, or a
relation pair, relation or shape in it) occurs nowhere else; a question is kept only if the obvious short cuts miss its
answer: no single relation of a named entity leads to it, and no partial result is it. Deterministic.

The result, which the environment reads: `{level: {"templates": [[text, program], ...], split: [[template, [entity,
...]], ...]}}`, with `{0}` in the text for the first entity.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from springtide.suites.kg.graph import Graph
from springtide.suites.kg.programs import Program, Value, evaluate, steps
from springtide.suites.kg.schema import ATTRIBUTES, QUICK, RELATIONS, plural

SIZES = {"train": 1600, "test": 500, "ood": 400}
Row = tuple[str, Program, tuple[str, ...]]  # text with places, program, entities
Names = dict[tuple[str, str], list[str]]  # (type, part) -> names that may stand in a question


def bucket(entity: str) -> str:
    """The split whose questions may name an entity; six tenths are `train`'s, `ood` shares those of `test`."""
    return "train" if hashlib.blake2b(entity.encode(), digest_size=2).digest()[0] % 10 < 6 else "test"


def generate() -> dict[str, Any]:
    """All questions of all levels."""
    graph = Graph()
    return {"quick": pack(_quick(graph)), "standard": pack(_standard(graph))}


def pack(splits: dict[str, list[Row]]) -> dict[str, Any]:
    templates: dict[str, tuple[int, Program]] = {}
    packed: dict[str, Any] = {}
    trained = {text for text, _, _ in splits["train"]}
    splits["test"] = [row for row in splits["test"] if row[0] in trained]  # the same templates, even the rarest
    for split, rows in splits.items():
        for text, program, _ in rows:
            templates.setdefault(text, (len(templates), program))
        packed[split] = [[templates[text][0], list(entities)] for text, _, entities in rows]
    return {"templates": [[text, program] for text, (_, program) in templates.items()], **packed}


# --- quick: two steps from one short name, or a count after one ------------------------------------------------------

QUICK_STARTS = ("airport", "city", "country", "region", "track", "album", "artist", "composer")
_PLAIN = re.compile(r"[A-Z][A-Za-z ]{1,9}")  # short names, made of what any small vocabulary spells
_WORDINGS = (
    "What is the {b} of the {a} of {x}?",
    "Name the {b} of {x}'s {a}.",
    "Go from {x} to its {a}, then to the {b}.",
    "Take the {a} of {x} and give its {b}.",
)
_COUNTS = ("How many {a} does {x} have?", "Count the {a} of {x}.")
_OOD_WORDINGS = ("Which {b} belongs to the {a} of {x}?",)
_OOD_COUNTS = ("Give the number of {a} of {x}.",)
# Steps that train and test never take one after the other, though they take each of them with others.
_OOD_PAIRS = {("country", "continent"), ("neighbour", "language"), ("capital", "region"), ("album", "composer"),
              ("track", "composer"), ("region", "airport"), ("city", "airport")}  # fmt: skip
_OOD_COUNTED = {"language", "composer"}
_SYNONYMS = {"currency": "money", "artist": "band", "track": "song", "genre": "style", "composer": "writer",
             "zone": "time zone"}  # fmt: skip
_COUNT_WEIGHT = 2  # a count is asked twice as often as each of the many pairs of steps
_SYNONYM_SHARE = 0.5  # of those that have one, at either step


def _quick(graph: Graph) -> dict[str, list[Row]]:
    pools: dict[tuple[str, str], list[str]] = defaultdict(list)
    for kind in QUICK_STARTS:
        for name in graph.entities(kind):
            if _PLAIN.fullmatch(name) and len(graph.relations([name], "quick")) >= 3:
                pools[kind, bucket(name)].append(name)
    rng = random.Random("quick")
    plans: dict[tuple[str, str, str], dict[str, list[str]]] = {}
    for kind in QUICK_STARTS:
        for a in QUICK[kind]:
            for b in (*QUICK[RELATIONS[kind][a].target], ""):
                good: dict[str, list[str]] = {}
                for part in ("train", "test"):
                    pool = rng.sample(pools[kind, part], min(400, len(pools[kind, part])))
                    good[part] = [n for n in pool if _quick_gate(graph, n, a, b)]
                if len(good["train"]) >= 12 and len(good["test"]) >= 8:
                    plans[kind, a, b] = good
    return {split: _draw_quick(split, plans) for split in SIZES}


def _quick_gate(graph: Graph, name: str, a: str, b: str) -> bool:
    first = {r: graph.follow([name], r) for r in graph.relations([name], "quick")}
    if a not in first:
        return False
    if not b:
        size = len(first[a])
        return 3 <= size <= 40 and sum(len(found) == size for found in first.values()) == 1
    middle = first[a]
    answer = graph.follow(middle, b)
    if not (0 < len(answer) <= 60 and len(middle) <= 20 and answer != {name} and answer not in first.values()):
        return False
    after = {r: graph.relations(found, "quick") for r, found in first.items() if len(found) <= 60}
    if b not in after[a] or len(after[a]) < 3:
        return False
    ways = sum(graph.follow(first[r], s) == answer for r, listed in after.items() for s in listed)
    return ways == 1


def _draw_quick(split: str, plans: dict[tuple[str, str, str], dict[str, list[str]]]) -> list[Row]:
    rng = random.Random(f"quick/{split}")
    held_out = [key for key in plans if key[1:3] in _OOD_PAIRS or (not key[2] and key[1] in _OOD_COUNTED)]
    seen = [key for key in plans if key not in held_out]
    part = "train" if split == "train" else "test"
    rows: dict[tuple[str, str], Row] = {}
    while len(rows) < SIZES[split]:
        new_wording = split == "ood" and rng.random() < 0.4
        among = seen if split != "ood" or new_wording else held_out
        kind, a, b = rng.choices(among, [1 if key[2] else _COUNT_WEIGHT for key in among])[0]
        counting = not b
        wordings = (_COUNTS, _WORDINGS) if not new_wording else (_OOD_COUNTS, _OOD_WORDINGS)
        wording = rng.choice(wordings[0 if counting else 1])
        if counting:
            text = wording.format(a=plural(a), x="{0}")
            program: Program = ["count", ["hop", ["entity", 0], a]]
        else:
            other = rng.choice((a, b)) if rng.random() < _SYNONYM_SHARE else ""
            said = {r: _SYNONYMS.get(r, r) if r == other else r for r in (a, b)}
            text = wording.format(a=said[a], b=said[b], x="{0}")
            program = ["hop", ["hop", ["entity", 0], a], b]
        entity = rng.choice(plans[kind, a, b][part])
        rows.setdefault((text, entity), (text, program, (entity,)))
    return list(rows.values())


# --- standard: the whole graph and all tools -------------------------------------------------------------------------

STARTS = ("country", "airport", "city", "region", "zone", "language", "currency", "track", "album", "artist",
           "composer", "playlist", "customer", "employee", "element", "group", "series", "affinity", "discoverer",
           "word", "word", "word")  # fmt: skip
_SHAPES = {
    "hop2": 18,
    "hop3": 14,
    "and": 14,
    "and2": 8,
    "count2": 10,
    "count_and": 7,
    "end1": 11,
    "end2": 9,
    "hop_end": 9,
}
_OOD_SHAPES = ("end_and", "hop_and", "count_hop_end")
# Relations that no train or test question follows; with them, one pair of successive steps in eight is held out.
OOD_NAMES = {"lattice", "playlist", "material", "domain", "agent", "seat of", "calling code", "found in"}
_TEMPLATES_A_SHAPE, _OOD_TEMPLATES_A_SHAPE = 24, 6
_TEMPLATES_A_START = 3  # of one shape, so that the type of the named entity tells little
_TEMPLATES_A_KIND = 8  # or it is not asked about
_DRAWS = 20_000
_ASKS = ("What {is_} {x}?", "Find {x}.")
_OOD_ASKS = ("Please tell me {x}.",)
_COUNT_ASKS = ("How many {bare} are there?", "Count {x}.")
_OOD_COUNT_ASKS = ("What is the number of {bare}?",)


class _Phrase:
    """A program with its type and its words."""

    def __init__(self, program: Program, kind: str, text: str, single: bool) -> None:
        self.program, self.kind, self.text, self.single = program, kind, text, single

    def hop(self, name: str) -> _Phrase:
        relation = RELATIONS[self.kind][name]
        single = self.single and relation.single
        text = f"the {relation.one if single else relation.many} {relation.phrase.format(x=self.text)}"
        return _Phrase(["hop", self.program, name], relation.target, text, single)

    def meet(self, other: _Phrase) -> _Phrase:
        text = f"{self.text} that are also among {other.text}"
        return _Phrase(["and", self.program, other.program], self.kind, text, False)

    def end(self, attribute: str, highest: bool) -> _Phrase:
        words = ATTRIBUTES[self.kind][attribute]
        text = f"the one with the {words.high if highest else words.low} among {self.text}"
        return _Phrase(["max" if highest else "min", self.program, attribute], self.kind, text, True)

    def count(self) -> _Phrase:
        return _Phrase(["count", self.program], "number", self.text, True)


def _standard(graph: Graph) -> dict[str, list[Row]]:
    names = names_of(graph)
    rng = random.Random("standard")
    found: dict[str, dict[str, set[tuple[str, ...]]]] = {}  # text of the noun phrase -> part -> entity tuples
    phrase_of: dict[str, tuple[str, _Phrase]] = {}
    for shape in (*_SHAPES, *_OOD_SHAPES):
        for part in ("train", "test"):
            for _ in range(_DRAWS):
                drawn = _draw(shape, part, names, graph, rng)
                if drawn is not None:
                    phrase, entities = drawn
                    phrase_of.setdefault(repr(phrase.program) + phrase.text, (shape, phrase))
                    found.setdefault(repr(phrase.program) + phrase.text, {}).setdefault(part, set()).add(entities)
    chosen: dict[bool, dict[str, list[str]]] = {False: defaultdict(list), True: defaultdict(list)}
    starts: Counter[tuple[bool, str, str | None]] = Counter()
    keys = sorted(found)
    rng.shuffle(keys)
    for key in keys:
        shape, phrase = phrase_of[key]
        new = shape in _OOD_SHAPES or held_out(phrase.program)
        if "test" not in found[key]:
            continue
        enough = len(found[key]["test"]) >= 4 and (new or len(found[key].get("train", ())) >= 8)
        place = (new, shape, graph.kind(min(found[key]["test"])[0]))
        room = _OOD_TEMPLATES_A_SHAPE if new else _TEMPLATES_A_SHAPE
        most = _TEMPLATES_A_START if place[2] != "word" else 3 * _TEMPLATES_A_START
        if enough and len(chosen[new][shape]) < room and starts[place] < most:
            starts[place] += 1
            chosen[new][shape].append(key)
    per_kind: Counter[str | None] = Counter()
    for (new, _, named), number in starts.items():
        per_kind[named] += 0 if new else number
    for shape, of_shape in chosen[False].items():
        chosen[False][shape] = [
            key for key in of_shape if per_kind[graph.kind(min(found[key]["test"])[0])] >= _TEMPLATES_A_KIND
        ]
    return {split: _draw_standard(split, chosen, found, phrase_of) for split in SIZES}


def names_of(graph: Graph) -> Names:
    """The entities that a question may start from."""
    names: Names = defaultdict(list)
    for kind in sorted(set(STARTS)):
        for name in filter(is_sayable, graph.entities(kind)):
            names[kind, bucket(name)].append(name)
    return names


def is_sayable(name: str) -> bool:
    """Whether a question may utter a name: texts are templates, whose braces are places."""
    return len(name) <= 32 and "{" not in name


def held_out(program: Program) -> bool:
    """Whether a program takes a step, or two steps in a row, that train and test never take."""
    match program:
        case ["entity", _]:
            return False
        case ["and", left, right]:
            return held_out(left) or held_out(right)
        case ["above" | "below", inner, _, other]:
            return held_out(inner) or held_out(other)
        case ["hop", ["hop", inner, a], b]:
            pair = hashlib.blake2b(f"{a}/{b}".encode(), digest_size=2).digest()[0] % 8 == 0
            return pair or b in OOD_NAMES or held_out(program[1])
        case ["hop", inner, a]:
            return a in OOD_NAMES or held_out(inner)
    return held_out(program[1])


def _draw(
    shape: str, part: str, names: Names, graph: Graph, rng: random.Random
) -> tuple[_Phrase, tuple[str, ...]] | None:
    """One random question of a shape that passes the gates, or None."""
    entities: list[str] = []

    def start(kind: str | None = None) -> _Phrase:
        kind = kind or rng.choice(STARTS)
        entities.append(rng.choice(names[kind, part]))
        return _Phrase(["entity", len(entities) - 1], kind, f"{{{len(entities) - 1}}}", True)

    def hop(phrase: _Phrase) -> _Phrase | None:
        at = evaluate(phrase.program, entities, graph)
        options = sorted(graph.relations(at)) if 0 < len(at) <= 150 else []
        if phrase.program[0] == "hop" and options:  # not straight back
            came = _last(phrase.program, entities, graph)
            options = [o for o in options if RELATIONS[phrase.kind][o].predicate != came]
        return phrase.hop(rng.choice(options)) if options else None

    def meet(phrase: _Phrase) -> _Phrase | None:
        """Intersect with one step from a second entity, chosen so that something is common."""
        at = sorted(evaluate(phrase.program, entities, graph))
        if not 3 <= len(at) <= 150:
            return None
        ways = [
            (kind, name)
            for kind in sorted(set(STARTS))
            for name, r in RELATIONS[kind].items()
            if r.target == phrase.kind
        ]
        if not ways:
            return None
        kind, name = rng.choice(ways)
        relation = RELATIONS[kind][name]
        known = graph.step(rng.choice(at), relation.predicate, not relation.inverse)
        near = [n for n in known if bucket(n) == part and len(n) <= 32 and n not in entities]
        if not near:
            return None
        entities.append(rng.choice(near))
        other = _Phrase(["entity", len(entities) - 1], kind, f"{{{len(entities) - 1}}}", True).hop(name)
        return phrase.meet(other)

    def end(phrase: _Phrase) -> _Phrase | None:
        at = evaluate(phrase.program, entities, graph)
        options = sorted(graph.attributes(at)) if 3 <= len(at) <= 150 else []
        return phrase.end(rng.choice(options), rng.random() < 0.5) if options else None

    plan: dict[str, tuple[Callable[[_Phrase], _Phrase | None], ...]] = {
        "hop2": (hop, hop),
        "hop3": (hop, hop, hop),
        "and": (hop, meet),
        "and2": (hop, hop, meet),
        "count2": (hop, hop, _Phrase.count),
        "count_and": (hop, meet, _Phrase.count),
        "end1": (hop, end),
        "end2": (hop, hop, end),
        "hop_end": (hop, end, hop),
        "end_and": (hop, meet, end),
        "hop_and": (hop, meet, hop),
        "count_hop_end": (hop, end, hop, _Phrase.count),
    }
    phrase = start()
    for move in plan[shape]:
        moved = move(phrase)
        if moved is None:
            return None
        phrase = moved
    return (phrase, tuple(entities)) if _gate(phrase.program, entities, graph) else None


def _last(program: Program, entities: list[str], graph: Graph) -> str:
    at = next(iter(evaluate(program[1], entities, graph)))
    return RELATIONS[graph.kind(at) or ""][program[2]].predicate


def parts(program: Program) -> Iterator[Program]:
    """The proper sub-programs."""
    for inner in program[1:]:
        if isinstance(inner, list):
            yield inner
            yield from parts(inner)


def _gate(program: Program, entities: list[str], graph: Graph) -> bool:
    answer: Value = evaluate(program, entities, graph)
    partial = [evaluate(part, entities, graph) for part in parts(program)]
    if not 0 < len(answer) <= 60 or answer in partial or any(len(p) > 400 for p in partial):
        return False
    if program[0] == "count":
        if not 3 <= next(iter(answer)) <= 400:
            return False
    elif any(graph.follow([e], r) == answer for e in entities for r in graph.relations([e])):
        return False
    for part in (program, *parts(program)):
        if part[0] == "and":
            left, right = (evaluate(side, entities, graph) for side in part[1:])
            if left <= right or right <= left:
                return False
        if part[0] in ("max", "min"):
            among = evaluate(part[1], entities, graph)
            known = sum(graph.value(e, part[2]) is not None for e in among)
            if known < 3 or known < len(among) or len(evaluate(part, entities, graph)) != 1:
                return False
    return True


def _draw_standard(
    split: str,
    chosen: dict[bool, dict[str, list[str]]],
    found: dict[str, dict[str, set[tuple[str, ...]]]],
    phrase_of: dict[str, tuple[str, _Phrase]],
) -> list[Row]:
    rng = random.Random(f"standard/{split}")
    part = "train" if split == "train" else "test"
    rows: dict[tuple[str, tuple[str, ...]], Row] = {}
    shapes = [(s, w) for s, w in _SHAPES.items() if chosen[False][s]]
    for _ in range(100 * SIZES[split]):
        if len(rows) == SIZES[split]:
            break
        new = split == "ood" and rng.random() < 0.6
        if new:
            key = rng.choice(chosen[True][rng.choice(sorted(chosen[True]))])
        else:
            key = rng.choice(chosen[False][rng.choices(*zip(*shapes, strict=True))[0]])
        _, phrase = phrase_of[key]
        reworded = split == "ood" and not new
        if phrase.kind == "number":
            ask = rng.choice(_OOD_COUNT_ASKS if reworded else _COUNT_ASKS)
        else:
            ask = rng.choice(_OOD_ASKS if reworded else _ASKS)
        text = ask.format(x=phrase.text, bare=phrase.text.removeprefix("the "), is_="is" if phrase.single else "are")
        entities = rng.choice(sorted(found[key][part]))
        rows.setdefault((text, entities), (text, phrase.program, entities))
    return list(rows.values())


def used(rows: list[Row]) -> Counter[str]:
    """How often each relation and attribute is used, for a look at the balance."""
    return Counter(step for _, program, _ in rows for step in steps(program))
