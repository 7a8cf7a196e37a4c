"""Waiting for Ray actors so that nothing hangs and the part that failed is named."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from trt_rl.errors import TrtRlError, WorkerDied, WorkerFailed, WorkerSilent

_DEATH_NOTICE_S = 3.0  # how long Ray may take to report a death that its peers have already felt


def gather(refs: Sequence[ray.ObjectRef], names: Sequence[str], timeout_s: float) -> list[Any]:
    """Results of `refs` in order; the first failure ends the wait at once, whichever part it came from.

    Raises:
        WorkerDied: a process ended.
        WorkerSilent: none of the remaining ones answered within `timeout_s`.
        WorkerFailed: a part raised something unexpected; the message holds its traceback.
        TrtRlError: what a part raised for the user, as it raised it.
    """
    name_of = dict(zip(refs, names, strict=True))
    pending = list(refs)
    while pending:
        done, pending = ray.wait(pending, num_returns=1, timeout=timeout_s)
        if not done:
            waiting = ", ".join(sorted(name_of[ref] for ref in pending))
            raise WorkerSilent(f"no answer within {timeout_s:.0f} s from: {waiting}")
        failure = _failure(done[0], name_of[done[0]])
        if isinstance(failure, WorkerFailed):
            # A lost connection is usually the echo of a peer's death: let the death speak first.
            late, _ = ray.wait(pending, num_returns=len(pending), timeout=_DEATH_NOTICE_S) if pending else ([], [])
            others = [_failure(ref, name_of[ref]) for ref in late]
            failure = next((f for f in others if isinstance(f, WorkerDied)), failure)
        if failure is not None:
            raise failure
    return [ray.get(ref) for ref in refs]


def settle(refs: Sequence[ray.ObjectRef], names: Sequence[str], timeout_s: float) -> list[Any]:
    """Results of `refs` in order, with the error in place of a result where a part failed. Waits for every part."""
    done, _ = ray.wait(list(refs), num_returns=len(refs), timeout=timeout_s)
    finished, results = set(done), []
    for ref, name in zip(refs, names, strict=True):
        if ref not in finished:
            results.append(WorkerSilent(f"no answer within {timeout_s:.0f} s from: {name}"))
        else:
            results.append(outcome_of(ref, name))
    return results


def outcome_of(ref: ray.ObjectRef, name: str) -> Any:
    """The result of a finished call, or the error it failed with."""
    failure = _failure(ref, name)
    return ray.get(ref) if failure is None else failure


def _failure(ref: ray.ObjectRef, name: str) -> TrtRlError | None:
    """What a finished call failed with, in the user's terms; None if it did not."""
    try:
        ray.get(ref)
    except RayTaskError as error:
        if isinstance(error.cause, TrtRlError):
            return type(error.cause)(f"{name}: {error.cause}")
        return WorkerFailed(f"{name} failed: {type(error.cause).__name__}: {error.cause}\n{error}")
    except RayError as error:
        return WorkerDied(f"{name} died: {str(error).strip().splitlines()[0]}")
    return None


_MPI = re.compile(r"^(PMI|PMIX|MPI|OMPI|SLURM)_")


def scrub_mpi_variables() -> list[str]:
    """Remove from this process what an MPI launcher or Slurm left: Ray hands it on, and in a TensorRT-LLM worker it would
    select the MPI orchestrator or end the process inside the MPI library. Returns the names removed."""
    found = sorted(key for key in os.environ if _MPI.match(key))
    for key in found:
        del os.environ[key]
    return found


def gpus_per_actor() -> int:
    """1 in a Ray cluster with GPUs, 0 in one without. The driver's own machine need not have any."""
    return int(ray.cluster_resources().get("GPU", 0) > 0)
