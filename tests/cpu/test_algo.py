"""The mathematics against formulas written out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from trt_rl.algo.advantage import grpo_advantages
from trt_rl.algo.correction import mismatch_metrics, truncated_importance
from trt_rl.algo.loss import clipped_policy_loss, token_weights
from trt_rl.algo.sampling import informative
from trt_rl.algo.shaping import overlong_penalty
from trt_rl.trainer.microbatch import plan_microbatches


def test_grpo_advantages_are_standard_scores_of_valid_samples():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [1.0, 7.0, 0.0, 0.5]])
    valid = torch.tensor([[1.0, 1.0, 1.0, 1.0], [1.0, 0.0, 1.0, 1.0]])
    result = grpo_advantages(rewards, valid)
    first = (rewards[0] - 0.5) / (rewards[0].std() + 1e-6)
    seen = rewards[1][[0, 2, 3]]
    assert torch.allclose(result[0], first)
    assert torch.allclose(result[1][[0, 2, 3]], (seen - seen.mean()) / (seen.std() + 1e-6))
    assert result[1, 1] == 0, "a failed sample neither learns nor counts"
    assert torch.allclose(grpo_advantages(rewards, valid, normalize_std=False)[0], rewards[0] - 0.5)
    assert (grpo_advantages(torch.ones(1, 4), torch.ones(1, 4)) == 0).all()
    assert torch.isfinite(grpo_advantages(torch.ones(1, 4), torch.zeros(1, 4))).all()


def test_token_weights_sum_to_one():
    mask = torch.tensor([[1.0, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]])
    assert torch.allclose(token_weights(mask, "token_mean"), mask / 4)
    by_sequence = token_weights(mask, "sequence_mean")
    assert torch.allclose(by_sequence[0, :3], torch.full((3,), 1 / 6)) and by_sequence[1, 0] == 0.5
    assert by_sequence.sum() == pytest.approx(1)


@pytest.mark.parametrize("advantage", [1.5, -1.5])
@pytest.mark.parametrize("ratio", [0.1, 0.79, 0.81, 1.0, 1.27, 1.29, 30.0])
def test_clip_higher_and_dual_clip(advantage, ratio):
    logp = torch.tensor([[math.log(ratio)]], requires_grad=True)
    one = torch.ones(1, 1)
    loss, sums = clipped_policy_loss(logp, 0 * one, advantage * one, one, one, clip_low=0.2, clip_high=0.28, dual_clip=10.0)
    clipped = min(max(ratio, 0.8), 1.28)
    expected = max(-advantage * ratio, -advantage * clipped)
    if advantage < 0:
        expected = min(expected, -advantage * 10.0)
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert sums["clip_fraction"].item() == float(-advantage * clipped > -advantage * ratio + 1e-9)
    assert sums["ppo_kl"].item() == pytest.approx(-math.log(ratio), rel=1e-5, abs=1e-7)
    loss.backward()
    limited = (advantage > 0 and ratio > 1.28) or (advantage < 0 and (ratio < 0.8 or ratio > 10))
    assert (logp.grad.abs().item() == 0) == limited


def test_correction_scales_the_gradient_and_padding_cannot_poison_it():
    logp = torch.tensor([[-1.0, 500.0]], requires_grad=True)
    weights = torch.tensor([[1.0, 0.0]])
    loss, _ = clipped_policy_loss(
        logp, torch.tensor([[-1.0, -500.0]]), torch.ones(1, 2), torch.tensor([[0.25, 1.0]]), weights, clip_low=0.2, clip_high=0.28
    )
    loss.backward()
    assert logp.grad.tolist() == [[-0.25, 0.0]]


def test_truncated_importance():
    old = torch.tensor([[-1.0, -1.0, -1.0, -torch.inf, 0.0]])
    engine = torch.tensor([[-1.0, -1.5, -3.0, -1.0, -9.0]])
    mask = torch.tensor([[1.0, 1, 1, 1, 0]])
    assert torch.allclose(truncated_importance(old, engine, mask, cap=2.0), torch.tensor([[1.0, math.exp(0.5), 2.0, 0.0, 1.0]]))


def test_mismatch_metrics():
    old, engine = torch.tensor([[-1.0, -2.0, 5.0]]), torch.tensor([[-1.1, -1.8, 0.0]])
    found = mismatch_metrics(old, engine, torch.tensor([[1.0, 1.0, 0.0]]))
    d = [0.1, -0.2]
    assert found["mismatch_kl"] == pytest.approx(sum(math.exp(x) - x - 1 for x in d) / 2, rel=1e-5)
    assert found["token_mult_prob_error"] == pytest.approx(sum(math.exp(abs(x)) for x in d) / 2, rel=1e-5)
    assert found["mismatch_abs_logp"] == pytest.approx(0.15, rel=1e-5)
    assert mismatch_metrics(old, old, torch.ones(1, 3))["mismatch_kl"] == 0


def test_dynamic_sampling_and_overlong_shaping():
    assert informative([0.0, 1.0]) and informative([None, 0.0, 0.5])
    assert not informative([1.0, 1.0]) and not informative([None, 1.0]) and not informative([None, None])
    assert [overlong_penalty(n, 20, 10, 1.0) for n in (5, 10, 15, 20, 30)] == [0, 0, -0.5, -1.0, -1.0]


def test_spans_inside_spans_are_not_counted_twice():
    from trt_rl.observe.span import Spans

    span = Spans()
    with span("outer"), span("inner"):
        pass
    with span("inner"):
        pass
    assert list(span.take_step()) == ["outer", "inner"] and list(span.total) == ["outer", "inner"] and not span.step


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_microbatch_plans_cover_every_row_once_and_keep_replicas_in_step(replicas):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 120, (50,), generator=generator).tolist()
    plans = plan_microbatches(lengths, replicas, token_budget=256, multiple=8)
    assert len({len(plan) for plan in plans}) == 1
    assert sorted(row for plan in plans for micro in plan for row in micro.rows) == list(range(50))
    for plan in plans:
        for micro in plan:
            assert micro.width % 8 == 0 and all(lengths[row] <= micro.width for row in micro.rows)
            assert len(micro.rows) * micro.width <= 256 or len(micro.rows) == 1
    loads = [sum(lengths[r] for m in plan for r in m.rows) for plan in plans]
    assert max(loads) - min(loads) <= max(lengths)
