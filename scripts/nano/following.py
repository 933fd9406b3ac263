"""How well a model follows given dialogues: one forward pass, no sampling.

The probability of every token of a correct solution is known without drawing it, so the chance of sampling exactly that
solution at temperature 1, and whether greedy decoding takes it, cost one forward pass. Both are lower bounds of success
(other solutions may do). Called by: the builder's curve, the audit, tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scripts.nano.dialogue import Dialogue, encode
from scripts.nano.network import hidden_states
from tokenizers import Tokenizer
from transformers import Qwen3ForCausalLM

_BATCH = 32


@dataclass(frozen=True)
class Followed:
    """One dialogue: ids int32 [T], learn bool [T]; where learn: logprobs float32 [T], best bool [T] (greedy)."""

    ids: np.ndarray
    learn: np.ndarray
    logprobs: np.ndarray
    best: np.ndarray

    @property
    def probability(self) -> float:
        """The chance of sampling exactly these turns at temperature 1."""
        return float(np.exp(self.logprobs[self.learn].sum()))

    @property
    def greedy(self) -> bool:
        """Whether greedy decoding takes exactly these turns."""
        return bool(self.best[self.learn].all())


@torch.no_grad()
def follow(model: Qwen3ForCausalLM, tokenizer: Tokenizer, dialogues: Sequence[Dialogue]) -> list[Followed]:
    """Every dialogue, in the order given."""
    rows = encode(dialogues, tokenizer)
    order = sorted(range(len(rows)), key=lambda i: len(rows[i][0]))
    found: dict[int, Followed] = {}
    for at in range(0, len(order), _BATCH):
        part = order[at : at + _BATCH]
        longest = max(len(rows[i][0]) for i in part)
        ids = torch.zeros(len(part), longest, dtype=torch.int64)
        for row, i in enumerate(part):
            ids[row, : len(rows[i][0])] = torch.from_numpy(rows[i][0])
        hidden = hidden_states(model, ids[:, :-1])
        for row, i in enumerate(part):
            given, learn = rows[i]
            at_tokens = np.flatnonzero(learn)
            logits = hidden[row, at_tokens - 1] @ model.model.embed_tokens.weight.T
            target = torch.from_numpy(given[at_tokens].astype(np.int64))
            logprobs, best = np.zeros(len(given), np.float32), np.zeros(len(given), np.bool_)
            logprobs[at_tokens] = torch.log_softmax(logits, -1).gather(1, target[:, None])[:, 0].numpy()
            best[at_tokens] = (logits.argmax(-1) == target).numpy()
            found[i] = Followed(given, learn, logprobs, best)
    return [found[i] for i in range(len(rows))]


def summary(followed: Sequence[Followed]) -> dict[str, float]:
    """`sampled` (mean probability), `greedy` (share), `nats` a learned token."""
    tokens = sum(int(f.learn.sum()) for f in followed)
    return {
        "sampled": float(np.mean([f.probability for f in followed])),
        "greedy": float(np.mean([f.greedy for f in followed])),
        "nats": -sum(float(f.logprobs.sum()) for f in followed) / tokens,
    }
