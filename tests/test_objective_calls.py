"""What a call brings to the objectives: prompts, rewards, packed layouts, a generator, the sampler's log-probs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_objective_coefficients import OWN, B, T, problem
from torch import Tensor

import grpo_kernels as gk

LENGTHS = (7, 3, 5, 1, 2, 6)


def both_layouts(config: gk.GRPOLossConfig, seed: int, **given: Any) -> list[tuple[Tensor, Tensor, dict[str, Tensor]]]:
    """Loss, gradient of the tokens that both have, metrics: padded, then packed with two dead tokens behind."""
    logits, ids, rest = problem(seed)
    keep = torch.arange(T)[None] < torch.tensor(LENGTHS)[:, None]
    rest["completion_mask"] = keep & (torch.arange(B * T).reshape(B, T) % 5 != 3)
    results = []
    for packed in (False, True):
        sides, leaf = dict(rest), logits.detach().clone()
        offsets = {}
        if packed:
            dead = 2

            def flat(value: Tensor, fill: float = float("nan"), dead: int = dead) -> Tensor:
                rows = value[keep]
                return torch.cat(
                    [rows, rows.new_full((dead, *rows.shape[1:]), fill if rows.is_floating_point() else 0)]
                )

            leaf, flat_ids = flat(leaf), flat(ids)
            sides = {
                name: flat(value) if isinstance(value, Tensor) and value.ndim == 2 else value
                for name, value in sides.items()
            }
            offsets = {"cu_seqlens": torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()])}
        leaf.requires_grad_()
        generator = {"generator": torch.Generator().manual_seed(0)} if config.loss_type == "clip_cov" else {}
        out = gk.grpo_loss(
            leaf, flat_ids if packed else ids, config=config, **sides, **offsets, **generator, **given
        )  # fmt: skip
        (grad,) = torch.autograd.grad(out.loss, leaf)
        results.append((out.loss.detach(), grad[:-2] if packed else grad[keep], out.metrics))
    return results


@pytest.mark.parametrize("loss_type", list(OWN))
def test_packed_and_padded_agree(loss_type: str) -> None:
    corrections = ["token_mask", "token_truncate"] if loss_type == "vespo" else ["sequence_mask", "token_truncate"]
    for seed, extra in enumerate([
        {"rollout_correction": corrections[0], "rollout_veto": 0.3, "aggregation": "seq_mean_token_mean"},
        {"rollout_correction": corrections[1], "off_policy_mask_threshold": 0.0, "beta": 0.1, "log_ratio_clamp": 0.4},
        {"top_entropy_quantile": 0.5, "entropy_coef": 0.1, "aggregation": "prompt_mean"},
    ]):  # fmt: skip
        config = gk.GRPOLossConfig(loss_type=loss_type, **OWN[loss_type] | extra)
        given = {"group_ids": torch.tensor([4, 4, -1, 9, -1, 4])} if config.aggregation == "prompt_mean" else {}
        (loss, grad, metrics), (packed, packed_grad, packed_metrics) = both_layouts(config, seed, **given)
        torch.testing.assert_close(packed, loss, rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(packed_grad, grad, rtol=1e-10, atol=1e-13)
        for name, value in metrics.items():
            torch.testing.assert_close(packed_metrics[name], value, rtol=1e-11, atol=1e-13, msg=name)


def prompt_loss(**given: Any) -> Tensor:
    logits, ids, rest = problem(1)
    config = gk.GRPOLossConfig(aggregation="prompt_mean", epsilon_high=0.28)
    loss: Tensor = gk.grpo_loss(logits, ids, config=config, **rest | given).loss
    return loss.detach()


def test_a_mean_over_prompts_is_the_mean_of_their_token_means() -> None:
    logits, ids, rest = problem(1)
    parts = []
    for rows in ([0, 3], [1, 2], [5, 4]):
        some = {name: value[rows] for name, value in rest.items()}
        parts.append(gk.grpo_loss(logits[rows], ids[rows], config=gk.GRPOLossConfig(epsilon_high=0.28), **some).loss)
    truth = torch.stack(parts).mean()
    torch.testing.assert_close(prompt_loss(group_ids=torch.tensor([7, 0, 0, 7, 3, 3])), truth)
    torch.testing.assert_close(prompt_loss(group_ids=torch.tensor([7, 0, 0, 7, 3, 3]), normalizer=2.0), truth * 1.5)
    assert (prompt_loss(group_size=3) - truth).abs() > 1e-3


def test_rewards_and_prompts_share_their_groups() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.5, 0.0, 1.0, 0.2], dtype=torch.float64)
    advantages = gk.group_advantages(rewards, group_size=2)
    made = prompt_loss(advantages=None, rewards=rewards, group_size=2)
    torch.testing.assert_close(made, prompt_loss(advantages=advantages.double(), group_size=2), rtol=1e-6, atol=1e-7)


def cov_loss(generator: torch.Generator | None) -> float:
    logits, ids, rest = problem(2)
    config = gk.GRPOLossConfig(loss_type="clip_cov", cov_ratio=0.1, cov_bounds=(-0.5, 5.0))
    return gk.grpo_loss(logits, ids, config=config, generator=generator, **rest).loss.item()


def test_the_random_choice_is_the_generators() -> None:
    seeds = [cov_loss(torch.Generator().manual_seed(seed)) for seed in range(8)]
    assert seeds[3] == cov_loss(torch.Generator().manual_seed(3))
    assert len(set(seeds)) > 3
    torch.manual_seed(3)
    assert cov_loss(None) == seeds[3]  # without one, torch's own


def test_missing_log_probs_weigh_one() -> None:
    logits, ids, rest = problem(0)
    config = gk.GRPOLossConfig(rollout_correction="token_mask", rollout_clip_min=0.9, rollout_clip_max=1.1)
    rest |= {"rollout_per_token_logps": torch.full((B, T), torch.nan)}
    out = gk.grpo_loss(logits, ids, config=config, **rest)
    plain = gk.grpo_loss(logits, ids, **rest | {"rollout_per_token_logps": None})
    assert torch.equal(out.loss, plain.loss)
    assert out.metrics["importance_sampling_ratio/min"] == out.metrics["importance_sampling_ratio/max"] == 1
    assert out.metrics["sampling_logp_difference/max"] == 0


def test_a_row_of_nan_shows_in_the_loss_whatever_masks_it() -> None:
    """A mask that looks at the row itself must not hide it."""
    logits, ids, rest = problem(0)
    broken = logits.detach().clone()
    where = rest["completion_mask"].nonzero()[0]
    broken[where[0], where[1]] = torch.nan
    for options in ({"off_policy_mask_threshold": 0.0}, {"top_entropy_quantile": 0.2}, {"log_ratio_clamp": 0.1},
                    {"kl_clamp": (0.1, 0.1), "beta": 0.1}, {"loss_type": "dppo_tv"}, {"loss_type": "dppo_kl"},
                    {"loss_type": "gmpo"}, {"loss_type": "vespo"}, {"loss_type": "sapo"}):  # fmt: skip
        advantages = {"advantages": -torch.ones(B, dtype=torch.float64)}
        out = gk.grpo_loss(broken, ids, config=gk.GRPOLossConfig(**options), **rest | advantages)
        assert out.loss.isnan(), options
