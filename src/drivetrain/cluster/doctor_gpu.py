"""The GPUs: what the driver says of each while it works, and what it really does, against what is expected of its kind."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from drivetrain.cluster.doctor_report import Check, laggards, size, spread

if TYPE_CHECKING:
    import torch

SIDE = 8192  # of the square matrices; large enough that the tensor cores are the limit
COPY = 1 << 30  # bytes copied, far more than any cache holds
UNFIT, WARNING = 0.70, 0.85  # of what is expected of this kind
EQUAL = 0.90  # of the median of the other GPUs of the same kind: a step takes as long as the slowest
BUSY = 2e9  # bytes in use before we began: somebody else works here


@dataclass(frozen=True)
class Expected:
    """What a healthy GPU of a kind does. flops: bf16 in/out, dense; copied: bytes read and written a second."""

    flops: float
    copied: float
    source: str


def _datasheet(teraflops: float, terabytes: float) -> Expected:
    """A datasheet's dense bf16 TFLOP/s and memory TB/s, times what a library call reaches of them.

    The measured H200 reaches 790 of 989 (0.80) and 4.3 of 4.8 (0.90); 0.75 and 0.85 leave other coolings room.
    """
    source = f"0.75 and 0.85 of the datasheet's {teraflops:g} TFLOP/s dense bf16 and {terabytes:g} TB/s"
    return Expected(0.75 * teraflops * 1e12, 0.85 * terabytes * 1e12, source)


# The first pattern that is found in the name counts.
KINDS: list[tuple[str, Expected]] = [
    (r"MIG", Expected(0, 0, "")),  # a slice: nothing is known of its share
    (r"GB200|\bB200", _datasheet(2250, 8.0)),
    (r"H200 NVL", _datasheet(835, 4.8)),
    (r"H200", Expected(790e12, 4.3e12, "measured: torch 2.11, CUDA 13, random data, 8192^3 and 8.6 GB")),
    (r"H100 NVL", _datasheet(835, 3.9)),
    (r"H100 PCIe", _datasheet(756, 2.0)),
    (r"H100", _datasheet(989, 3.35)),
    (r"A100.*SXM4-40|A100.*PCIE-40", _datasheet(312, 1.555)),
    (r"A100.*PCIe", _datasheet(312, 1.935)),
    (r"A100.*80GB", _datasheet(312, 2.039)),
    (r"L40S", _datasheet(362, 0.864)),
    (r"\bL4\b", _datasheet(121, 0.300)),
    (r"RTX A6000", _datasheet(154.8, 0.768)),
    (r"RTX 4090", _datasheet(165.2, 1.008)),
]

# NVML's bits of why a clock is held down. Power capping is how a GPU at full load works, so it is only told.
REASONS = {
    0x02: "application clocks are set", 0x04: "software power cap", 0x08: "hardware slowdown", 0x10: "sync boost",
    0x20: "software thermal slowdown", 0x40: "hardware thermal slowdown", 0x80: "hardware power brake",
}  # fmt: skip
HARMFUL, TELLING = 0x08 | 0x40 | 0x80, 0x20


@dataclass(frozen=True)
class Driver:
    """What NVML says of one GPU. None where this GPU or driver does not say.

    sm_clock, max_sm_clock: MHz, under load.   reasons: NVML's bits, all that were seen under load.
    corrected, uncorrected: memory errors since the driver was loaded.
    remap_pending, remap_failed: a memory row waits for a reset to be replaced, or could not be.
    pcie: (generation, lanes) under load, and the most that GPU and slot can do together.
    """

    version: str
    sm_clock: int | None
    max_sm_clock: int | None
    reasons: int
    temperature: int | None
    watts: float | None
    corrected: int | None
    uncorrected: int | None
    remap_pending: bool
    remap_failed: bool
    pcie: tuple[int, int] | None
    max_pcie: tuple[int, int] | None


@dataclass(frozen=True)
class Gpu:
    """One GPU, measured by its own process while all others of the node work too.

    flops: bf16 product of 8192 x 8192 random matrices.   copied: bytes read and written a second, device to device.
    to_device: bytes a second from pinned host memory.    repeatable: the same product twice gave the same bits.
    driver: None where NVML cannot be asked; then `no_driver` says why.
    """

    node: str
    rank: int
    index: int
    name: str
    memory: int
    used_before: int
    flops: float
    copied: float
    to_device: float
    repeatable: bool
    driver: Driver | None
    no_driver: str = ""

    @property
    def label(self) -> str:
        return f"{self.node} GPU {self.index}"


def expected_of(name: str) -> Expected | None:
    """What is expected of a GPU of this name; None where nothing is known."""
    found = next((e for pattern, e in KINDS if re.search(pattern, name)), None)
    return found if found and found.flops else None


def measure_gpu(node: str, rank: int, index: int) -> Gpu:
    """About three seconds of work on GPU `index`. Needs torch; NVML is asked where nvidia-ml-py is installed."""
    import torch

    device = torch.device("cuda", index)
    properties = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    nvml = _Nvml(properties)
    flops, repeatable = _products(device, nvml.sample)
    copied, to_device = _copies(device, min(COPY, free // 4), nvml.sample)
    torch.cuda.empty_cache()
    driver, why = nvml.result()
    return Gpu(
        node, rank, index, properties.name, total, total - free, flops, copied, to_device, repeatable, driver, why
    )


def _products(device: torch.device, sample: Callable[[], None]) -> tuple[float, bool]:
    """(floating-point operations a second, whether the last product has the bits of the first)."""
    import torch

    generator = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(SIDE, SIDE, device=device, dtype=torch.bfloat16, generator=generator) for _ in range(2))
    first, last = torch.mm(a, b), torch.empty_like(a)
    seconds = _seconds(lambda: torch.mm(a, b, out=last), device, 1.0, sample)
    return 2 * SIDE**3 / seconds, torch.equal(first, last)


def _copies(device: torch.device, count: int, sample: Callable[[], None]) -> tuple[float, float]:
    """Bytes a second: read and written within the GPU, and brought from pinned host memory."""
    import torch

    source = torch.empty(count, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    copied = 2 * count / _seconds(lambda: target.copy_(source), device, 0.3, sample)
    pinned = torch.empty(min(count, 256 << 20), dtype=torch.uint8, pin_memory=True)
    part = target[: len(pinned)]
    return copied, len(pinned) / _seconds(lambda: part.copy_(pinned, non_blocking=True), device, 0.3, sample)


def _seconds(work: Callable[[], object], device: torch.device, budget: float, sample: Callable[[], None]) -> float:
    """Seconds that one call takes: the median of several bursts. `sample` is called while the GPU is at it."""
    import torch

    def burst(repeats: int, during: Callable[[], None] | None = None) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(repeats):
            work()
        end.record()
        if during:
            during()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / repeats

    with torch.cuda.device(device):
        burst(2)  # kernels are chosen and clocks rise
        repeats = max(1, int(budget / 5 / burst(2)))
        bursts = [burst(repeats, sample) for _ in range(5)]
    return sorted(bursts)[2]


class _Nvml:
    """NVML's word on one GPU; every question may go unanswered."""

    def __init__(self, properties: Any) -> None:
        self.why, self.reasons, self.under_load = "", 0, {}
        try:
            import pynvml

            self.nvml: Any = pynvml
            pynvml.nvmlInit()
            self.handle = self._find(properties)
        except ImportError:
            self.nvml, self.why = (
                None,
                "the driver is not asked: nvidia-ml-py is not installed (pip install nvidia-ml-py)",
            )
        except Exception as error:  # no library, no permission, no such GPU: NVML has an error class for each
            self.nvml, self.why = None, f"NVML does not answer: {error}"

    def _find(self, properties: Any) -> Any:
        """By its identity: NVML knows nothing of CUDA_VISIBLE_DEVICES."""
        uuid = str(properties.uuid)
        return self.nvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}")

    def ask(self, question: str, *arguments: Any) -> Any:
        try:
            return getattr(self.nvml, question)(self.handle, *arguments)
        except (self.nvml.NVMLError, AttributeError):  # not supported by this GPU, this driver, or this nvidia-ml-py
            return None

    def sample(self) -> None:
        """Called while the GPU works, a few times for each of the measurements; the highest clock counts."""
        if self.nvml is None:
            return
        reasons = self.ask("nvmlDeviceGetCurrentClocksEventReasons")
        if reasons is None:
            reasons = self.ask("nvmlDeviceGetCurrentClocksThrottleReasons")
        self.reasons |= reasons or 0
        seen = {
            "sm_clock": self.ask("nvmlDeviceGetClockInfo", self.nvml.NVML_CLOCK_SM),
            "temperature": self.ask("nvmlDeviceGetTemperature", self.nvml.NVML_TEMPERATURE_GPU),
            "watts": (self.ask("nvmlDeviceGetPowerUsage") or 0) / 1e3 or None,
        }
        for name, value in seen.items():
            if value is not None:
                self.under_load[name] = max(value, self.under_load.get(name, value))
        self.under_load["pcie"] = self._pair("nvmlDeviceGetCurrPcieLinkGeneration", "nvmlDeviceGetCurrPcieLinkWidth")

    def _pair(self, first: str, second: str) -> tuple[int, int] | None:
        a, b = self.ask(first), self.ask(second)
        return (a, b) if a and b else None

    def result(self) -> tuple[Driver | None, str]:
        if self.nvml is None:
            return None, self.why
        errors = [
            self.ask("nvmlDeviceGetTotalEccErrors", kind, self.nvml.NVML_VOLATILE_ECC)
            for kind in (self.nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, self.nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED)
        ]
        _, _, pending, failed = self.ask("nvmlDeviceGetRemappedRows") or (0, 0, 0, 0)
        load = self.under_load
        return Driver(
            version=self.nvml.nvmlSystemGetDriverVersion(),
            sm_clock=load.get("sm_clock"),
            max_sm_clock=self.ask("nvmlDeviceGetMaxClockInfo", self.nvml.NVML_CLOCK_SM),
            reasons=self.reasons,
            temperature=load.get("temperature"),
            watts=load.get("watts"),
            corrected=errors[0],
            uncorrected=errors[1],
            remap_pending=bool(pending),
            remap_failed=bool(failed),
            pcie=load.get("pcie"),
            max_pcie=self._pair("nvmlDeviceGetMaxPcieLinkGeneration", "nvmlDeviceGetMaxPcieLinkWidth"),
        ), ""


