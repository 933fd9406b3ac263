"""The tables of the trainer and of the frozen policies beside it.

Owns: their options, types, defaults and bounds. Called by: `config`, which holds them, and the trainer's modules.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from springtide.tables import Decay, LearningRate, Natural, Positive, Processes, Share, Table


class ColdStart(Table):
    steps: Natural = Field(0, description="supervised steps on gold before RL; 0 for none")
    tasks: Positive = Field(256, description="gold tasks a suite")
    batch: Positive = Field(32, description="trajectories a step")
    lr: LearningRate = Field(1e-3, description="learning rate of the cold start")


class Lora(Table):
    rank: Natural = Field(0, description="of the trained update of each frozen layer; 0: all weights are trained")
    alpha: float = Field(32.0, gt=0, le=1e6, description="the update is scaled by alpha / rank")
    targets: tuple[str, ...] = Field(
        ("all",),
        min_length=1,
        description="its layers, as q_proj or mlp.up_proj; all: every linear one but the head",
    )


class Trainer(Table):
    groups: Positive = Field(24, description="groups an optimiser step consumes")
    micro_tokens: Positive = Field(8192, description="padded tokens in one forward pass")
    optimizer: Literal["adamw", "muon"] = Field(
        "adamw", description="AdamW, or Muon for hidden matrices with AdamW for the rest"
    )
    lr: LearningRate = Field(4e-4, description="learning rate")
    warmup: Natural = Field(0, description="steps of linear warm-up")
    lr_decay: Share = Field(0.0, description="the last share of the run, in which the rate falls linearly to 0")
    weight_decay: float = Field(0.0, ge=0, le=100, description="decoupled from the gradient; matrices only")
    betas: tuple[Decay, Decay] = Field((0.9, 0.95), description="AdamW's decay rates, each below 1")
    grad_clip: float = Field(1.0, gt=0, le=1e9, description="largest norm of a step's gradient")
    logit_chunk: Positive = Field(4096, description="action tokens whose logits exist at once")
    checkpoint_every: Positive = Field(20, description="steps between checkpoints")
    checkpoint_keep: Positive = Field(2, description="newest checkpoints kept")
    device: str = Field("cpu", description="the torch device of the trainer")
    ranks: Processes = Field(1, description="trainer processes, which share a step's segments (docs/fsdp.md)")
    sharding: Literal["replicate", "fsdp"] = Field(
        "replicate", description="each rank holds all weights, gradients and moments, or its rows of them (FSDP2)"
    )
    param_dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="what the weights are cast to for a pass; they stay float32. bfloat16: fsdp only"
    )
    reduce_dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="in which the ranks sum gradients. bfloat16: fsdp only"
    )
    inflight: int = Field(
        2, ge=1, le=64, description="micro-batches that may wait for log-probs of a frozen rank before their loss"
    )
    lend: bool = Field(False, description="the trainer's ranks may host an engine while they wait for data")
    activation_checkpointing: bool = Field(
        False, description="keep each layer's input only, and compute its activations again in the backward pass"
    )
    cold_start: ColdStart = ColdStart()
    lora: Lora = Lora()


class Reference(Table):
    path: str | None = Field(None, description="weights of the KL reference; default: the run's start")
    pipeline: Literal["auto", "streaming", "aggregate", "resident"] = Field(
        "auto",
        description="who computes its log-probs: a rank of its own, by micro-batch while the trainer trains "
        "(streaming), or the trainer, which loads it for each step (aggregate) or keeps it (resident); auto: "
        "streaming, or the trainer's adapter turned off",
    )
