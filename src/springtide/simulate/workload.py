"""What is played: laws of turns, lengths and latencies, presets of them, random ones, and traces.

Owns: how an episode is drawn. Invariants: an episode depends on (seed, visit, member, retry) alone, so every policy
meets the same; the members of a group share a part of what makes them long (`shared`), as reruns of one task differ too
(tiderl_async 6.1: the same task took 222 to 402 s); the ranges of `random_workload` were written down before any policy
was tried on it.
Sources: tiderl_async 6.1 and 6.2 (a table of presets, inferred from public traces where no figures were published).
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path


class WorkloadError(ValueError):
    """A workload or trace that cannot be played. One line: what is wrong, where."""


@dataclass(frozen=True, slots=True)
class Law:
    """A lognormal law: its median, the deviation of its logarithm, and the most it gives."""

    median: float
    sigma: float = 0.0
    most: float = math.inf

    def at(self, z: float) -> float:
        """The value at `z` standard deviations."""
        return min(self.most, self.median * math.exp(self.sigma * z))

    @property
    def mean(self) -> float:
        """Of the law without its cut."""
        return self.median * math.exp(self.sigma**2 / 2)


@dataclass(frozen=True, slots=True)
class Tail:
    """A Pareto law of rare, long waits: P(X > x) = (least / x)^alpha, cut at `most`."""

    least: float
    alpha: float
    most: float

    def draw(self, rng: random.Random) -> float:
        return min(self.most, self.least * rng.paretovariate(self.alpha))


@dataclass(frozen=True, slots=True)
class Workload:
    """Tokens and seconds of an environment's episodes.

    turns; prompt, sampled, answer: tokens at the start, a turn, a tool's answer; tool_s: (share, law) of its seconds;
    reset_s: until the first turn, long_resets: share of them and their range; fails: share of episodes that end in an
    environment error; context: the most tokens; images: (kept, tokens of each) where every answer is a screenshot and
    only the newest are kept, so the prefix breaks; shared: share of the variance of logarithms that a group's members
    have in common; solves: a and b of the Beta law of tasks' success.
    """

    turns: Law
    prompt: Law
    sampled: Law
    answer: Law
    tool_s: tuple[tuple[float, Law | Tail], ...]
    reset_s: Law = Law(0.0)
    long_resets: tuple[float, float, float] = (0.0, 0.0, 0.0)
    fails: float = 0.0
    context: int = 8192
    images: tuple[int, int] | None = None
    shared: float = 0.5
    solves: tuple[float, float] = (1.0, 1.0)


# tiderl_async 6.2. webshop's and osworld's latencies are estimates: none were published.
PRESETS: dict[str, Workload] = {
    "alfworld": Workload(
        turns=Law(16, 0.5, 20), prompt=Law(800, 0.15), sampled=Law(60, 0.7), answer=Law(50, 0.5),
        tool_s=((1.0, Law(0.09, 0.4)),), reset_s=Law(0.5), fails=0.001,
    ),
    "webshop": Workload(
        turns=Law(7, 0.4, 20), prompt=Law(600, 0.1), sampled=Law(60, 0.6), answer=Law(400, 0.7),
        tool_s=((1.0, Law(0.15, 0.6)),), reset_s=Law(0.2), fails=0.001,
    ),
    "office": Workload(
        turns=Law(32.5, 0.36, 100), prompt=Law(9000, 0.2), sampled=Law(26, 1.26, 4000), answer=Law(202, 2.0, 5000),
        tool_s=((0.995, Law(0.53, 0.8)), (0.005, Tail(10.0, 1.1, 1800.0))), reset_s=Law(2.0), fails=0.01,
        context=65_536,
    ),
    "swe": Workload(
        turns=Law(35, 0.5, 100), prompt=Law(8000, 0.2), sampled=Law(150, 1.0, 8000), answer=Law(250, 1.5, 8000),
        tool_s=(
            (0.61, Law(0.1, 1.0)), (0.27, Law(2.5, 0.6)), (0.08, Law(22.0, 0.5)), (0.04, Tail(60.0, 1.2, 1800.0)),
        ),
        reset_s=Law(20.0, 1.0), long_resets=(0.01, 300.0, 900.0), fails=0.05, context=98_304,
    ),
    "osworld": Workload(
        turns=Law(18, 0.5, 50), prompt=Law(2000, 0.1), sampled=Law(150, 0.6), answer=Law(20, 0.0),
        tool_s=((1.0, Law(2.5, 0.5)),), reset_s=Law(45.0, 0.5), fails=0.03, context=32_768, images=(5, 1250),
    ),
    "math": Workload(
        turns=Law(1), prompt=Law(200, 0.3), sampled=Law(3000, 1.0, 32_000), answer=Law(0.0), tool_s=((1.0, Law(0.0)),),
        context=32_768,
    ),
}  # fmt: skip


def random_workload(rng: random.Random) -> Workload:
    """A workload out of the ranges below, which were settled before any policy was tried on one."""

    def between(low: float, high: float) -> float:
        return math.exp(rng.uniform(math.log(low), math.log(high)))

    tail = rng.uniform(0.0, 0.06)
    return Workload(
        turns=Law(between(3, 40), rng.uniform(0.2, 0.7), 100),
        prompt=Law(between(300, 10_000), 0.2),
        sampled=Law(between(30, 400), rng.uniform(0.5, 1.2), 8000),
        answer=Law(between(30, 800), rng.uniform(0.5, 1.5), 5000),
        tool_s=(
            (1.0 - tail, Law(between(0.05, 5.0), rng.uniform(0.3, 1.0))),
            (tail, Tail(between(5.0, 60.0), rng.uniform(1.1, 2.0), 1800.0)),
        ),
        reset_s=Law(between(0.2, 40.0), rng.uniform(0.0, 1.0)),
        fails=rng.uniform(0.0, 0.05),
        context=int(between(8_000, 64_000)),
        shared=rng.uniform(0.3, 0.7),
    )


class Plan:
    """One attempt of an episode: what it will do, turn by turn.

    before: context when a turn starts; keep: of it, the prefix that the turn before left in the KV; sampled: tokens it
    samples; tool_s: seconds until the answer. fails_after: turns until an environment error, or None. tokens: distinct
    ones, that a trainer computes; final: context at the end.
    """

    __slots__ = ("before", "fails_after", "final", "keep", "prompt", "reset_s", "sampled", "tokens", "tool_s")

    def __init__(
        self, reset_s: float, before: list[int], keep: list[int], sampled: list[int], tool_s: list[float]
    ) -> None:
        self.reset_s, self.before, self.keep, self.sampled, self.tool_s = reset_s, before, keep, sampled, tool_s
        self.prompt = before[0]
        self.fails_after: int | None = None
        self.final = before[-1] + sampled[-1]
        self.tokens = sum(b - k for b, k in zip(before, keep, strict=True)) + sum(sampled)


Source = Callable[[int, int, int], Plan]


def episodes(workload: Workload, seed: int) -> Source:
    """Draws the attempt (visit, member, retry)."""
    common, own = math.sqrt(workload.shared), math.sqrt(1 - workload.shared)
    window = workload.images

    def draw(visit: int, member: int, retry: int) -> Plan:
        task = random.Random((seed * 1_000_003 + visit) * 2 + 1)
        rng = random.Random(((seed * 1_000_003 + visit) * 4096 + member * 64 + retry + 1) * 2)
        gauss = rng.gauss
        z_turns, z_sampled, z_prompt = task.gauss(0, 1), task.gauss(0, 1), task.gauss(0, 1)
        turns = max(1, round(workload.turns.at(common * z_turns + own * gauss(0, 1))))
        context = max(1, round(workload.prompt.at(z_prompt)))
        before, keep, sampled, tool_s, texts = [context], [0], list[int](), list[float](), [context]
        for turn in range(turns):
            room = workload.context - before[-1]
            count = min(max(1, round(workload.sampled.at(common * z_sampled + own * gauss(0, 1)))), max(1, room))
            sampled.append(count)
            law = _pick(workload.tool_s, rng.random())
            tool_s.append(law.draw(rng) if isinstance(law, Tail) else law.at(gauss(0, 1)))
            answer = round(workload.answer.at(gauss(0, 1)))
            texts.append(texts[-1] + count + answer)
            end = before[-1] + count
            if window is None:
                follows, kept = end + answer, end
            else:
                most, each = window
                follows = texts[-1] + min(turn + 1, most) * each
                # Where an image is dropped, what stands before it is all that the cache still serves.
                kept = end if turn + 1 <= most else texts[turn + 1 - most]
            if turn + 1 == turns or follows >= workload.context:
                break
            before.append(follows)
            keep.append(min(kept, follows))
        reset_s = workload.reset_s.at(gauss(0, 1))
        share, low, high = workload.long_resets
        if share and rng.random() < share:
            reset_s = rng.uniform(low, high)
        plan = Plan(reset_s, before, keep, sampled, tool_s)
        if rng.random() < workload.fails:
            plan.fails_after = rng.randrange(len(sampled))
        return plan

    return draw


def _pick(laws: Sequence[tuple[float, Law | Tail]], at: float) -> Law | Tail:
    """The law whose share of [0, 1) holds `at`."""
    for share, law in laws:
        at -= share
        if at < 0:
            return law
    return laws[-1][1]


def success(workload: Workload, seed: int, visit: int, members: int) -> list[bool]:
    """Which members of a group succeed: tasks differ in how likely it is."""
    rng = random.Random((seed * 1_000_003 + visit) * 8 + 5)
    likely = rng.betavariate(*workload.solves)
    return [rng.random() < likely for _ in range(members)]


def read_trace(path: Path, context: int = 1 << 20) -> Source:
    """Episodes of a JSONL file, one a line, drawn in turn: `input_prompt_length, assistant_response_length[],
    tool_call_output_length[], tool_call_latency[], final_assistant_response_length` (Applied-Compute/trie's form).

    Raises: WorkloadError, OSError."""
    plans: list[Plan] = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            data = json.loads(line)
            sampled = [*map(int, data["assistant_response_length"]), int(data["final_assistant_response_length"])]
            answers = [int(n) for n in data["tool_call_output_length"]]
            waits = [float(s) for s in data["tool_call_latency"]]
            before, keep = [int(data["input_prompt_length"])], [0]
        except (ValueError, KeyError, TypeError) as error:
            raise WorkloadError(f"{path}, line {number}: not an episode ({error!r})") from None
        if not len(sampled) - 1 == len(answers) == len(waits):
            raise WorkloadError(
                f"{path}, line {number}: {len(sampled) - 1} tool calls, {len(answers)} outputs, {len(waits)} latencies"
            )
        if min(*before, *sampled) < 1 or min((*answers, *waits), default=0) < 0:
            raise WorkloadError(f"{path}, line {number}: a length is below 1, or an output or a latency below 0")
        for count, answer in zip(sampled, answers, strict=False):
            keep.append(before[-1] + count)
            before.append(keep[-1] + answer)
        cut = next((i for i, b in enumerate(before) if b >= context), len(before))
        if cut == 0:
            raise WorkloadError(f"{path}, line {number}: its prompt alone passes the context of {context} tokens")
        plans.append(Plan(0.0, before[:cut], keep[:cut], sampled[:cut], [*waits, 0.0][:cut]))
    if not plans:
        raise WorkloadError(f"{path} holds no episode")

    def draw(visit: int, member: int, retry: int) -> Plan:
        return plans[(visit * 31 + member * 7 + retry) % len(plans)]

    return draw


def named(name: str) -> Workload:
    """A preset. Raises: WorkloadError."""
    try:
        return PRESETS[name]
    except KeyError:
        raise WorkloadError(f"there is no workload {name!r}; there are {', '.join(PRESETS)}") from None


def without_latency(workload: Workload) -> Workload:
    """The same tokens, and an environment that answers at once."""
    return replace(workload, tool_s=((1.0, Law(0.0)),), reset_s=Law(0.0), long_resets=(0.0, 0.0, 0.0), fails=0.0)


def mean_context(source: Source, count: int = 64) -> float:
    """Tokens of an episode's KV, averaged over its turns and over `count` episodes."""
    plans: Sequence[Plan] = [source(visit, 0, 0) for visit in range(count)]
    return sum(sum(p.before) / len(p.before) for p in plans) / len(plans)
