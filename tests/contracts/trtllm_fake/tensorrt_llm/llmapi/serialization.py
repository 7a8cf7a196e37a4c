"""`tensorrt_llm.llmapi.serialization`, from 1.4."""

from tensorrt_llm import _family

_family.only_in(__name__, _family.NEW_LAYOUT)
from tensorrt_llm._fake_pickle import Unpickler, dumps, loads  # noqa: E402

__all__ = ["Unpickler", "dumps", "loads"]