# --- what of it is amiss ----------------------------------------------------------------------------------------------


def gpu_checks(gpus: list[Gpu]) -> list[Check]:
    """Every GPU against what is known of its kind, and against the others of its kind."""
    if not gpus:
        return [Check("gpu", "GPUs", "", "not here", "torch sees no CUDA device; what follows holds for CPUs")]
    checks = []
    for name in sorted({g.name for g in gpus}):
        alike = [g for g in gpus if g.name == name]
        checks += [_speeds(name, alike), *_slow(name, alike)]
    if len({g.name for g in gpus}) > 1:
        text = "several kinds of GPU: " + ", ".join(sorted({g.name for g in gpus}))
        checks.append(Check("gpu", "GPUs", "", "warning", text, "All wait for the slowest. Use GPUs of one kind."))
    for g in gpus:
        checks += _faults(g)
    if all(g.repeatable for g in gpus):
        checks.append(Check("gpu", "repeatable", "", "ok", "the same product twice gives the same bits"))
    return checks + _driver_summary(gpus)


def _speeds(name: str, alike: list[Gpu]) -> Check:
    expected = expected_of(name)
    against = (
        f"expected {expected.flops / 1e12:.0f} and {expected.copied / 1e12:.2f} ({expected.source})"
        if expected
        else "no expectation known for this kind"
    )
    found = (
        f"{len(alike)} x {name} ({size(alike[0].memory)}): bf16 {spread([g.flops / 1e12 for g in alike])} TFLOP/s, "
        f"copy {spread([g.copied / 1e12 for g in alike], 2)} TB/s read and written, "
        f"from the host {spread([g.to_device / 1e9 for g in alike], 1)} GB/s; {against}"
    )
    return Check("gpu", "speed", "", "ok", found)


