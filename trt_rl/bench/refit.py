"""`trt-rl bench refit`: how long a refit takes and where the time goes, against the link, the copy and a plain baseline."""

from __future__ import annotations

import os
import platform
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from trt_rl.arch import Arch
from trt_rl.bench.party import Parties, Setup
from trt_rl.config import load_recipe
from trt_rl.errors import RecipeError
from trt_rl.layout import EngineLayout, Layout
from trt_rl.refit.engine_shards import violations
from trt_rl.refit.member import Agreement
from trt_rl.refit.precision import BLOCK, FORMATS, PrecisionPolicy, PrecisionTable
from trt_rl.refit.stream import Refit
from trt_rl.refit.transports.link import Meeting

CPU_SHAPE = {
    "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 8, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 32768, "max_position_embeddings": 4096, "tie_word_embeddings": True,
}  # fmt: skip
"""Qwen3-0.6B's layer, eight of them: what `--cpu` without a recipe measures."""


@dataclass(frozen=True)
class Case:
    """One benchmark."""

    arch: Arch
    layout: Layout
    engine: EngineLayout
    policy: PrecisionPolicy
    bucket_bytes: int
    transport: str
    repeats: int = 5
    verify: str = "full"
    colocated: bool = False
    baseline: bool = True

    def describe(self) -> dict[str, Any]:
        return {
            "parameters": self.arch.parameters(),
            "model_type": self.arch.model_type,
            "trainer": str(self.layout),
            "engine": str(self.engine),
            "format": self.policy.format,
            "transport": self.transport,
            "bucket_mib": self.bucket_bytes / 2**20,
            "verify": self.verify,
        }


def hardware() -> dict[str, Any]:
    found = {"machine": platform.machine(), "cpus": len(os.sched_getaffinity(0)), "cpu": _cpu_name(), "torch": torch.__version__}
    if torch.cuda.is_available():
        found |= {
            "gpu": torch.cuda.get_device_name(0),
            "gpus": torch.cuda.device_count(),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "nccl_nvls": os.environ.get("NCCL_NVLS_ENABLE", "default"),
        }
    return found


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next((line.split(":")[1].strip() for line in file if line.startswith("model name")), "unknown")
    except OSError:
        return "unknown"


def measure(case: Case, device: str) -> dict[str, Any]:
    """Run one case in processes of its own.

    Raises:
        RecipeError: the engine layout cannot hold the model, or the machine has too few GPUs.
    """
    table = PrecisionTable.build(case.arch, case.policy)
    problems = [*case.arch.layout_violations(case.layout), *violations(case.arch, case.engine, table.formats, BLOCK, fused=True)]
    members = case.layout.world + case.engine.world
    gpus = case.layout.world if case.colocated else members
    if device == "cuda" and torch.cuda.device_count() < gpus:
        problems.append(f"the case needs {gpus} GPUs, {torch.cuda.device_count()} present")
    if problems:
        raise RecipeError("the benchmark cannot run:\n" + "\n".join(f"  - {p}" for p in problems))
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    address = ("127.0.0.1", store.port)
    setup = Setup(case.arch, table, case.layout, case.engine, address, device, case.colocated)
    agreement = Agreement(case.layout, case.engine, case.bucket_bytes, case.transport, Meeting(*address, members, case.layout.world, 300.0))
    result = case.describe() | {"table": table.summary()}
    with Parties(setup) as parties:
        trainers = case.layout.world
        started = time.perf_counter()
        if len(set(parties.call("agree", agreement))) > 1:
            raise RecipeError("the parties computed different routes")
        result["agree_s"] = time.perf_counter() - started
        parties.call("join")
        result["join_s"] = time.perf_counter() - started - result["agree_s"]
        size = min(case.bucket_bytes, 1 << 30)
        if case.transport in ("gloo", "nccl"):
            result["link_gb_per_s"] = parties.call("link_bandwidth", size, 10)[trainers]
        result["copy_gb_per_s"] = parties.call("copy_bandwidth")[0]
        result["modelopt_gb_per_s"] = parties.call("modelopt_bandwidth")[0]

        refits = [_refit(parties, version, case.verify, trainers) for version in range(case.repeats + 1)]
        result["first"] = refits[0]  # tables, allocations, connections
        result["refits"] = refits[1:]
        result["total_s"] = median(r["total_s"] for r in refits[1:])
        result["bytes"] = refits[-1]["bytes"]
        result["bytes_on_busiest_link"] = refits[-1]["bytes_of_busiest_rank"]
        snapshot = parties.call("snapshot")

        if "link_gb_per_s" in result:
            result["wire_alone_s"] = min([_wire(parties, 1000 + i) for i in range(3)][1:])
            result["wire_gb_per_s"] = result["bytes_on_busiest_link"] / result["wire_alone_s"] / 1e9
            result["wire_of_link"] = result["wire_gb_per_s"] / result["link_gb_per_s"]
        quantized = [r for r in parties.call("quantize_only", Refit(0, "off")) if r]
        result["quantize_alone_s"] = max(r["seconds"] for r in quantized)
        result["quantize_gb_per_s"] = min(r["gb_per_s"] for r in quantized)
        result["quantize_of_copy"] = result["quantize_gb_per_s"] / result["copy_gb_per_s"]
        result["peak_memory"] = parties.call("peak_memory")
        if case.baseline:
            runs = [_baseline(parties) for _ in range(3)]
            result["baseline"] = min(runs[1:], key=lambda r: r["seconds"])
            result["speedup_vs_baseline"] = result["baseline"]["seconds"] / result["total_s"]
            result["bytes_vs_baseline"] = result["bytes"] / result["baseline"]["bytes"]
            result["same_weights_as_baseline"] = parties.call("snapshot") == snapshot
    return result


