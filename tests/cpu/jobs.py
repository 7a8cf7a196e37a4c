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
