"""The samplers of a run: from its configuration, its tasks, and what its ledger says of draws and outcomes before.

Owns: the reading of measured pass rates. Invariants: samplers are told the ledger's draws and outcomes in their order,
so a resumed run draws as an undisturbed one would; one that cannot keep its promises is refused before the run starts.
Called by: the driver.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from springtide.config import Config, ConfigError
from springtide.ledger import Ledger
from springtide.schedule.sampling import SAMPLERS, Rules, Sampler
from springtide.schedule.sampling.prefilter import keep
from springtide.trace import TaskRef


def make_samplers(
    config: Config, tasks: Mapping[str, Sequence[TaskRef]], shares: Mapping[str, float], ledger: Ledger
) -> dict[str, Sampler]:
    """Suite -> its sampler, as it stood when the ledger was left. Raises: ConfigError.

    shares: of the mixture, on any scale.
    """
    table = config.rollout.sampling
    rates = None if table.pass_rates is None else read_pass_rates(Path(table.pass_rates))
    most = max(config.rollout.concurrency, config.trainer.groups)  # a synchronous run draws a step's groups at once
    samplers: dict[str, Sampler] = {}
    for suite, all_of_it in tasks.items():
        some = tuple(all_of_it)
        if rates is not None and not (some := keep(some, rates, table.pass_low, table.pass_high)):
            measured = sum(t.id in rates for t in all_of_it)
            raise ConfigError(
                f"rollout.sampling.pass_rates: of the {len(all_of_it)} tasks of suite {suite}, {table.pass_rates} has "
                f"{measured}, none between {table.pass_low} and {table.pass_high}; measure this suite, or widen "
                "pass_low and pass_high"
            )
        if table.kind != "uniform" and len(some) < most:
            raise ConfigError(
                f"rollout.sampling.kind {table.kind} plays no task twice at once, but suite {suite} has {len(some)} "
                f"tasks for {most} groups in flight; set rollout.concurrency and trainer.groups to at most {len(some)}"
            )
        rules = Rules(
            batch=max(1, round(config.trainer.groups * shares[suite] / sum(shares.values()))),
            ema=table.ema,
            centre=table.centre,
            width=table.width,
            candidates=table.candidates,
            explore=table.explore,
            cooldown=table.cooldown,
            retire_after=table.retire_after,
        )
        samplers[suite] = SAMPLERS[table.kind](suite, some, config.run.seed, rules, rates)
    for suite, task, draw in ledger.last_draws():
        samplers[suite].restore(task, draw=draw)
    for outcome in ledger.outcomes():
        samplers[outcome.suite].restore(outcome.task, outcome=(outcome.wins, outcome.played))
    return samplers


def read_pass_rates(path: Path) -> dict[str, float]:
    """Task id -> its pass rate: a JSON object, or a run's `evaluations/*.jsonl`. Raises: ConfigError."""
    where = f"rollout.sampling.pass_rates: {path}"
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where} cannot be read: {error}") from None
    at = 0
    try:
        if path.suffix != ".jsonl":
            rates = {str(task): float(rate) for task, rate in json.loads(text).items()}
        else:
            played: dict[str, list[float]] = defaultdict(list)
            for at, line in enumerate(text.splitlines(), 1):  # noqa: B007  # said below
                record = json.loads(line)
                if record["success"] is not None:  # its environment failed: it says nothing of the policy
                    played[str(record["task"])].append(float(record["success"]))
            rates = {task: sum(wins) / len(wins) for task, wins in played.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        line = f" line {at}" if at else ""
        raise ConfigError(
            f"{where}{line} is no pass rates ({type(error).__name__}: {error}); give a JSON object of task ids and "
            "rates, or the episodes of an evaluation (evaluations/NAME.jsonl)"
        ) from None
    if bad := [task for task, rate in rates.items() if not 0 <= rate <= 1]:
        raise ConfigError(f"{where}: the rate of {bad[0]} is {rates[bad[0]]}, not between 0 and 1")
    return rates
