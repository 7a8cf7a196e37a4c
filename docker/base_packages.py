"""Which packages of the base image stay as they are, while the Dockerfile adds those of requirements/docker.txt.

pip weighs the requirements of what it installs, not of what is there already: left alone it would exchange the torch that
TensorRT-LLM was built for. So everything TensorRT-LLM names, and torch's stack, becomes a constraint. Only the standard
library is used, because this runs before anything is installed:

    python base_packages.py kind                            # "trtllm" or "cpu"
    python base_packages.py write docker.txt FOLDER         # FOLDER/requirements.txt and FOLDER/constraints.txt
    python base_packages.py check FOLDER/constraints.txt    # after the installation: nothing of it has changed
"""

from __future__ import annotations

import re
import sys
from importlib import metadata
from pathlib import Path

STACK = re.compile(
    r"(torch.*|pytorch-triton|triton|tensorrt.*|transformer-engine.*|flash-?attn.*|flashinfer.*|nvidia-.*|cuda-.*|tokenizers|mpi4py)"
)
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def installed() -> dict[str, str]:
    """Version by name; of two copies of a package, the one that an import finds."""
    found: dict[str, str] = {}
    for distribution in metadata.distributions():
        if name := distribution.metadata["Name"]:
            found.setdefault(canonical(name), distribution.version)
    return found


def kind(versions: dict[str, str]) -> str:
    """Of the base: a TensorRT-LLM image, or one for CPUs that brings none of the stack."""
    has = {name: name in versions for name in ("torch", "tensorrt-llm")}
    if all(has.values()):
        return "trtllm"
    if not any(has.values()):
        return "cpu"
    lacking = next(name for name, there in has.items() if not there)
    sys.exit(
        f"error: the base image has {next(name for name, there in has.items() if there)} but no {lacking}; "
        "BASE is a TensorRT-LLM release image (nvcr.io/nvidia/tensorrt-llm/release:TAG), or, for CPUs, an image with Python 3.11 and neither of them"
    )


def pins(lines: list[str]) -> dict[str, str]:
    """Requirement by name."""
    stripped = (line.split("#")[0].strip() for line in lines)
    return {canonical(_NAME.match(line)[0]): line for line in stripped if line}


def plan(wanted: dict[str, str], versions: dict[str, str], named: set[str]) -> tuple[list[str], list[str], list[str]]:
    """What to install, what must not change, and what to tell the reader. `named` is what TensorRT-LLM requires."""
    kept = {name for name in wanted if name in versions and name.startswith(("transformer-engine", "torch", "tensorrt"))}
    requirements = [line for name, line in wanted.items() if name not in kept]
    fixed = {name for name in versions if name in named or STACK.fullmatch(name)} - (wanted.keys() - kept)
    told = [f"kept from the base: {name} {versions[name]} (in place of {wanted[name]})" for name in sorted(kept)]
    told += [
        f"replaced for trt_rl: {name} {versions[name]} of the base, by {wanted[name]}"
        for name in sorted(wanted.keys() - kept)
        if name in versions and f"=={versions[name]}" not in wanted[name]
    ]
    return requirements, [f"{name}=={versions[name]}" for name in sorted(fixed)], told


def changes(constraints: list[str], versions: dict[str, str]) -> list[str]:
    was = dict(line.split("==", 1) for line in constraints)
    return [f"{name} was {version}, is {versions.get(name, 'gone')}" for name, version in was.items() if versions.get(name) != version]


def main(command: str, *paths: str) -> None:
    versions = installed()
    if command == "kind":
        print(kind(versions))
    elif command == "write":
        named = {canonical(match[0]) for line in metadata.requires("tensorrt-llm") or [] if (match := _NAME.match(line))}
        requirements, constraints, told = plan(pins(Path(paths[0]).read_text().splitlines()), versions, named)
        Path(paths[1], "requirements.txt").write_text("\n".join(requirements) + "\n")
        Path(paths[1], "constraints.txt").write_text("\n".join(constraints) + "\n")
        print("\n".join([*told, f"{len(constraints)} packages of the base stay as they are"]))
    elif command == "check":
        if found := changes(Path(paths[0]).read_text().split(), versions):
            sys.exit("error: the installation changed packages of the base: " + "; ".join(found))
    else:
        sys.exit(f"error: {command!r} is none of kind, write, check")


if __name__ == "__main__":
    main(*sys.argv[1:])
