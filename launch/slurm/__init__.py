"""The sbatch script of a run: `trt_rl.sbatch` with values in the places of its @NAMES@."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

from launch.containers import NO_CONTAINER, Container
from launch.hosts import FIRST_PORT, LaunchError, environment_problems, slots

_PLAIN = re.compile(r"[A-Za-z0-9_./:=,@%+\-\[\]]+")


@dataclass(frozen=True)
class SlurmJob:
    name: str
    nodes: int
    gpus_per_node: int
    launch_folder: Path
    """Absolute; seen by all nodes. Scripts, recipes and logs of the launch."""
    workdir: Path
    driver: tuple[str, ...] | None = None
    """Instead of `trt-rl train` with the recipe in the launch folder."""
    recipe: str = "recipe"
    """Name of that file without `.yaml`; of an array's, `_TASK` follows."""
    python: str = "python"
    paths: tuple[str, ...] = ()
    """That must exist on every node, e.g. the model's folder."""
    cpus_per_node: int | None = None
    time: str = ""
    sbatch: tuple[str, ...] = ()
    """Further options of sbatch, e.g. `--partition=h100`."""
    requeue: bool = True
    grace_s: int = 300
    replicas: int = 1
    container: Container = NO_CONTAINER
    setup: str = ""
    environment: tuple[str, ...] = ()
    """NAME=VALUE."""
    ready_timeout_s: float = 600.0
    first_port: int = FIRST_PORT
    ip_version: int | None = None
    object_store_bytes: int | None = None

    @property
    def script(self) -> Path:
        return self.launch_folder / "trt_rl.sbatch"

    @property
    def _box(self) -> Container:
        """The container with the folders of this job."""
        folders = dict.fromkeys((str(self.workdir), str(self.launch_folder.parent)))
        return replace(self.container, folders=tuple(folders))

    def problems(self) -> list[str]:
        """What would end the job, or change what its script does."""
        found = list(self._box.problems())
        values = [self.name, str(self.launch_folder), str(self.workdir), self.python, *self.paths, *self.sbatch, *self.environment]
        values += [self.time, *(self.driver or ()), *self.container.values()]
        found += [f"{v!r} holds a line break or NUL, which no script can carry in one line" for v in values if re.search(r"[\n\r\0]", v)]
        if "\0" in self.setup:
            found.append("--setup holds NUL")
        if not self.name.strip():
            found.append("--job-name is empty")
        if "\\" in str(self.launch_folder):  # in #SBATCH --output it would switch off %j
            found.append(
                f"run.folder = {self.launch_folder} holds a backslash, which Slurm reads as part of a file name pattern; rename it"
            )
        for option in self.sbatch:
            if not option.startswith("-"):
                found.append(f"--sbatch {option!r} is no option of sbatch; write e.g. --sbatch=--partition=h100")
        found += environment_problems(self.environment)
        if self.ip_version not in (None, 4, 6):
            found.append(f"--ip-version = {self.ip_version}; works: 4, 6")
        if self.first_port < 1024 or slots(self.first_port) < 1:
            found.append(f"--first-port = {self.first_port}: ports lie between 1024 and 32768; use e.g. {FIRST_PORT}")
        return found

    def render(self, refused: Sequence[str] = ()) -> str:
        """
        Args:
            refused: what the plan says against the run.

        Raises:
            LaunchError: lists everything that cannot work.
        """
        if found := [*refused, *self.problems()]:
            raise LaunchError.of("the job cannot be launched", found)
        recipe = f'"$launch_folder/{self.recipe}$replica.yaml"'
        driver = _words(self.driver) if self.driver else f'"$python" -m trt_rl.cli train {recipe} --resume-or-start'
        container, ray, quote = self._box, [], shlex.quote
        names = [name for name, _, _ in (pair.partition("=") for pair in self.environment)]
        version = [f"--ip-version={self.ip_version}"] if self.ip_version else []
        ray += [f"--cpus={self.cpus_per_node}"] if self.cpus_per_node else []
        ray += [f"--object-store-bytes={self.object_store_bytes}"] if self.object_store_bytes else []
        values = {
            "SBATCH": "\n".join(f"#SBATCH {_sbatch_word(option)}" for option in self._options()),
            "LAUNCH_FOLDER": quote(str(self.launch_folder)),
            "PYTHON": quote(self.python),
            "GPUS": str(self.gpus_per_node),
            "FIRST_PORT": str(self.first_port),
            "READY_TIMEOUT": f"{self.ready_timeout_s:g}",
            "REQUEUE": str(int(self.requeue)),
            "SETUP": quote(self.setup),
            "RUNTIME": quote(container.program),
            "IMAGE_FILE": quote(container.image_file),
            "STEP_OPTIONS": _words(container.srun_options(names)),
            "INSIDE": _words(container.command(bool(self.gpus_per_node))),
            "RAY_OPTIONS": _words(ray),
            "CHECK_OPTIONS": _words([*(f"--path={path}" for path in self.paths), *version]),
            "DRIVER": driver,
            "EXPORTS": "".join(f"export {k}={quote(v)}\n" for k, _, v in (pair.partition("=") for pair in self.environment)),
        }
        template = resources.files("launch").joinpath("slurm/trt_rl.sbatch").read_text()
        return re.sub("@([A-Z_]+)@", lambda match: values[match[1]], template)  # in one pass: values are not looked at again

    def _options(self) -> list[str]:
        output = str(self.launch_folder).replace("%", "%%") + ("/slurm-%A_%a.out" if self.replicas > 1 else "/slurm-%j.out")
        options = [f"--job-name={self.name}", f"--nodes={self.nodes}", "--ntasks-per-node=1"]
        options += [f"--gpus-per-node={self.gpus_per_node}"] if self.gpus_per_node else []
        options += [f"--cpus-per-task={self.cpus_per_node}"] if self.cpus_per_node else []
        options += [f"--chdir={self.workdir}", f"--output={output}", "--open-mode=append"]
        options += ["--requeue" if self.requeue else "--no-requeue", f"--signal=B:USR1@{self.grace_s}"]
        options += [f"--time={self.time}"] if self.time else []
        options += [f"--array=0-{self.replicas - 1}"] if self.replicas > 1 else []
        return [*options, *self.sbatch]


def submit(script: Path) -> str:
    """The job's number.

    Raises:
        LaunchError: Slurm is not installed here, or refuses the job.
    """
    if shutil.which("sbatch") is None:
        raise LaunchError(
            f"Slurm is not installed here (no sbatch on PATH); on a login node of the cluster: sbatch {shlex.quote(str(script))}"
        )
    done = subprocess.run(["sbatch", "--parsable", str(script)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise LaunchError(f"Slurm refused the job: {done.stderr.strip()}")
    return done.stdout.strip().partition(";")[0]


def _words(items) -> str:
    """For an array of bash; shellcheck takes a bare comma there for a mistake."""
    return " ".join(f"'{item}'" if "," in item and shlex.quote(item) == item else shlex.quote(item) for item in items)


def _sbatch_word(option: str) -> str:
    """For sbatch, which reads its lines with rules of its own: everything between double quotes is one word, in which a
    backslash takes the next character as it is."""
    if _PLAIN.fullmatch(option):
        return option
    return '"' + re.sub(r'([\\"])', r"\\\1", option) + '"'
