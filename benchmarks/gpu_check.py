"""All that needs a GPU, in one program: engines, trainers and publication on it, and what they reach of its peak.

    python benchmarks/gpu_check.py [--size 0.6B] [--model DIR] [--vllm PYTHON] [--device cuda] [--quick] [--json]

Without a GPU it says so and exits with 0. What it does, part by part, on the device:

product      the largest rate of a matrix product (bfloat16; float32 with --device cpu), of which others are shares
fingerprint  a float64 sum computed there equals the one computed on the processor, to the last bit
publication  one version of the weights to another process: by the store (as a run does it: shared memory, fingerprint,
             back to the device), by a shared handle (CUDA IPC), by a broadcast (NCCL; with two GPUs). The receiver
             computes the fingerprint each time. The last two are what a faster path would take: runs use the store
runs         whole runs of some RL steps, each in processes of its own: the local engine with replicated float32
             weights, the same with FSDP2 (bfloat16 over float32, activation checkpointing), and vLLM with --vllm, the
             interpreter of its environment. Of each: tokens/s of the engine while it is busy, tokens/s of the trainer
             and its share of the peak (6 operations a parameter and token, MFU), seconds from weights to weights in
             the engine, the gap between engine and trainer

The model has random weights in the shapes of Qwen3 and springtide-nano's tokenizer, unless --model names one. Its
replies are noise, and some hold the letter that is asked for, so a step has something to learn from. It was written
on a machine without a GPU: its parts are tested with --device cpu (tests/test_gpu_check.py); its figures are to come.
"""

from __future__ import annotations

import json
import multiprocessing
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import common
import torch
from common import Json, Load, Row, emit, report, scratch

from springtide.config import Config, make_config
from springtide.weights.fingerprint import Fingerprint, TensorPrint, float64_sum
from springtide.weights.store import WeightStore

# hidden, feed-forward, layers, heads, KV heads, head size
SIZES = {
    "tiny": (64, 128, 2, 4, 2, 16),
    "0.6B": (1024, 3072, 28, 16, 8, 128),
    "1.7B": (2048, 6144, 28, 16, 8, 128),
    "4B": (2560, 9728, 36, 32, 8, 128),
}
_WAIT_S = 600.0


def main(argv: Sequence[str] | None = None) -> None:
    parser = common.arguments(__doc__)
    parser.add_argument("--size", choices=SIZES, default="0.6B", help="of the random model")
    parser.add_argument("--model", type=Path, metavar="DIR", help="a Hugging Face directory instead")
    parser.add_argument("--vllm", type=Path, metavar="PYTHON", help="interpreter of an environment that holds vLLM")
    parser.add_argument("--device", default="cuda", help="cpu tries the program itself; never stored")
    args = parser.parse_args(argv)
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        print("gpu_check: torch sees no GPU here, so nothing was checked")
        return
    with Load() as load, scratch() as directory:
        model = args.model or make_model(directory / "model", args.size)
        rows = check(model, directory, args.device, args.vllm, quick=args.quick)
    device = torch.cuda.get_device_name() if args.device.startswith("cuda") else args.device
    result = report("gpu_check", rows, load, quick=args.quick, device=device, model=str(args.model or args.size))
    emit(result, as_json=args.json, store=args.device.startswith("cuda"))


def check(model: Path, directory: Path, device: str, vllm: Path | None, *, quick: bool) -> list[Row]:
    """Every part, in order; a fault in one ends the program with its cause."""
    kind, size = (torch.float32, 512) if device == "cpu" else (torch.bfloat16, 8192)
    peak = product_flops(device, size, kind)
    rows = [Row(f"{str(kind).removeprefix('torch.')} matrix product", peak / 1e12, "TFLOP/s")]
    tensors = {name: t.to(device) for name, t in weights_of(model).items()}
    rows.append(Row("fingerprint on the device as on the processor", float(same_sums(tensors)), "equal", required=1.0))
    rows += publication(tensors, directory)
    parameters = sum(t.numel() for t in tensors.values())
    del tensors
    if device.startswith("cuda"):
        torch.cuda.empty_cache()  # the runs' processes need it
    for arm, tables in arms(device, vllm).items():
        if tables is None:
            rows.append(Row(f"{arm}: not installed", None, "tokens/s"))
            continue
        config = make_run(model, directory, arm, device, tables, quick=quick)
        rows += run_rows(arm, run(config), parameters, peak * config.trainer.ranks)
    return rows


