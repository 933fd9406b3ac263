"""What overflows in one version of the weights stays there."""

from __future__ import annotations

import numpy as np
import pytest

from engine_models import random_ids, tiny
from springtide.engine.protocol import EngineError, Sampling
from springtide.models.decoder import Decoder
from test_engine_core import ask, core, decoder, run, turn


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_kv_that_overflowed_does_not_poison_who_gets_its_blocks(kernels: str) -> None:
    """Finite weights, so they were published, whose keys and values are not: a pinned, healthy version goes on."""
    engine = core(kernels=kernels)
    tensors = {k: v.clone() for k, v in tiny().tensors().items()}
    tensors["model.layers.1.self_attn.v_proj.weight"].fill_(3e38)
    engine.add_version(2, Decoder(decoder().config, tensors))
    prompt = random_ids(np.random.default_rng(12), 60)
    result = ask(engine, "broken", prompt, Sampling(0, 0, 5), version=2)
    run(engine)
    assert isinstance(result[0], EngineError)
    engine.release("broken")
    healthy = turn(engine, "healthy", prompt[:5], Sampling(0, 0, 5), version=1)
    assert np.isfinite(healthy.logprobs).all()
