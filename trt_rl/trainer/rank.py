"""One Megatron rank: model, optimizer and the operations the driver asks of every rank together.

Imports megatron; on a machine without CUDA the stand-ins of `trainer.cpu` must be installed first.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from trt_rl.algo.loss import clipped_policy_loss
from trt_rl.arch import Arch
from trt_rl.batch import Batch
from trt_rl.config import Recipe
from trt_rl.refit.member import Agreement, TrainerMember
from trt_rl.refit.precision import PrecisionTable
from trt_rl.refit.stream import Refit
from trt_rl.trainer import checkpoint
from trt_rl.trainer.calibrate import calibrate
from trt_rl.trainer.model import build_model, start_parallel_state
from trt_rl.trainer.offload import Offload
from trt_rl.trainer.optimizer import make_optimizer, make_schedule, wrap
from trt_rl.trainer.step import Pass, local_rows, logprob_pass, train_pass
from trt_rl.trainer.weights import gather_hf, load_hf


class MegatronRank:
    """Every method is collective over all ranks unless it says otherwise."""

    def __init__(self, recipe: Recipe) -> None:
        trainer = recipe.trainer
        self.recipe, self.arch, self.layout = recipe, Arch.load(recipe.model.path), trainer.parallel.layout()
        self.rank = dist.get_rank()
        start_parallel_state(self.layout, recipe.seed)
        self.module = build_model(self.arch, self.layout, trainer.precision, trainer.megatron)
        load_hf(self.module, recipe.model.path, self.arch, self.layout)
        self.model = wrap(self.module, overlap=torch.cuda.is_available())
        self.optimizer = make_optimizer(self.model, trainer.optimizer, bf16=trainer.precision == "bf16")
        self.schedule = make_schedule(self.optimizer, trainer.optimizer, recipe.run.steps * trainer.mini_batches)
        self.settings = Pass(self.arch, self.layout, trainer.microbatch_tokens, trainer.logprob_chunk, recipe.rollout.sampling.temperature)
        algo = recipe.algo
        self.loss = partial(clipped_policy_loss, clip_low=algo.clip_low, clip_high=algo.clip_high, dual_clip=algo.dual_clip)
        self.member: TrainerMember | None = None
        self.input_scales: dict[str, float] = {}
        self.offload = Offload(self.model, self.optimizer, trainer.offload)
        self.offload.out()  # an engine that starts beside this rank measures what is free

    def logprobs(self, batch: Batch) -> list[tuple[list[int], torch.Tensor]]:
        """Row numbers and log-probs of this rank's rows; empty where another rank reports them."""
        self.model.eval()
        size, results = len(batch) // self.recipe.trainer.mini_batches, []
        for i, part in enumerate(batch.minibatches(self.recipe.trainer.mini_batches)):
            rows, logp = logprob_pass([self.model], part, self.settings)
            if self._reports():
                results.append(([i * size + row for row in rows], logp))
        return results

    def train(self, batch: Batch) -> dict[str, float]:
        """One optimizer update per mini-batch. Metrics are means over the mini-batches, from one rank only."""
        self.model.train()
        self.offload.back()
        parts, totals = batch.minibatches(self.recipe.trainer.mini_batches), {}
        for part in parts:
            self.model.zero_grad_buffer()
            self.optimizer.zero_grad()
            self.schedule.step(increment=1)  # before the update: Megatron's order would make the first one with lr = 0
            lr = self.optimizer.param_groups[0]["lr"]
            metrics = train_pass([self.model], part, self.settings, self._loss)
            ok, norm, _ = self.optimizer.step()
            if not ok:
                raise FloatingPointError(f"rank {self.rank}: the optimizer refused the update (gradient norm {norm})")
            for name, value in (metrics | {"grad_norm": float(norm), "lr": lr}).items():
                totals[name] = totals.get(name, 0.0) + value / len(parts)
        self.offload.out()
        if self.recipe.rollout.colocated:
            torch.cuda.empty_cache()  # what activations took belongs to the engine until the next step
        return totals if self._reports() else {}

    def _loss(self, logp: torch.Tensor, entropy: torch.Tensor, rows: Batch):
        mine = local_rows(rows)
        loss, sums = self.loss(logp, mine.old_logp_N_S, mine.advantages_N_S, mine.correction_N_S, mine.weights_N_S)
        return loss, sums | {"loss": loss, "entropy": (entropy * mine.weights_N_S).sum()}

    def _reports(self) -> bool:
        """Last stage, first tensor- and context-parallel rank: it has complete results of its rows."""
        return (
            parallel_state.is_pipeline_last_stage()
            and parallel_state.get_tensor_model_parallel_rank() == 0
            and parallel_state.get_context_parallel_rank() == 0
        )

    # --- refit: each method is one step of `refit.session` ------------------------------------------------------

    def set_input_scales(self, scales: dict[str, float]) -> None:
        self.input_scales = scales

    def calibrate(self, batch: Batch) -> dict[str, float]:
        """Find input scales for fp8_per_tensor by forward passes over `batch`."""
        self.model.eval()
        table = PrecisionTable.build(self.arch, self.recipe.refit.policy())
        forward = partial(logprob_pass, [self.model], batch, self.settings)
        self.input_scales = calibrate(self.module, self.arch, self.layout, table, self.arch.rms_eps, forward)
        return self.input_scales

    def refit_agree(self, agreement: Agreement) -> list[str]:
        table = PrecisionTable.build(self.arch, self.recipe.refit.policy())
        self.member = TrainerMember(
            agreement,
            self.arch,
            table,
            self.rank,
            self.module.named_parameters(),
            parallel_state.get_tensor_model_parallel_group(),
            parallel_state.get_expert_tensor_parallel_group(),
            self.input_scales,
        )
        return [self.member.digest]

    def refit_join(self) -> None:
        self.member.join()

    def refit_check(self) -> None:
        self.member.check()

    def refit_prepare(self) -> None:
        self.member.prepare()

    def refit_send(self, refit: Refit) -> dict[str, Any]:
        return self.member.send(refit).as_dict()

    def refit_disconnect(self) -> None:
        if self.member is not None:
            self.member.close()
            self.member = None

    # --- checkpoints -------------------------------------------------------------------------------------------

    def save(self, folder: str) -> None:
        checkpoint.save(Path(folder), self.model, self.optimizer, self.schedule)

    def load(self, folder: str) -> None:
        self.offload.back()
        checkpoint.load(Path(folder), self.model, self.optimizer, self.schedule)
        settings = self.recipe.trainer.optimizer
        for group in self.optimizer.param_groups:  # the checkpoint brought its own; the recipe may have changed since
            group["max_lr"], group["min_lr"] = settings.lr, settings.min_lr
        self.schedule.step(increment=0)
        self.offload.out()

    def export_hf(self, folder: str) -> None:
        """Write the weights as a Hugging Face folder (rank 0), without config or tokenizer."""
        from trt_rl.refit.hf_files import write_folder

        tensors = gather_hf(self.module, self.arch, self.layout)
        if self.rank == 0:
            write_folder(Path(folder), tensors)
        else:
            for _ in tensors:
                pass
