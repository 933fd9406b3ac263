"""Counter-based randomness: a uniform number for every token from (seed, turn, position) and nothing else.

Owns: `uniforms`. Invariants: token t of a turn gets the same number whatever runs beside it, on every machine;
different seeds, turns and positions get unrelated numbers (verl#2646: cloned seeds clone a group's members).
Called by: `engine.local.core`, once a turn. Source of the mixer: SplitMix64 (Steele, Lea, Flood 2014).
"""

from __future__ import annotations

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_A, _B = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def uniforms(seed: int, turn: int, count: int) -> np.ndarray:
    """float64 [count] in [0, 1): the draws of tokens 0 to count - 1."""
    with np.errstate(over="ignore"):  # arithmetic modulo 2**64 is the method
        stream = _mix(_mix(np.uint64(seed & 0xFFFFFFFFFFFFFFFF)) + np.uint64(turn) * _GOLDEN)
        bits = _mix(stream + (np.arange(count, dtype=np.uint64) + np.uint64(1)) * _GOLDEN)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(value: np.ndarray | np.uint64) -> np.ndarray:
    z = np.asarray(value, np.uint64)
    z = np.multiply(z ^ (z >> np.uint64(30)), _A)
    z = np.multiply(z ^ (z >> np.uint64(27)), _B)
    return np.bitwise_xor(z, z >> np.uint64(31))
