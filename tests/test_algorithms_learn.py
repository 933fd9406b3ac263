"""Every loss and correction of the shelf learns a small task from samples, also from stale ones.

The policy is a table of logits: at each of three places it takes one of four tokens; an episode earns 1 if at least two
of its tokens are right. What is sampled is two updates old, as in an asynchronous run.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from springtide.algorithms.advantages.group_relative import group_relative
from springtide.algorithms.losses import Tokens, policy_loss
from springtide.config import Algorithm

PLACES, CHOICES, GROUPS, MEMBERS, STEPS, LAG = 3, 4, 6, 8, 40, 2
RIGHT = torch.tensor([2, 0, 3])


def learn(algorithm: Algorithm, lr: float = 0.3) -> list[float]:
    """Success of what was sampled at each step."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.zeros(PLACES, CHOICES, requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr)
    past: list[Tensor] = []
    success = []
    reference = torch.log_softmax(torch.zeros(PLACES, CHOICES), -1)
    for _ in range(STEPS):
        past.append(logits.detach().clone())
        behaviour, proximal = torch.log_softmax(past[max(0, len(past) - 1 - LAG)], -1), torch.log_softmax(past[-1], -1)
        n = GROUPS * MEMBERS
        taken = torch.multinomial(behaviour.exp(), n, replacement=True, generator=generator).T  # [n, PLACES]
        reward = ((taken == RIGHT).sum(1) >= 2).float()
        success.append(float(reward.mean()))
        groups = reward.view(GROUPS, MEMBERS).numpy()
        advantage = torch.cat([torch.from_numpy(group_relative(g, False)).float() for g in groups])
        place = torch.arange(PLACES)

        def at(table: Tensor, taken: Tensor = taken, place: Tensor = place) -> Tensor:
            return table[place, taken].reshape(-1)

        now = torch.log_softmax(logits, -1)
        entropy = -(now.exp() * now).sum(-1)
        tokens = Tokens(
            logprobs=at(now),
            rollout=at(behaviour),
            old=at(proximal if algorithm.old_logprobs == "recompute" else behaviour),
            advantages=advantage.repeat_interleave(PLACES),
            weights=torch.full((n * PLACES,), 1 / PLACES),
            sequence=torch.arange(n).repeat_interleave(PLACES),
            reference=at(reference),
            entropy=entropy.repeat(n),
        )
        optimizer.zero_grad()
        (policy_loss(tokens, algorithm).loss / n).backward()
        optimizer.step()
    return success


OPTIONS = {
    "ppo": {},
    "gspo": {"loss": "gspo", "clip_low": 0.1, "clip_high": 0.15},
    "cispo": {"loss": "cispo"},
    "decoupled": {"old_logprobs": "recompute"},
    **{
        f"{mode}-{level}": {"old_logprobs": "recompute", "correction": mode, "correction_level": level}
        for mode in ("truncate", "mask")
        for level in ("token", "sequence", "geometric")
    },
    "kl-k2": {"kl_coef": 0.01, "kl_estimator": "k2"},
    "kl-k3": {"kl_coef": 0.01},
    "entropy": {"entropy_coef": 0.005},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_success_rises(options: dict[str, object]) -> None:
    success = learn(Algorithm(**options))
    assert sum(success[:3]) / 3 < 0.35
    assert sum(success[-5:]) / 5 > 0.75


def test_a_strong_entropy_bonus_or_kl_keeps_the_policy_from_learning() -> None:
    for options in ({"entropy_coef": 5.0}, {"kl_coef": 5.0}, {"kl_coef": 5.0, "kl_estimator": "k2"}):
        assert sum(learn(Algorithm(**options))[-5:]) / 5 < 0.5
