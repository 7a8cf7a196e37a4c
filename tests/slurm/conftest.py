"""One Slurm for all tests here."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.slurm.cluster import SlurmCluster


@pytest.fixture(scope="session")
def slurm():
    done = subprocess.run(["bash", str(Path(__file__).parent / "setup.sh")], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no Slurm here: {done.stderr.strip()}")
    if (why := SlurmCluster.cannot_start()) is not None:
        pytest.skip(f"no Slurm here: {why}")
    cluster = SlurmCluster()
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
