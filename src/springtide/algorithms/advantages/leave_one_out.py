"""Leave-one-out advantages: a member against the mean of the others, an unbiased baseline.

    A_i = r_i - (1 / (n - 1)) * sum over j != i of r_j  =  n / (n - 1) * (r_i - mean(r))

Source: RLOO (Kool et al. 2019; Ahmadian et al., arXiv 2402.14740). The credit goes to every action token alike.
"""

from __future__ import annotations

import numpy as np


def leave_one_out(rewards: np.ndarray) -> np.ndarray:
    """rewards: float64 [n], n >= 2, finite. Returns: float64 [n], summing to 0. Raises: ValueError for n < 2."""
    if rewards.ndim != 1 or len(rewards) < 2:
        raise ValueError(f"leave_one_out needs the rewards of at least 2 members, not shape {rewards.shape}")
    n = len(rewards)
    return n / (n - 1) * (rewards - rewards.mean())
