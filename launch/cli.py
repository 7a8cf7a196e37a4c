"""`trt-rl launch slurm | ssh | kuberay`. Renders and submits; needs neither torch nor Ray."""

from __future__ import annotations

import hashlib
import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from launch import kuberay as k8s
from launch import needs, ssh
from launch.containers import Container
from launch.hosts import FIRST_PORT, Host, LaunchError
from launch.slurm import SlurmJob, submit
from trt_rl import plan
from trt_rl.config import Recipe, dump_recipe, load_recipe, parse_recipe
from trt_rl.errors import TrtRlError

app = typer.Typer(no_args_is_help=True, help="Run a recipe on several machines.")
console = Console(soft_wrap=True, highlight=False, markup=False)

RecipePath = Annotated[Path, typer.Argument(help="YAML file")]
Overrides = Annotated[list[str] | None, typer.Argument(help="dotted overrides, e.g. trainer.parallel.tp=2")]
Nodes = Annotated[int | None, typer.Option(min=1, help="the recipe's cluster.nodes, or as many as it needs, if left out")]
Gpus = Annotated[int | None, typer.Option(min=0, help="the recipe's cluster.gpus_per_node if left out; 0 runs on CPUs")]
Cpus = Annotated[int | None, typer.Option(min=1, help="all of the machine if left out")]
DryRun = Annotated[bool, typer.Option(help="check everything and print what would be used; write and start nothing")]
Command = Annotated[str, typer.Option(help="run this on the head instead of `trt-rl train`, e.g. 'python script.py'")]
Ready = Annotated[float, typer.Option(min=1, help="seconds until every node must have joined")]
FirstPort = Annotated[int, typer.Option(help="ports of jobs begin here; each job takes ten a node, by its number")]
ObjectStore = Annotated[int | None, typer.Option(min=75 << 20, help="bytes of Ray's object store on each node")]
Env = Annotated[list[str] | None, typer.Option(help="NAME=VALUE for every process, repeatable; NCCL_* set here are passed on anyway")]
Python = Annotated[str, typer.Option(help="interpreter on the nodes; this one if left out, in containers `python`")]
IpVersion = Annotated[int | None, typer.Option(min=4, max=6, help="4 or 6; IPv4 where there is one, if left out")]
_READY, _GRACE = 600.0, 300


@app.command("slurm")
def slurm_command(
    recipe: RecipePath,
    overrides: Overrides = None,
    nodes: Nodes = None,
    gpus_per_node: Gpus = None,
    cpus_per_node: Cpus = None,
    job_name: Annotated[str, typer.Option(help="the recipe's name if left out")] = "",
    time: Annotated[str, typer.Option(help="limit as Slurm writes it, e.g. 4:00:00")] = "",
    sbatch: Annotated[list[str] | None, typer.Option(help="any option of sbatch, repeatable, e.g. --sbatch=--partition=h100")] = None,
    requeue: Annotated[bool, typer.Option(help="before the time limit: save, requeue and continue")] = True,
    grace: Annotated[int, typer.Option(min=1, help="seconds before the time limit at which the run is asked to save")] = _GRACE,
    replicas: Annotated[int, typer.Option(min=1, help="a job array of runs with seeds seed, seed+1, ... in folders of their own")] = 1,
    container: Annotated[str, typer.Option(help="none, pyxis or apptainer")] = "none",
    image: Annotated[str, typer.Option(help="file or reference of the container image")] = "",
    mount: Annotated[list[str] | None, typer.Option(help="/HOST:/CONTAINER, repeatable; working and run folder are mounted anyway")] = None,
    setup: Annotated[str, typer.Option(help="bash to run on each node first, e.g. 'module load cuda'")] = "",
    python: Python = "",
    env: Env = None,
    command: Command = "",
    ready_timeout: Ready = _READY,
    first_port: FirstPort = FIRST_PORT,
    ip_version: IpVersion = None,
    object_store_memory: ObjectStore = None,
    submit_job: Annotated[bool, typer.Option("--submit", help="give it to sbatch")] = False,
    dry_run: DryRun = False,
) -> None:
    """Write the sbatch script of a run, and submit it with --submit."""
    try:
        resolved = _sized(recipe, overrides, nodes, gpus_per_node)
        box = Container(container, image, tuple(mount or ()), inputs=_inputs(resolved, command))
        recipes = _recipes(resolved, replicas)
        job = SlurmJob(
            name=job_name or resolved.name,
            nodes=resolved.cluster.nodes,
            gpus_per_node=resolved.cluster.gpus_per_node,
            cpus_per_node=cpus_per_node,
            launch_folder=Path.cwd() / resolved.folder / "launch",
            workdir=Path.cwd(),
            driver=_words(command, "--command") or None,
            recipe=_stem(resolved),
            python=python or ("python" if container != "none" else sys.executable),
            paths=_model_paths(resolved, command),
            time=time,
            sbatch=tuple(sbatch or ()),
            requeue=requeue,
            grace_s=grace,
            replicas=replicas,
            container=box,
            setup=setup,
            environment=(*_nccl(), *(env or ())),
            ready_timeout_s=ready_timeout,
            first_port=first_port,
            ip_version=ip_version,
            object_store_bytes=object_store_memory,
        )
        script = job.render(_refused(resolved, cpus_per_node, command))
        if dry_run:
            print(script)
            return
        _write(job.launch_folder, {"trt_rl.sbatch": script} | recipes)
        if requeue and not command and not resolved.run.save_every:
            typer.echo(
                f"note: run.save_every = 0: all is lost where a step and a save outlast --grace {grace}; set it, e.g. to 10", err=True
            )
        if submit_job:
            number = submit(job.script)
            console.print(f"job {number}; its output is {job.launch_folder}/slurm-{number}{'_*' if replicas > 1 else ''}.out")
        else:
            console.print(f"sbatch {shlex.quote(str(job.script))}")
    except TrtRlError as error:
        _refuse(error)


