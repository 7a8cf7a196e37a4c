"""What a refit adds to SGLang's scheduler processes: where Hugging Face slices land in its live parameters, and the
calls that move them.

SGLang runs `run_command` in every tensor-parallel rank, as a loader registered by `custom_weight_loader` and named by
`update_weights_from_tensor(load_format=...)`. The "tensors" of such an update are one command: a JSON text and an empty
tensor. SGLang drops what a loader returns and lets its process end on what it raises, so answers go through a store of
the adapter's. Values are written where they are, so CUDA graphs stay valid.

Written from the source of SGLang 0.5.16. On Hopper its FP8 block kernels read weights and scales as a checkpoint has
them; layouts that kernels rearrange are refused (`refuse_other_layouts`).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from trt_rl.arch import Arch
from trt_rl.errors import RefitError
from trt_rl.layout import EngineLayout
from trt_rl.refit.landing import Landings
from trt_rl.refit.member import Agreement, EngineMember
from trt_rl.refit.names import Box
from trt_rl.refit.precision import PrecisionPolicy, PrecisionTable
from trt_rl.refit.stream import Refit
from trt_rl.rollout.live import EXPERT, FUSED, Parameters, lay_over, parameter_of

LOADER = "trt_rl.rollout.sglang_worker.run_command"
"""The path by which SGLang imports the loader, in `custom_weight_loader` and as `load_format`."""

_parameter = partial(parameter_of, "SGLang")
_CONSTANTS = re.compile(r".*\.self_attn\.attn\.[kv]_scale")
"""Scales of an FP8 KV cache, 1.0 unless a checkpoint brings others; no refit writes them."""
_PADDED = ("model.embed_tokens.weight", "lm_head.weight")
_KNOWN_METHODS = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "UnquantizedFusedMoEMethod", "Fp8LinearMethod", "Fp8MoEMethod", "Fp8KVCacheMethod")  # fmt: skip
_FAILURES = (RefitError, RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError, OSError, ImportError)


def map_parameters(parameters: dict[str, torch.Tensor], arch: Arch, table: PrecisionTable, layout: EngineLayout, rank: int) -> Landings:
    """Views of SGLang's live parameters under the names of a refit.

    Args:
        parameters: `model.named_parameters()` after loading.
        rank: of this scheduler among all engine ranks.

    Raises:
        RefitError: a tensor of the refit has no place, or a parameter would be left unwritten.
    """

    def unwritten(name: str, parameter: torch.Tensor, covered: int) -> bool:
        return bool(_CONSTANTS.fullmatch(name)) or (name in _PADDED and name in table.shapes)

    return lay_over("SGLang", parameters, arch, table, layout, rank, partial(_find, parameters), unwritten)


def _find(parameters: Parameters, name: str, box: Box, expected: dict, local_experts: int) -> tuple[str, torch.Tensor]:
    rows = box[0][1] - box[0][0]
    if match := EXPERT.fullmatch(name):
        at, expert, matrix, leaf = match[1], int(match[2]), match[3], match[4]
        target = f"{at}.{'w2' if matrix == 'down' else 'w13'}_{leaf}"
        mine = _parameter(target, name, parameters)[expert % local_experts]
        start = rows if matrix == "up" else 0  # gate rows come first
        return target, mine[start : start + rows]
    module, _, leaf = name.rpartition(".")
    owner, _, matrix = module.rpartition(".")
    if matrix not in FUSED:
        return name, _parameter(name, name, parameters)[:rows]
    fused, before = FUSED[matrix]
    sides = [expected[f"{owner}.{other}.{leaf}"][1][0] for other in before]
    start = sum(stop - begin for begin, stop in sides)
    target = f"{owner}.{fused}.{leaf}"
    return target, _parameter(target, name, parameters)[start : start + rows]


def refuse_other_layouts(model: torch.nn.Module) -> None:
    """Raise unless every layer runs a method that is known to leave weights as they were loaded.

    Raises:
        RefitError: names the layer, what it runs, and the option that keeps the layout.
    """
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if method is None:
            continue
        kind, runner = type(method).__name__, getattr(getattr(method, "runner", None), "runner_backend", None)
        if kind not in _KNOWN_METHODS:
            raise RefitError(f"SGLang runs {name} with {kind}, whose layout no refit knows; known: {', '.join(_KNOWN_METHODS)}")
        if kind.endswith("MoEMethod") and _value(runner) not in ("triton", "deep_gemm"):
            raise RefitError(
                f"SGLang runs the experts of {name} with {_value(runner)}, which may rearrange weights; "
                "set rollout.sglang.moe_runner_backend = triton"
            )
        if getattr(method, "use_marlin", False):
            raise RefitError(f"SGLang repacks {name} for Marlin; unset SGLANG_FORCE_FP8_MARLIN and use a GPU with FP8 (Hopper)")
    for name, parameter in model.named_parameters():
        if getattr(parameter, "format_ue8m0", False):
            raise RefitError(f"SGLang holds {name} as powers of two (UE8M0); set rollout.sglang.fp8_gemm_runner_backend = triton")


def _value(runner: Any) -> str:
    return str(getattr(runner, "value", runner))


@dataclass
class _Seat:
    """One rank's side of the refit, between commands. A scheduler process has one."""

    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    member: EngineMember | None = None

    def agree(self, model: torch.nn.Module, agreement: str, policy: dict, folder: str, engine_rank: int) -> str:
        """Build this rank's side; the digest of its precision table and route."""
        agreed, arch = Agreement.from_json(agreement), Arch.load(folder)
        table = PrecisionTable.build(arch, PrecisionPolicy.from_dict(policy))
        refuse_other_layouts(model)
        parameters = dict(model.named_parameters())
        landings = map_parameters(parameters, arch, table, agreed.engine, engine_rank)
        landings.label = agreed.label(engine_rank)
        if not self.constants:  # sleeping loses them, and a refit comes before the first sleep
            self.constants = {n: p.detach().to("cpu", copy=True) for n, p in parameters.items() if _CONSTANTS.fullmatch(n)}
        self.disconnect(model)
        self.member = EngineMember(agreed, arch, table, landings)
        return self.member.digest

    def join(self, model: torch.nn.Module) -> None:
        self._seated().join()

    def prepare(self, model: torch.nn.Module) -> None:
        self._seated().prepare()

    def receive(self, model: torch.nn.Module, version: int, verify: str, full: bool) -> dict[str, Any]:
        _settle_gpu()  # the last pass of what ran before may still read the weights
        report = self._seated().receive(Refit(version, verify, full))
        with torch.no_grad():
            for name, value in self.constants.items():
                model.get_parameter(name).copy_(value)
        _settle_gpu()
        return report.as_dict()

    def disconnect(self, model: torch.nn.Module) -> None:
        if self.member is not None:
            self.member.close()
            self.member = None

    def _seated(self) -> EngineMember:
        if self.member is None:
            raise RefitError("this SGLang rank has not agreed to a refit; agree_refit comes first")
        return self.member


def _settle_gpu() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


_seats: dict[int, _Seat] = {}
_stores: dict[int, dist.TCPStore] = {}


def run_command(model: torch.nn.Module, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """SGLang's `custom_weight_loader`: do what the one "name" says and leave the answer in the adapter's store."""
    ((text, _),) = named_tensors
    command = json.loads(text)
    rank, port = command["rank"], command["store"]
    try:
        answer = {"answer": getattr(_seats.setdefault(rank, _Seat()), command["do"])(model, **command["arguments"])}
    except _FAILURES as error:  # leaving here it would end the process
        answer = {"failure": str(error) if isinstance(error, RefitError) else f"{type(error).__name__}: {error}"}
    if port not in _stores:
        _stores[port] = dist.TCPStore("127.0.0.1", port, is_master=False)
    _stores[port].set(command["key"], json.dumps(answer))
