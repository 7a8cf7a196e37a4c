"""What a refit adds to vLLM's workers: where Hugging Face slices land in its live parameters, and the calls that move them.

Loaded into every worker by `worker_extension_cls`. Nothing here replaces a parameter: values are written where they
are, so CUDA graphs stay valid. Written against vLLM 0.24 on Hopper with `linear_backend="triton"` or `"cutlass"` and
`moe_backend="triton"`, which keep weights row-major as they were loaded; other backends swap, transpose or requantize
(`LAYOUT_KEEPING`), and the worker refuses them.
"""

from __future__ import annotations

import json
import re
import sys
from functools import partial
from typing import Any

import torch

from trt_rl.arch import Arch
from trt_rl.errors import RefitError
from trt_rl.layout import EngineLayout
from trt_rl.refit.landing import Landings
from trt_rl.refit.member import Agreement, EngineMember
from trt_rl.refit.names import Box
from trt_rl.refit.precision import PrecisionPolicy, PrecisionTable
from trt_rl.refit.stream import Refit
from trt_rl.rollout.live import EXPERT, FUSED, Parameters, lay_over, parameter_of

_parameter = partial(parameter_of, "vLLM")
LAYOUT_KEEPING = ("TritonFp8BlockScaledMMKernel", "CutlassFp8BlockScaledMMKernel", "CutlassFP8ScaledMMLinearKernel")
"""vLLM's FP8 linear kernels that leave weights and scales as the checkpoint has them."""


def map_parameters(parameters: dict[str, torch.Tensor], arch: Arch, table: PrecisionTable, layout: EngineLayout, rank: int) -> Landings:
    """Views of vLLM's live parameters under the names of a refit.

    Args:
        parameters: `model.named_parameters()` after loading.
        rank: of this worker among all engine ranks.

    Raises:
        RefitError: a tensor of the refit has no place, or a parameter would be left unwritten.
    """

    def unwritten(name: str, parameter: torch.Tensor, covered: int) -> bool:
        # Scales that what is fused shares are written more than once; vocabularies are padded.
        return covered > parameter.numel() or parameter.dim() == 0 or name in ("model.embed_tokens.weight", "lm_head.weight")

    find = partial(_find, parameters)
    return lay_over("vLLM", parameters, arch, table, layout, rank, find, unwritten)


def _find(parameters: Parameters, name: str, box: Box, expected: dict, local_experts: int) -> tuple[str, torch.Tensor]:
    if match := EXPERT.fullmatch(name):
        return _expert(match, box, parameters, local_experts)
    module, leaf = name.rsplit(".", 1)
    owner, matrix = module.rsplit(".", 1) if "." in module else ("", module)
    rows = box[0][1] - box[0][0]
    if matrix not in FUSED:
        return name, _rows(_parameter(name, name, parameters), leaf, 0, rows)
    fused, before = FUSED[matrix]
    target = f"{owner}.{fused}.{leaf}"
    start = 0
    if leaf in ("weight", "weight_scale_inv"):
        for other in before:
            side = expected[f"{owner}.{other}.{leaf}"][1][0]
            start += side[1] - side[0]
    return target, _rows(_parameter(target, name, parameters), leaf, start, rows)


def _rows(parameter: torch.Tensor, leaf: str, start: int, rows: int) -> torch.Tensor:
    if parameter.dim() == 0:  # a per-tensor scale, shared by what vLLM fuses
        return parameter.view(1)
    if leaf == "weight" and parameter.dim() == 2 and parameter.stride(0) == 1 and parameter.stride(1) > 1:
        parameter = parameter.t()  # static per-tensor FP8: stored row-major, seen transposed
    return parameter[start : start + rows]


def _expert(match: re.Match, box, parameters, local_experts: int) -> tuple[str, torch.Tensor]:
    at, expert, matrix, leaf = match[1], int(match[2]), match[3], match[4]
    target = f"{at}.routed_experts.{'w2' if matrix == 'down' else 'w13'}_{leaf}"
    whole = _parameter(target, match[0], parameters)
    if whole.dim() == 0:
        return target, whole.view(1)
    mine = whole[expert % local_experts]
    if mine.dim() == 0:
        return target, mine.view(1)
    rows = box[0][1] - box[0][0]
    start = rows if matrix == "up" else 0
    return target, mine[start : start + rows]


class RefitExtension:
    """Methods that vLLM's workers get. Names carry a prefix: a clash with a worker's own attribute is refused by vLLM."""

    def trt_rl_agree(self, agreement: str, policy: str, first_rank: int) -> str:
        """Build this worker's side; returns the digest of its precision table and route."""
        agreed, arch = Agreement.from_json(agreement), Arch.load(self.vllm_config.model_config.model)
        table = PrecisionTable.build(arch, PrecisionPolicy.from_dict(json.loads(policy)))
        _refuse_other_layouts(self.get_model(), fp8=table.format != "bf16")
        landings = map_parameters(dict(self.get_model().named_parameters()), arch, table, agreed.engine, first_rank + self.rank)
        landings.label = agreed.label(landings.rank)
        self._trt_rl_member = EngineMember(agreed, arch, table, landings)
        return self._trt_rl_member.digest

    def trt_rl_join(self) -> None:
        self._trt_rl_member.join()

    def trt_rl_prepare(self) -> None:
        self._trt_rl_member.prepare()

    def trt_rl_receive(self, version: int, verify: str, full: bool) -> dict[str, Any]:
        """The report of this rank, or `{"failure": reason}`: vLLM would pass an exception on without its type."""
        failures = (RefitError, RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError, OSError)
        try:
            report = self._trt_rl_member.receive(Refit(version, verify, full))
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        except failures as error:
            return {"failure": str(error) if isinstance(error, RefitError) else f"{type(error).__name__}: {error}"}
        return report.as_dict()

    def trt_rl_disconnect(self) -> None:
        if getattr(self, "_trt_rl_member", None) is not None:
            self._trt_rl_member.close()
            self._trt_rl_member = None


def keep_weights_on_cpu() -> None:
    """On a CPU vLLM packs linear weights after loading and drops the originals, which a refit writes. Keep them instead.

    Takes effect when this module is imported in a worker, before the model is loaded; does nothing on a GPU.
    """
    from vllm.model_executor.layers import utils
    from vllm.platforms import current_platform

    def plain(layer: torch.nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    if current_platform.is_cpu():
        utils.dispatch_cpu_unquantized_gemm = plain


def _refuse_other_layouts(model: torch.nn.Module, fp8: bool) -> None:
    """Raise unless every FP8 layer runs a kernel that is known to leave weights as they were loaded."""
    known = 0
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        kernel, backend = getattr(method, "fp8_linear", None), getattr(method, "fp8_backend", None)
        if kernel is not None and type(kernel).__name__ not in LAYOUT_KEEPING:
            raise RefitError(
                f"vLLM runs {name} with {type(kernel).__name__}, which rearranges or requantizes weights; "
                "start it with linear_backend=triton (or cutlass) and moe_backend=triton"
            )
        if backend is not None and getattr(backend, "name", str(backend)) != "TRITON":
            raise RefitError(f"vLLM runs the experts of {name} with {backend}; start it with moe_backend=triton")
        known += kernel is not None or backend is not None
    if fp8 and not known:
        raise RefitError("this version of vLLM does not tell which FP8 kernels it runs; a refit into it is refused (written against 0.24)")


if "vllm" in sys.modules:  # imported by a worker, not by a test of the mapping
    keep_weights_on_cpu()
