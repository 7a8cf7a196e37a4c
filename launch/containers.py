"""How a command of a job enters its container: pyxis (options of srun), Apptainer (a command before it), or not at all."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

RUNTIMES = ("none", "pyxis", "apptainer")


@dataclass(frozen=True)
class Container:
    runtime: str = "none"
    image: str = ""
    mounts: tuple[str, ...] = ()
    """HOST:CONTAINER, besides the working folder and the run's."""

    def problems(self) -> Iterator[str]:
        """Found on the machine that submits; every node looks for the image again."""
        if self.runtime not in RUNTIMES:
            yield f"--container = {self.runtime!r} is not known; works: {', '.join(RUNTIMES)}"
        elif self.runtime == "none" and (self.image or self.mounts):
            yield "--image and --mount need --container pyxis or apptainer"
        elif self.runtime != "none" and not self.image:
            yield f"--container {self.runtime} needs --image: a file, or a reference such as {_EXAMPLE[self.runtime]}"
        if self.image_file and not Path(self.image_file).is_file():
            yield f"container image {self.image_file} is missing (--image)"
        for mount in self.mounts:
            if not re.fullmatch(r"/[^:,]*:/[^:,]*(:[^:,]+)?", mount):
                yield f"--mount {mount!r} is not /HOST:/CONTAINER (no colon or comma in either)"

    @property
    def image_file(self) -> str:
        """The file that must exist on every node; empty for images of a registry."""
        if self.runtime not in ("pyxis", "apptainer") or "://" in self.image:
            return ""
        is_file = self.runtime == "apptainer" or self.image.startswith(("/", ".")) or self.image.endswith(".sqsh")
        return self.image if is_file else ""

    @property
    def program(self) -> str:
        """That every node must have. pyxis is part of Slurm; it starts enroot."""
        return {"pyxis": "enroot", "apptainer": "apptainer"}.get(self.runtime, "")

    def values(self) -> tuple[str, ...]:
        return self.image, *self.mounts

    def _mounts(self, *folders: str) -> list[str]:
        return [*(f"{folder}:{folder}" for folder in dict.fromkeys(folders)), *self.mounts]

    def srun_options(self, workdir: str, launch_folder: str) -> list[str]:
        if self.runtime != "pyxis":
            return []
        mounts = ",".join(self._mounts(workdir, _run_folder(launch_folder)))
        return [
            f"--container-image={os.path.abspath(self.image) if self.image_file else self.image}",  # pyxis pulls what has no slash first
            f"--container-mounts={mounts}",
            f"--container-workdir={workdir}",
            "--no-container-mount-home",
        ]

    def command(self, workdir: str, launch_folder: str, gpus: bool) -> list[str]:
        if self.runtime != "apptainer":
            return []
        binds = [f"--bind={mount}" for mount in self._mounts(workdir, _run_folder(launch_folder))]
        return ["apptainer", "exec", *(["--nv"] if gpus else []), *binds, f"--pwd={workdir}", self.image]


def _run_folder(launch_folder: str) -> str:
    return str(Path(launch_folder).parent)


_EXAMPLE = {"pyxis": "nvcr.io#nvidia/tensorrt-llm/release:1.3.0rc15", "apptainer": "docker://nvcr.io/nvidia/tensorrt-llm/release:1.3.0rc15"}
NO_CONTAINER = Container()
