"""`springtide advise`: how to divide a cluster before it is rented."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from springtide.config import ConfigError, Schedule, load_config

_BOUNDS = (0, 1, 2, 4)


def command(
    config: Annotated[Path, typer.Argument(help="the run's configuration")],
    gpus: Annotated[int, typer.Option(min=2, help="GPUs in all")] = 8,
    device: Annotated[str, typer.Option(help="h100, h200, a100 or h20")] = "h100",
    workload: Annotated[str, typer.Option(help="what its environments are like: a preset, or a trace FILE.jsonl")] = (
        "webshop"
    ),
    model: Annotated[str, typer.Option(help="in the place of model.path: a known model, or a directory")] = "",
    tensor: Annotated[int, typer.Option(min=1, help="GPUs of one rank")] = 1,
    sets: Annotated[list[str] | None, typer.Option("--set", help="change one key")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the trials as JSON")] = False,
) -> None:
    """Recommend a split of the ranks, a staleness bound, how much plays at once, and a scheduling policy.

    Every candidate is simulated on one seed; of those that a live run obeys, the best by time to equal learning is
    recommended."""
    from springtide.schedule.registry import POLICIES
    from springtide.schedule.roofline import UnknownHardware
    from springtide.simulate.run import Setup, Simulation
    from springtide.simulate.workload import WorkloadError, read_trace

    run = load_config(config, tuple(sets or ()))
    live = get_args(Schedule.model_fields["policy"].annotation)
    trace = Path(workload) if workload.endswith(".jsonl") else None
    trials: list[dict[str, Any]] = []
    try:
        source = read_trace(trace) if trace else None
        for bound in _BOUNDS:
            simulation = Simulation(
                Setup(
                    workload="webshop" if trace else workload,
                    source=source,
                    model=model or str(run.model.path),
                    device=device,
                    gpus=gpus,
                    tensor=tensor,
                    groups=run.trainer.groups,
                    members=run.rollout.group.n,
                    bound=bound,
                    reference=_reference(run),
                    steps=6,
                )
            )
            shares = [None] if bound else []
            for name in POLICIES:
                for share in simulation.shares() if POLICIES[name].swept else shares:
                    row = simulation.run(name, 0, share=share)
                    trials.append(
                        {
                            "policy": name,
                            "live": name in live,
                            "bound": bound,
                            "rollout": row.layout[0],
                            "reference": row.layout[1],
                            "trainer": row.layout[2],
                            "concurrency": simulation.bounds.concurrency,
                            "goodput_tokens_per_s": row.goodput_tokens_per_s,
                            "time_to_equal_learning_s": row.time_to_equal_learning_s,
                        }
                    )
    except OSError as error:
        raise ConfigError(f"cannot read {workload}: {error.strerror}") from None
    except (WorkloadError, UnknownHardware) as error:
        raise ConfigError(str(error)) from None
    trials.sort(key=lambda trial: trial["time_to_equal_learning_s"])
    if as_json:
        print(json.dumps({"config": str(config), "gpus": gpus, "device": device, "trials": trials}))
        return
    best = next(trial for trial in trials if trial["live"])
    print(
        f"on {gpus} {device}: schedule.policy = {best['policy']}, staleness.bound = {best['bound']}, "
        f"rollout.concurrency = {best['concurrency']}, starting with {best['rollout']} ranks that play, "
        f"{best['reference']} for the reference, {best['trainer']} that train"
    )
    if trials[0] is not best:
        faster = best["time_to_equal_learning_s"] / trials[0]["time_to_equal_learning_s"]
        print(f"{trials[0]['policy']} would be {faster:.2f} times as fast; live runs do not obey it yet")
    print(f"{'policy':<15}{'bound':>6}{'rollout':>9}{'trainer':>9}{'goodput tok/s':>15}{'equal learning':>16}")
    for trial in trials[:12]:
        print(
            f"{trial['policy']:<15}{trial['bound']:>6}{trial['rollout']:>9}{trial['trainer']:>9}"
            f"{trial['goodput_tokens_per_s']:>15,.0f}{trial['time_to_equal_learning_s']:>14,.0f} s"
        )


def _reference(run: Any) -> Any:
    """Where a run's reference weights would be: an adapter's are the base it trains on."""
    if run.algorithm.kl_coef == 0:
        return "none"
    return "resident" if run.trainer.lora.rank else "swapped"
