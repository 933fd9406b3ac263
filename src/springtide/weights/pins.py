"""Which published versions must be kept, as one empty file each, so that any process can say so without loading torch.

    DIR/pins/<version>.<owner>

Called by: `weights.store` (what may be collected), the runtime (what a restarted engine will have to load again).
"""

from __future__ import annotations

from pathlib import Path


class Pins:
    """The pins of the store in `store`. Any process may add and remove; each owner removes its own."""

    def __init__(self, store: Path) -> None:
        self._directory = store / "pins"
        self._directory.mkdir(parents=True, exist_ok=True)

    def add(self, version: int, owner: str) -> None:
        (self._directory / f"{version}.{owner}").touch()

    def remove(self, version: int, owner: str) -> None:
        (self._directory / f"{version}.{owner}").unlink(missing_ok=True)

    def versions(self) -> frozenset[int]:
        return frozenset(int(p.name.partition(".")[0]) for p in self._directory.iterdir())
