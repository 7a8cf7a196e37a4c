"""Run a command in a Ray cluster of two nodes on this machine: `python -m tests.support.two_nodes CPUS CPUS -- command...`."""

from __future__ import annotations

import os
import subprocess
import sys

from ray.cluster_utils import Cluster


def main() -> int:
    split = sys.argv.index("--")
    first, *others = map(int, sys.argv[1:split])
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": first, "include_dashboard": False})
    try:
        for cpus in others:
            cluster.add_node(num_cpus=cpus)
        cluster.wait_for_nodes()
        return subprocess.run(sys.argv[split + 1 :], env=os.environ | {"RAY_ADDRESS": cluster.address}, check=False).returncode
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    sys.exit(main())
