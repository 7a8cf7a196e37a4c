"""Drivers that take the training run's place where a test is about the launch: `python tests/slurm/drivers.py KIND FOLDER ...`."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path


def report(folder: Path, name: str, other: str, code: str, *arguments: str) -> int:
    """Write what Ray's workers see on every node, wait until job `other` has done the same, and end with `code`."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ray.init(log_to_driver=False)
    look = ray.remote(num_cpus=0)(lambda: (ray.get_runtime_context().get_node_id(), dict(os.environ)))
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    seen = ray.get([look.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote() for node in nodes])
    found = {"workers": dict(seen), "driver": dict(os.environ), "arguments": arguments, "cwd": os.getcwd()}
    (folder / f"{name}.new").write_text(json.dumps(found))
    (folder / f"{name}.new").rename(folder / f"{name}.json")
    while not ((folder / f"{other}.json").exists() and (folder / "go").exists()):
        time.sleep(0.2)
    return int(code)


def sleep(folder: Path) -> int:
    (folder / "started").touch()
    while True:
        time.sleep(1)


def stubborn(folder: Path) -> int:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return sleep(folder)


def grow(folder: Path) -> int:
    """Take memory until someone objects."""
    held = []
    for _ in range(60):
        held.append(b"x" * (100 << 20))
        time.sleep(0.2)
    time.sleep(60)
    return 0


if __name__ == "__main__":
    kind, where, *rest = sys.argv[1:]
    sys.exit({"report": report, "sleep": sleep, "stubborn": stubborn, "grow": grow}[kind](Path(where), *rest))
