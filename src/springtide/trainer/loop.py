"""The loop that is the program.

Draw a task, open its environment, let the policy act, score what happened, learn from exactly that, publish the new
weights, and let what is ready decide what happens next. Drawing, playing and scoring go on beside this loop, in the
feeder, as the scheduling policy decides; what is below waits for what is ready, learns, and publishes.
Called by: `springtide.api.train`.
"""

from __future__ import annotations

from springtide.observe.metrics import Summary
from springtide.trainer.driver import Driver


async def train(run: Driver) -> Summary:
    """Train from where `run` stands to its last step (or minute), and say what came of it."""
    if run.fresh:
        await run.cold_start()
        await run.checkpoint()
    await run.open_frozen()
    await run.publish()
    if run.step == 0:
        await run.evaluate("start")
    async with run.feeding():
        while batch := await run.next_batch():
            await run.learn(batch)
            await run.publish()
            await run.evaluate_if_due()
            await run.checkpoint_if_due()
    await run.checkpoint()
    await run.evaluate("end")
    return await run.summarise()