def _refit(parties: Parties, version: int, verify: str, trainers: int) -> dict[str, Any]:
    """One whole refit, as the session orders it: check, prepare, move. Timed from outside all processes."""
    started = time.perf_counter()
    checks = parties.call("check")
    checked = time.perf_counter()
    parties.call("prepare")
    prepared = time.perf_counter()
    reports = parties.call("move", Refit(version, verify, full=version == 0))
    ended = time.perf_counter()
    phases: dict[str, float] = {}
    for index, report in enumerate(reports):
        side = "trainer" if index < trainers else "engine"
        for phase, seconds in report["seconds"].items():
            phases[f"{side}/{phase}"] = max(seconds, phases.get(f"{side}/{phase}", 0.0))
    return {
        "total_s": ended - started,
        "check_s": checked - started,
        "check_on_device_s": max(c.get("check", 0.0) for c in checks),
        "prepare_s": prepared - checked,
        "move_s": ended - prepared,
        "bytes": sum(r["bytes"] for r in reports[:trainers]),
        "bytes_of_busiest_rank": max(r["bytes"] for r in reports),
        "verified_slices": sum(r["verified"] for r in reports),
        "host_seconds_by_phase": phases,
    }


def _wire(parties: Parties, version: int) -> float:
    reports = parties.call("move_nothing_but_bytes", Refit(version, "off", full=True))
    return max(r["seconds"]["wire"] for r in reports)


def _baseline(parties: Parties) -> dict[str, float]:
    results = parties.call("run_baseline")
    return {"seconds": max(r["seconds"] for r in results), "bytes": sum(r["bytes"] for r in results)}


def run(cases: list[Case], device: str) -> dict[str, Any]:
    """Measure cases one after the other. FP8 and BF16 of one shape in one run give the ratio of bytes."""
    results = [measure(case, device) for case in cases]
    summary: dict[str, Any] = {"hardware": hardware(), "results": results}
    by_format = {r["format"]: r for r in results}
    if {"bf16", "fp8_block"} <= by_format.keys():
        summary["bf16_bytes_over_fp8"] = by_format["bf16"]["bytes"] / by_format["fp8_block"]["bytes"]
        summary["bf16_seconds_over_fp8"] = by_format["bf16"]["total_s"] / by_format["fp8_block"]["total_s"]
    main = by_format.get("fp8_block", results[0])
    if "baseline" in main:
        summary |= {key: main[key] for key in ("speedup_vs_baseline", "bytes_vs_baseline")}
    return summary


def cases_from(recipe: Path | None, overrides: list[str], cpu: bool, formats: str, repeats: int, baseline: bool) -> list[Case]:
    """Cases of a recipe, or of the built-in shape for a CPU.

    Raises:
        RecipeError: no recipe on a GPU, or a format is unknown.
    """
    if recipe is None:
        if not cpu:
            raise RecipeError("bench refit needs --recipe FILE, or --cpu for the built-in shape")
        arch, layout, engine = Arch.from_dict(CPU_SHAPE, "the built-in shape"), Layout(tp=2, etp=2), EngineLayout()
        policy, bucket, transport, verify = PrecisionPolicy(), 32 << 20, "gloo", "full"
    else:
        resolved = load_recipe(recipe, overrides)
        arch, layout, engine = Arch.load(resolved.model.path), resolved.trainer.parallel.layout(), resolved.rollout.layout()
        refit = resolved.refit
        policy, bucket, verify = refit.policy(), refit.bucket_mib << 20, refit.verify
        transport = refit.transport if refit.transport != "auto" else "gloo" if cpu else "nccl"
    chosen = [f for f in formats.split(",") if f] or [policy.format]
    if unknown := set(chosen) - set(FORMATS):
        raise RecipeError(f"--formats {', '.join(unknown)}: known formats are {', '.join(FORMATS)}")
    return [
        Case(
            arch,
            layout,
            engine,
            replace(policy, format=format),
            bucket,
            transport,
            repeats,
            verify,
            transport == "ipc",
            baseline and transport != "ipc",
        )
        for format in chosen
    ]
