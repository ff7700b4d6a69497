from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from fixtures import Tiny, write_v21, write_v30

TINY = Tiny()


@pytest.fixture(scope="session")
def ray_session() -> Iterator[str]:
    """One small local Ray for all tests of the lake; `ingest` uses a Ray that is already initialised."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    import ray

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="lance is not fork-safe")
        context = ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="error",
            object_store_memory=100_000_000,
        )
    yield context.address_info["address"]
    ray.shutdown()


@pytest.fixture(scope="session")
def tiny21(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clean v2.1 data set; tests that change it work on a copy."""
    return write_v21(tmp_path_factory.mktemp("source") / "tiny21", TINY)


@pytest.fixture(scope="session")
def tiny30(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clean v3.0 data set, with four episodes in each file."""
    return write_v30(tmp_path_factory.mktemp("source") / "tiny30", TINY)
