"""Load a Hugging Face checkpoint into this rank's Megatron parameters, and collect it back."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist

from trt_rl.arch import Arch
from trt_rl.errors import RefitError
from trt_rl.layout import Layout
from trt_rl.refit.hf_files import HFFolder
from trt_rl.refit.names import Box, hf_pieces, owns, slices


@torch.no_grad()
def load_hf(model: torch.nn.Module, folder: str, arch: Arch, layout: Layout) -> None:
    """Fill every parameter of `model` from `folder`, reading only this rank's slices. Padding becomes zero."""
    files, at = HFFolder(folder, arch), layout.at(dist.get_rank())
    for name, parameter in model.named_parameters():
        parameter.zero_()
        for piece in hf_pieces(name, arch, layout, at):
            parameter[slices(piece.local_box)].copy_(files.read(piece.hf_name, piece.hf_box))


@torch.no_grad()
def gather_hf(model: torch.nn.Module, arch: Arch, layout: Layout) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every Hugging Face tensor, assembled on rank 0 (other ranks yield nothing). Collective.

    Meant for saving a checkpoint: one tensor at a time is whole, on the CPU of rank 0.
    """
    at = layout.at(dist.get_rank())
    mine: dict[str, list[tuple[Box, torch.Tensor]]] = {}
    for name, parameter in model.named_parameters():
        if owns(name, at, arch):
            for piece in hf_pieces(name, arch, layout, at):
                part = parameter[slices(piece.local_box)].detach().cpu().contiguous()
                mine.setdefault(piece.hf_name, []).append((piece.hf_box, part))
    for hf_name, shape in arch.hf_shapes().items():
        parts = [None] * layout.world if dist.get_rank() == 0 else None
        dist.gather_object(mine.get(hf_name, []), parts)
        if parts is None:
            continue
        pieces = [piece for rank_parts in parts for piece in rank_parts]
        covered = sum(part.numel() for _, part in pieces)
        whole = torch.empty(shape, dtype=pieces[0][1].dtype) if pieces else torch.empty(0)
        if covered != whole.numel() or not pieces:
            raise RefitError(f"{hf_name}: trainer ranks hold {covered} of {whole.numel()} values")
        for box, part in pieces:
            whole[slices(box)] = part
        yield hf_name, whole
