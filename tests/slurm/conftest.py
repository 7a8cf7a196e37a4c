"""One Slurm for all tests here."""

from __future__ import annotations

import pytest

from tests.slurm.cluster import SlurmCluster


@pytest.fixture(scope="session")
def slurm():
    if (why := SlurmCluster.cannot_start()) is not None:
        pytest.skip(f"no Slurm here: {why}")
    cluster = SlurmCluster()
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
