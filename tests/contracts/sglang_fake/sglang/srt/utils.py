"""`MultiprocessingSerializer` (sglang/srt/utils/common.py)."""

import io
import pickle
from multiprocessing.reduction import ForkingPickler

_ALLOWED = (
    "builtins.",
    "collections.",
    "copyreg.",
    "functools.",
    "torch.",
    "multiprocessing.resource_sharer.",
    "multiprocessing.reduction.",
)
_DENIED = {("builtins", "eval"), ("builtins", "exec"), ("builtins", "compile")}


class SafeUnpickler(pickle.Unpickler):
    def find_class(self, module, name):
        if (module, name) not in _DENIED and (module + ".").startswith(_ALLOWED):
            return super().find_class(module, name)
        raise RuntimeError(f"Blocked unsafe class loading ({module}.{name}), to prevent exploitation of CVE-2025-10164")


class MultiprocessingSerializer:
    @staticmethod
    def serialize(obj, output_str: bool = False):
        assert not output_str, "the stand-in has no base64 form"
        buffer = io.BytesIO()
        ForkingPickler(buffer).dump(obj)
        return buffer.getvalue()

    @staticmethod
    def deserialize(data):
        return SafeUnpickler(io.BytesIO(data)).load()
