"""The command line: `trt-rl train | plan | export | bench | doctor | launch`."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Column, Table
from rich.text import Text

import trt_rl
from launch.cli import app as launch
from trt_rl import doctor, plan
from trt_rl.config import dump_recipe, load_recipe
from trt_rl.errors import RecipeError, TrtRlError
from trt_rl.observe.log import console
from trt_rl.plan.gpus import GPUS, speeds_of
from trt_rl.plan.projection import Rates
from trt_rl.plan.show import show_plan

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=trt_rl.__doc__)

RecipePath = Annotated[Path, typer.Argument(help="YAML file, e.g. examples/quickstart/recipe.yaml")]
Overrides = Annotated[list[str] | None, typer.Argument(help="dotted overrides, e.g. trainer.parallel.tp=2")]


@app.callback()
def main() -> None:
    """BF16 Megatron-core training and FP8 rollout engines on Ray, joined by a verified refit."""


@app.command()
def train(
    recipe: RecipePath,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option(help="continue from the latest checkpoint in run.folder")] = False,
    overwrite: Annotated[bool, typer.Option(help="replace the run that run.folder holds")] = False,
    resume_or_start: Annotated[bool, typer.Option(help="continue from the latest checkpoint; start if there is none yet")] = False,
    dry_run: Annotated[bool, typer.Option(help="check everything, write the resolved recipe, start nothing")] = False,
) -> None:
    """Train a recipe."""
    try:
        resolved = load_recipe(recipe, overrides)
        if dry_run:
            plan.check(resolved)
            path = resolved.folder / "resolved.yaml"
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(dump_recipe(resolved))
            except OSError as error:
                raise RecipeError(f"run.folder {resolved.folder} cannot be written: {error.strerror}; set run.folder") from error
            console.print(f"the recipe can run; resolved into {path}")
            return
        from trt_rl.train import train as run  # imports torch and Ray, which a dry run does without

        summary = run(resolved, resume=resume, overwrite=overwrite, resume_or_start=resume_or_start)
    except TrtRlError as error:
        console.print(f"{type(error).__name__}: {error}")
        raise typer.Exit(2) from None
    except KeyboardInterrupt as interrupt:
        console.print("stopped at once, without a checkpoint")
        raise typer.Exit(128 + next(iter(interrupt.args), signal.SIGINT)) from None
    _show(summary)
    if summary["interrupted"]:
        raise typer.Exit(128 + signal.SIGINT)


@app.command("plan")
def plan_command(
    recipe: RecipePath,
    overrides: Overrides = None,
    inside_gb_s: Annotated[float | None, typer.Option(min=0.1, help="GB/s between GPUs of a node; by default of cluster.gpu")] = None,
    between_gb_s: Annotated[float | None, typer.Option(min=0.1, help="GB/s between nodes; by default of cluster.gpu")] = None,
    mfu: Annotated[
        float, typer.Option(min=0, max=1, help="share of the BF16 peak that training reaches; 0: 0.40 dense, 0.25 MoE")
    ] = Rates.mfu,
    decode: Annotated[float, typer.Option(min=0.01, max=1, help="share of memory bandwidth that decoding reaches")] = Rates.decode,
    prompt_share: Annotated[float, typer.Option(min=0.01, max=1, help="mean prompt over data.max_prompt_tokens")] = Rates.prompt_share,
    response_share: Annotated[
        float, typer.Option(min=0.01, max=1, help="mean response over rollout.sampling.max_tokens")
    ] = Rates.response_share,
    oversampling: Annotated[
        float, typer.Option(min=0, help="samples generated for each one trained on; 0: 1.5 with dynamic sampling, 1 without")
    ] = Rates.oversampling,
    json_output: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Say what a recipe takes: ranks on nodes, parameters, memory, refits, a projected step. Needs no GPU.

    Ends with 0 if nothing is wrong, with 2 and all violations otherwise.
    """
    try:
        resolved = load_recipe(recipe, overrides)
        speeds = speeds_of(GPUS[resolved.cluster.gpu], inside_gb_s, between_gb_s)
        made = plan.make_plan(resolved, Rates(prompt_share, response_share, oversampling, mfu, decode), speeds)
    except TrtRlError as error:
        console.print(f"{type(error).__name__}: {error}")
        raise typer.Exit(2) from None
    if json_output:
        print(json.dumps(made.as_dict(), indent=1))
    else:
        show_plan(made, console)
    raise typer.Exit(2 if made.violations else 0)


