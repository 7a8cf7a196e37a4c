from tensorrt_llm._fake_control import control_action_decorator, unwrap_ray_errors

__all__ = ["control_action_decorator", "unwrap_ray_errors"]
