"""Hugging Face safetensors folders: read slices of tensors, write sharded checkpoints."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from trt_rl.arch import Arch
from trt_rl.errors import ModelError
from trt_rl.refit.names import Box, slices

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"


class HFFolder:
    """Lazy view of the weights in `folder`: a slice is read from disk when it is asked for.

    Raises:
        ModelError: a file named by the index is missing or truncated, or the tensors do not fit `arch`.
    """

    def __init__(self, folder: str | Path, arch: Arch) -> None:
        self.folder = Path(folder)
        self._files: dict[str, safe_open] = {}
        self._home = self._locate()
        self._check_shapes(arch)

    def _locate(self) -> dict[str, str]:
        index, single = self.folder / _INDEX, self.folder / _WEIGHTS
        if index.is_file():
            return json.loads(index.read_text())["weight_map"]
        if single.is_file():
            return {name: _WEIGHTS for name in self._open(_WEIGHTS).keys()}  # noqa: SIM118  a file, not a dict
        raise ModelError(f"{self.folder} holds neither {_WEIGHTS} nor {_INDEX}; weights must be safetensors")

    def _open(self, file: str) -> safe_open:
        if file not in self._files:
            path = self.folder / file
            if not path.is_file():
                raise ModelError(f"{path} is missing although {_INDEX} names it; download the model again")
            _check_length(path)
            try:
                self._files[file] = safe_open(path, framework="pt")
            except SafetensorError as error:
                raise ModelError(f"{path} is not a readable safetensors file: {error}") from error
        return self._files[file]

    def _check_shapes(self, arch: Arch) -> None:
        expected = arch.hf_shapes()
        missing = [name for name in expected if name not in self._home]
        if missing:
            raise ModelError(f"{self.folder}: {len(missing)} tensors are missing, the first is {missing[0]}")
        for name, shape in expected.items():
            found = tuple(self._open(self._home[name]).get_slice(name).get_shape())
            if found != shape:
                raise ModelError(f"{self.folder}: {name} has shape {list(found)}, config.json makes it {list(shape)}")

    def read(self, name: str, box: Box) -> torch.Tensor:
        """`name[box]`, read without touching the rest of the tensor."""
        view = self._open(self._home[name]).get_slice(name)
        return view[slices(box)]


def _check_length(path: Path) -> None:
    """Compare the file's size with what its header promises: a truncated copy is named before anything loads."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        header_size = struct.unpack("<Q", head)[0] if len(head) == 8 else size
        if header_size + 8 > size:
            raise ModelError(f"{path} is truncated: {size} bytes, its header alone needs {header_size + 8}")
        try:
            header = json.loads(file.read(header_size))
        except ValueError as error:
            raise ModelError(f"{path} is not a safetensors file: {error}") from error
    promised = 8 + header_size + max((t["data_offsets"][1] for k, t in header.items() if k != "__metadata__"), default=0)
    if size != promised:
        raise ModelError(f"{path} is truncated: {size} bytes where its header promises {promised}")


def write_folder(folder: Path, tensors: Iterator[tuple[str, torch.Tensor]], shard_bytes: int = 4 * 2**30) -> None:
    """Write `tensors` as `model-00001-of-N.safetensors` and an index, holding one shard in memory at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    shard: dict[str, torch.Tensor] = {}
    written: list[dict[str, torch.Size]] = []
    total = filled = 0

    def flush() -> None:
        nonlocal shard, filled
        save_file(shard, folder / f"part-{len(written)}.tmp", metadata={"format": "pt"})
        written.append(dict.fromkeys(shard))
        shard, filled = {}, 0

    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if shard and filled + size > shard_bytes:
            flush()
        shard[name] = tensor.contiguous().cpu()
        filled, total = filled + size, total + size
    flush()
    if len(written) == 1:
        (folder / "part-0.tmp").rename(folder / _WEIGHTS)
        return
    weight_map = {}
    for i, names in enumerate(written):
        file = f"model-{i + 1:05d}-of-{len(written):05d}.safetensors"
        (folder / f"part-{i}.tmp").rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / _INDEX).write_text(json.dumps(index, indent=2))