@app.command("ssh")
def ssh_command(
    recipe: RecipePath,
    hosts: Annotated[str, typer.Option(help="a,b or a=10.0.0.1,b=10.0.0.2; the first is the head. Names are given to ssh")],
    overrides: Overrides = None,
    gpus_per_node: Gpus = None,
    cpus_per_node: Cpus = None,
    ssh_command: Annotated[str, typer.Option("--ssh", help="how to reach a host, e.g. 'ssh -p 2222 -l me'")] = ssh.DEFAULT,
    python: Python = "",
    env: Env = None,
    command: Command = "",
    ready_timeout: Ready = _READY,
    first_port: FirstPort = FIRST_PORT,
    ip_version: IpVersion = None,
    object_store_memory: ObjectStore = None,
    dry_run: DryRun = False,
) -> None:
    """Run on hosts that ssh reaches, which share this folder and the run's. Ends with the run's exit code."""
    try:
        machines = Host.parse(hosts)
        resolved = _sized(recipe, overrides, len(machines), gpus_per_node)
        if found := _refused(resolved, cpus_per_node, command):
            raise LaunchError.of("the run cannot be launched", found)
        folder = Path.cwd() / resolved.folder / "launch"
        interpreter = python or sys.executable
        recipes = _recipes(resolved, 1)
        train = (interpreter, "-m", "trt_rl.cli", "train", str(folder / next(iter(recipes))), "--resume-or-start")
        job = ssh.SshJob(
            hosts=machines,
            gpus_per_node=resolved.cluster.gpus_per_node,
            cpus_per_node=cpus_per_node,
            launch_folder=folder,
            workdir=Path.cwd(),
            driver=_words(command, "--command") or train,
            python=interpreter,
            paths=_model_paths(resolved, command),
            environment=tuple(env or ()),
            ready_timeout_s=ready_timeout,
            first_port=first_port,
            ip_version=ip_version,
            object_store_bytes=object_store_memory,
            ssh=_words(ssh_command, "--ssh"),
        )
        if dry_run:
            print("\n".join(shlex.join(line) for line in job.commands()))
            return
        _write(folder, recipes)
        code = job.run()
    except TrtRlError as error:
        _refuse(error)
    raise typer.Exit(code)


