"""Fake only: the restricted unpickler, `tensorrt_llm.serialization` or `tensorrt_llm.llmapi.serialization` by release."""

from __future__ import annotations

import io
import pickle
import re
from typing import Any

_BUILTINS = ("list", "tuple", "str", "int", "float", "bool", "bytes", "dict", "NoneType", "type", "set", "complex", "getattr")


class Unpickler(pickle.Unpickler):
    def __init__(self, file, approved: dict[str, list[str]], patterns: list[str], denied: dict[str, list[str]]) -> None:
        super().__init__(file)
        self.approved, self.patterns, self.denied = approved, patterns, denied

    def find_class(self, module: str, name: str) -> Any:
        allowed = name in self.approved.get(module, ()) or any(re.match(p, module) for p in self.patterns)
        if not allowed or name in self.denied.get(module, ()):
            raise ValueError(f"Import {module} | {name} is not allowed")
        return super().find_class(module, name)


def loads(data: bytes, approved_imports: dict | None = None, approved_module_patterns: list | None = None, disallowed_imports=None) -> Any:
    approved = {"builtins": list(_BUILTINS)} if approved_imports is None else approved_imports
    patterns = [r"^torch.*"] if approved_module_patterns is None else approved_module_patterns
    denied = {"torch.storage": ["_load_from_bytes"], "torch.hub": ["_load_local"], "torch": ["save"]} | (disallowed_imports or {})
    return Unpickler(io.BytesIO(data), approved, patterns, denied).load()


def dumps(obj: Any) -> bytes:
    return pickle.dumps(obj)
