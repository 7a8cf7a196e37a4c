"""`tensorrt_llm._torch.utils`: the identity of a device, which on this machine is made up from the Ray node and its number."""

from __future__ import annotations

import uuid


def get_device_uuid(device_idx: int) -> str:
    import ray

    node = ray.get_runtime_context().get_node_id() if ray.is_initialized() else "no ray"
    return f"GPU-{uuid.uuid5(uuid.NAMESPACE_URL, f'trtllm-fake/{node}/{device_idx}')}"
