"""Which split a goal or a layout belongs to, and numbers that are the same in every process.

Owns the hash that divides `train` from `test`. Invariant: a key is in exactly one of the two, whoever asks; `ood` takes
any key, for its names and templates set it apart. Called by: `generate` and `houses`, which draw tasks.
"""

from __future__ import annotations

import hashlib

_TEST_SHARE = 5  # one goal and one layout in this many belong to `test`


class Again(Exception):
    """This draw does not make a task; draw on."""


def of_split(split: str, *key: str) -> bool:
    """Whether a goal or a layout belongs to `split`."""
    return split == "ood" or (stable_hash(*key) % _TEST_SHARE == 0) == (split == "test")


def stable_hash(*key: object) -> int:
    """The same number in every process, unlike `hash`."""
    return int.from_bytes(hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=8).digest(), "little")
