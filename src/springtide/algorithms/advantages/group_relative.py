"""Group-relative advantages: a member is as good as its reward stands above its group's mean.

    A_i = r_i - mean(r)                        divide_by_std = False
    A_i = (r_i - mean(r)) / (std(r) + 1e-6)    divide_by_std = True, std the sample deviation (n - 1)

Source: DeepSeekMath (arXiv 2402.03300), as in AgentRL (arXiv 2510.04206); without the division: Dr. GRPO (2503.20783).
The credit goes to every action token of the member alike.
"""

from __future__ import annotations

import numpy as np

EPSILON = 1e-6  # AgentRL's; keeps two nearly equal rewards from becoming a large advantage


def group_relative(rewards: np.ndarray, divide_by_std: bool) -> np.ndarray:
    """rewards: float64 [n], n >= 2, finite. Returns: float64 [n], summing to 0. Raises: ValueError for n < 2."""
    if rewards.ndim != 1 or len(rewards) < 2:
        raise ValueError(f"group_relative needs the rewards of at least 2 members, not shape {rewards.shape}")
    centred = rewards - rewards.mean()
    return centred / (rewards.std(ddof=1) + EPSILON) if divide_by_std else centred
