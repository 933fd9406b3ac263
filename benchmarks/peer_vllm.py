"""vLLM's CPU build as one arm of `engine.py`: generates on demand, in the interpreter of an environment of its own.

Owns: vLLM's settings. Protocol: a line of JSON in, a line of JSON out. The first out says what was started; then each
`{"count", "context", "new_tokens", "vocabulary"}` is answered with `{"seconds"}`: prompts in, that many tokens of each
out, with the prompts' ids drawn as `engine.py` draws them. It ends at the end of its input.
Called by: `engine.py --against vllm`, as `PYTHON peer_vllm.py MODEL`. Knows nothing of Springtide.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # scheduler and model in one process, on one thread
    "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB: far more than 64 sequences need
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def main() -> None:
    (model,) = sys.argv[1:]
    # What libraries print goes to stderr; the answers keep the real stdout.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    os.environ.update(ENVIRONMENT)
    import numpy as np
    import torch
    import vllm

    engine = vllm.LLM(
        model=model,
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=64,
        max_num_batched_tokens=8192,
        enable_prefix_caching=False,  # the same prompts come again: only the first time would be measured
        enforce_eager=False,  # compiled: the faster of the two at every shape asked for
        seed=0,
    )
    print(json.dumps({"vllm": vllm.__version__, "torch": torch.__version__, "dtype": "float32"}), file=answers)
    for line in sys.stdin:
        asked: dict[str, Any] = json.loads(line)
        rng = np.random.default_rng(0)
        shape = (asked["count"], asked["context"])
        prompts = [{"prompt_token_ids": ids.tolist()} for ids in rng.integers(0, asked["vocabulary"], shape)]
        sampling = vllm.SamplingParams(
            temperature=1.0, max_tokens=asked["new_tokens"], ignore_eos=True, detokenize=False
        )
        start = time.perf_counter()
        results = engine.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - start
        if any(len(r.outputs[0].token_ids) != asked["new_tokens"] for r in results):
            raise SystemExit("vLLM ended a sequence early")
        print(json.dumps({"seconds": seconds}), file=answers)


if __name__ == "__main__":
    main()
