"""Paced devices: work takes the roofline's time, asleep; what took longer is counted, and much of it voids a run."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from rich.console import Console
from tests.engine_models import tiny
from tests.run_support import records, run_config
from tests.test_engine_process import publish
from tests.trainer_parts import config as trainer_config
from tests.trainer_parts import tiny_model, write_groups

import springtide
from springtide.config import Config, ConfigError, PaceTable, make_config
from springtide.engine.local.engine import EngineSettings, LocalEngine
from springtide.engine.protocol import Generation, Sampling
from springtide.observe.pace import cpu_seconds, describe, scale_for, summarise_pace
from springtide.observe.progress import Quiet
from springtide.pace import KINDS, Pace, check
from springtide.rundir import RunDirectory
from springtide.schedule.roofline import DEVICES, MODELS, Roofline, Shape, causal_pairs
from springtide.trainer.rank import Rank
from springtide.trainer.start import _scaled

# Upper bounds hold on a busy machine too: a step sleeps for most of its time, and a late wake-up is what is tolerated.
LATE = 0.15


def paced(scale: float | str = 1.0, **table: Any) -> Config:
    return make_config({"suites": [{"use": "db"}], "runtime": {"pace": {"device": "h100", "scale": scale, **table}}})


def test_the_options_name_what_the_roofline_knows() -> None:
    assert set(get_args(PaceTable.model_fields["device"].annotation)) == {"none", *DEVICES}
    assert PaceTable().model in MODELS and Pace.of(make_config({"suites": [{"use": "db"}]}), "engine") is None


def test_the_page_lists_what_the_roofline_knows() -> None:
    page = (Path(__file__).parents[1] / "docs" / "pace.md").read_text()
    for name, device in DEVICES.items():
        row = next(line for line in page.splitlines() if line.startswith(f"| `{name}`"))
        assert (
            f"| {device.flops / 1e12:g} TFLOP/s | {device.bandwidth / 1e12:.4g} TB/s | {device.memory / 1e9:g} GB"
            in row
        )
    for name in MODELS:
        row = next(line for line in page.splitlines() if line.startswith(f"| `{name}`"))
        shape = Shape.of(name)
        kib = Roofline(DEVICES["h100"], shape).kv_bytes / 1024
        assert f"| {shape.parameters / 1e9:.1f} billion" in row and f"| {kib:g} KiB" in row
        assert not shape.experts or f"{shape.active / 1e9:.1f} of them" in row


# --- the clock --------------------------------------------------------------------------------------------------------


def test_work_ends_at_its_time_and_sleeps_until_then() -> None:
    pace = Pace.of(paced(scale=5.0), "engine")
    assert pace is not None
    step_s = 5 * Roofline(DEVICES["h100"], Shape.of("qwen2.5-7b")).engine_step_s(decode=4, context=400)
    begun, cpu = time.monotonic(), time.process_time()
    pace.begin()
    for _ in range(20):
        pace.engine_step(0, 0.0, 4, 400)
    took, busy = time.monotonic() - begun, time.process_time() - cpu
    assert 20 * step_s <= took <= 20 * step_s * (1 + LATE)
    assert busy < 0.1 * took
    counts = pace.counts
    assert counts["engine/steps"] == 20 and counts["engine/target_s"] == pytest.approx(20 * step_s)
    assert sum(n for name, n in counts.items() if name.startswith("engine/spread/")) == 20


def test_work_that_took_longer_is_an_overrun_and_what_follows_begins_at_its_end() -> None:
    pace = Pace.of(paced(), "engine")
    assert pace is not None
    pace.begin()
    time.sleep(0.1)
    pace.engine_step(0, 0.0, 1, 1)  # 8.5 ms
    late = time.monotonic()
    pace.engine_step(0, 0.0, 1, 1)
    assert time.monotonic() - late >= 8e-3, "nothing is made up for"
    assert pace.counts["engine/overran"] == 1 and pace.counts["engine/took_s"] > 0.1
    before = pace.counts["engine/overran"]
    time.sleep(0.1)
    pace.begin()  # it had nothing to do
    pace.engine_step(0, 0.0, 1, 1)
    assert pace.counts["engine/overran"] == before


@pytest.mark.alone
def test_a_rank_stands_for_its_roles_devices_and_a_calibration_holds_nothing_back() -> None:
    table = {"tensor_parallel": 2, "trainer_devices": 8, "model": "qwen3-8b", "recompute": False}
    tokens, rows = 1000, [600, 400]
    pairs = causal_pairs(600) + causal_pairs(400)
    for role, devices in (("reference", 2), ("trainer", 8)):
        pace = Pace.of(paced("auto", **table), role)  # type: ignore[arg-type]
        assert pace is not None
        begun = time.monotonic()
        pace.micro_batch("backward", tokens, rows)
        assert time.monotonic() - begun < 5e-3
        wanted = Roofline(DEVICES["h100"], Shape.of("qwen3-8b"), devices).backward_s(tokens, pairs, recompute=False)
        assert pace.counts["backward/target_s"] == pytest.approx(wanted)
    again = Pace.of(paced("auto", **{**table, "recompute": True}), "trainer")
    assert again is not None
    again.micro_batch("backward", tokens, rows)
    assert again.counts["backward/target_s"] == pytest.approx(wanted * 1.5, rel=0.05)


# --- the engine and the trainer ---------------------------------------------------------------------------------------


def test_an_engines_turns_take_the_time_of_their_steps(tmp_path: Path) -> None:
    """Steps by hand: 40 prompt tokens in chunks of 16, the last with the first token; then a token a step."""
    publish(tmp_path / "store", 1)
    settings = EngineSettings(str(tiny().path), str(tmp_path / "store"), kv_tokens=2048, max_batch=8, prefill_chunk=16)
    scale, prompt, made = 3.0, 40, 12
    roofline = Roofline(DEVICES["h100"], Shape.of("qwen2.5-7b"))

    async def turn(pace: Pace | None) -> tuple[Generation, float]:
        async with LocalEngine.open(settings, pace) as engine:
            await engine.load(1)
            begun = time.monotonic()
            out = await engine.generate("s", np.arange(prompt, dtype=np.int32) % 7, Sampling(0, 0, made))
            return out, time.monotonic() - begun

    pace = Pace.of(paced(scale), "engine")
    (out, took), (plain, _) = asyncio.run(turn(pace)), asyncio.run(turn(None))
    assert out.ids.tolist() == plain.ids.tolist(), "pacing changes no token"
    wanted = sum(
        roofline.engine_step_s(prefill=n, pairs=causal_pairs(n, before)) for n, before in ((16, 0), (16, 16), (8, 32))
    )
    wanted += sum(roofline.engine_step_s(decode=1, context=prompt + i) for i in range(1, len(out.ids)))
    assert pace is not None and pace.counts["engine/steps"] == 3 + len(out.ids) - 1
    assert pace.counts["engine/target_s"] == pytest.approx(scale * wanted)
    for seconds in (took, out.decode_s):  # no reply leaves before its step's end
        assert scale * wanted * 0.999 <= seconds <= scale * wanted * (1 + LATE)


def test_a_group_that_shares_a_prompt_is_one_prefill_and_a_batch_of_decodes(tmp_path: Path) -> None:
    publish(tmp_path / "store", 1)
    settings = EngineSettings(str(tiny().path), str(tmp_path / "store"), kv_tokens=2048, max_batch=8, prefill_chunk=64)
    steps: list[tuple[float, ...]] = []

    async def group() -> None:
        async with LocalEngine.open(settings) as engine:
            engine.core.paced = lambda *work: steps.append(work)
            await engine.load(1)
            ids = np.arange(32, dtype=np.int32) % 7
            await asyncio.gather(*(engine.generate(f"{i}", ids, Sampling(i, 0, 3), prefix="g") for i in range(3)))

    asyncio.run(group())
    assert steps[0] == (32, causal_pairs(32), 0, 0)
    totals = Counter({"prefill": 0, "decode": 0})
    for prefill, _, decode, context in steps:
        totals.update(prefill=int(prefill), decode=int(decode))
        assert 32 * decode <= context <= 35 * decode
    assert totals == {"prefill": 32, "decode": 3 * 3 - 1}


def test_a_training_step_takes_the_time_of_its_passes(tmp_path: Path) -> None:
    shapes = [[[(60, 30)], [(50, 20)]], [[(40, 20)]]]
    items, model = write_groups(tmp_path / "groups", shapes), tiny_model(tmp_path / "model")
    pace = {"device": "a100", "model": "qwen3-14b", "trainer_devices": 4, "scale": 40.0}
    config = trainer_config(runtime={"pace": pace}, trainer={"micro_tokens": 130})
    rank = Rank()
    rank.init(config=config.model_dump(mode="json"), model=str(model))
    figures = rank.train(items=tuple(items), version=0)
    counts = rank.status()["pace"]
    roofline = Roofline(DEVICES["a100"], Shape.of("qwen3-14b"), 4)
    tokens, pairs = figures["computed_tokens"], sum(map(causal_pairs, (60, 50, 40)))
    assert figures["micro_batches"] == counts["forward/steps"] == counts["backward/steps"] == 2
    for kind, wanted in (
        ("forward", roofline.forward_s(tokens, pairs)),
        ("backward", roofline.backward_s(tokens, pairs, recompute=True)),
    ):
        assert counts[f"{kind}/target_s"] == pytest.approx(40 * wanted)
    whole = 40 * (roofline.forward_s(tokens, pairs) + roofline.backward_s(tokens, pairs, recompute=True))
    spent = sum(figures["seconds"][name] for name in ("pack_s", "forward_s", "backward_s"))
    assert counts["forward/overran"] == 0 and whole * 0.999 <= spent <= whole * (1 + LATE)
    frozen = Rank()
    frozen.init(config=config.model_dump(mode="json"), model=str(model), role="reference")
    frozen.logprobs(items=tuple(items), out=str(tmp_path / "out"))
    wanted = Roofline(DEVICES["a100"], Shape.of("qwen3-14b"), 1).logprobs_s(tokens, pairs)
    assert frozen.status()["pace"]["logprobs/target_s"] == pytest.approx(40 * wanted)


# --- runs -------------------------------------------------------------------------------------------------------------


def test_a_paced_run_keeps_to_the_roofline_and_says_by_how_much_it_does_not(tiny_model: Path, tmp_path: Path) -> None:
    """The scale is large, so that steps are asleep for nearly all of their time however busy the machine is."""
    scale = 25.0
    table = {"device": "h20", "model": "qwen3-8b", "scale": scale}
    config = run_config(
        tiny_model, tmp_path, run={"steps": 2}, runtime={"pace": table}, algorithm={"kl_coef": 0.01},
        trainer={"ranks": 2}, observe={"report": True},
    )  # fmt: skip
    pace, steps = springtide.train(config).pace, records(config)
    assert pace is not None and {pace["scale"], *(r["pace"]["scale"] for r in steps)} == {scale}
    for kind in KINDS:
        assert pace[kind]["steps"] == sum(r["pace"][kind]["steps"] for r in steps) > 0
        assert pace[kind]["target_s"] == pytest.approx(sum(r["pace"][kind]["target_s"] for r in steps))
        assert 0 <= pace[kind]["overrun_share"] <= 1 and pace[kind]["took_s"] >= pace[kind]["target_s"] * 0.99
    assert pace["forward"]["steps"] == sum(r["trainer"]["micro_batches"] for r in steps), "of both trainer ranks"
    floor = scale * Roofline(DEVICES["h20"], Shape.of("qwen3-8b")).engine_step_s(decode=1)
    assert pace["engine"]["target_s"] >= pace["engine"]["steps"] * floor
    ratios = sorted(k for r in steps for k, n in r["pace"]["engine"]["spread"] for _ in range(n))
    assert ratios[0] >= 0 and ratios[len(ratios) // 2] <= 100 * LATE, "half of the steps are within 15% of the roofline"
    assert 0 < pace["cpu_share"] < 1
    assert describe(pace).capitalize() in (config.run_dir / "report.html").read_text()
    text = (Path(__file__).parents[1] / "docs" / "metrics.md").read_text()
    assert {name for name in (*steps[0]["pace"], *steps[0]["pace"]["engine"]) if f"{name}`" not in text} == set()


@pytest.mark.slow
def test_a_calibration_finds_the_scale_of_the_run_that_follows(
    tiny_model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    table = {"device": "h20", "model": "qwen3-8b", "scale": "auto"}
    config = run_config(tiny_model, tmp_path, runtime={"pace": table})
    pace = springtide.train(config).pace
    scale = json.loads(RunDirectory(config.run_dir).pace.read_text())["scale"]
    assert pace is not None and pace["scale"] == scale > 0
    trial = [json.loads(line) for line in (config.run_dir / "calibration" / "metrics.jsonl").read_text().splitlines()]
    measured = [r for r in trial if r["kind"] == "step"]
    assert scale == scale_for(measured, 1)
    assert any(r["pace"]["engine"]["took_s"] < r["pace"]["engine"]["target_s"] * scale for r in measured)
    assert "calibrating the pace" in (told := capfd.readouterr().err) and f"the pace's scale is {scale:g}" in told
    assert "auto" in (config.run_dir / "config.toml").read_text(), "a resume asks for the same"


def test_a_run_that_is_resumed_keeps_the_scale_that_its_first_start_found(tiny_model: Path, tmp_path: Path) -> None:
    config = run_config(tiny_model, tmp_path, runtime={"pace": {"device": "h100", "scale": "auto"}})
    directory = RunDirectory(config.run_dir)
    directory.path.mkdir(parents=True)
    directory.write_json(directory.pace, {"scale": 7.5})
    resumed = asyncio.run(_scaled(config, directory, Quiet(Console(quiet=True)), resume=True))
    assert resumed.runtime.pace.scale == 7.5


def test_a_run_that_cannot_keep_to_its_pace_is_void_and_says_so(
    tiny_model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    table = {"device": "h200", "scale": 0.01}
    config = run_config(tiny_model, tmp_path, runtime={"pace": table}, observe={"report": True}, run={"steps": 2})
    summary = springtide.train(config)
    assert summary.pace is not None and summary.pace["engine"]["overrun_share"] > 0.9
    void = summary.pace["void"]
    assert void.startswith("this paced run is void as a measurement: ")
    assert "raise runtime.pace.scale (now 0.01)" in void and "\n" not in void
    assert [r["text"] for r in records(config, "note") if "void" in r["text"]] == [void]
    assert f"note: {void}" in capfd.readouterr().err
    assert void in (config.run_dir / "report.html").read_text()


def part(cpu_s: float = 1.0, wall_s: float = 10.0, scale: float = 2.0, **kinds: tuple[int, float, float]) -> Any:
    """A step's record: by kind steps, target_s and took_s."""
    out: dict[str, Any] = {"scale": scale, "cpu_s": cpu_s, "wall_s": wall_s}
    for kind, (steps, target_s, took_s) in kinds.items():
        k = round(100 * np.log(took_s / target_s))
        spread = [[k, steps]]
        out[kind] = {"steps": steps, "target_s": target_s, "took_s": took_s, "overran": 0, "spread": spread}
    return {"kind": "step", "pace": out}