def _slow(name: str, alike: list[Gpu]) -> list[Check]:
    checks = []
    expected = expected_of(name)
    remedy = (
        "Stop other work on it, then look at clocks, power limit and temperature: nvidia-smi -q -d CLOCK,POWER,"
        "TEMPERATURE,PERFORMANCE. If it stays so, leave the GPU's node out."
    )
    figures = {
        "bf16 product": ({g.label: g.flops for g in alike}, expected and expected.flops, "TFLOP/s"),
        "copy": ({g.label: g.copied for g in alike}, expected and expected.copied, "TB/s"),
        "from the host": ({g.label: g.to_device for g in alike}, None, "GB/s"),
    }
    for what, (values, wanted, unit) in figures.items():
        scale = 1e9 if unit == "GB/s" else 1e12
        behind = laggards(values, EQUAL if what != "from the host" else 0.5)
        for label, value in values.items():
            text = f"{value / scale:.3g} {unit}"
            if wanted and value < WARNING * wanted:
                status = "unfit" if value < UNFIT * wanted else "warning"
                text += f" where {wanted / scale:.3g} are expected of a {name}"
                checks.append(Check("gpu", what, label, status, text, remedy))
            elif label in behind:
                text += f" where the others of its kind do {behind[label] / scale:.3g}"
                status = "warning" if what == "from the host" else "unfit"
                checks.append(Check("gpu", what, label, status, text, remedy))
    return checks


