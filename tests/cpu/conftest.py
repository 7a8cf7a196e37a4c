"""Fixtures that are expensive to make and shared by the whole session."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def ranks():
    """Up to four real processes for distributed jobs."""
    from tests.support.ranks import Pool

    pool = Pool(4)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Folder of a small random model by kind: dense, tied, moe."""
    from tests.support.models import write_model

    root = tmp_path_factory.mktemp("models")
    made = {}

    def get(kind: str):
        if kind not in made:
            made[kind] = write_model(root / kind, kind)
        return made[kind]

    return get