@pytest.mark.parametrize(
    ("rows", "faults"),
    [
        ([part(engine=(99, 9.9, 10.0))], None),
        ([part(cpu_s=7.5), part(cpu_s=7.5)], ["75% of the CPU"]),
        ([part(engine=(10, 1.0, 1.04)), part(engine=(10, 1.0, 1.08))], ["engine took 6.0%"]),
        ([part(engine=(10, 8.0, 8.0), logprobs=(1, 1.0, 1.2))], ["logprobs took 20.0%"]),
        ([part(cpu_s=9.0, forward=(1, 1.0, 2.0))], ["90% of the CPU", "forward took 100.0%"]),
        ([part(), part(scale=3.0)], ["its scale changed (2, 3)"]),
    ],
)
def test_the_cpu_share_and_every_kind_of_work_can_void_a_run(
    monkeypatch: pytest.MonkeyPatch, rows: list[Any], faults: list[str] | None
) -> None:
    monkeypatch.setattr("springtide.observe.pace.cores", lambda: 1.0)
    summary = summarise_pace(rows)
    assert summary is not None
    if faults is None:
        assert summary["void"] is None
    else:
        assert all(fault in summary["void"] for fault in faults) and "\n" not in summary["void"]
    assert summarise_pace([{"kind": "step"}]) is None


