"""`python -m scripts.nano COMMAND`: build springtide-nano, or look at one.

    tokenizer   train the BPE and write it with the template into the package
    train       train from scratch, or on from the checkpoint; writes the checkpoint and its curve
    package     write the checkpoint's weights into the package
    play        sampled and greedy success of the package on dev tasks
    audit       accuracy by kind of decision on dev tasks
    curve       the checkpoint's curve as an image

Run on one core; `train` may be stopped and started again at any time.
"""

from __future__ import annotations

import argparse
import json
import os
import random
from pathlib import Path
from typing import Any

import torch
from scripts.nano import gold, playing, training
from scripts.nano.audit import audit, table
from scripts.nano.drills import DRILLS, Lexicon
from scripts.nano.following import follow, summary
from scripts.nano.packaging import package
from scripts.nano.tokenizer import train_tokenizer, write_tokenizer
from tokenizers import Tokenizer

from springtide.models.presets import resolve_model

PACKAGE = resolve_model("springtide-nano")
CHECKPOINT = Path("checkpoints/springtide-nano.pt")
VOCABULARY = 1536
_CURVE_TASKS = 120
_CORPUS_DRILLS = 700  # a suite, so that merges know syllables and not only the names of training prompts


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.nano", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("command", choices=tuple(COMMANDS))
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT)
    parser.add_argument("--out", type=Path, default=PACKAGE)
    parser.add_argument("--steps", type=int, default=None, help="length of the schedule")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="fields of the recipe")
    parser.add_argument("--every", type=int, default=50, help="steps between points of the curve")
    parser.add_argument("--tasks", type=int, default=160, help="dev tasks a suite")
    parser.add_argument("--image", type=Path, default=Path("docs/nano-curve.png"), help="where curve draws")
    args = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the batches are short; one core was promised
    torch.set_num_threads(1)
    COMMANDS[args.command](args)


def tokenizer(args: argparse.Namespace) -> None:
    seen = gold.see()
    lexicon, rng = Lexicon(seen.names()), random.Random(0)
    texts = [d.text() for dialogues in seen.gold.values() for d in dialogues]
    texts += [prompt for prompts in seen.prompts.values() for prompt in prompts]
    texts += [make(rng, lexicon).text() for make in DRILLS.values() for _ in range(_CORPUS_DRILLS)]
    write_tokenizer(train_tokenizer(texts, seen.tools.values(), VOCABULARY), args.out)


def train(args: argparse.Namespace) -> None:
    seen, words = gold.see(), _tokenizer(args)
    dev = gold.dev(_CURVE_TASKS)
    lexicon = Lexicon(seen.names())
    changes: dict[str, Any] = {name: json.loads(value) for name, value in (item.split("=") for item in args.set)}
    if args.steps is not None:
        changes["steps"] = args.steps
    args.checkpoint.parent.mkdir(parents=True, exist_ok=True)
    if args.checkpoint.exists():
        run = training.resume(args.checkpoint, **changes)
    else:
        run = training.start(training.Recipe(**changes), words)
    losses: list[float] = []
    while run.step < run.recipe.steps:
        losses.append(training.train_step(run, training.draw(run.recipe, run.step, seen, lexicon), words))
        if run.step % args.every and run.step != run.recipe.steps:
            continue
        found = {suite: summary(follow(run.model, words, dialogues)) for suite, dialogues in dev.items()}
        point = {"step": run.step, "tokens": run.tokens, "seconds": run.seconds, "loss": sum(losses) / len(losses)}
        run.curve.append(point | {"dev": found})
        losses = []
        training.save(run, args.checkpoint)
        rates = "  ".join(f"{s} {100 * f['sampled']:.0f}/{100 * f['greedy']:.0f}" for s, f in found.items())
        print(f"step {run.step}  {run.tokens:,} tokens  loss {point['loss']:.3f}  {rates}", flush=True)


def write(args: argparse.Namespace) -> None:
    package(training.resume(args.checkpoint).model, _tokenizer(args), args.out)


def play(args: argparse.Namespace) -> None:
    for temperature in (1.0, 0.0):
        result, _ = playing.play_dev(args.out, tasks=args.tasks, temperature=temperature)
        for suite, r in result.suites.items():
            span = f"{r.success:.1%} [{r.low:.1%}, {r.high:.1%}]"
            size = f"{r.episodes} episodes, {r.tokens:.0f} tokens, {r.turns:.1f} turns"
            print(f"T={temperature:g}  {suite:10} {span}  {size}")


def look(args: argparse.Namespace) -> None:
    dialogues = [d for suite in gold.dev(args.tasks).values() for d in suite]
    print(table(audit(training.resume(args.checkpoint).model, _tokenizer(args), dialogues)))


def curve(args: argparse.Namespace) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    points = training.resume(args.checkpoint).curve
    millions = [p["tokens"] / 1e6 for p in points]
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for suite, colour in zip(gold.SUITES, ("tab:blue", "tab:orange", "tab:green")):
        for kind, style in (("sampled", "-"), ("greedy", "--")):
            axes.plot(millions, [p["dev"][suite][kind] for p in points], style, color=colour, label=f"{suite}, {kind}")
    axes.set(xlabel="tokens (millions)", ylabel="dev solutions followed exactly", ylim=(0, 1))
    axes.legend(fontsize=8)
    figure.savefig(args.image, dpi=110)


def _tokenizer(args: argparse.Namespace) -> Tokenizer:
    return Tokenizer.from_file(str(args.out / "tokenizer.json"))


COMMANDS = {"tokenizer": tokenizer, "train": train, "package": write, "play": play, "audit": look, "curve": curve}

if __name__ == "__main__":
    main()
