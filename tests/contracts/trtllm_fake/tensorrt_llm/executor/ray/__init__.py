"""`tensorrt_llm.executor.ray`, from 1.4."""

from tensorrt_llm import _family

_family.only_in(__name__, _family.NEW_LAYOUT)
