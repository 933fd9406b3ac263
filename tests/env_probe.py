"""An environment that misbehaves on demand, for the contract suite. Its tasks' payloads say how."""

import asyncio
import contextlib
import os
import sys
import time
from pathlib import Path

from springtide.env import Check, Environment, Limits, Outcome, Requires, TaskList, ToolError, tool

BEHAVIOURS = (
    "plain",
    "start raises",
    "start hangs",
    "start hangs in a thread",
    "start returns nothing",
    "start is cancelled",
    "score raises",
    "score is cancelled",
    "score is nan",
    "score is text",
    "score hangs",
    "score is an outcome",
    "score fails itself",
    "settle raises",
    "close raises",
    "infeasible",
    "solved",
)


class Probe(Environment):
    limits = Limits(max_turns=6, start_s=0.7, act_s=0.7, settle_s=0.7, score_s=0.7)

    @classmethod
    def tasks(cls, split, level):
        def make(i):
            name = BEHAVIOURS[i]
            return cls.make_task(split, level, i, {"behaviour": name}, infeasible=name == "infeasible")

        return TaskList(len(BEHAVIOURS), make)

    def trace(self, event):
        """Append to the file that tests read: what happened inside, in whichever process it did."""
        with open(Path(os.environ["SPRINGTIDE_PROBE"]), "a") as file:
            file.write(f"{event}\n")

    async def start(self):
        self.behaviour = self.task.payload["behaviour"]
        self.notes = []
        self.trace("start")
        if self.behaviour == "start raises":
            raise RuntimeError("no database")
        if self.behaviour == "start hangs":
            await asyncio.sleep(60)
        if self.behaviour == "start hangs in a thread":
            await asyncio.to_thread(time.sleep, 3)
        if self.behaviour == "start is cancelled":
            raise asyncio.CancelledError
        if self.behaviour == "start returns nothing":
            return None
        return f"Do it: {self.rng.random()}"

    @tool
    async def note(self, text: str, times: int = 1) -> str:
        """Write something down.

        text: what to write
        times: how often
        """
        self.notes += [text] * times
        self.trace(f"note {text}")
        return f"{len(self.notes)} notes"

    @tool
    def earn(self, amount: float) -> dict:
        """Earn a step reward."""
        self.reward(amount, "earned")
        return {"earned": amount}

    @tool
    async def refuse(self) -> str:
        """Always refuse."""
        raise ToolError("no such table: birds")

    @tool
    async def crash(self) -> str:
        """Fail."""
        raise KeyError("lost")

    @tool
    async def leave(self) -> str:
        """Exit."""
        sys.exit(3)

    @tool
    async def cancel(self) -> str:
        """Raise what a library raises whose own task was cancelled."""
        raise asyncio.CancelledError

    @tool
    def cancel_in_a_thread(self) -> str:
        """The same."""
        raise asyncio.CancelledError

    @tool
    async def give_nothing(self) -> str:
        """Return what no tool may return."""
        return None

    @tool
    async def sleep(self, seconds: float) -> str:
        """Wait in the event loop."""
        await asyncio.sleep(seconds)
        return "awake"

    @tool
    def doze(self, seconds: float) -> str:
        """Wait in a thread."""
        time.sleep(seconds)
        return "awake"

    @tool
    def spin(self, seconds: float) -> str:
        """Compute in a thread."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            pass
        return "done"

    @tool
    async def stubborn(self, seconds: float) -> str:
        """Wait in the event loop and ignore cancellation."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            try:
                await asyncio.sleep(0.1)
            except asyncio.CancelledError:
                continue
        return "done"

    @tool
    async def block(self, seconds: float) -> str:
        """Block the event loop, as no tool should."""
        time.sleep(seconds)
        return "done"

    @tool
    async def pid(self) -> str:
        """Tell the process."""
        return str(os.getpid())

    @tool
    async def die(self) -> str:
        """End the process, as a fault in a C library would."""
        os._exit(7)

    @tool
    async def give_up(self) -> str:
        """Declare the task infeasible."""
        self.end("cannot be done", infeasible=True)
        return "given up"

    @tool(final=True)
    async def done(self) -> str:
        """End."""
        self.trace("done")
        return "ended"

    async def settle(self):
        self.trace("settle")
        if self.behaviour == "settle raises":
            raise OSError("disk full")

    async def score(self):
        self.trace("score")
        if self.behaviour == "score raises":
            raise ZeroDivisionError("judge")
        if self.behaviour == "score is cancelled":
            asyncio.current_task().cancel()
            await asyncio.sleep(1)
        if self.behaviour == "score hangs":
            await asyncio.sleep(60)
        if self.behaviour == "score is an outcome":
            return Outcome("completed", 0.5, True, (Check("half", 0.5),), artifacts={"sql": "select 1"})
        if self.behaviour == "score fails itself":
            return Outcome("environment_error", cause="judge", detail="server down")
        if self.behaviour == "solved":
            return 1.0
        return {"score is nan": float("nan"), "score is text": "good"}.get(self.behaviour, await super().score())

    async def gold(self):
        return [("earn", {"amount": 1.0}), ("done", {})]

    async def close(self):
        self.trace("close")
        if self.behaviour == "close raises":
            raise RuntimeError("cannot close")


class Alone(Probe):
    """The same, each episode in a process of its own."""

    requires = Requires(isolated=True)


class Short(Probe):
    """The same, its process replaced after three episodes."""

    requires = Requires(max_episodes=3)


class Talk(Environment):
    """A user simulator: text is answered, a second text ends."""

    @classmethod
    def tasks(cls, split, level):
        return TaskList(10, lambda i: cls.make_task(split, level, i, {}))

    async def start(self):
        self.heard = []
        return "Hello"

    async def reply(self, text):
        self.heard.append(text)
        if len(self.heard) == 2:
            self.end("had enough")
            return None
        return f"You said {text}"

    async def score(self):
        return float(len(self.heard) == 2)


class Quiz(Environment):
    """A plain answer ends it."""

    plain_answer = True

    @classmethod
    def tasks(cls, split, level):
        return TaskList(10, lambda i: cls.make_task(split, level, i, {}))

    async def start(self):
        return "6 * 7?"

    async def score(self):
        return float(self.answer == "42")


class Library(Environment):
    """Its shelf is shared by all episodes of a process; the first attempt to open it fails where a file says so."""

    @classmethod
    def tasks(cls, split, level):
        return TaskList(10, lambda i: cls.make_task(split, level, i, {}))

    @classmethod
    @contextlib.asynccontextmanager
    async def shared(cls):
        trace = Path(os.environ["SPRINGTIDE_PROBE"])
        with open(trace, "a") as file:
            file.write("shelf opened\n")
        if (trace.parent / "no shelf").exists():
            (trace.parent / "no shelf").unlink()
            raise OSError("no shelf")
        yield {"visits": 0}
        with open(trace, "a") as file:
            file.write("shelf closed\n")

    async def start(self):
        self.shared["visits"] += 1
        return f"visit {self.shared['visits']}"

    @tool(final=True)
    async def read(self) -> str:
        """Read."""
        return "read"
