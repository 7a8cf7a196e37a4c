"""Model and optimizer state through `megatron.core.dist_checkpointing`."""

from __future__ import annotations

import queue
from pathlib import Path

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

# A synchronous save fills and empties this queue in one process; Megatron's default is a manager process, which
# takes seconds to start and needs an importable `__main__`.
filesystem_async._results_queue = queue.Queue()

# The optimizer's default sharding raises "flattened_range is not supported" in megatron-core 0.16.1.
_METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "distrib_optim_fully_reshardable_mem_efficient": False}


def _state(model: DistributedDataParallel, optimizer: MegatronOptimizer, schedule: OptimizerParamScheduler, loading: bool) -> dict:
    # Copies: Megatron writes the current process group into the dict it is given.
    weights = model.module.sharded_state_dict(metadata=dict(_METADATA))
    return {
        "model": weights,
        "optimizer": optimizer.sharded_state_dict(weights, is_loading=loading, metadata=dict(_METADATA)),
        "schedule": schedule.state_dict(),
    }


def save(folder: Path, model: DistributedDataParallel, optimizer: MegatronOptimizer, schedule: OptimizerParamScheduler) -> None:
    """Write this rank's part of the state into the existing, empty `folder`. Collective."""
    dist_checkpointing.save(_state(model, optimizer, schedule, loading=False), str(folder), content_metadata=dict(_METADATA))


def load(folder: Path, model: DistributedDataParallel, optimizer: MegatronOptimizer, schedule: OptimizerParamScheduler) -> None:
    """Restore what `save` wrote, in place. Collective."""
    state = dist_checkpointing.load(_state(model, optimizer, schedule, loading=True), str(folder))
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    schedule.load_state_dict(state["schedule"])