@app.command("export")
def export_command(
    model: Annotated[Path, typer.Argument(help="Hugging Face folder, e.g. runs/quickstart/model")],
    target: Annotated[Path, typer.Argument(help="new folder")],
    precision: Annotated[str, typer.Option(help="bf16 or fp8_block")] = "fp8_block",
    exclude: Annotated[list[str] | None, typer.Option(help="pattern of tensors that stay BF16, repeatable")] = None,
) -> None:
    """Write a checkpoint in the format that engines serve."""
    try:
        from trt_rl.refit.export import export
        from trt_rl.refit.precision import PrecisionPolicy
        from trt_rl.trainer.cpu import install_without_cuda

        install_without_cuda()  # ModelOpt imports megatron
        table = export(model, target, PrecisionPolicy(precision, tuple(exclude or ())))
    except TrtRlError as error:
        console.print(f"{type(error).__name__}: {error}")
        raise typer.Exit(2) from None
    console.print(f"{target}: {table.summary()}")


bench = typer.Typer(no_args_is_help=True, help="Measure parts of the stack.")
app.add_typer(bench, name="bench")
app.add_typer(launch, name="launch")


@bench.command("refit")
def bench_refit(
    recipe: Annotated[Path | None, typer.Option(help="layouts and refit settings from here; model.path needs config.json only")] = None,
    set: Annotated[list[str] | None, typer.Option(help="dotted override of the recipe, repeatable")] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="run on the CPU over gloo; without a recipe, a small built-in shape")] = False,
    formats: Annotated[str, typer.Option(help="comma-separated; the recipe's own if left out")] = "",
    repeats: Annotated[int, typer.Option(min=1)] = 5,
    baseline: Annotated[bool, typer.Option(help="also measure gather, broadcast, quantize at the receiver")] = True,
    json_file: Annotated[Path | None, typer.Option("--json", help="write everything measured to this file")] = None,
) -> None:
    """Time refits with random weights: total, phases, link, copy bandwidth, baseline."""
    try:
        from trt_rl.bench import refit as measured

        result = measured.run(measured.cases_from(recipe, set or [], cpu, formats, repeats, baseline), "cpu" if cpu else "cuda")
    except TrtRlError as error:
        console.print(f"{type(error).__name__}: {error}")
        raise typer.Exit(2) from None
    if json_file:
        json_file.write_text(json.dumps(result, indent=1) + "\n")
    for case in result["results"]:
        _show({k: v for k, v in case.items() if k not in ("refits", "first")})
    console.print({k: v for k, v in result.items() if k != "results"})


@app.command("doctor")
def doctor_command(
    overrides: Overrides = None,
    recipe: Annotated[Path | None, typer.Option(help="check what this recipe needs, instead of everything")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="write what was found to this file")] = None,
    quick: Annotated[bool, typer.Option(help="do not import TensorRT-LLM and mpi4py, which takes up to a minute")] = False,
) -> None:
    """Check this machine: versions, GPUs, driver, NCCL, Ray, shared memory, ports; what is missing and the fix.

    Ends with 0 if nothing required is missing, with 1 otherwise.
    """
    try:
        if overrides and recipe is None:
            raise RecipeError(f"{overrides[0]} overrides a recipe; name it with --recipe")
        checks = doctor.examine(doctor.scene(load_recipe(recipe, overrides) if recipe else None, quick))
        if json_file:
            try:
                json_file.write_text(json.dumps({"ok": doctor.passed(checks), "checks": [vars(c) for c in checks]}, indent=1) + "\n")
            except OSError as error:
                raise TrtRlError(f"--json {json_file} cannot be written: {error.strerror}") from error
    except TrtRlError as error:
        console.print(f"{type(error).__name__}: {error}")
        raise typer.Exit(2) from None
    table = Table("check", "", Column("found, and the fix", overflow="fold"), title="trt-rl doctor")
    for check in checks:
        style = {"ok": "green", "note": "yellow", "problem": "bold red"}[check.status]
        table.add_row(check.name, Text(check.status, style), check.found + (f"\nfix: {check.fix}" if check.fix else ""))
    console.print(table, soft_wrap=False)
    problems = [check.name for check in checks if check.status == "problem"]
    console.print(f"to be repaired: {', '.join(problems)}" if problems else "nothing required is missing")
    raise typer.Exit(0 if doctor.passed(checks) else 1)


def _show(summary: dict) -> None:
    table = Table("summary", "", show_header=False, title="summary")
    for name, value in summary.items():
        shown = ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else json.dumps(value)
        table.add_row(name, shown)
    console.print(table)


if __name__ == "__main__":
    app()
