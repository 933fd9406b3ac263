"""Supervised training of nano on drills and gold, resumable at any saved step.

Owns: the batches, the schedule, the checkpoint. Invariants: the batch of step k follows from (seed, k) alone, so a
resumed run goes on exactly where it stopped; loss counts the model's own tokens only; the checkpoint (weights,
optimiser, curve) is one file under 25 MB, replaced atomically. Called by: the command line, tests.
"""

from __future__ import annotations

import io
import random
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from scripts.nano.dialogue import END, PAD, Dialogue, encode
from scripts.nano.drills import DRILLS, Lexicon
from scripts.nano.gold import Seen
from scripts.nano.network import hidden_states, make_config, make_model
from tokenizers import Tokenizer
from transformers import Qwen3Config, Qwen3ForCausalLM

from springtide.trace import atomic_write
from springtide.trainer.muon import Muon


@dataclass(frozen=True)
class Recipe:
    """How nano is trained; the defaults are what made the shipped weights.

    `steps` is the whole schedule; the learning rates fall to zero over its last `decay`. `db_share` and `kg_share` of
    the dialogues are those suites', the rest is household's: kg is learned several times faster than the others.
    `gold_share` of each are gold, the rest drills.
    """

    seed: int = 0
    steps: int = 500
    batch: int = 32
    micro_batch: int = 16
    db_share: float = 0.48
    kg_share: float = 0.08
    gold_share: float = 0.15
    muon_lr: float = 0.01
    adam_lr: float = 0.003
    warmup: int = 20
    decay: float = 0.0
    clip: float = 1.0


@dataclass
class Run:
    """A training in progress. `tokens` counts every token of a batch, `learned` those with loss."""

    recipe: Recipe
    model: Qwen3ForCausalLM
    muon: Muon
    adam: torch.optim.AdamW
    step: int = 0
    tokens: int = 0
    learned: int = 0
    seconds: float = 0.0
    curve: list[dict[str, Any]] = field(default_factory=list)


def start(recipe: Recipe, tokenizer: Tokenizer) -> Run:
    """A run at step 0."""
    end, pad = tokenizer.token_to_id(END), tokenizer.token_to_id(PAD)
    if end is None or pad is None:
        raise ValueError(f"the tokenizer lacks {END} or {PAD}")
    config = make_config(tokenizer.get_vocab_size(), end, pad)
    return _run(recipe, make_model(config, recipe.seed))


def _run(recipe: Recipe, model: Qwen3ForCausalLM) -> Run:
    hidden = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    adam = torch.optim.AdamW(others, lr=recipe.adam_lr, betas=(0.9, 0.98), weight_decay=0.0)
    return Run(recipe, model, Muon(hidden, recipe.muon_lr, adjust="original"), adam)


def draw(recipe: Recipe, step: int, seen: Seen, lexicon: Lexicon) -> list[Dialogue]:
    """The dialogues of a step: each suite by its share (stratified), gold by its share, the rest drills."""
    rng = random.Random(f"{recipe.seed}/{step}")
    batch = []
    for i in range(recipe.batch):
        place = (i + rng.random()) / recipe.batch
        suite = "db" if place < recipe.db_share else "kg" if place < recipe.db_share + recipe.kg_share else "household"
        if rng.random() < recipe.gold_share:
            batch.append(rng.choice(seen.gold[suite]))
        else:
            batch.append(DRILLS[suite](rng, lexicon))
    return batch


def train_step(run: Run, dialogues: list[Dialogue], tokenizer: Tokenizer) -> float:
    """One optimiser step; returns the mean loss a learned token, in nats."""
    began = time.perf_counter()
    recipe = run.recipe
    rows = sorted(encode(dialogues, tokenizer), key=lambda row: len(row[0]))
    count = sum(int(learn[1:].sum()) for _, learn in rows)
    run.model.zero_grad(set_to_none=True)
    total = 0.0
    for at in range(0, len(rows), recipe.micro_batch):
        part = rows[at : at + recipe.micro_batch]
        ids, learn = _pad(part)
        hidden = hidden_states(run.model, ids[:, :-1])[learn[:, 1:]]
        logits = hidden @ run.model.model.embed_tokens.weight.T
        loss = F.cross_entropy(logits, ids[:, 1:][learn[:, 1:]], reduction="sum")
        (loss / count).backward()
        total += float(loss.detach())
    torch.nn.utils.clip_grad_norm_(run.adam.param_groups[0]["params"], recipe.clip)
    scale = rate(recipe, run.step)
    for group in run.muon.param_groups:
        group["lr"] = recipe.muon_lr * scale
    run.adam.param_groups[0]["lr"] = recipe.adam_lr * scale
    run.muon.step()
    run.adam.step()
    run.step += 1
    run.tokens += sum(len(ids) for ids, _ in rows)
    run.learned += count
    run.seconds += time.perf_counter() - began
    return total / count


def rate(recipe: Recipe, step: int) -> float:
    """The learning rates' factor: a linear start, a plateau, a linear end."""
    left = (recipe.steps - step) / max(1.0, recipe.decay * recipe.steps)
    return max(0.0, min(1.0, (step + 1) / recipe.warmup, left))


def _pad(rows: list[tuple[np.ndarray, np.ndarray]]) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(len(ids) for ids, _ in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    learn = torch.zeros(len(rows), longest, dtype=torch.bool)
    for i, (row, mask) in enumerate(rows):
        ids[i, : len(row)] = torch.from_numpy(row)
        learn[i, : len(row)] = torch.from_numpy(mask)
    return ids, learn


def save(run: Run, path: Path) -> None:
    """Write everything a resumed run needs, weights in full precision."""
    state = {
        "recipe": asdict(run.recipe),
        "config": run.model.config.to_dict(),
        "model": {n: t for n, t in run.model.state_dict().items() if n != "lm_head.weight"},
        "muon": run.muon.state_dict(),
        "adam": run.adam.state_dict(),
        "counts": {"step": run.step, "tokens": run.tokens, "learned": run.learned, "seconds": run.seconds},
        "curve": run.curve,
    }
    buffer = io.BytesIO()
    torch.save(state, buffer)
    atomic_write(path, buffer.getvalue())


def resume(path: Path, **changes: Any) -> Run:
    """The run saved at `path`; `changes` replace fields of its recipe (a longer schedule, say)."""
    state = torch.load(path, weights_only=True)
    model = Qwen3ForCausalLM(Qwen3Config(**state["config"])).float()
    model.load_state_dict(state["model"], strict=False)
    model.tie_weights()
    run = _run(replace(Recipe(**state["recipe"]), **changes), model)
    run.muon.load_state_dict(state["muon"])
    run.adam.load_state_dict(state["adam"])
    for name, value in state["counts"].items():
        setattr(run, name, value)
    run.curve = state["curve"]
    return run
