"""Facts of machines that nobody here has, for the rules that judge them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from drivetrain.cluster.doctor_gpu import Driver, Gpu
from drivetrain.cluster.doctor_machine import Machine
from drivetrain.cluster.doctor_report import Check

DRIVER = Driver(
    version="580.65.06", sm_clock=1830, max_sm_clock=1980, reasons=0x04, temperature=61, watts=690.0,
    corrected=0, uncorrected=0, remap_pending=False, remap_failed=False, pcie=(5, 16), max_pcie=(5, 16),
)  # fmt: skip


def h200(node: str = "n0", index: int = 0, **changes: Any) -> Gpu:
    """A healthy H200; `changes` of its fields or of its driver's."""
    driver: Driver | None = replace(DRIVER, **{k: v for k, v in changes.items() if k in Driver.__dataclass_fields__})
    gpu = Gpu(
        node=node, rank=index, index=index, name="NVIDIA H200", memory=150_000_000_000, used_before=600_000_000,
        flops=788e12, copied=4.29e12, to_device=52e9, repeatable=True, driver=driver,
    )  # fmt: skip
    return replace(gpu, **{k: v for k, v in changes.items() if k in Gpu.__dataclass_fields__})


def machine(node: str = "n0", rank: int = 0, **changes: Any) -> Machine:
    """A healthy node with one process; `changes` of its fields."""
    healthy = Machine(
        node=node, rank=rank, local_rank=0, local_size=1, cores=64, threads=8, memory=512_000_000_000,
        memory_free=500_000_000_000, shm=64_000_000_000, shm_free=64_000_000_000, open_files=(65536, 1048576),
        memlock=-1, disk="out", disk_kind="xfs", disk_free=2_000_000_000_000, address="10.0.0.1", interface="eth0",
        interfaces=("lo", "eth0"), speed=100e9, versions={"python": "3.12.1", "torch": "2.11.0"}, variables={},
    )  # fmt: skip
    return replace(healthy, **changes)


def bad(checks: list[Check]) -> list[tuple[str, str, str]]:
    """(what, where, status) of all that is neither ok nor absent."""
    return [(c.what, c.where, c.status) for c in checks if c.status in ("warning", "unfit")]
