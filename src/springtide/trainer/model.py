"""The trained policy: a Hugging Face causal LM and the log-probs of its action tokens.

Owns: loading a model directory, and going from hidden states to log-probs without ever holding logits for more than
`logit_chunk` action tokens. Invariants: weights are float32; dropout is off in training too (the log-probs trained on
are those the engine samples with); the logits are divided by the temperature, nothing else.
Called by: trainer and reference ranks, cold start and model building scripts.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, PreTrainedModel

from springtide.trainer.attention import ATTENTION
from springtide.trainer.data import Row
from springtide.trainer.lora import Adapter
from springtide.trainer.packing import MicroBatch, collate
from springtide.training import Lora


class ModelError(Exception):
    """A model directory that cannot be trained. One line: what is wrong with it and what would do."""


class Policy:
    """A causal LM and where it came from (`directory`: its tokenizer files travel with checkpoints)."""

    def __init__(self, model: PreTrainedModel, directory: Path) -> None:
        self.model, self.directory = model.eval(), directory
        self.adapter: Adapter | None = None
        # Llama 4's base is called otherwise than it says.
        self._body: Any = model.base_model if model.base_model is not model else getattr(model, "model", None)
        self.head = model.get_output_embeddings()
        if self.head is None or self._body is None:
            raise ModelError(f"{directory}: {type(model).__name__} has no output embeddings; give a causal LM")
        # How the weights come to hand for a pass, and how many passes make one's own many: trainer.shards changes both.
        self.at_hand: Callable[..., Any] = lambda compute, *args: compute(*args)
        self.rounds: Callable[[int], int] = int
        self.lockstep = False
        self._check()

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def vocab_size(self) -> int:
        return self.head.weight.shape[0]

    def parameters(self) -> list[torch.nn.Parameter]:
        """The trained parameters, tied ones once, in checkpoint order."""
        return list(self.trained().values())

    def trained(self) -> dict[str, torch.nn.Parameter]:
        """The same by name: all weights, or an adapter's."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def tensors(self) -> dict[str, Tensor]:
        """The weights by checkpoint name, tied ones once, detached (not copied, but merged where an adapter is)."""
        parameters = {name: p.detach() for name, p in self.model.named_parameters()}
        return self.adapter.merge(parameters) if self.adapter else parameters

    def adapt(self, config: Lora, seed: int) -> Adapter:
        """From now on only an adapter is trained. Raises: ModelError for targets that are not there."""
        try:
            self.adapter = Adapter(self.model, config, seed)
        except ValueError as error:
            raise ModelError(f"{self.directory}: {error}") from None
        return self.adapter

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Overwrite all weights in place. Raises: ModelError if names or shapes disagree."""
        own = dict(self.model.named_parameters())
        if own.keys() != tensors.keys():
            odd = sorted(own.keys() ^ tensors.keys())
            raise ModelError(f"weights do not fit the model of {self.directory}: {odd[:4]} are on one side only")
        with torch.no_grad():
            for name, parameter in own.items():
                if parameter.shape != tensors[name].shape:
                    raise ModelError(
                        f"weights do not fit the model of {self.directory}: {name} is {tuple(tensors[name].shape)}, "
                        f"not {tuple(parameter.shape)}"
                    )
                parameter.copy_(tensors[name])

    def logprobs(self, batch: MicroBatch, temperature: float, logit_chunk: int) -> Tensor:
        """Log-probs of the batch's action tokens, float32 [A], with gradient where enabled."""
        return self.judge(batch, temperature, logit_chunk)[0]

    def judge(
        self, batch: MicroBatch, temperature: float, logit_chunk: int, *, entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """`logprobs`, and where asked for the entropy of the distribution each was taken from, float32 [A], in nats.

        Beyond one chunk, each chunk's logits are computed again in the backward pass instead of being kept.
        """
        return self.at_hand(self._judge, batch, temperature, logit_chunk, entropy)

    def idle(self) -> None:
        """A pass that adds nothing, backward too where gradients are enabled."""
        one = np.zeros(1, dtype=np.float32)
        row = Row(("idle", 0, 0, 0), np.zeros(2, np.int32), np.ones(1, np.int64), one, one.astype(np.int64), 0.0, 0.0)
        logprobs = self.logprobs(collate([row], self.device), 1.0, 1)
        if logprobs.requires_grad:
            (0 * logprobs.sum()).backward()

    def _judge(
        self, batch: MicroBatch, temperature: float, logit_chunk: int, entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        out = self._body(input_ids=batch.ids, position_ids=batch.positions, use_cache=False, tree=batch.tree)
        hidden = out.last_hidden_state[0].index_select(0, batch.predict)
        if len(hidden) <= logit_chunk:
            values = self._chunk(hidden, batch.targets, temperature, entropy)
        else:
            parts = zip(hidden.split(logit_chunk), batch.targets.split(logit_chunk))
            values = torch.cat(
                [checkpoint(self._chunk, h, t, temperature, entropy, use_reentrant=False) for h, t in parts], dim=-1
            )
        values = values.index_select(-1, batch.pair)
        return (values[0], values[1]) if entropy else (values, None)

    def score(self, ids: np.ndarray) -> np.ndarray:
        """Log-probs (temperature 1) of each token of `ids` (int32 [T]) after the first, float32 [T - 1]."""
        with torch.no_grad():
            return self.at_hand(self._score, torch.from_numpy(ids.astype(np.int64)).to(self.device)[None]).cpu().numpy()

    def _score(self, rows: Tensor) -> Tensor:
        hidden = self._body(input_ids=rows, use_cache=False).last_hidden_state[0, :-1]
        return self._chunk(hidden, rows[0, 1:], 1.0, False)

    def _chunk(self, hidden: Tensor, targets: Tensor, temperature: float, entropy: bool) -> Tensor:
        """Log-probs of `targets` [N]; with entropy [2, N], it below them."""
        logits = self.head(hidden).float()
        if temperature != 1.0:
            logits = logits / temperature
        logprobs = -F.cross_entropy(logits, targets, reduction="none")
        if not entropy:
            return logprobs
        every = F.log_softmax(logits, dim=-1)
        return torch.stack((logprobs, -(every.exp() * every).sum(-1)))

    def _check(self) -> None:
        """Compare our log-probs of segments that begin alike with the model's own logits and attention, each by itself.

        Some architectures scale or cap their logits behind the head, mix tokens outside attention, or have another
        attention than ours; those would train another policy than the one that is sampled.
        """
        rows = []
        for i, last in enumerate((3, 4, 5)):
            ids = (np.array([1, 2, 3, 1, last, 2][: 6 - i], dtype=np.int32)) % self.vocab_size
            at = np.arange(1, len(ids))
            zeros = np.zeros(len(at), dtype=np.float32)
            rows.append(Row(("check", 0, i, 0), ids, at, zeros, np.zeros(len(at), dtype=np.int64), 0.0, 1.0))
        with torch.no_grad():
            ours = self.logprobs(collate(rows, self.device), 1.0, 1 << 20)
            theirs = []
            self.model.set_attn_implementation("eager")
            for r in rows:
                tokens = torch.from_numpy(r.ids.astype(np.int64)).to(self.device)
                logits = self.model(input_ids=tokens[None], use_cache=False).logits[0, :-1].float()
                theirs.append(-F.cross_entropy(logits, tokens[1:], reduction="none"))
            self.model.set_attn_implementation(ATTENTION)
        expected = torch.cat(theirs)
        # Weights that are not finite are another fault, which is named where it counts: at a checkpoint, a publication.
        if expected.isfinite().all() and not torch.allclose(ours, expected, atol=1e-3, rtol=1e-3):
            raise ModelError(
                f"{self.directory}: {type(self.model).__name__} scales or caps its logits after the output head, mixes "
                "tokens outside attention, or has another attention; the trainer supports none of these"
            )


def load_policy(directory: Path, device: str = "cpu") -> Policy:
    """Load a Hugging Face model directory in float32, from local files only. Raises: ModelError."""
    if not (directory / "config.json").is_file():
        raise ModelError(f"{directory} has no config.json; model.path must be a Hugging Face model directory")
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=torch.float32,
            attn_implementation=ATTENTION,
            local_files_only=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(f"{directory} does not load as a causal LM: {str(error).splitlines()[0]}") from error
    model, report = loaded
    if absent := sorted(map(str, report["missing_keys"])):
        raise ModelError(
            f"{directory}: its weights lack {', '.join(absent[:4])}; the model would start from noise there"
        )
    try:
        policy = Policy(model.to(device), directory)
    except ValueError as error:  # an attention that neither ours nor PyTorch's computes, as Gemma 2's
        raise ModelError(
            f"{directory}: {type(model).__name__} cannot be trained: {str(error).splitlines()[0]}"
        ) from None
    tokens = _tokenizer_size(directory)
    if tokens > policy.vocab_size:
        raise ModelError(
            f"{directory}: the tokenizer has ids up to {tokens - 1}, the model a vocabulary of {policy.vocab_size}; "
            "they belong to different models, or the embedding must be resized"
        )
    return policy


def _tokenizer_size(directory: Path) -> int:
    """One more than the largest id of tokenizer.json; 0 without one."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        return 0
    data = json.loads(path.read_text())
    vocab = data.get("model", {}).get("vocab", {})
    ids = list(vocab.values()) if isinstance(vocab, dict) else [len(vocab) - 1]  # unigram: a list of pieces
    return 1 + max([*ids, *(t["id"] for t in data.get("added_tokens", ()))], default=-1)