# --- parts --------------------------------------------------------------------------------------------------------


def product_flops(device: str, size: int, dtype: torch.dtype) -> float:
    """Operations a second of the best of some square matrix products."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    best = float("inf")
    for _ in range(10):
        _finish(device)
        started = time.perf_counter()
        torch.mm(a, b)
        _finish(device)
        best = min(best, time.perf_counter() - started)
    return 2 * size**3 / best


def same_sums(tensors: dict[str, torch.Tensor]) -> bool:
    """Whether each sum is the processor's, in float32 and in bfloat16."""
    kinds = (torch.float32, torch.bfloat16)
    return all(
        float64_sum(t.to(kind).view(-1)) == float64_sum(t.to(kind).cpu().view(-1))
        for t in tensors.values()
        for kind in kinds
    )


def publication(tensors: dict[str, torch.Tensor], directory: Path) -> list[Row]:
    """Seconds of one version from this process to another, verified there, by each way there is."""
    gigabytes = sum(t.nbytes for t in tensors.values()) / 1e9
    ways = {"the store": by_store(tensors), "a shared handle": by_handle(tensors)}
    device = next(iter(tensors.values())).device
    if device.type == "cpu" or torch.cuda.device_count() > 1:
        ways["a broadcast"] = by_broadcast(tensors, directory)
    rows = [
        Row(f"publication of {gigabytes:.3g} GB by {way}", s, "s", extra={"gb_per_s": gigabytes / s})
        for way, s in ways.items()
    ]
    if "a broadcast" not in ways:
        rows.append(Row("publication by a broadcast: needs two GPUs", None, "s"))
    return rows


def by_store(tensors: dict[str, torch.Tensor]) -> float:
    """The median of versions that are written over older ones."""
    times = []
    place = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="springtide-gpu-", dir=place) as directory:
        store, reader = WeightStore(Path(directory)), WeightStore(Path(directory))
        device = next(iter(tensors.values())).device
        for version in range(9):
            started = time.perf_counter()
            store.publish(version, tensors)
            arrived = {name: t.to(device, copy=True) for name, t in reader.load(version).items()}
            _finish(str(device))
            times.append(time.perf_counter() - started)
            del arrived
    return sorted(times[6:])[1]


def by_handle(tensors: dict[str, torch.Tensor]) -> float:
    """Handles to the tensors' memory go to a process that copies and verifies them: CUDA IPC, or shared memory."""
    context = torch.multiprocessing.get_context("spawn")
    to, back = context.Queue(), context.Queue()
    child = context.Process(target=_receive_handles, args=(to, back), daemon=True)
    child.start()
    try:
        _answer(child, back)  # it is up
        shared = {name: t if t.device.type == "cuda" else t.clone().share_memory_() for name, t in tensors.items()}
        fingerprint = Fingerprint(0, {name: TensorPrint.of(t) for name, t in tensors.items()})
        started = time.perf_counter()
        to.put((shared, fingerprint.to_json()))
        if told := _answer(child, back):
            raise SystemExit(f"by a shared handle: {told}")
        seconds = time.perf_counter() - started
        to.put(None)
        child.join(_WAIT_S)
        return seconds
    finally:
        child.kill()


def _receive_handles(to: Any, back: Any) -> None:
    back.put("")
    tensors, text = to.get()
    back.put(_verified({name: t.clone() for name, t in tensors.items()}, text))
    del tensors
    to.get()  # the publisher's memory is let go first


