"""TRL's GRPOTrainer as one arm of `goodput.py`, in the interpreter of an environment of its own.

Owns: TRL's settings. Reads one JSON file, `{model, prompts, threads, processes, per_device, batch, generations,
max_tokens, ahead, steps, lr, seed, out}`, trains that many steps, and writes to `out` when each step ended and what it
trained by TRL's own counts. `batch` completions make an optimiser step, `generations` of each prompt, and `ahead`
steps' are generated at once. Run by torch.distributed where there is more than one process.
Called by: `goodput.py --trl PYTHON`, as `PYTHON [-m torch.distributed.run ...] peer_trl.py SETTINGS`. Knows nothing of
Springtide, so its reward is written again here: what `wrapped.reward` is, which a test holds it to.
"""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

_SPECIAL = re.compile(r"</?tool_call>|<\|\w+\|>")


def reward(completions: list[str], gold: list[str], **_: Any) -> list[float]:
    """The rewards of completions; `gold` is the first call of each one's prompt."""
    return [_reward(text, right) for text, right in zip(completions, gold, strict=True)]


def _reward(text: str, gold: str) -> float:
    text = _SPECIAL.sub("", text)
    lines = text.split("\n")
    return 0.5 * sum(a == b for a, b in zip(text, gold)) / len(gold) + 0.5 * len(set(lines)) / len(lines)


def main() -> None:
    given = json.loads(Path(sys.argv[1]).read_text())
    import datasets
    import torch
    import transformers
    import trl

    torch.set_num_threads(given["threads"])
    transformers.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    steps: list[dict[str, float]] = []

    made: dict[str, float] = {"total": 0.0}  # by the last generation

    class Watch(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            steps.append({"t": time.monotonic()})

        def on_log(self, *args: Any, logs: dict[str, Any], **__: Any) -> None:
            if "train_runtime" in logs:  # the summary at the end
                return
            if "completions/mean_length" in logs:  # completions were generated for this step, and `ahead` - 1 more
                total = float(logs["num_tokens"])  # prompts and completions, since the start
                made["tokens"], made["total"] = (total - made["total"]) / given["ahead"], total
                made["loss_tokens"] = float(logs["completions/mean_length"]) * given["batch"]
            steps[-1] |= {"loss_tokens": made["loss_tokens"], "tokens": made["tokens"]}

    config = trl.GRPOConfig(
        output_dir=given["out"] + ".scratch",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,  # it would compute the forward pass twice; memory is no concern here
        per_device_train_batch_size=given["per_device"],
        gradient_accumulation_steps=given["batch"] // (given["per_device"] * given["processes"]),
        steps_per_generation=given["ahead"] * given["batch"] // (given["per_device"] * given["processes"]),
        num_generations=given["generations"],
        max_completion_length=given["max_tokens"],
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        beta=0.0,
        epsilon=0.2,
        epsilon_high=0.28,
        max_grad_norm=1.0,
        learning_rate=given["lr"],
        lr_scheduler_type="constant",
        max_steps=given["steps"],
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        seed=given["seed"],
        ddp_find_unused_parameters=False,
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(given["model"])
    rows = json.loads(Path(given["prompts"]).read_text())
    for row in rows:
        if tokenizer(row["prompt"])["input_ids"] != row["ids"]:
            raise SystemExit(f"transformers reads other tokens than were given: {row['prompt']!r}")
    model = transformers.AutoModelForCausalLM.from_pretrained(given["model"], dtype=torch.float32)
    trainer = trl.GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=reward,
        args=config,
        train_dataset=datasets.Dataset.from_list([{"prompt": r["prompt"], "gold": r["gold"]} for r in rows]),
        callbacks=[Watch()],
    )
    trainer.train()
    if trainer.accelerator.is_main_process:
        versions = {"trl": trl.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
        Path(given["out"]).write_text(json.dumps({"steps": steps, "versions": versions, "dtype": "float32"}))


if __name__ == "__main__":
    main()
