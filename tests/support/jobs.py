"""Functions that tests run on every rank of a distributed job."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from trt_rl.arch import Arch
from trt_rl.batch import Batch, make_batch
from trt_rl.layout import Layout


def _setup(folder: str, layout: Layout, precision: str):
    from trt_rl.trainer.model import build_model, start_parallel_state
    from trt_rl.trainer.weights import load_hf

    arch = Arch.load(folder)
    start_parallel_state(layout, seed=1)
    model = build_model(arch, layout, precision)
    load_hf(model, folder, arch, layout)
    return arch, model


def sample_batch(rows: int = 8, width: int = 24, vocab: int = 130) -> Batch:
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(width // 2, width + 1, (rows,), generator=generator).tolist()
    samples = [torch.randint(0, vocab, (n,), generator=generator).tolist() for n in lengths]
    prompts, responses = [s[:5] for s in samples], [s[5:] for s in samples]
    return make_batch(prompts, responses, [[-1.0] * len(r) for r in responses])


def logits(folder: str, layout: Layout, precision: str = "fp32"):
    """Logits by row number (last stage only) and whether HF -> Megatron -> HF gave the same bits."""
    from trt_rl.refit.hf_files import HFFolder
    from trt_rl.trainer.step import Pass, forward_logits
    from trt_rl.trainer.weights import gather_hf

    arch, model = _setup(folder, layout, precision)
    batch, settings = sample_batch(), Pass(arch, layout, 100, 7, 1.0)
    by_row = {}
    for micro, part in zip(settings.microbatches(batch), forward_logits([model], batch, settings), strict=False):
        by_row |= {row: part[i, : batch.lengths_N[row]].clone() for i, row in enumerate(micro.rows)}
    files, wrong = HFFolder(Path(folder), arch), []
    for name, tensor in gather_hf(model, arch, layout):
        original = files.read(name, tuple((0, n) for n in tensor.shape))
        if not torch.equal(original.to(tensor.dtype), tensor):
            wrong.append(name)
    return dist.get_rank(), by_row, wrong


def recipe(folder: str, layout: Layout, precision: str = "fp32", **sections):
    from trt_rl.config import parse_recipe

    tree = {
        "name": "test",
        "model": {"path": str(folder)},
        "data": {"train": {"source": "tests.support.tasks:rows"}, "max_prompt_tokens": 64},
        "reward": {"function": "tests.support.tasks:score"},
        "rollout": {"engine": "hf", "prompts_per_step": 4, "group_size": 2, "sampling": {"max_tokens": 32}},
        "trainer": {
            "parallel": vars(layout),
            "precision": precision,
            "microbatch_tokens": 100,
            "logprob_chunk": 7,
            "optimizer": {"lr": 5e-5},  # small enough that no step of a test clips every token
        },
        "refit": {"bucket_mib": 1},
    }
    for name, values in sections.items():
        tree[name] = tree.get(name, {}) | values
    return parse_recipe(tree)


def ready_batch(batch: Batch) -> Batch:
    from trt_rl.algo.loss import token_weights

    generator = torch.Generator().manual_seed(5)
    advantages = torch.randn(len(batch), 1, generator=generator) * batch.mask_N_S
    return batch.with_(advantages_N_S=advantages, weights_N_S=token_weights(batch.mask_N_S, "token_mean"))


def train_steps(folder: str, layout: Layout, steps: int = 5, precision: str = "fp32"):
    """Metrics of `steps` updates against the log-probs of the untouched policy, from the reporting rank."""
    from trt_rl.trainer.group import assemble
    from trt_rl.trainer.rank import MegatronRank

    trainer = MegatronRank(recipe(folder, layout, precision))
    batch, parts = ready_batch(sample_batch()), [None] * layout.world
    dist.all_gather_object(parts, trainer.logprobs(batch))
    old = assemble(batch, parts)
    return [trainer.train(batch.with_(old_logp_N_S=old)) for _ in range(steps)]


def checkpoint_steps(folder: str, layout: Layout, path: str):
    """Two steps, save, two more; then restore into a new trainer and repeat the last two."""
    from megatron.core import parallel_state

    from trt_rl.trainer.rank import MegatronRank

    settings = recipe(folder, layout, "bf16")
    batch = ready_batch(sample_batch())
    trainer = MegatronRank(settings)
    for _ in range(2):
        trainer.train(batch)
    trainer.save(path)
    straight = [trainer.train(batch) for _ in range(2)]
    parallel_state.destroy_model_parallel()
    trainer = MegatronRank(settings)
    trainer.load(path)
    return straight, [trainer.train(batch) for _ in range(2)]


def offloaded_steps(folder: str, layout: Layout, path: str, precision: str):
    """The steps of `checkpoint_steps` without and with offload; bytes of gradient buffers, of host memory, and that the GPU got back."""
    from megatron.core import parallel_state

    from trt_rl.trainer.rank import MegatronRank

    batch, histories, held = ready_batch(sample_batch()), [], []
    for what in ([], ["gradients", "optimizer"]):
        settings = recipe(folder, layout, precision, rollout={"engine": "vllm", "colocated": True}, trainer={"offload": what})
        trainer, folder_of_this = MegatronRank(settings), f"{path}/{len(what)}"
        Path(folder_of_this).mkdir(exist_ok=True)
        history = [trainer.train(batch)]
        gradients = sum(b.grad_data.untyped_storage().size() for b in trainer.model.buffers + trainer.model.expert_parallel_buffers)
        trainer.offload.back()
        inside = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
        trainer.offload.out()
        outside = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
        held.append((gradients, trainer.offload.host_bytes(), inside - outside))
        logp = [part for _, part in trainer.logprobs(batch)]  # the weights are there
        dist.barrier()
        trainer.save(folder_of_this)
        history.append(trainer.train(batch))
        parallel_state.destroy_model_parallel()
        trainer = MegatronRank(settings)
        trainer.load(folder_of_this)
        history.append(trainer.train(batch))
        parallel_state.destroy_model_parallel()
        histories.append((history, logp))
        del trainer
    return histories, held


def logprobs(folder: str, layout: Layout, precision: str = "bf16"):
    """Log-probs of the sample batch through a whole trainer rank, for every layout, context parallelism included."""
    from trt_rl.trainer.group import assemble
    from trt_rl.trainer.rank import MegatronRank

    trainer = MegatronRank(recipe(folder, layout, precision))
    batch, parts = ready_batch(sample_batch()), [None] * layout.world
    dist.all_gather_object(parts, trainer.logprobs(batch))
    return assemble(batch, parts)
