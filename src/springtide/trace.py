"""The one trace model: what is drawn, what was said, what was sampled, and what it was worth.

Rollout, training, evaluation, checkpoints, the viewer and replay all use these types; there is no second form of any.
Invariants: a trajectory holds exactly the ids the engine sampled; a failed environment has no reward; every array of
a segment has the segment's length; versions never fall along a trajectory except in turns marked stale.
"""

from __future__ import annotations

import hashlib
import json
import math
import numbers
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from springtide.wire import pack, record, unpack

Split = Literal["train", "test", "ood"]
Status = Literal[
    "completed", "turn_limit", "context_limit", "time_limit", "invalid_action", "cancelled", "environment_error"
]
Cause = Literal["setup", "tool", "judge", "infrastructure", "worker_lost"]
INCOMPLETE: tuple[Status, ...] = ("turn_limit", "context_limit", "time_limit", "invalid_action")

REWARD_LIMIT = 1e6
"""The largest size of a reward: beyond any use, and no sum, square or mean of such numbers can overflow."""

_STEP_BITS = 32


def make_version(incarnation: int, step: int) -> int:
    """The tag of a weight set: a resumed run is a new incarnation, so no tag ever names two weights."""
    return (incarnation << _STEP_BITS) | step


def version_step(version: int) -> int:
    """The optimiser step inside a version tag; staleness is a difference of these."""
    return version & ((1 << _STEP_BITS) - 1)


def sampling_seed(run_seed: int, purpose: str, task_id: str, visit: int, member: int, retry: int) -> int:
    """A 63-bit seed for one episode's tokens. Distinct for every member of every visit, on every rank."""
    text = json.dumps([run_seed, purpose, task_id, visit, member, retry])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def as_reward(value: Any, what: str) -> float:
    """`value` as a float. Raises: TypeError or ValueError that begins with `what` ("Shop.score returned", say)."""
    if not isinstance(value, numbers.Real):
        raise TypeError(f"{what} {type(value).__name__}; it must be a number")
    try:
        reward = float(value)
    except OverflowError:  # an integer of hundreds of digits
        reward = math.inf
    if not abs(reward) <= REWARD_LIMIT:
        raise ValueError(f"{what} {reward:g}; it must be finite and at most {REWARD_LIMIT:,.0f} in size")
    return reward


def is_finite(value: Any) -> bool:
    """Whether `value` is a number that a float holds, neither NaN nor infinite."""
    try:
        return isinstance(value, numbers.Real) and math.isfinite(value)
    except OverflowError:
        return False


def common_start(a: np.ndarray, b: np.ndarray) -> int:
    """How many tokens two id arrays begin with together."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n


@record
@dataclass(frozen=True, slots=True)
class Limits:
    """What one episode may use. Times in seconds; they run only inside the call they bound."""

    max_turns: int = 10
    start_s: float = 60.0
    act_s: float = 30.0
    settle_s: float = 30.0
    score_s: float = 30.0


@record
@dataclass(frozen=True, slots=True)
class TaskRef:
    """What the world outside an environment worker may know of a task."""

    id: str
    suite: str
    version: str
    split: str
    level: str
    index: int
    seed: int
    tags: tuple[str, ...] = ()


@record
@dataclass(frozen=True, slots=True)
class Task:
    """A task's specification. Lives in environment workers only; everyone else holds its `ref`."""

    id: str
    suite: str
    version: str
    split: str
    level: str
    index: int
    seed: int
    tags: tuple[str, ...] = ()
    limits: Limits | None = None  # None: the environment's own
    payload: dict[str, Any] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)
    setup: tuple[dict[str, Any], ...] = ()
    settle: tuple[dict[str, Any], ...] = ()
    judge: dict[str, Any] | None = None
    infeasible: bool = False

    @property
    def ref(self) -> TaskRef:
        return TaskRef(self.id, self.suite, self.version, self.split, self.level, self.index, self.seed, self.tags)


@record
@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call as the model wrote it: `arguments` is its JSON text, kept even when it is not JSON.

    `error` says why it must not be executed (malformed, or cut by the token limit); the environment answers with it.
    """

    id: str
    name: str
    arguments: str
    error: str | None = None


@record
@dataclass(frozen=True, slots=True)
class Message:
    """A chat message in OpenAI's form. `content` is text, or a tuple of content parts (dicts) with images."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | tuple[dict[str, Any], ...] = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str = ""

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.get("text", "") for part in self.content)

    def to_openai(self) -> dict[str, Any]:
        out: dict[str, Any] = {
            "role": self.role,
            "content": self.content if isinstance(self.content, str) else list(self.content),
        }
        if self.tool_calls:
            out["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
                for c in self.tool_calls
            ]
        for key in ("tool_call_id", "name"):
            if getattr(self, key) is not None:
                out[key] = getattr(self, key)
        if self.reasoning_content:
            out["reasoning_content"] = self.reasoning_content
        return out

    @classmethod
    def from_openai(cls, data: dict[str, Any]) -> Message:
        content = data.get("content") or ""
        calls = tuple(
            ToolCall(c.get("id") or f"call_{i}", c["function"]["name"], c["function"].get("arguments") or "{}")
            for i, c in enumerate(data.get("tool_calls") or ())
        )
        return cls(
            role=data["role"],
            content=content if isinstance(content, str) else tuple(content),
            tool_calls=calls,
            tool_call_id=data.get("tool_call_id"),
            name=data.get("name"),
            reasoning_content=data.get("reasoning_content") or "",
        )