def test_the_calibrated_scale_leaves_room_for_the_cpu_and_for_the_slowest_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("springtide.observe.pace.cores", lambda: 2.0)
    # 10 s of CPU for 2 s of the GPU's time: at 5 the run takes 10 s at least, one core of two.
    assert scale_for([part(cpu_s=10.0, engine=(100, 2.0, 1.0))], 1) == 5.0
    assert scale_for([part(cpu_s=10.0, engine=(100, 2.0, 1.0))], 2) == 10.0, "two engines share these 2 s"
    slow = [part(cpu_s=10.0, engine=(100, 2.0, 1.0), forward=(5, 1.0, 8.0))]
    assert scale_for(slow, 1) == pytest.approx(8.0, rel=0.02), "a forward pass takes eight times the GPU's"
    trained = [part(cpu_s=10.0, forward=(5, 1.0, 1.0), backward=(5, 1.0, 1.0))]
    assert (scale_for(trained, 1), scale_for(trained, 1, 2)) == (5.0, 10.0), "two trainer ranks share these 2 s"
    assert scale_for([part()], 1) is None


def test_cpu_time_counts_children_that_ended() -> None:
    before = cpu_seconds(os.getpid())
    spin = "import time\nwhile time.process_time() < 0.5: pass"
    subprocess.run([sys.executable, "-c", spin], check=True)
    assert cpu_seconds(os.getpid()) - before >= 0.45


