"""Waiting for Ray actors so that nothing hangs and the part that failed is named."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError, WorkerCrashedError

from trt_rl.errors import TrtRlError, WorkerDied


def gather(refs: Sequence[ray.ObjectRef], names: Sequence[str], timeout_s: float) -> list[Any]:
    """Results of `refs` in order; the first failure ends the wait at once, whichever part it came from.

    Raises:
        WorkerDied: a process ended, or none of the remaining ones answered within `timeout_s`.
        TrtRlError: what a part raised for the user, as it raised it.
    """
    name_of = dict(zip(refs, names, strict=True))
    pending = list(refs)
    while pending:
        done, pending = ray.wait(pending, num_returns=1, timeout=timeout_s)
        if not done:
            waiting = ", ".join(sorted(name_of[ref] for ref in pending))
            raise WorkerDied(f"no answer within {timeout_s:.0f} s (run.wait_s) from: {waiting}")
        for ref in done:
            result(ref, name_of[ref])
    return [ray.get(ref) for ref in refs]


def result(ref: ray.ObjectRef, name: str) -> Any:
    """The value of a finished call, or its failure with the part's name."""
    try:
        return ray.get(ref)
    except RayTaskError as error:
        if isinstance(error.cause, TrtRlError):
            raise type(error.cause)(f"{name}: {error.cause}") from None
        raise
    except (ActorDiedError, ActorUnavailableError, WorkerCrashedError) as error:
        raise WorkerDied(f"{name} died: {str(error).strip().splitlines()[0]}") from error


def gpus_per_actor() -> int:
    """1 in a Ray cluster with GPUs, 0 in one without. The driver's own machine need not have any."""
    return int(ray.cluster_resources().get("GPU", 0) > 0)