@app.command("kuberay")
def kuberay_command(
    recipe: RecipePath,
    overrides: Overrides = None,
    image: Annotated[str, typer.Option(help="container image with trt_rl")] = "",
    nodes: Nodes = None,
    gpus_per_node: Gpus = None,
    cpus_per_node: Annotated[int, typer.Option(min=1, help="CPUs to request for each pod")] = 32,
    memory: Annotated[str, typer.Option(help="memory to request for each pod")] = "512Gi",
    shared_memory: Annotated[str, typer.Option(help="size of /dev/shm of each pod")] = "64Gi",
    name: Annotated[str, typer.Option(help="of the RayJob; the recipe's if left out")] = "",
    namespace: str = "",
    volume: Annotated[list[str] | None, typer.Option(help="CLAIM:/PATH, repeatable; run.folder and the model belong on one")] = None,
    retries: Annotated[int, typer.Option(min=0, help="new clusters after a failure; each continues from the last checkpoint")] = 3,
    env: Env = None,
    output: Annotated[Path | None, typer.Option(help="file to write; standard output if left out")] = None,
) -> None:
    """Print a KubeRay RayJob (kubectl apply -f)."""
    try:
        resolved = _sized(recipe, overrides, nodes, gpus_per_node)
        job = k8s.RayJob(
            name=name or k8s.name_from(resolved.name),
            namespace=namespace,
            image=image,
            recipe=dump_recipe(resolved),
            nodes=resolved.cluster.nodes,
            gpus=resolved.cluster.gpus_per_node,
            cpus=cpus_per_node,
            memory=memory,
            shared_memory=shared_memory,
            volumes=tuple(volume or ()),
            environment=(*_nccl(), *(env or ())),
            retries=retries,
            folders={"run.folder": str(resolved.folder), "model.path": resolved.model.path},
        )
        refused = [*plan.recipe_violations(resolved), *needs.shortage(resolved, cpus_per_node)]  # the model is on a volume, not here
        text = job.render(refused)
        if output:
            try:
                output.write_text(text)
            except OSError as error:
                raise LaunchError(f"--output {output} cannot be written: {error.strerror}") from error
        else:
            print(text, end="")
    except TrtRlError as error:
        _refuse(error)


def _words(text: str, option: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise LaunchError(f"{option} {text!r} is not readable as a shell's words: {error}") from error


def _sized(path: Path, overrides: list[str] | None, nodes: int | None, gpus: int | None) -> Recipe:
    """The recipe with the cluster that the options name."""
    recipe = load_recipe(path, overrides)
    cluster = recipe.cluster
    size = {"nodes": nodes or cluster.nodes, "gpus_per_node": cluster.gpus_per_node if gpus is None else gpus}
    if not size["nodes"]:
        size["nodes"] = needs.nodes(recipe, size["gpus_per_node"])
    return recipe.model_copy(update={"cluster": cluster.model_copy(update=size)})


def _refused(recipe: Recipe, cpus: int | None, command: str) -> list[str]:
    """Everything that the plan says against the recipe there; with another command than `trt-rl train`, nothing."""
    if command:
        return []
    if recipe.cluster.gpus_per_node:
        return plan.make_plan(recipe).violations
    return [*plan.violations(recipe), *needs.shortage(recipe, cpus)]


def _model_paths(recipe: Recipe, command: str) -> tuple[str, ...]:
    return () if command else (str(Path(recipe.model.path) / "config.json"),)


def _stem(recipe: Recipe) -> str:
    """Of its file: another recipe has another name, so that a later launch does not change what a waiting job will read."""
    return f"recipe-{hashlib.sha256(dump_recipe(recipe).encode()).hexdigest()[:8]}"


def _inputs(recipe: Recipe, command: str) -> tuple[str, ...]:
    """Absolute paths of what a training run reads: what a container must show at the same place."""
    named = (recipe.model.path, recipe.model.tokenizer, recipe.data.train.source, recipe.data.validation and recipe.data.validation.source)
    files = [name for name in named[:2] if name] + [name for name in named[2:] if name and name.endswith((".jsonl", ".json", ".parquet"))]
    return () if command else tuple(os.path.abspath(name) for name in files)


def _recipes(recipe: Recipe, replicas: int) -> dict[str, str]:
    """File names and texts: the resolved recipe, for an array one for each task."""
    stem = _stem(recipe)
    if replicas == 1:
        return {f"{stem}.yaml": dump_recipe(recipe)}
    found = {}
    for i in range(replicas):
        run = recipe.run.model_copy(update={"folder": str(recipe.folder / f"replica_{i}")})
        found[f"{stem}_{i}.yaml"] = dump_recipe(recipe.model_copy(update={"seed": recipe.seed + i, "run": run}))
    return found


def _write(folder: Path, files: dict[str, str]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).touch(mode=0o600)  # values of --env may be secrets
            (folder / name).write_text(text)
    except OSError as error:
        raise LaunchError(f"{folder} cannot be written: {error.strerror}; set run.folder to one that every node shares") from error
    for name in files:
        if name.endswith(".yaml"):
            _read_back(folder / name)


def _read_back(path: Path) -> None:
    """What the job will read must be the recipe that was checked; a value with ${...} would be resolved a second time."""
    import yaml

    if load_recipe(path) != parse_recipe(yaml.safe_load(path.read_text())):
        raise LaunchError(f"{path} holds a value that reads as an interpolation (${{...}}); write that value without it")


def _nccl() -> tuple[str, ...]:
    return tuple(f"{key}={value}" for key, value in sorted(os.environ.items()) if key.startswith("NCCL_"))


def _refuse(error: TrtRlError) -> None:
    console.print(f"{type(error).__name__}: {error}")
    raise typer.Exit(2) from None
