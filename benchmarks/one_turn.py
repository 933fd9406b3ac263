"""TRL's GRPOTrainer beside ours on equal terms: the same single-turn prompts, lengths, model and cores.

Both train a copy of springtide-nano in float32 on the first training tasks of the three shipped suites, whose prompts
are the shipped ones token for token (`wrapped.py:OneTurn...`; `peer_trl.py` checks the ids). In the copy the end of a
turn is a token that the model never samples, so that every completion has exactly `MAX_TOKENS` tokens in both systems:
no padding, no straggler. `GROUPS` prompts of `MEMBERS` completions make a step, all of them in the loss; the reward is
one function of the text. The learning rate is too small to move the policy, so neither drifts from the other. TRL runs
single-turn in its own loop, its best case: with environments it plays the turns of a batch in lockstep.

TRL's settings are chosen by `--tune`: every shape in `GRID`, then the best of them generating two steps' completions at
once. Each trial is a cell, whose key holds the versions in TRL's environment; the best by loss tokens/s is published.
Not tried: vLLM as TRL's generator (it needs a GPU), and its continuous batching on CPU (73 tokens/s in our trials).
Called by: `goodput.py`.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean

from common import CELLS, HERE, Cell, Json, Row, fingerprint, ratio_interval, scratch

from springtide.chat import load_chat
from springtide.env import InProcessClient
from springtide.models.presets import resolve_model

MODEL = "springtide-nano"
USES = tuple(f"{HERE / 'wrapped.py'}:OneTurn{suite}" for suite in ("Db", "Kg", "Household"))
GROUPS, MEMBERS, MAX_TOKENS = 16, 8, 64  # of a step; the quickstart's
LR = 1e-8
TRIAL_STEPS = 3  # the first is not counted; the others are one generation, where two steps' are made at once
TARGET = 2.0
NOT_INSTALLED = "TRL: not installed"
_PROGRAM = (HERE / "peer_trl.py", HERE / "wrapped.py")
_END = "{{- '<|im_end|>' -}}\n{%- endif -%}\n{%- endfor -%}"  # how nano's template closes a message


@dataclass(frozen=True, slots=True)
class Setting:
    """How TRL uses the machine: threads of each process, processes, completions of a micro-batch in each, and how many
    steps' completions it generates at once."""

    threads: int
    processes: int
    per_device: int
    ahead: int = 1

    @property
    def label(self) -> str:
        return f"{self.threads}t{self.processes}p-{self.per_device}" + (f"-ahead{self.ahead}" if self.ahead > 1 else "")


QUICK = Setting(threads=1, processes=2, per_device=16)
GRID = tuple(
    Setting(threads, processes, size)
    for threads, processes, sizes in ((1, 1, (16, 32, 64, 128)), (2, 1, (16, 32, 64, 128)), (1, 2, (16, 32, 64)))
    for size in sizes
)


@dataclass(frozen=True, slots=True)
class Speed:
    """Of one run, over its steps but the first."""

    loss_tokens_per_s: float
    all_tokens_per_s: float
    step_s: float
    completion: float  # tokens, mean


# --- what both are given ----------------------------------------------------------------------------------------------


def prepare(directory: Path) -> tuple[Path, Path]:
    """The model's copy, and a file of all prompts (as text, as ids, and the gold their reward knows)."""
    model, prompts = directory / "endless", directory / "prompts.json"
    make_model(model)
    prompts.write_text(json.dumps(asyncio.run(_prompts(model))))
    return model, prompts


def make_model(directory: Path) -> None:
    """A copy of springtide-nano that ends a turn with <|endoftext|>, which it never samples."""
    shutil.copytree(resolve_model(MODEL), directory)
    template = directory / "chat_template.jinja"
    text = template.read_text()
    if text.count(_END) != 1:
        raise SystemExit(f"{MODEL}'s chat template does not close a message as one_turn.py knows it")
    end = _END.replace("'<|im_end|>'", "'<|endoftext|>' if message.role == 'assistant' else '<|im_end|>'")
    template.write_text(text.replace(_END, end))
    config = json.loads((directory / "config.json").read_text())
    for name, key, value in (
        ("config.json", "eos_token_id", config["pad_token_id"]),
        ("generation_config.json", "eos_token_id", config["pad_token_id"]),
        ("tokenizer_config.json", "eos_token", "<|endoftext|>"),
    ):
        data = json.loads((directory / name).read_text())
        (directory / name).write_text(json.dumps({**data, key: value}))


