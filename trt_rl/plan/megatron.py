"""Which names `trainer.megatron` may use, read from Megatron-core's source: importing it would import torch."""

from __future__ import annotations

import ast
import difflib
import importlib.util
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path

_CLASSES = {"transformer/transformer_config.py": "TransformerConfig", "model_parallel_config.py": "ModelParallelConfig"}


@cache
def config_fields() -> frozenset[str]:
    """Fields of the installed `TransformerConfig` and of what it inherits; empty where Megatron-core is not installed."""
    found = importlib.util.find_spec("megatron")
    cores = [Path(place) / "core" for place in (found.submodule_search_locations if found else ())]
    core = next((core for core in cores if (core / "transformer").is_dir()), None)
    if core is None:
        return frozenset()
    names = set()
    for file, wanted in _CLASSES.items():
        body = next(n.body for n in ast.parse((core / file).read_text()).body if isinstance(n, ast.ClassDef) and n.name == wanted)
        names |= {n.target.id for n in body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
    return frozenset(names)


def unknown_fields(asked: Collection[str]) -> Iterator[str]:
    """What is wrong with the names in `trainer.megatron`."""
    known = config_fields() if asked else ()
    for key in sorted(set(asked) - known) if known else ():
        near = difflib.get_close_matches(key, known, n=1)
        yield f"trainer.megatron.{key} is no field of Megatron-core's TransformerConfig" + (f"; did you mean {near[0]!r}?" if near else "")
