"""What engines' live parameters have in common: matrices that they keep in one, and how a refit's slices are laid over them.

Each engine's worker module says where its own parameters are; here is what none of them need say twice.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import torch

from trt_rl.arch import Arch
from trt_rl.errors import RefitError
from trt_rl.layout import EngineLayout
from trt_rl.refit.landing import Landings, Place, expected_places
from trt_rl.refit.names import Box
from trt_rl.refit.precision import PrecisionTable

EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.(.+)")
"""Owner, expert, matrix, leaf of an expert's tensor."""
FUSED: dict[str, tuple[str, tuple[str, ...]]] = {
    "q_proj": ("qkv_proj", ()),
    "k_proj": ("qkv_proj", ("q_proj",)),
    "v_proj": ("qkv_proj", ("q_proj", "k_proj")),
    "gate_proj": ("gate_up_proj", ()),
    "up_proj": ("gate_up_proj", ("gate_proj",)),
}
"""Matrix -> the module that holds it, and the matrices before it there."""
Parameters = dict[str, torch.Tensor]
Find = Callable[[str, Box, dict, int], tuple[str, torch.Tensor]]
"""(wire name, its box, expected places, experts of this rank) -> name of the live parameter, and the view of it."""


def parameter_of(engine: str, target: str, name: str, parameters: Parameters) -> torch.Tensor:
    """The live parameter `target`, which should hold `name`.

    Raises:
        RefitError: there is none.
    """
    if target not in parameters:
        raise RefitError(f"{name}: {engine} has no parameter {target}; is the module FP8 there as the precision table says?")
    return parameters[target].detach()


def lay_over(
    engine: str,
    parameters: Parameters,
    arch: Arch,
    table: PrecisionTable,
    layout: EngineLayout,
    rank: int,
    find: Find,
    unwritten: Callable[[str, torch.Tensor, int], bool],
) -> Landings:
    """Views of live parameters under the names of a refit.

    Args:
        rank: among all engine ranks.
        unwritten: (parameter's name, parameter, values that a refit writes) -> whether the rest may stay as it is.

    Raises:
        RefitError: a tensor of the refit has no place, or a parameter would be left unwritten.
    """
    expected = expected_places(arch, table, layout, layout.at(rank))
    places, covered = {}, dict.fromkeys(parameters, 0)
    local_experts = arch.experts // layout.ep if arch.experts else 0
    for name, (_, box) in expected.items():
        target, view = find(name, box, expected, local_experts)
        places[name] = Place(box, view)
        covered[target] += view.numel()
    for name, parameter in parameters.items():
        if covered[name] != parameter.numel() and not unwritten(name, parameter, covered[name]):
            raise RefitError(
                f"{engine}'s parameter {name} {list(parameter.shape)}: a refit would write {covered[name]} of {parameter.numel()} values"
            )
    return Landings(places, rank)