# --- what cannot be -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "engine", "fault"),
    [
        ({"device": "b300"}, {}, r"runtime\.pace\.device: Input should be 'none', 'h100'.* not 'b300'"),
        (
            {"model": "qwen9"},
            {},
            r"runtime\.pace\.model: 'qwen9' is neither a known model \(.*config\.json",
        ),
        ({"scale": 0}, {}, r"runtime\.pace\.scale"),
        ({"tensor_parallel": 3}, {}, r"runtime\.pace\.tensor_parallel: 3 does not divide qwen2\.5-7b's 28 heads"),
        (
            {"model": "qwen3-32b", "device": "a100"},
            {"kv_tokens": 65536},
            r"engine\.kv_tokens: 65536 is more than",
        ),
        (
            {"model": "big"},
            {},
            r"runtime\.pace\.tensor_parallel: .*big \(\d+\.\d GB .*\) does not fit 1 x h100",
        ),
        ({"trainer_devices": 1}, {}, r"runtime\.pace\.trainer_devices: 1 x h100 cannot hold qwen2\.5-7b"),
    ],
)
def test_a_pace_that_cannot_be_is_one_line_before_anything_starts(
    tmp_path: Path, table: dict[str, Any], engine: dict[str, Any], fault: str
) -> None:
    if table.get("model") == "big":
        (tmp_path / "big").mkdir()
        (tmp_path / "big" / "config.json").write_text(json.dumps({**MODELS["qwen3-32b"], "num_hidden_layers": 100}))
        table = {**table, "model": str(tmp_path / "big")}
    with pytest.raises(ConfigError, match=fault) as caught:
        config = {"suites": [{"use": "db"}], "engine": engine, "runtime": {"pace": {"device": "h100", **table}}}
        check(make_config(config))
    assert "\n" not in str(caught.value)


def test_an_adapters_base_needs_less_room_to_train() -> None:
    config = {"suites": [{"use": "db"}], "trainer": {"lora": {"rank": 8}}}
    check(make_config({**config, "runtime": {"pace": {"device": "h100", "trainer_devices": 1}}}))


def test_ranks_that_hold_their_rows_only_need_less_room() -> None:
    table = {"pace": {"device": "h100", "trainer_devices": 1}}
    for trainer, fits in (({"ranks": 2, "sharding": "fsdp"}, True), ({"ranks": 2}, False)):
        with contextlib.nullcontext() if fits else pytest.raises(ConfigError, match="trainer_devices: 1 x h100"):
            check(make_config({"suites": [{"use": "db"}], "trainer": trainer, "runtime": table}))


def test_only_local_engines_and_ranks_are_held_to_a_pace() -> None:
    with pytest.raises(ConfigError, match=r'runtime\.pace\.device: only engine\.kind = "local"'):
        check(make_config({"suites": [{"use": "db"}], "runtime": {"kind": "ray", "pace": {"device": "h100"}}}))
