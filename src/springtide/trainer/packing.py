"""Which segments share a forward pass, and how they are laid out in it. Called by the trainer and reference ranks.

Segments are sorted as token strings and cut into micro-batches. Inside one, they form a prefix tree that is laid out
flat: a run of tokens that several segments begin with (a system prompt, a group's task, equal first turns) is one run
of nodes, computed once, and its gradient is the sum of theirs. Products, norms and the output head see the nodes only,
without padding; so does attention on a CPU (`attention.c`), which follows each run's path of nodes. On a GPU attention
alone sees one right-padded row a segment, gathered from the nodes.

Invariants: every segment lies in exactly one micro-batch, whole; rows * longest is at most `micro_tokens` (a longer
segment gets a micro-batch of its own); each action token has its own log-prob; the layout depends on the ids only.

Why a gather there and not a mask: causal attention never looks right, so padded rows need no mask. Sharing prefixes is
exact because a causal model's state at a token depends on the tokens up to it and on nothing else.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from springtide.trace import common_start
from springtide.trainer.data import Row

# The cost of a row's token in attention against a node's in all else, and of one more micro-batch, in nodes. Measured
# on a CPU with a 1.7 M model: attention is about a fifth of a token's time; 480-token batches ran 8% slow.
_ATTENTION_SHARE = 0.2
_OVERHEAD = 40


def plan(rows: Sequence[np.ndarray], micro_tokens: int) -> list[list[int]]:
    """Partition the token strings `rows` (int32 [T] each) into micro-batches of indices, neighbours together.

    The cost (nodes + share * padded row tokens + overhead, summed) is minimal among cuts of the sorted order.
    """
    order, shared = prefix_order(rows)
    n = len(order)
    sizes = [len(rows[i]) for i in order]
    best, cut = [0.0] * (n + 1), [0] * (n + 1)  # best[i]: least cost of the first i; the last batch is [cut[i], i)
    for end in range(1, n + 1):
        best[end] = float("inf")
        width = nodes = 0
        for start in range(end - 1, -1, -1):
            width = max(width, sizes[start])
            padded = (end - start) * width
            if padded > micro_tokens and end - start > 1:
                break
            # The batch's first segment shares with none before it; those after share with their neighbour.
            whole = nodes + sizes[start]
            cost = best[start] + whole + _ATTENTION_SHARE * padded + _OVERHEAD
            if cost < best[end]:
                best[end], cut[end] = cost, start
            nodes += sizes[start] - shared[start]
    batches: list[list[int]] = []
    end = n
    while end:
        batches.append(order[cut[end] : end])
        end = cut[end]
    return batches[::-1]


def prefix_order(rows: Sequence[np.ndarray]) -> tuple[list[int], list[int]]:
    """Indices of the token strings `rows` in sorted order, and how many tokens each shares with the one before it."""
    # Big-endian bytes sort as the (non-negative) numbers do.
    order = sorted(range(len(rows)), key=lambda i: (rows[i].astype(">i4").tobytes(), i))
    return order, [0] + [common_start(rows[a], rows[b]) for a, b in itertools.pairwise(order)]


@dataclass(frozen=True, slots=True)
class Tree:
    """Who sees whom, in two forms: as runs of new nodes and their paths, and as padded rows.

    runs: int64 [R + 1, 3] on the CPU, of each row that adds nodes: the first, how many, and where its path begins in
    `paths` (the last row ends the last path). paths: int64 [., 2] on the CPU, intervals of nodes from the root to the
    run's own, each its first node and length. longest: the most nodes on a path.
    gather: int64 [rows * width], the node of each row's token (0 beyond a row's end). scatter: int64 [N], where among
    them each node is first found.
    """

    runs: Tensor
    paths: Tensor
    longest: int
    gather: Tensor
    scatter: Tensor
    rows: int


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """N nodes, P distinct (node, next token) pairs, A action tokens in the order of the rows given to `collate`.

    ids, positions: int64 [1, N]. predict: int64 [P], the node whose output predicts; targets: int64 [P], what.
    pair: int64 [A], the pair of each action token. row: int64 [A], the row it belongs to.
    """

    ids: Tensor
    positions: Tensor
    tree: Tree
    predict: Tensor
    targets: Tensor
    pair: Tensor
    row: Tensor


def collate(rows: Sequence[Row], device: torch.device) -> MicroBatch:
    """Lay the segments out as one prefix tree; neighbours that begin alike share nodes."""
    width = max(len(r) for r in rows)
    gather = np.zeros((len(rows), width), dtype=np.int64)
    ids, positions, scatter = [], [], []
    runs: list[tuple[int, int, int]] = []
    paths: list[tuple[int, int]] = []
    path: list[tuple[int, int]] = []
    nodes = 0
    for i, r in enumerate(rows):
        known = common_start(r.ids, rows[i - 1].ids) if i else 0
        gather[i, :known] = gather[i - 1, :known]
        new = len(r) - known
        path = _first(path, known)
        if new:
            path.append((nodes, new))
            runs.append((nodes, new, len(paths)))
            paths += path
        gather[i, known : len(r)] = np.arange(nodes, nodes + new)
        ids.append(r.ids[known:])
        positions.append(np.arange(known, len(r)))
        scatter.append(np.arange(i * width + known, i * width + len(r)))
        nodes += new
    predict = np.concatenate([gather[i, r.at - 1] for i, r in enumerate(rows)])
    targets = np.concatenate([r.ids[r.at] for r in rows]).astype(np.int64)
    _, first, pair = np.unique(predict << 32 | targets, return_index=True, return_inverse=True)
    row = np.repeat(np.arange(len(rows)), [len(r.at) for r in rows])

    def tensor(array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64)).to(device)

    return MicroBatch(
        ids=tensor(np.concatenate(ids)[None]),
        positions=tensor(np.concatenate(positions)[None]),
        tree=Tree(
            runs=torch.tensor([*runs, (nodes, 0, len(paths))]),
            paths=torch.tensor(paths),
            longest=width,
            gather=tensor(gather.reshape(-1)),
            scatter=tensor(np.concatenate(scatter)),
            rows=len(rows),
        ),
        predict=tensor(predict[first]),
        targets=tensor(targets[first]),
        pair=tensor(pair),
        row=tensor(row),
    )


def _first(path: list[tuple[int, int]], count: int) -> list[tuple[int, int]]:
    """The intervals of a path's first `count` nodes."""
    kept: list[tuple[int, int]] = []
    for first, length in path:
        if count <= 0:
            break
        kept.append((first, min(length, count)))
        count -= length
    return kept
