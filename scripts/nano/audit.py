"""Which decisions nano gets right: accuracy by kind of choice, on solutions it was not trained on.

A decision is a span of a call that has to be chosen: the tool, a table, a column, a relation, a place, a copied value.
It counts as right if greedy decoding takes every token of the span, given the solution up to it; beside it stands the
mean probability of the whole span at temperature 1. A decision at chance is a matter of drills or of the task, not of
RL. Called by: the command line.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from scripts.nano.dialogue import Dialogue, call_text
from scripts.nano.following import follow
from tokenizers import Tokenizer
from transformers import Qwen3ForCausalLM

_SQL = tuple(
    re.compile(pattern)
    for pattern in (
        r"PRAGMA (?P<lookup>table_list|table_info)(?:\((?P<table>[^)]*)\))?",
        r"SELECT COUNT\(\*\) FROM (?P<table>\w+) WHERE (?P<where>\w+)(?P<operator>[=<>])'?(?P<value>[^\"]*?)'?\"",
        r"SELECT (?P<column>\w+) FROM (?P<table>\w+) WHERE (?P<where>\w+)='?(?P<value>[^\"]*?)'?\"",
        r"SELECT (?P<column>\w+) FROM (?P<table>\w+) ORDER BY (?P<order>\w+)",
        r"UPDATE (?P<table>\w+) SET (?P<column>\w+)='?(?P<new>[^\"]*?)'? WHERE (?P<where>\w+)='?(?P<value>[^\"]*?)'?\"",
    )
)


@dataclass(frozen=True)
class Decision:
    """How often a kind of choice came up, greedy took it, and its mean probability."""

    suite: str
    name: str
    count: int
    greedy: float
    sampled: float


def audit(model: Qwen3ForCausalLM, tokenizer: Tokenizer, dialogues: Sequence[Dialogue]) -> list[Decision]:
    """Every kind of decision in these solutions, by suite, in order of first appearance."""
    tally: dict[tuple[str, str], list[tuple[bool, float]]] = defaultdict(list)
    for dialogue, followed in zip(dialogues, follow(model, tokenizer, dialogues)):
        text, begins = dialogue.laid_out()
        offsets = np.array(tokenizer.encode(text, add_special_tokens=False).offsets)
        for begin, turn in zip(begins, dialogue.turns):
            if not turn.learn:
                continue
            for name, start, end in _choices(call_text(turn.call)):
                span = (offsets[:, 0] < begin + end) & (offsets[:, 1] > begin + start) & followed.learn
                chance = float(np.exp(followed.logprobs[span].sum()))
                tally[dialogue.suite, name].append((bool(followed.best[span].all()), chance))
    return [
        Decision(suite, name, len(seen), float(np.mean([g for g, _ in seen])), float(np.mean([p for _, p in seen])))
        for (suite, name), seen in tally.items()
    ]


def table(decisions: Sequence[Decision]) -> str:
    """Markdown."""
    lines = ["| suite | decision | n | greedy | sampled |", "|---|---|---|---|---|"]
    lines += [f"| {d.suite} | {d.name} | {d.count} | {d.greedy:.1%} | {d.sampled:.1%} |" for d in decisions]
    return "\n".join(lines)


def _choices(text: str) -> Iterator[tuple[str, int, int]]:
    """(kind, start, end) of every choice in a call's text."""
    answer = re.match(r"Final Answer: #(\d+)", text)
    if answer:
        yield "to answer", 0, len("Final Answer: #")
        yield "answer's variable", *answer.span(1)
        return
    name = re.search(r'"name": "(\w+)"', text)
    if name is None:
        return
    yield "tool", *name.span(1)
    for argument in re.finditer(r'"(\w+)": "((?:[^"\\]|\\.)*)"', text[name.end() :]):
        at = name.end()
        if argument[1] != "sql":
            yield f"{name[1]}: {argument[1]}", at + argument.start(2), at + argument.end(2)
            continue
        committed = "commit " if name[1].startswith("commit") else ""
        for pattern in _SQL:
            match = pattern.search(text, at)
            if match is None:
                continue
            for part, value in match.groupdict().items():
                if value is not None:
                    yield committed + part, *match.span(part)
            break
