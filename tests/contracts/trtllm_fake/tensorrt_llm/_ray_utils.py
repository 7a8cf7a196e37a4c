"""`tensorrt_llm._ray_utils`, before 1.4."""

from tensorrt_llm import _family

_family.only_in(__name__, not _family.NEW_LAYOUT)
from tensorrt_llm._fake_control import control_action_decorator, unwrap_ray_errors  # noqa: E402

__all__ = ["control_action_decorator", "unwrap_ray_errors"]
