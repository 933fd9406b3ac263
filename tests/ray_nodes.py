"""A Ray cluster on this machine whose nodes are groups of processes, so that one can be killed as a machine would die.

Called by: the tests of the Ray runtime, `benchmarks/kills.py`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.run_support import descendants, program, wait_for

_UP_S = 120.0


class Nodes:
    """`address` is the head's, the first that is added. Use `open_nodes`."""

    def __init__(self, directory: Path) -> None:
        token = directory / "token"  # it listens beyond loopback, as clusters do
        token.touch(0o600)
        token.write_text(secrets.token_hex(32))
        self.env = {
            **os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token),
            "PYTHONUNBUFFERED": "1",
        }  # fmt: skip
        self._directory, self._nodes = directory, dict[str, subprocess.Popen[bytes]]()
        self.address = ""

    def add(self, name: str, cpus: int, *, inside: tuple[str, ...] = (), labels: dict[str, str] | None = None) -> None:
        """A node of that name; one that was killed may come again. inside: a command that it is run by."""
        log = self._directory / f"{name}.log"
        options = [f"--num-cpus={cpus}", "--num-gpus=0", f"--object-store-memory={80 << 20}", "--block"]
        if labels:
            options.append("--labels=" + ",".join(f"{k}={v}" for k, v in labels.items()))
        if self.address:  # addresses of their own, as machines have
            options += [f"--address={self.address}", f"--node-ip-address=127.0.0.{2 + sum(map(ord, name)) % 250}"]
        else:
            options += ["--head", "--port=0", "--include-dashboard=false", f"--temp-dir={self._directory / 'ray'}"]
        with log.open("wb") as out:
            self._nodes[name] = subprocess.Popen(
                [*inside, sys.executable, "-m", "ray.scripts.scripts", "start", *options],
                env=self.env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        wait_for(f"node {name} ({log})", lambda: "Ray runtime started" in log.read_text(), _UP_S)
        if not self.address:
            place = self._directory / "ray" / "ray_current_cluster"  # written a moment after that was said
            self.address = wait_for("the head's address", lambda: place.exists() and place.read_text().strip(), _UP_S)

    def kill(self, name: str) -> None:
        """All that belongs to the node, at once."""
        node = self._nodes.pop(name)
        for pid in (node.pid, *descendants(node.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        node.wait()

    def pids(self, name: str | None = None) -> set[int]:
        """Of every process of a node, or of all."""
        return {pid for n, node in self._nodes.items() if name in (None, n) for pid in descendants(node.pid)}

    def holds(self, name: str) -> set[str]:
        """The programs of a run on that node."""
        return {program(pid) for pid in self.pids(name)}

    def end(self) -> None:
        for name in reversed(self._nodes.copy()):
            self.kill(name)


@contextlib.contextmanager
def open_nodes() -> Iterator[Nodes]:
    directory = Path(tempfile.mkdtemp(prefix="st-"))  # a short name: sockets lie below it
    nodes = Nodes(directory)
    try:
        yield nodes
    finally:
        nodes.end()
        shutil.rmtree(directory, ignore_errors=True)
