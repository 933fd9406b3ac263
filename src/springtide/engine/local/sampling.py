"""Counter-based randomness: a uniform number for every token from (seed, turn, position) and nothing else.

Owns: `uniforms`. Invariants: token t of a turn gets the same number whatever runs beside it, on every machine;
different seeds, turns and positions get unrelated numbers (verl#2646: cloned seeds clone a group's members).
Called by: `engine.local.core`, once a turn. Source of the mixer: SplitMix64 (Steele, Lea, Flood 2014).
"""

from __future__ import annotations

import numpy as np

_MASK = 0xFFFFFFFFFFFFFFFF
_GOLDEN, _A, _B = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def uniforms(seed: int, turn: int, count: int) -> np.ndarray:
    """float64 [count] in [0, 1): the draws of tokens 0 to count - 1."""
    stream = _mix((_mix(int(seed) & _MASK) + int(turn) * _GOLDEN) & _MASK)
    z = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN) + np.uint64(stream)  # arrays wrap modulo 2**64
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_A)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_B)
    z ^= z >> np.uint64(31)
    return (z >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: int) -> int:
    """The mixer of one number, in Python: a numpy scalar is several times slower."""
    z = (z ^ (z >> 30)) * _A & _MASK
    z = (z ^ (z >> 27)) * _B & _MASK
    return z ^ (z >> 31)
