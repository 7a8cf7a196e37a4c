"""Samples on their way from prompt to gradient: generate, reward, filter, advantages, batch."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import torch

from trt_rl.algo.advantage import grpo_advantages
from trt_rl.algo.correction import mismatch_metrics, truncated_importance
from trt_rl.algo.loss import token_weights
from trt_rl.algo.sampling import informative
from trt_rl.algo.shaping import overlong_penalty
from trt_rl.batch import Batch, make_batch
from trt_rl.config import Recipe, SamplingSettings
from trt_rl.data.prompts import Prompt
from trt_rl.errors import DataError
from trt_rl.observe.span import span
from trt_rl.reward.pool import RewardPool, Score
from trt_rl.rollout.engine import SEEDS, Completion, Request, Sampling
from trt_rl.rollout.pool import RolloutPool


@dataclass
class Group:
    """All samples of one prompt. `rewards` holds None where the reward function failed."""

    prompt: Prompt
    completions: list[Completion]
    texts: list[str]
    scores: list[Score]
    rewards: list[float | None]
    advantages: list[float] = field(default_factory=list)


@dataclass
class Sampler:
    """Turns prompts into scored groups."""

    recipe: Recipe
    pool: RolloutPool
    rewards: RewardPool
    tokenizer: object
    stop_token_ids: tuple[int, ...]

    def groups(self, prompts: list[Prompt], size: int, settings: SamplingSettings, stream: str) -> list[Group]:
        """`size` scored samples of every prompt. `stream` names the random stream: equal names, equal samples."""
        requests = [
            Request(f"{stream}/{p}/{g}", prompt.tokens, self._sampling(settings, f"{stream}/{p}/{g}"))
            for p, prompt in enumerate(prompts)
            for g in range(size)
        ]
        with span("generate"):
            completions = self.pool.generate(requests)
        with span("reward"):
            texts = [self.tokenizer.decode(c.tokens, skip_special_tokens=True) for c in completions]
            rows = [prompt.row for prompt in prompts for _ in range(size)]
            scores = self.rewards.score(list(zip(texts, rows, strict=True)))
        groups = []
        for p, prompt in enumerate(prompts):
            at = slice(p * size, (p + 1) * size)
            groups.append(Group(prompt, completions[at], texts[at], scores[at], [s.value for s in scores[at]]))
        return groups

    def _sampling(self, settings: SamplingSettings, name: str) -> Sampling:
        seed = hashlib.sha256(f"{self.recipe.seed}/{name}".encode()).digest()[:8]
        return Sampling.of(settings, self.stop_token_ids, int.from_bytes(seed, "big") % SEEDS)

    def training_groups(self, stream: object, step: int) -> tuple[list[Group], list[Group]]:
        """The groups to train on in `step`, and all groups that were sampled for it.

        With dynamic sampling, each round asks for exactly as many groups as are still missing.

        Raises:
            DataError: the rounds are used up and `on_shortfall` is `stop`, or nothing at all can be learned.
        """
        rollout, dynamic = self.recipe.rollout, self.recipe.algo.dynamic_sampling
        kept: list[Group] = []
        sampled: list[Group] = []
        for round_number in range(dynamic.max_rounds if dynamic.enabled else 1):
            prompts = stream.take(rollout.prompts_per_step - len(kept))
            fresh = self.groups(prompts, rollout.group_size, rollout.sampling, f"step{step}/round{round_number}")
            self._shape(fresh)
            sampled += fresh
            failures = [s.failure for group in fresh for s in group.scores if s.failure]
            if len(failures) == len(fresh) * rollout.group_size:
                raise DataError(f"step {step}: reward.function failed on every sample; the first: {failures[0]}")
            # Judged by the verifier's scores: a length penalty alone is no signal about the answer.
            kept += [group for group in fresh if not dynamic.enabled or informative([s.value for s in group.scores])]
            if len(kept) == rollout.prompts_per_step:
                break
        short = rollout.prompts_per_step - len(kept)
        if short and (dynamic.on_shortfall == "stop" or not kept):
            raise DataError(
                f"step {step}: after {dynamic.max_rounds} rounds (algo.dynamic_sampling.max_rounds) {len(kept)} of "
                f"{rollout.prompts_per_step} groups have differing rewards; raise max_rounds, use easier or harder data, "
                "or set on_shortfall: train"
            )
        return kept, sampled

    def _shape(self, groups: list[Group]) -> None:
        overlong, limit = self.recipe.algo.overlong, self.recipe.rollout.sampling.max_tokens
        if overlong.enabled:
            for group in groups:
                lengths = [len(c.tokens) for c in group.completions]
                group.rewards = [
                    None if r is None else r + overlong_penalty(n, limit, overlong.buffer_tokens, overlong.penalty)
                    for r, n in zip(group.rewards, lengths, strict=True)
                ]


def training_batch(recipe: Recipe, groups: list[Group]) -> Batch:
    """Advantages of every group, and all its samples as one padded batch. Failed samples carry no weight."""
    rewards = torch.tensor([[r if r is not None else 0.0 for r in g.rewards] for g in groups])
    valid = torch.tensor([[float(r is not None) for r in g.rewards] for g in groups])
    advantages = grpo_advantages(rewards, valid, recipe.algo.normalize_std)
    for group, row in zip(groups, advantages.tolist(), strict=True):
        group.advantages = row
    completions = [c for g in groups for c in g.completions]
    batch = make_batch(
        [list(g.prompt.tokens) for g in groups for _ in g.completions],
        [c.tokens for c in completions],
        [c.logprobs for c in completions],
    )
    mask = batch.mask_N_S * valid.flatten().unsqueeze(-1)
    weights = torch.cat([token_weights(part, recipe.algo.aggregation) for part in mask.chunk(recipe.trainer.mini_batches)])
    return batch.with_(mask_N_S=mask, advantages_N_S=advantages.flatten().unsqueeze(-1) * mask, weights_N_S=weights)


def correct(recipe: Recipe, batch: Batch, old_logp_N_S: torch.Tensor) -> tuple[Batch, dict[str, float]]:
    """Put the trainer's log-probs in, measure the gap to the engine's, and weigh tokens against it if configured."""
    metrics = mismatch_metrics(old_logp_N_S, batch.engine_logp_N_S, batch.mask_N_S)
    if recipe.correct_importance:
        weights = truncated_importance(old_logp_N_S, batch.engine_logp_N_S, batch.mask_N_S, recipe.algo.tis.cap)
        batch = batch.with_(correction_N_S=weights)
        inside = weights[batch.mask_N_S > 0]
        metrics |= {"tis_mean": inside.mean().item(), "tis_capped": (inside >= recipe.algo.tis.cap).float().mean().item()}
    return batch.with_(old_logp_N_S=old_logp_N_S), metrics


def sampling_metrics(kept: list[Group], sampled: list[Group]) -> dict[str, float]:
    """What was sampled for a step, and how many of its groups are trained on."""
    values = [s.value for g in sampled for s in g.scores if s.value is not None]
    completions = [c for g in sampled for c in g.completions]
    return {
        "reward": sum(values) / max(len(values), 1),
        "response_length": sum(len(c.tokens) for c in completions) / len(completions),
        "truncated": sum(c.finish == "length" for c in completions) / len(completions),
        "groups_trained": len(kept),
        "groups_sampled": len(sampled),
        "reward_failures": sum(s.value is None for g in sampled for s in g.scores),
    }


def rollout_rows(groups: list[Group], step: int) -> list[dict]:
    """One JSON row per sample: everything needed to read it, or to train on it again."""
    return [
        {
            "step": step,
            "prompt": g.prompt.row,
            "prompt_tokens": list(g.prompt.tokens),
            "response": g.texts[i],
            "tokens": c.tokens,
            "logprobs": c.logprobs,
            "weight_versions": c.versions,
            "finish": c.finish,
            "reward": g.rewards[i],
            "score": g.scores[i].value,
            "reward_failure": g.scores[i].failure,
            "advantage": g.advantages[i] if g.advantages else None,
        }
        for g in groups
        for i, c in enumerate(g.completions)
    ]
