"""What kind of file system a path lies in. Standard library only: it is also imported where little else is installed.

Called by: `weights.files`, `doctor cluster`.
"""

from __future__ import annotations

import os
from pathlib import Path


def file_system(path: Path) -> str | None:
    """The type of the file system a path lies in, as tmpfs or ext4; None where that cannot be found out."""
    device = os.stat(path).st_dev
    try:
        mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    except OSError:
        return None
    wanted = f"{os.major(device)}:{os.minor(device)}"
    return next((m[m.index("-") + 1] for m in reversed(mounts) if m[2] == wanted), None)