def _faults(g: Gpu) -> list[Check]:
    checks = []
    if not g.repeatable:
        text = "the same product gave different bits the second time"
        remedy = "It corrupts silently. Take it out of use and run the vendor's diagnostics (dcgmi diag -r 3)."
        checks.append(Check("gpu", "repeatable", g.label, "unfit", text, remedy))
    if g.used_before > BUSY:
        text = f"{size(g.used_before)} of its memory were in use before we began"
        remedy = "Another process holds it; its speed here is not its own. See nvidia-smi, and stop what is not needed."
        checks.append(Check("gpu", "memory in use", g.label, "warning", text, remedy))
    d = g.driver
    if d is None:
        return checks
    if d.uncorrected:
        text = f"{d.uncorrected} memory error(s) that could not be corrected"
        remedy = "What was computed may be wrong. Reset the GPU (nvidia-smi -r) or restart the node; if they return, replace it."
        checks.append(Check("gpu", "memory errors", g.label, "unfit", text, remedy))
    if d.remap_failed or d.remap_pending:
        text = "a memory row could not be replaced" if d.remap_failed else "a memory row waits to be replaced"
        remedy = "Replace the GPU." if d.remap_failed else "Reset the GPU (nvidia-smi -r) or restart the node."
        checks.append(Check("gpu", "memory rows", g.label, "unfit", text, remedy))
    if d.reasons & (HARMFUL | TELLING):
        text = f"held down under load by: {_named(d.reasons & (HARMFUL | TELLING))}" + (
            f", {d.temperature} C" if d.temperature else ""
        )
        remedy = "Cooling or power supply: look at fans, inlet temperature and the node's power cap."
        status = "unfit" if d.reasons & HARMFUL else "warning"
        checks.append(Check("gpu", "clocks", g.label, status, text, remedy))
    if d.pcie and d.max_pcie and d.pcie[1] < d.max_pcie[1]:
        text = f"PCIe with {d.pcie[1]} lanes of {d.max_pcie[1]} under load"
        checks.append(Check("gpu", "PCIe", g.label, "warning", text, "Reseat the card or its riser."))
    return checks


def _driver_summary(gpus: list[Gpu]) -> list[Check]:
    known = [g.driver for g in gpus if g.driver]
    if not known:
        return [Check("gpu", "clocks and memory errors", "", "not here", gpus[0].no_driver)]
    checks = []
    clocks = [d.sm_clock for d in known if d.sm_clock]
    tops = [d.max_sm_clock for d in known if d.max_sm_clock]
    reasons = 0
    for d in known:
        reasons |= d.reasons
    if clocks and tops:
        told = f"; {_named(reasons & 0x16)}" if reasons & 0x16 else ""
        text = f"SM {spread(clocks)} MHz of {spread(tops)} under load{told}, driver {known[0].version}"
        watts = [d.watts for d in known if d.watts]
        hot = [d.temperature for d in known if d.temperature]
        text += f", up to {max(watts):.0f} W" if watts else ""
        text += f", {max(hot)} C" if hot else ""
        checks.append(Check("gpu", "clocks", "", "ok", text))
    if all(d.uncorrected is None for d in known):
        checks.append(
            Check("gpu", "memory errors", "", "not here", "these GPUs do not count them (no ECC, or it is off)")
        )
    elif not any(d.uncorrected or d.remap_pending or d.remap_failed for d in known):
        corrected = sum(d.corrected or 0 for d in known)
        checks.append(Check("gpu", "memory errors", "", "ok", f"none uncorrected, {corrected} corrected"))
    if len({d.version for d in known}) > 1:
        text = "drivers differ: " + ", ".join(sorted({d.version for d in known}))
        checks.append(Check("gpu", "driver", "", "warning", text, "Install one driver on all nodes."))
    return checks


def _named(reasons: int) -> str:
    return ", ".join(text for bit, text in REASONS.items() if reasons & bit)


def slowest_gpu(gpus: list[Gpu]) -> str:
    """The GPU that the others wait for, in words."""
    slow = min(gpus, key=lambda g: g.flops)
    return f"{slow.label}: {slow.flops / 1e12:.0f} TFLOP/s bf16"
