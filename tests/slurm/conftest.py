"""One Slurm for all tests here."""

from __future__ import annotations

import pytest

from tests.slurm.cluster import SlurmCluster


def pytest_addoption(parser):
    parser.addoption("--long", action="store_true", help="also what waits for Slurm's minutes")


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--long", default=False):
        for item in items:
            if item.get_closest_marker("slow") and "slurm" in item.path.parts:
                item.add_marker(pytest.mark.skip(reason="runs with `tests/run.sh --slurm`"))


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