@record
@dataclass(frozen=True, slots=True)
class ImageRef:
    """An image by content: sha256 of the encoded bytes, before any resizing."""

    sha256: str
    media_type: str
    width: int
    height: int


@record
@dataclass(frozen=True, slots=True)
class ImageSpan:
    """Where an image's placeholder tokens stand in a segment: [start, start + length), with its patch grid."""

    ref: ImageRef
    start: int
    length: int
    grid: tuple[int, int, int]


@record
@dataclass(frozen=True, slots=True)
class Segment:
    """One contiguous token sequence the engine conditioned on, T tokens long.

    ids: int32 [T]. loss_mask: bool [T], true where sampled. logprobs: float32 [T], the sampling policy's, 0 where the
    mask is false. versions: int64 [T], -1 where not sampled.
    """

    ids: np.ndarray
    loss_mask: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    images: tuple[ImageSpan, ...] = ()

    def __post_init__(self) -> None:
        shape = self.ids.shape
        for name, dtype in (
            ("ids", np.int32),
            ("loss_mask", np.bool_),
            ("logprobs", np.float32),
            ("versions", np.int64),
        ):
            array = getattr(self, name)
            if array.shape != shape or array.ndim != 1 or array.dtype != dtype:
                raise ValueError(f"segment.{name} is {array.dtype} {array.shape}; it must be {np.dtype(dtype)} {shape}")
        if not np.array_equal(self.loss_mask, self.versions >= 0):
            raise ValueError("segment: versions must be set exactly where loss_mask is true")

    @property
    def loss_tokens(self) -> int:
        return int(self.loss_mask.sum())


@record
@dataclass(frozen=True, slots=True)
class Turn:
    """One assistant turn: where its sampled tokens stand, and where its time went (seconds)."""

    segment: int
    start: int
    end: int
    step_reward: float = 0.0
    policy: Literal["current", "stale", "gold"] = "current"
    finish: Literal["stop", "length"] = "stop"
    queue_s: float = 0.0
    decode_s: float = 0.0
    env_s: float = 0.0
    paused_s: float = 0.0


@record
@dataclass(frozen=True, slots=True)
class Check:
    """One thing a judge looked at."""

    name: str
    value: float
    weight: float = 1.0
    evidence: str = ""


@record
@dataclass(frozen=True, slots=True)
class Outcome:
    """How an episode ended. An environment error has a cause and neither reward nor success."""

    status: Status
    reward: float | None = None
    success: bool | None = None
    checks: tuple[Check, ...] = ()
    cause: Cause | None = None
    detail: str = ""
    artifacts: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.status == "environment_error") != (self.cause is not None):
            raise ValueError("outcome: an environment_error has a cause, and nothing else has one")
        if self.cause is not None and (self.reward is not None or self.success is not None):
            raise ValueError("outcome: an environment_error has no reward and no success")
        if self.reward is not None and not is_finite(self.reward):
            raise ValueError(f"outcome: reward {self.reward!r:.60} is not a finite number")

    @property
    def failed_environment(self) -> bool:
        return self.status == "environment_error"


@record
@dataclass(frozen=True, slots=True)
class Trajectory:
    """The record of one episode. `header` holds fingerprints (tokenizer, template), sampling parameters, versions."""

    task: TaskRef
    visit: int
    member: int
    retry: int
    segments: tuple[Segment, ...]
    turns: tuple[Turn, ...]
    messages: tuple[Message, ...]
    outcome: Outcome
    header: dict[str, Any] = field(default_factory=dict)

    @property
    def loss_tokens(self) -> int:
        return sum(s.loss_tokens for s in self.segments)

    @property
    def tokens(self) -> int:
        return sum(len(s.ids) for s in self.segments)

    def oldest_version(self) -> int | None:
        """The oldest version a `current` turn was sampled with: what the trajectory's staleness counts from."""
        seen = [
            int(self.segments[t.segment].versions[t.start : t.end].min())
            for t in self.turns
            if t.policy == "current" and t.end > t.start
        ]
        return min(seen) if seen else None


@record
@dataclass(frozen=True, slots=True)
class Group:
    """All trained members of one visit, in the order of their member numbers."""

    task: TaskRef
    visit: int
    trajectories: tuple[Trajectory, ...]

    def save(self, path: Path) -> None:
        """Write the group to `path`, atomically and durably."""
        atomic_write(path, pack(self))

    @staticmethod
    def load(path: Path) -> Group:
        group = unpack(path.read_bytes())
        if not isinstance(group, Group):
            raise ValueError(f"{path} does not hold a group")
        return group


def atomic_write(path: Path, data: bytes) -> None:
    """Write `data` to `path` so that a reader sees the old file or the whole new one, also after a crash."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    finally:
        temporary.unlink(missing_ok=True)