async def _prompts(model: Path) -> list[Json]:
    chat, rows = load_chat(model, "plain"), list[Json]()
    async with InProcessClient(USES) as client:
        for use in USES:
            for task in await client.catalog(use, "train", None):
                if "dev" in task.tags:
                    continue
                session = await client.open(task, 0, 0, 0, 60)
                ids = chat.start(session.messages).ids
                gold = await session.environment.gold_text()  # type: ignore[attr-defined]
                rows.append({"prompt": chat.decode(ids), "ids": ids.tolist(), "gold": gold})
                await session.close()
    return rows


def our_sets(model: Path, groups: int) -> tuple[str, ...]:
    """How our side of the comparison differs from the quickstart's preset."""
    uses = ", ".join(f'{{use="{use}"}}' for use in USES)
    return (
        f"model.path={model}", "model.tool_format=plain", f"suites=[{uses}]", f"trainer.groups={groups}",
        f"rollout.group.n={MEMBERS}", f"rollout.max_new_tokens={MAX_TOKENS}", "rollout.stale_probability=0",
        "algorithm.equal_rewards=keep", f"trainer.lr={LR}",
    )  # fmt: skip


# --- TRL --------------------------------------------------------------------------------------------------------------


def run_trl(python: Path, setting: Setting, model: Path, prompts: Path, *, groups: int, steps: int) -> Json:
    """Train `steps` steps. Returns what `peer_trl.py` wrote. Raises: SystemExit with the end of its log."""
    with scratch() as place:
        settings, out, log = (place / f for f in ("settings.json", "out.json", "trl.log"))
        shape = {"batch": groups * MEMBERS, "generations": MEMBERS, "max_tokens": MAX_TOKENS, "lr": LR, "seed": 0}
        given = {**asdict(setting), **shape, "steps": steps, "model": str(model), "prompts": str(prompts)}
        settings.write_text(json.dumps({**given, "out": str(out)}))
        world = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={setting.processes}"]
        command = [str(python), *(world if setting.processes > 1 else ()), str(HERE / "peer_trl.py"), str(settings)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(setting.threads), "TOKENIZERS_PARALLELISM": "false"}
        environment.pop("PYTHONPATH", None)  # ours
        with open(log, "wb") as output:
            done = subprocess.run(command, env=environment, cwd=place, stdout=output, stderr=subprocess.STDOUT)
        if done.returncode:
            raise SystemExit(f"TRL ended with {done.returncode}:\n{log.read_text(errors='replace')[-4000:]}")
        result: Json = json.loads(out.read_text())
        return result


def speed_of(result: Json, groups: int) -> Speed:
    """From the end of the first step to the end of the last."""
    first, *rest = result["steps"]
    seconds = rest[-1]["t"] - first["t"]
    loss = sum(step["loss_tokens"] for step in rest)
    return Speed(
        loss_tokens_per_s=loss / seconds,
        all_tokens_per_s=sum(step["tokens"] for step in rest) / seconds,
        step_s=seconds / len(rest),
        completion=loss / (len(rest) * groups * MEMBERS),
    )


def steps_within(seconds: float, trial: Json, ahead: int) -> int:
    """How many steps a run of about `seconds` has, as a trial went: the first, and whole generations behind it."""
    counted = max(2, math.ceil(seconds / speed_of(trial["result"], GROUPS).step_s))
    return 1 + ahead * math.ceil(counted / ahead)


# --- the choice of TRL's setting --------------------------------------------------------------------------------------


def versions(python: Path) -> Json:
    """What is installed in TRL's environment."""
    names = ("trl", "torch", "transformers", "accelerate")
    code = f"import json, importlib.metadata as m; print(json.dumps({{n: m.version(n) for n in {names!r}}}))"
    done = subprocess.run([str(python), "-c", code], text=True, capture_output=True)
    if done.returncode:
        raise SystemExit(f"--trl {python}: {done.stderr.strip().splitlines()[-1]}; it needs trl and torch installed")
    found: Json = json.loads(done.stdout)
    return found