def by_broadcast(tensors: dict[str, torch.Tensor], directory: Path) -> float:
    """Two ranks of a world of their own; the second verifies what came. NCCL on GPUs, gloo on processors."""
    context = multiprocessing.get_context("spawn")
    device = next(iter(tensors.values())).device.type
    shapes = {name: (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in tensors.items()}
    saved = directory / "broadcast.pt"
    torch.save({name: t.cpu() for name, t in tensors.items()}, saved)
    fingerprint = Fingerprint(0, {name: TensorPrint.of(t) for name, t in tensors.items()}).to_json()
    back = context.Queue()
    meet = f"file://{directory}/meet"
    ranks = [
        context.Process(target=_broadcast, args=(rank, meet, device, shapes, saved, fingerprint, back), daemon=True)
        for rank in range(2)
    ]
    for rank in ranks:
        rank.start()
    try:
        told, seconds = _answer(ranks[1], back)
        if told:
            raise SystemExit(f"by a broadcast: {told}")
        for rank in ranks:
            rank.join(_WAIT_S)
        return float(seconds)
    finally:
        for rank in ranks:
            rank.kill()


def _broadcast(
    rank: int, meet: str, device: str, shapes: dict[str, Any], saved: Path, fingerprint: str, back: Any
) -> None:
    from springtide.trainer.collective import Collective

    world = Collective.join(rank, 2, meet, device)
    mine = (
        torch.load(saved) if rank == 0 else {n: torch.empty(s, dtype=getattr(torch, d)) for n, (s, d) in shapes.items()}
    )
    tensors = {name: t.to(world.device) for name, t in mine.items()}
    world.exchange("ready")
    started = time.perf_counter()
    arrived = {name: world.broadcast(t, 0) for name, t in tensors.items()}
    _finish(str(world.device))
    told = _verified(arrived, fingerprint)
    if rank == 1:
        back.put((told, time.perf_counter() - started))
    world.exchange("done")


def _verified(tensors: dict[str, torch.Tensor], text: str) -> str:
    """Empty where the tensors have the fingerprint, else what differs."""
    from springtide.weights.fingerprint import FingerprintMismatch

    try:
        Fingerprint.from_json(text).check(tensors)
    except FingerprintMismatch as error:
        return str(error)
    return ""


def _answer(child: Any, back: Any) -> Any:
    """What a child says next. Raises: SystemExit if it ended, or takes too long."""
    import queue

    for _ in range(int(_WAIT_S)):
        try:
            return back.get(timeout=1.0)
        except queue.Empty:
            if not child.is_alive():
                raise SystemExit(f"a receiving process ended with {child.exitcode}") from None
    raise SystemExit(f"a receiving process said nothing within {_WAIT_S:g} s")


# --- runs ---------------------------------------------------------------------------------------------------------


def arms(device: str, vllm: Path | None) -> dict[str, dict[str, Any] | None]:
    """What differs between the runs; None for one that cannot be made here."""
    ranks = 1 if device == "cpu" else max(1, min(2, torch.cuda.device_count()))
    sharded = {
        "sharding": "fsdp",
        "ranks": ranks,
        "param_dtype": "bfloat16",
        "activation_checkpointing": True,
    }
    on_vllm = {"engine": {"kind": "vllm", "vllm": {"python": str(vllm)}}} if vllm else None
    return {"local engine": {}, f"FSDP2 bfloat16, {ranks} ranks": {"trainer": sharded}, "vLLM": on_vllm}


def make_run(model: Path, directory: Path, arm: str, device: str, tables: dict[str, Any], *, quick: bool) -> Config:
    """A run of some steps on questions of our own; `quick` for one of a tenth of the tokens."""
    questions = directory / "letters.toml"
    if not questions.exists():
        rows = [
            {"prompt": f"Write the letter {'abcdefghij'[i % 10]}. ({i})", "answer": "abcdefghij"[i % 10]}
            for i in range(512)
        ]
        (directory / "letters.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        questions.write_text('data = "letters.jsonl"\nverifier = "regex"\n')
    tokens, groups = (16, 4) if quick else (256, 16)
    base: dict[str, Any] = {
        "run": {
            "dir": str(directory / "runs"),
            "name": arm.replace(" ", "-").replace(",", ""),
            "steps": 3,
            "minutes": 60,
        },
        "model": {"path": str(model), "context": 512},
        "suites": [{"use": str(questions)}],
        "engine": {"device": device, "max_batch": 128, "kv_tokens": 65536, "weight_slots": 2},
        "rollout": {"max_new_tokens": tokens, "group": {"n": 8}, "concurrency": 128},
        "algorithm": {"equal_rewards": "keep"},
        "trainer": {"device": device, "groups": groups, "lr": 1e-6, "micro_tokens": 2048 if quick else 16384},
        "eval": {"at_ends": False},
        "observe": {"report": False, "progress": False},
        "runtime": {"start_s": 600},
    }
    return make_config({**base, **{table: {**base[table], **values} for table, values in tables.items()}})


def run(config: Config) -> Json:
    """Train, and read what its steps after the first were. Raises: SystemExit with the end of the run's log."""
    finished = common.train(config)
    records = [r for r in common.read_lines(config.run_dir / "metrics.jsonl") if r["kind"] == "step"]
    later = records[1:]
    engine_s = sum(r["step_s"] * r["engine"]["busy_share"] for r in later)
    trainer_s = sum(r["trainer"]["seconds"]["total_s"] for r in later)
    gaps = [r["trainer"]["gap_mean"] for r in records if r["trainer"].get("gap_mean") is not None]
    return {
        "steps": len(records),
        "wall_s": finished.wall_s,
        "generated_per_s": sum(r["engine"]["generated_tokens"] for r in later) / max(engine_s, 1e-9),
        "trained_per_s": sum(r["trainer"]["computed_tokens"] for r in later) / max(trainer_s, 1e-9),
        "sync_s": sum(r["seconds"].get("publish", 0.0) for r in later) / max(1, len(later)),
        "gap": max(gaps) if gaps else None,
        "grad_norm": max(r["trainer"]["grad_norm"] for r in records),
    }


def run_rows(arm: str, figures: Json, parameters: int, peak: float) -> list[Row]:
    mfu = 6 * parameters * figures["trained_per_s"] / peak
    return [
        Row(f"{arm}: sampled while busy", figures["generated_per_s"], "tokens/s"),
        Row(f"{arm}: trained", figures["trained_per_s"], "tokens/s", extra={"grad_norm": figures["grad_norm"]}),
        Row(f"{arm}: of the matrix product's rate (MFU)", mfu, "share"),
        Row(f"{arm}: from weights to weights in every engine", figures["sync_s"], "s"),
        Row(f"{arm}: mean gap of log-probs, engine to trainer", figures["gap"], "nats"),
    ]


# --- the model ----------------------------------------------------------------------------------------------------


def make_model(directory: Path, size: str) -> Path:
    """A random Qwen3 in bfloat16, with springtide-nano's tokenizer and as many tokens as that has."""
    import shutil

    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    from springtide.models.presets import resolve_model, vocab_size

    logging.disable_progress_bar()
    hidden, inner, layers, heads, kv_heads, head = SIZES[size]
    nano = resolve_model("springtide-nano")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocab_size(nano),
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    for file in nano.iterdir():
        if file.name.startswith(("tokenizer", "chat_template", "generation_config", "special_tokens")):
            shutil.copyfile(file, directory / file.name)
    return directory


def weights_of(model: Path) -> dict[str, torch.Tensor]:
    """A model's tensors in float32, as a trainer publishes them."""
    from springtide.models.decoder import read_checkpoint

    return {name: t.float() for name, t in read_checkpoint(model).items()}


def _finish(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
