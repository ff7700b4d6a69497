from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fixtures import Tiny, write_v21, write_v30

from drivetrain.lake import pool

TINY = Tiny()


@pytest.fixture(scope="session")
def bucket() -> Iterator[str]:
    """An empty bucket of an S3 server on loopback, as an s3:// address."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "key")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        import s3fs

        s3fs.S3FileSystem(skip_instance_cache=True).mkdir("s3://drivetrain")
        yield "s3://drivetrain"
    server.stop()


@pytest.fixture(scope="session")
def ray_session(bucket: str) -> Iterator[str]:
    """One small local Ray for all tests of the lake; `ingest` uses a Ray that is already initialised.

    It starts after the S3 server, whose address its workers inherit.
    """
    import ray

    with pool.ray_at("local"):
        yield ray.get_runtime_context().gcs_address


@pytest.fixture(scope="session")
def tiny21(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clean v2.1 data set; tests that change it work on a copy."""
    return write_v21(tmp_path_factory.mktemp("source") / "tiny21", TINY)


@pytest.fixture(scope="session")
def tiny30(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clean v3.0 data set, with four episodes in each file."""
    return write_v30(tmp_path_factory.mktemp("source") / "tiny30", TINY)