def trial_cell(setting: Setting, installed: Json) -> Cell:
    shape = {"groups": GROUPS, "members": MEMBERS, "max_tokens": MAX_TOKENS, "steps": TRIAL_STEPS, "lr": LR}
    sources = fingerprint((), [*_PROGRAM, resolve_model(MODEL)])
    return Cell(f"goodput-trl-{setting.label}", {**asdict(setting), **shape, "installed": installed}, sources)


def tune(python: Path, *, missing: bool, directory: Path = CELLS) -> dict[Setting, Json]:
    """Try every setting; resumable. Returns the cells."""
    installed = versions(python)
    with scratch() as place:
        model, prompts = prepare(place)

        def trial(setting: Setting) -> Json:
            def compute() -> Json:
                return run_trl(python, setting, model, prompts, groups=GROUPS, steps=TRIAL_STEPS)

            return trial_cell(setting, installed).run(compute, missing=missing, directory=directory)

        cells = {setting: trial(setting) for setting in GRID}
        further = replace(best(cells), ahead=2)
        return {**cells, further: trial(further)}


def best(cells: Mapping[Setting, Json]) -> Setting:
    """The setting with the most loss tokens a second."""
    return max(cells, key=lambda s: speed_of(cells[s]["result"], GROUPS).loss_tokens_per_s)


def stored(installed: Json, directory: Path = CELLS) -> dict[Setting, Json]:
    """The trials that still hold; empty unless all are there."""
    found = {s: cell for s in GRID if (cell := trial_cell(s, installed).stored(directory)) is not None}
    if len(found) < len(GRID):
        return {}
    further = replace(best(found), ahead=2)
    last = trial_cell(further, installed).stored(directory)
    return {} if last is None else {**found, further: last}


def trial_rows(cells: Mapping[Setting, Json]) -> list[Row]:
    """One row a trial, for the page."""
    rows = []
    for setting, cell in cells.items():
        speed = speed_of(cell["result"], GROUPS)
        what = f"{setting.threads} threads, {setting.processes} processes, micro-batch {setting.per_device}"
        what += f", {setting.ahead} steps generated at once" if setting.ahead > 1 else ""
        rows.append(Row(f"TRL: {what}", speed.loss_tokens_per_s, "loss tokens/s", extra={"step_s": speed.step_s}))
    return rows


def notes(python: Path) -> list[str]:
    """What was tried and chosen, and with which versions, for the page."""
    installed = versions(python)
    cells = stored(installed)
    tried = [f"| {row.target} | {row.value:,.0f} |" for row in trial_rows(cells)]
    packages = ", ".join(f"{name} {version}" for name, version in installed.items())
    head = f"TRL's settings, tuned before ({packages}; float32); chosen: {best(cells).label}."
    return [head, "", "| setting | loss tokens/s |", "|---|---|", *tried]


# --- the table --------------------------------------------------------------------------------------------------------


def make_rows(ours: Sequence[Speed], theirs: Sequence[Speed], setting: Setting | None) -> list[Row]:
    """Ours against TRL's. Raises: SystemExit where the lengths of the completions differ."""
    lengths = [s.completion for s in (*ours, *theirs)]
    if lengths and max(lengths) - min(lengths) > 0.01 * MAX_TOKENS:
        raise SystemExit(f"completions of {min(lengths):.2f} to {max(lengths):.2f} tokens are no equal work")
    rows = []
    for what in ("loss", "all"):
        a, b = ([getattr(s, f"{what}_tokens_per_s") for s in speeds] for speeds in (ours, theirs))
        low, high = ratio_interval(a, b)
        rows.append(
            Row(
                f"one turn of {MAX_TOKENS} tokens, against TRL: {what} tokens",
                fmean(a) if a else None,
                "tokens/s",
                f"TRL's GRPOTrainer, {setting.label}" if setting else NOT_INSTALLED,
                fmean(b) if b else None,
                required=TARGET,
                judged="ratio",
                seeds=len(a),
                ci_low=low,
                ci_high=high,
                extra={"setting": asdict(setting) if setting else None, "completion_tokens": lengths},
            )
        )
    return rows
