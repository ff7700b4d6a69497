"""How GPUs are judged, on facts as a GPU's process gathers them. Measuring them needs one (`test_this_gpu`)."""

from __future__ import annotations

import pytest
from patients import bad, h200

from drivetrain.cluster.doctor_gpu import expected_of, gpu_checks, measure_gpu

EIGHT = [h200(index=i) for i in range(8)]


def test_healthy_gpus_pass_and_are_named_with_what_was_expected() -> None:
    checks = gpu_checks(EIGHT)
    assert bad(checks) == []
    speed = next(c for c in checks if c.what == "speed").found
    assert "8 x NVIDIA H200" in speed and "788 TFLOP/s" in speed and "expected 790 and 4.30" in speed


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"flops": 500e12}, ("bf16 product", "n0 GPU 3", "unfit")),
        ({"flops": 640e12}, ("bf16 product", "n0 GPU 3", "warning")),
        ({"flops": 700e12}, ("bf16 product", "n0 GPU 3", "unfit")),  # good by itself, but the other seven wait for it
        ({"copied": 2e12}, ("copy", "n0 GPU 3", "unfit")),
        ({"to_device": 12e9}, ("from the host", "n0 GPU 3", "warning")),
        ({"repeatable": False}, ("repeatable", "n0 GPU 3", "unfit")),
        ({"uncorrected": 2}, ("memory errors", "n0 GPU 3", "unfit")),
        ({"remap_pending": True}, ("memory rows", "n0 GPU 3", "unfit")),
        ({"reasons": 0x48}, ("clocks", "n0 GPU 3", "unfit")),
        ({"reasons": 0x20}, ("clocks", "n0 GPU 3", "warning")),
        ({"pcie": (5, 8)}, ("PCIe", "n0 GPU 3", "warning")),
        ({"used_before": 40e9}, ("memory in use", "n0 GPU 3", "warning")),
    ],
)
def test_one_bad_gpu_of_eight_is_named(changes: dict, found: tuple[str, str, str]) -> None:
    assert bad(gpu_checks([*EIGHT[:3], h200(index=3, **changes), *EIGHT[4:]])) == [found]


def test_a_capped_clock_at_full_power_is_told_and_is_no_fault() -> None:
    assert any("software power cap" in c.found for c in gpu_checks(EIGHT))


def test_of_an_unknown_gpu_nothing_is_expected() -> None:
    gpus = [h200(index=i, name="NVIDIA Unheard-Of 9000", flops=3e12) for i in range(2)]
    checks = gpu_checks(gpus)
    assert bad(checks) == []
    assert any("no expectation known" in c.found for c in checks)


def test_what_the_driver_does_not_say_is_not_here() -> None:
    silent = [h200(driver=None, no_driver="nvidia-ml-py is not installed")]
    assert [(c.what, c.status) for c in gpu_checks(silent) if c.status == "not here"] == [
        ("clocks and memory errors", "not here")
    ]
    uncounted = gpu_checks([h200(corrected=None, uncorrected=None)])
    assert [c.what for c in uncounted if c.status == "not here"] == ["memory errors"]


def test_no_gpu_is_not_here() -> None:
    assert [c.status for c in gpu_checks([])] == ["not here"]


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA H200", 790),
        ("NVIDIA H100 80GB HBM3", 0.75 * 989),
        ("NVIDIA H100 PCIe", 0.75 * 756),
        ("NVIDIA A100-SXM4-80GB", 0.75 * 312),
        ("NVIDIA A100 80GB PCIe", 0.75 * 312),
        ("NVIDIA L4", 0.75 * 121),
        ("NVIDIA L40S", 0.75 * 362),
    ],
)
def test_expectations_by_the_name_that_the_driver_gives(name: str, teraflops: float) -> None:
    expected = expected_of(name)
    assert expected is not None and expected.flops == pytest.approx(teraflops * 1e12)


def test_a_slice_of_a_gpu_has_no_expectation() -> None:
    assert expected_of("NVIDIA H200 MIG 1g.18gb") is None


def test_this_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    gpu = measure_gpu("here", 0, 0)
    assert gpu.repeatable and gpu.flops > 1e12 and gpu.copied > 1e10
    assert gpu.driver or gpu.no_driver
