"""Forward and backward over micro-batches through Megatron's pipeline schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from trt_rl.arch import Arch
from trt_rl.batch import Batch
from trt_rl.layout import Layout
from trt_rl.trainer.logprobs import token_logprobs
from trt_rl.trainer.microbatch import MicroBatch, plan_microbatches

# (log-probs [b, s], entropy [b, s], the micro-batch's rows) -> (loss, sums to be reported)
LossFunction = Callable[[torch.Tensor, torch.Tensor, Batch], tuple[torch.Tensor, dict[str, torch.Tensor]]]


@dataclass(frozen=True)
class Pass:
    """What every pass over a batch needs to know."""

    arch: Arch
    layout: Layout
    token_budget: int
    chunk: int
    temperature: float

    def microbatches(self, batch: Batch) -> list[MicroBatch]:
        multiple = self.layout.tp * self.layout.cp * (2 if self.layout.cp > 1 else 1)
        plans = plan_microbatches(batch.lengths_N.tolist(), self.layout.dp, self.token_budget, multiple)
        return plans[parallel_state.get_data_parallel_rank()]


def train_pass(models: list[torch.nn.Module], batch: Batch, settings: Pass, loss: LossFunction) -> dict[str, float]:
    """Accumulate gradients of `sum(loss)` over the whole global batch and return its summed metrics.

    Megatron divides by the number of micro-batches and averages over data-parallel ranks; both are
    multiplied back, because the weights in `batch` already make the loss an average over the global batch.
    Collective. Ranks that are not on the last pipeline stage return an empty dict.
    """
    plan = settings.microbatches(batch)
    scale = len(plan) * settings.layout.dp

    def on_logits(logits: torch.Tensor, rows: Batch):
        logp, entropy = _rows_logprobs(logits, rows, settings)
        value, sums = loss(logp, entropy, rows)
        return value * scale, {name: total.detach() for name, total in sums.items()}

    outputs = _run(models, batch, plan, settings, on_logits, forward_only=False)
    return _reduce_sums(outputs)


@torch.no_grad()
def logprob_pass(models: list[torch.nn.Module], batch: Batch, settings: Pass) -> tuple[list[int], torch.Tensor]:
    """Log-probs of this data-parallel rank's rows, without gradients.

    Returns row numbers and log-probs `[rows, S]` (FP32, zero outside the mask); empty on ranks that are not on the
    last pipeline stage. Collective.
    """
    plan = settings.microbatches(batch)

    def on_logits(logits: torch.Tensor, rows: Batch):
        logp, _ = _rows_logprobs(logits, rows, settings)
        return logits.new_zeros(()), {"logp": logp * _local(rows.mask_N_S)}

    outputs = _run(models, batch, plan, settings, on_logits, forward_only=True)
    if not outputs:
        return [], torch.empty(0)
    numbers = [row for micro in plan for row in micro.rows]
    result = torch.zeros(len(numbers), batch.tokens_N_S.shape[1])
    start = 0
    for micro, output in zip(plan, outputs, strict=True):
        logp = _join_context(output["logp"])
        count, width = len(micro.rows), min(micro.width, result.shape[1])
        result[start : start + count, :width] = logp[:count, :width].float().cpu()
        start += count
    return numbers, result


def forward_logits(models: list[torch.nn.Module], batch: Batch, settings: Pass) -> list[torch.Tensor]:
    """Full logits `[rows, width, vocab]` of every micro-batch on the last stage; for tests of numerics only."""
    plan = settings.microbatches(batch)

    def on_logits(logits: torch.Tensor, rows: Batch):
        parts = [torch.empty_like(logits) for _ in range(settings.layout.tp)]
        dist.all_gather(parts, logits.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
        return logits.new_zeros(()), {"logits": torch.cat(parts, -1)[..., : settings.arch.vocab]}

    with torch.no_grad():
        return [o["logits"] for o in _run(models, batch, plan, settings, on_logits, forward_only=True)]


def _run(models, batch, plan, settings, on_logits, forward_only: bool) -> list[dict]:
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")

    def forward(iterator: Iterator[MicroBatch], model: torch.nn.Module):
        rows = _take(batch, next(iterator), device)
        positions = torch.arange(rows.tokens_N_S.shape[1], device=device).expand_as(rows.tokens_N_S)
        output = model(_local(rows.tokens_N_S), _local(positions), attention_mask=None)
        return output, lambda logits: on_logits(logits, rows)

    return get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iter(plan) if len(models) == 1 else [iter(plan) for _ in models],
        model=models,
        num_microbatches=len(plan),
        seq_length=max(m.width for m in plan),
        micro_batch_size=1,  # with variable_seq_lengths, stages tell each other the true shapes
        forward_only=forward_only,
    )


def _take(batch: Batch, micro: MicroBatch, device: torch.device) -> Batch:
    """The micro-batch's rows at its width. An empty one becomes a single row of zero weight."""
    rows = batch.rows(list(micro.rows) or [0])
    values = {}
    for name, value in vars(rows).items():
        if value.dim() == 2:
            short = micro.width - value.shape[1]
            value = torch.nn.functional.pad(value, (0, short)) if short > 0 else value[:, : micro.width]
        values[name] = (value if micro.rows else torch.zeros_like(value)).to(device)
    return Batch(**values)


def _rows_logprobs(logits: torch.Tensor, rows: Batch, settings: Pass) -> tuple[torch.Tensor, torch.Tensor]:
    targets = _local(torch.roll(rows.tokens_N_S, -1, dims=1))
    group = parallel_state.get_tensor_model_parallel_group() if settings.layout.tp > 1 else None
    logp, entropy = token_logprobs(
        logits.flatten(0, 1),
        targets.flatten(),
        first_column=parallel_state.get_tensor_model_parallel_rank() * logits.shape[-1],
        vocab=settings.arch.vocab,
        temperature=settings.temperature,
        chunk=settings.chunk,
        group=group,
    )
    return logp.view(targets.shape), entropy.view(targets.shape)


def local_rows(rows: Batch) -> Batch:
    """`rows` cut to this context-parallel rank's positions."""
    return Batch(**{name: _local(value) if value.dim() == 2 else value for name, value in vars(rows).items()})


def _local(value_B_S: torch.Tensor) -> torch.Tensor:
    """This context-parallel rank's positions: chunk r and its mirror image, so that causal work is balanced."""
    parts = parallel_state.get_context_parallel_world_size()
    if parts == 1:
        return value_B_S
    rank = parallel_state.get_context_parallel_rank()
    chunks = value_B_S.chunk(2 * parts, dim=-1)
    return torch.cat([chunks[rank], chunks[2 * parts - 1 - rank]], dim=-1)


def _join_context(value: torch.Tensor) -> torch.Tensor:
    """Undo `_local` along the last dimension. Collective over the context-parallel group."""
    parts = parallel_state.get_context_parallel_world_size()
    if parts == 1:
        return value
    shards = [torch.empty_like(value) for _ in range(parts)]
    dist.all_gather(shards, value.contiguous(), group=parallel_state.get_context_parallel_group())
    pairs = [shard.chunk(2, dim=-1) for shard in shards]
    return torch.cat([first for first, _ in pairs] + [second for _, second in reversed(pairs)], dim=-1)


def _reduce_sums(outputs: list[dict[str, torch.Tensor]]) -> dict[str, float]:
    if not outputs:
        return {}
    names = sorted(outputs[0])
    totals = torch.stack([torch.stack([o[name].double() for o in outputs]).sum() for name in names])
    dist.all_reduce(totals, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    return dict(zip(names, totals.tolist(), strict=True))
