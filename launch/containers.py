"""How a command of a job enters its container: pyxis (options of srun), Apptainer (a command before it), or not at all."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

RUNTIMES = ("none", "pyxis", "apptainer")


@dataclass(frozen=True)
class Container:
    runtime: str = "none"
    image: str = ""
    mounts: tuple[str, ...] = ()
    """HOST:CONTAINER, besides `folders` and `inputs`."""
    folders: tuple[str, ...] = ()
    """Of the host, at the same place inside; the first is the working folder."""
    inputs: tuple[str, ...] = ()
    """Absolute paths of what the run reads. Those that are not on the machine that submits may be in the image."""

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
        ours = [mount for mount in self._all_mounts() if mount not in self.mounts] if self.runtime != "none" else []
        if odd := [mount for mount in ours if mount.count(":") != 1 or "," in mount]:
            yield f"a container cannot mount {' and '.join(odd)}: colon and comma separate mounts; rename the folder"
        # pyxis writes mounts between double quotes into a script of bash, which would read these.
        if self.runtime == "pyxis" and (odd := [mount for mount in self._all_mounts() if set('$`"') & set(mount)]):
            yield f"pyxis cannot mount {' and '.join(odd)}: dollar, backtick and double quote mean something to it; rename the folder"

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

    def _all_mounts(self) -> list[str]:
        """In this order: a later one may lie in an earlier one."""
        # enroot gives each step a /tmp of its own, in memory; Ray's sockets are there, which attach.sh needs. Apptainer shares it.
        tmp = ["/tmp:/tmp"] if self.runtime == "pyxis" else []
        own = (f"{folder}:{folder}" for folder in self.folders)
        read = (mount for path in self.inputs for mount in _mounts_of(path, self.folders))
        return list(dict.fromkeys([*tmp, *own, *read, *self.mounts]))

    def srun_options(self, names: Sequence[str]) -> list[str]:
        """
        Args:
            names: of environment variables that keep their values where the image sets them too.
        """
        if self.runtime != "pyxis":
            return []
        return [
            f"--container-image={os.path.abspath(self.image) if self.image_file else self.image}",  # pyxis pulls what has no slash first
            f"--container-mounts={','.join(self._all_mounts())}",
            f"--container-workdir={self.folders[0]}",
            "--no-container-mount-home",
            "--container-writable",  # compilers of kernels keep what they made in the home folder; the next step has a new container
            *([f"--container-env={','.join(dict.fromkeys(names))}"] if names else []),
        ]

    def command(self, gpus: bool) -> list[str]:
        if self.runtime != "apptainer":
            return []
        binds = [f"--bind={mount}" for mount in self._all_mounts()]
        return ["apptainer", "exec", *(["--nv"] if gpus else []), *binds, f"--pwd={self.folders[0]}", self.image]


def _mounts_of(path: str, mounted: Sequence[str]) -> Iterator[str]:
    """So that `path` is found inside; in a folder also what its links lead to, as in Hugging Face's cache."""

    def one(inside: str) -> Iterator[str]:
        source = os.path.realpath(inside)
        if any(Path(inside).is_relative_to(folder) for folder in mounted):
            inside = source  # the link itself is there
        if os.path.exists(source) and not any(Path(inside).is_relative_to(folder) for folder in mounted):
            yield f"{source}:{inside}"

    yield from one(path)
    for entry in os.scandir(path) if os.path.isdir(path) else ():
        if entry.is_symlink():
            target = os.path.normpath(os.path.join(path, os.readlink(entry.path)))
            if not Path(target).is_relative_to(path):
                yield from one(os.path.dirname(target))


_EXAMPLE = {"pyxis": "nvcr.io#nvidia/tensorrt-llm/release:1.3.0rc15", "apptainer": "docker://nvcr.io/nvidia/tensorrt-llm/release:1.3.0rc15"}
NO_CONTAINER = Container()
