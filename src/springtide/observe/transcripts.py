"""An episode as a person reads it: chat bubbles, tool calls as calls, replies, and what it was worth.

Owns: how messages and outcomes look. Invariants: nothing is left out (long text folds, it is not cut); all text goes
through `markup`, so a reply that holds HTML is shown, never run.
Called by: `observe.report`, `observe.view`.
"""

from __future__ import annotations

import json

from springtide.observe.markup import Html, tag, wide_table
from springtide.trace import Group, Message, Outcome, ToolCall, Trajectory, Turn

_LONG = 900  # characters of a bubble that are shown unfolded


def badge(outcome: Outcome) -> Html:
    """Success, failure or environment error, with the reward and how the episode ended."""
    if outcome.failed_environment:
        return tag("span", f"environment error: {outcome.cause}", class_="badge error")
    kind, word = ("good", "success") if outcome.success else ("bad", "failed")
    if outcome.success is None:
        kind, word = "plain", "not judged"
    ended = "" if outcome.status == "completed" else f", {outcome.status.replace('_', ' ')}"
    reward = "" if outcome.reward is None else f" · reward {outcome.reward:.3g}"
    return tag("span", f"{word}{ended}{reward}", class_=f"badge {kind}")


def transcript(trajectory: Trajectory) -> Html:
    """One episode: its badge, its counts, and its messages as bubbles."""
    outcome = trajectory.outcome
    turns = iter(trajectory.turns)
    bubbles = [
        _bubble(message, next(turns, None) if message.role == "assistant" else None) for message in trajectory.messages
    ]
    counts = (
        f"{_n(len(trajectory.turns), 'turn')}, {_n(trajectory.loss_tokens, 'sampled token')} of {trajectory.tokens}"
    )
    return tag(
        "div",
        tag("div", badge(outcome), tag("span", counts, class_="muted"), class_="line"),
        tag("p", outcome.detail, class_="detail") if outcome.detail else None,
        _checks(outcome),
        bubbles or tag("p", "no messages", class_="muted"),
        class_="transcript",
    )


def group(group: Group, *, title: Html | str, key: str, open_: bool = False) -> Html:
    """A group: its members side by side in a table, each with its transcript folded below."""
    best = max((t.outcome.reward or 0.0 for t in group.trajectories), default=0.0) or 1.0
    rows = [
        tag(
            "tr",
            tag("td", f"member {t.member}" + (f", retry {t.retry}" if t.retry else "")),
            tag("td", badge(t.outcome)),
            tag("td", _reward_bar(t.outcome.reward, best)),
            tag("td", _n(len(t.turns), "turn"), class_="num"),
            tag("td", _n(t.loss_tokens, "token"), class_="num"),
            tag("td", _policies(t)),
        )
        for t in group.trajectories
    ]
    members = [
        tag("details", tag("summary", f"member {t.member} ", badge(t.outcome)), transcript(t), id=f"{key}-m{t.member}")
        for t in group.trajectories
    ]
    return tag(
        "details",
        tag("summary", title, " ", [_dot(t.outcome) for t in group.trajectories]),
        wide_table(rows, class_="members"),
        members,
        id=key,
        class_="group",
        open=open_,
    )


def _bubble(message: Message, turn: Turn | None) -> Html:
    name = message.role if message.role != "tool" or not message.name else f"tool · {message.name}"
    stale = tag("em", "stale policy", class_="stale") if turn is not None and turn.policy == "stale" else None
    info = ""
    if turn is not None:
        info = _n(turn.end - turn.start, "token") + (", cut" if turn.finish == "length" else "")
        info += f", step reward {turn.step_reward:g}" if turn.step_reward else ""
    text = _content(message)
    fold = message.role == "system" or len(text) > _LONG
    body: list[Html | None] = [
        tag("details", tag("summary", "thinking"), tag("pre", message.reasoning_content), class_="thinking")
        if message.reasoning_content
        else None,
        (_folded(text) if fold else tag("pre", text, class_="text")) if text else None,
        *(_call(call) for call in message.tool_calls),
    ]
    if not any(body):
        body = [tag("span", "(empty)", class_="muted")]
    return tag(
        "div",
        tag("div", tag("b", name), stale, tag("span", info, class_="muted"), class_="who"),
        body,
        class_=f"bubble {message.role}",
    )


def _content(message: Message) -> str:
    if isinstance(message.content, str):
        return message.content
    return "".join(part.get("text", "") if part.get("type") == "text" else "[image]" for part in message.content)


def _folded(text: str) -> Html:
    head = " ".join(text[:110].split())
    return tag("details", tag("summary", f"{head}… ({len(text):,} characters)"), tag("pre", text, class_="text"))


def _call(call: ToolCall) -> Html:
    try:
        arguments = json.loads(call.arguments)
    except ValueError:
        arguments = None
    if isinstance(arguments, dict):
        inside = [
            [tag("span", f"{key}=", class_="arg"), json.dumps(value, ensure_ascii=False), ", " if more else ""]
            for more, (key, value) in zip(
                [*([True] * (len(arguments) - 1)), False], arguments.items(), strict=False
            )
        ]  # fmt: skip
    else:
        inside = [[call.arguments]]
    return tag(
        "div",
        tag("code", tag("b", call.name), "(", inside, ")"),
        tag("div", call.error, class_="callerror") if call.error else None,
        class_="call",
    )


def _checks(outcome: Outcome) -> Html | None:
    if not outcome.checks:
        return None
    rows = [
        tag("tr", tag("td", c.name), tag("td", f"{c.value:g}"), tag("td", f"×{c.weight:g}"), tag("td", c.evidence))
        for c in outcome.checks
    ]
    return tag("details", tag("summary", _n(len(rows), "check")), wide_table(rows), class_="checks")


def _reward_bar(reward: float | None, best: float) -> Html:
    if reward is None:
        return tag("span", "no reward", class_="muted")
    width = 100 * min(1.0, max(0.0, reward / best))
    return tag("div", tag("i", style=f"width:{width:.1f}%"), tag("span", f"{reward:.3g}"), class_="rewardbar")


def _policies(trajectory: Trajectory) -> str:
    stale = sum(t.policy == "stale" for t in trajectory.turns)
    return f"{stale} of {len(trajectory.turns)} turns stale" if stale else ""


def _dot(outcome: Outcome) -> Html:
    kind = "error" if outcome.failed_environment else "good" if outcome.success else "bad"
    return tag("i", class_=f"dot {kind}", title="environment error" if kind == "error" else f"reward {outcome.reward}")


def _n(count: int, word: str) -> str:
    return f"{count:,} {word}" + ("" if count == 1 else "s")
