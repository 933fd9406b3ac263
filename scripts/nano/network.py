"""The network: a Qwen3 configuration, a start that can already copy, and a forward pass made for short batches.

Owns the sizes and the initial weights. A randomly started model of this size spends most of its training on a plateau
before it learns to copy names. So the start builds the circuit that copying needs (an induction head, Olsson et al.
2022, in the manner of mimetic initialisation, Trockman and Kolter 2023): in layer 0 two heads look one and two tokens
back and write what stood there; in layer 1 heads look for earlier places whose predecessor was the present token, and
copy what stands there. All of it is ordinary weights that training goes on to change.
Invariant: `hidden_states` equals transformers' Qwen3 on the same weights (a test). Called by: the builder.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

MOST_PARAMETERS = 2_000_000
HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD, INNER = 128, 5, 4, 2, 32, 320
POSITIONS = 1024
THETA = 1_000_000.0
_EMBEDDING = 0.1  # standard deviation of an embedding's entries
_SHARPNESS = 2.0  # of query and key norms: lets a head pick one of 150 tokens from the start
_REST = 0.3  # scale of what the other weights add to the stream at first
_FAST = 5  # rotary frequencies, the fastest first, that a head uses to find its neighbour


def make_config(vocab_size: int, end: int, pad: int) -> Qwen3Config:
    """A Qwen3 of about a million parameters."""
    return Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD,
        max_position_embeddings=POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=pad,
        dtype="float32",
    )


def make_model(config: Qwen3Config, seed: int) -> Qwen3ForCausalLM:
    """The start. Raises: ValueError if it has more than two million parameters."""
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config).float()
    count = sum(p.numel() for p in model.parameters())
    if count > MOST_PARAMETERS:
        raise ValueError(f"nano has {count} parameters; it may have {MOST_PARAMETERS}")
    with torch.no_grad():
        _build_copying(model)
    return model


def _build_copying(model: Qwen3ForCausalLM) -> None:
    """Write the induction circuit into layers 0 and 1.

    The stream's space is split by an orthonormal basis: `one` (a direction every token shares, which gives heads a
    constant query), `word` (64 directions that hold embeddings; its first 32 serve for matching), and `before` (two
    times about 32 directions, empty in embeddings, into which layer 0 writes the tokens one and two back).
    """
    h = HIDDEN
    one = F.one_hot(torch.tensor(0), h).float()
    basis = torch.randn(h, h)
    basis[:, 0] = one
    q, _ = torch.linalg.qr(basis)
    rows = q[:, 1:].T.contiguous()
    word, match = rows[:64], rows[:32]
    before = (rows[64:96], torch.cat([rows[96:127], torch.zeros(1, h)]))

    table = model.model.embed_tokens.weight
    drawn = torch.randn(len(table), 64) @ word
    table.copy_(drawn / drawn.norm(dim=1, keepdim=True) * _EMBEDDING * h**0.5)
    table[:, 0] = _EMBEDDING * h**0.5
    for layer in model.model.layers:
        layer.self_attn.q_norm.weight.fill_(_SHARPNESS)
        layer.self_attn.k_norm.weight.fill_(_SHARPNESS)
        layer.self_attn.o_proj.weight.mul_(_REST)
        layer.mlp.down_proj.weight.mul_(_REST)

    # Layer 0: a constant key, and queries turned back by one and by two positions.
    look = model.model.layers[0].self_attn
    turn = THETA ** (-torch.arange(0, HEAD, 2).float() / HEAD)
    fast = (torch.arange(HEAD // 2) < _FAST).float()
    look.k_proj.weight[:HEAD] = 0.1 * look.k_proj.weight[:HEAD] + torch.cat([fast, 0 * fast])[:, None] * one
    for head, back in enumerate((1, 2)):
        query = torch.cat([fast * torch.cos(back * turn), -fast * torch.sin(back * turn)])
        rows_of = slice(head * HEAD, (head + 1) * HEAD)
        look.q_proj.weight[rows_of] = 0.1 * look.q_proj.weight[rows_of] + query[:, None] * one
        look.o_proj.weight[:, rows_of] = before[head].T
    look.v_proj.weight[:HEAD] = 1.5 * _EMBEDDING * match

    # Layer 1: find places whose predecessor is the present token, and copy what stands there.
    copy = model.model.layers[1].self_attn
    for head in range(HEADS):
        copy.q_proj.weight[head * HEAD : (head + 1) * HEAD] = match
    copy.k_proj.weight[:HEAD] = before[0]
    copy.k_proj.weight[HEAD:] = before[0]
    copy.v_proj.weight.copy_(_EMBEDDING * word)
    copy.o_proj.weight.copy_(torch.cat([word[:32].T, word[:32].T, word[32:].T, word[32:].T], 1))


def hidden_states(model: Qwen3ForCausalLM, ids: Tensor) -> Tensor:
    """Final hidden states float32 [B, T, H] of right-padded ids int64 [B, T]; what stands in padding is meaningless.

    The same arithmetic as transformers' Qwen3 without its masks and caches: a quarter faster at this size.
    """
    batch, length = ids.shape
    config = model.config
    eps = config.rms_norm_eps
    frequency = THETA ** (-torch.arange(0, HEAD, 2).float() / HEAD)
    angle = torch.arange(length)[:, None] * frequency
    cos, sin = torch.cat([angle.cos()] * 2, -1), torch.cat([angle.sin()] * 2, -1)
    group = HEADS // KV_HEADS
    x = F.embedding(ids, model.model.embed_tokens.weight)
    for layer in model.model.layers:
        a, m = layer.self_attn, layer.mlp
        n = F.rms_norm(x, (HIDDEN,), layer.input_layernorm.weight, eps)
        joined = torch.cat([a.q_proj.weight, a.k_proj.weight, a.v_proj.weight])
        heads = F.linear(n, joined).view(batch, length, HEADS + 2 * KV_HEADS, HEAD)
        q, k, v = heads.split([HEADS, KV_HEADS, KV_HEADS], 2)
        q = _rotate(F.rms_norm(q, (HEAD,), a.q_norm.weight, eps).transpose(1, 2), cos, sin)
        k = _rotate(F.rms_norm(k, (HEAD,), a.k_norm.weight, eps).transpose(1, 2), cos, sin)
        k, v = k.repeat_interleave(group, 1), v.transpose(1, 2).repeat_interleave(group, 1)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.linear(seen.transpose(1, 2).reshape(batch, length, HEADS * HEAD), a.o_proj.weight)
        n = F.rms_norm(x, (HIDDEN,), layer.post_attention_layernorm.weight, eps)
        gated = F.silu(F.linear(n, m.gate_proj.weight)) * F.linear(n, m.up_proj.weight)
        x = x + F.linear(gated, m.down_proj.weight)
    return F.rms_norm(x, (HIDDEN,), model.model.norm.weight, eps)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin
