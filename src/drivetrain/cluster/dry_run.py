"""One training step of one rank of any number, in shapes alone: the full model, the real sharding, the loop's own code.

Tensors are fake (torch's FakeTensorMode: shapes and types without memory) and so is the process group, so that a step of
rank 700 of 1,024 runs in seconds on one CPU core. What it reports was counted while it ran.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from drivetrain.cluster.dry_run_record import Collective, Recorder, peak
from drivetrain.data.plan import ROUND_TOKENS
from drivetrain.parallel.mesh import World, make_mesh
from drivetrain.policies import make_model, parallelize, sample_tokens, tokens_per_image
from drivetrain.run import Run
from drivetrain.train.loop import update
from drivetrain.train.optimizer import clipped_step, make_optimizer
from drivetrain.train.stop import StopRequest
from drivetrain.types import DrivetrainError, PackedBatch, PackShape, StepPacks

GIB = 2**30
GPUS_PER_NODE = 8  # over which a copy of the parameters is spread where the run does not say


@dataclass(frozen=True)
class DryRun:
    """What one rank does in one optimizer update.

    shape, packs: of a pack, and how many of them the rank computes.   scaled: the recipe's batch was too small.
    memory:       bytes by kind when most is held. Activations are those of uncompiled blocks: compiled ones keep less.
    peak_phase:   of the step in which that is.
    collectives:  in the order in which they are issued.
    checkpoint_bytes, checkpoint_share: the whole checkpoint, and what one rank writes of it.
    weights_bytes: of the published weights, which every process reads.
    """

    recipe: str
    gpus: int
    rank: int
    shard: int
    samples: int
    shape: PackShape
    packs: int
    scaled: bool
    parameters: int
    trained: int
    memory: dict[str, int]
    peak_phase: str
    collectives: tuple[Collective, ...]
    checkpoint_bytes: int
    checkpoint_share: int
    weights_bytes: int
    seconds: float

    def __str__(self) -> str:
        return _text(self)


def dry_run(run: Run, gpus: int, rank: int = 0, cameras: int = 2) -> DryRun:
    """One update of rank `rank` of `gpus`, in shapes.

    cameras: of every sample, where the run has no `batch.shape`; texts are then of usual length.
    Raises DrivetrainError where the processes cannot be split as `run.shard` asks.
    """
    started = time.perf_counter()
    if not 0 <= rank < gpus:
        raise DrivetrainError(f"there is no rank {rank} among {gpus} GPUs; give --rank 0 to {gpus - 1}.")
    batch, scaled = batch_for(run, gpus)
    per_pack = -(-batch.samples // batch.packs)
    shape = batch.shape or usual_shape(run, per_pack, cameras)
    run = replace(run, batch=replace(batch, shape=shape))
    with fake_world(gpus, rank, run.shard or min(gpus, GPUS_PER_NODE)) as here, FakeTensorMode():
        model = make_model(run.policy)
        parallelize(run.policy, model, here.mesh, run.precision)
        optimizer = make_optimizer(model, run.optimizer)
        model.train()
        packs = [fake_pack(run, shape) for _ in range(-(-batch.packs // gpus))]
        one_update(run, model, optimizer, packs, here)  # the first makes the optimizer's state
        with recording(model, optimizer, packs) as recorder:
            one_update(run, model, optimizer, packs, here, recorder)
        at, memory = peak(recorder.allocations, recorder.marks)
        saved = [t for t in tree_leaves(get_state_dict(model, optimizer)) if isinstance(t, Tensor)]
        parameters = list(model.parameters())
        return DryRun(
            recipe=run.recipe,
            gpus=gpus,
            rank=rank,
            shard=here.mesh.shape[-1],
            samples=batch.samples,
            shape=shape,
            packs=len(packs),
            scaled=scaled,
            parameters=sum(p.numel() for p in parameters),
            trained=sum(p.numel() for p in parameters if p.requires_grad),
            memory=memory,
            peak_phase=max((m for m in recorder.marks if recorder.marks[m] <= at), key=recorder.marks.__getitem__),
            collectives=tuple(recorder.collectives),
            checkpoint_bytes=sum(t.nbytes for t in saved),
            checkpoint_share=sum(t.nbytes // _writers(t, gpus) for t in saved),
            weights_bytes=2 * sum(p.numel() for p in parameters),
            seconds=time.perf_counter() - started,
        )


def batch_for(run: Run, gpus: int) -> tuple[Any, bool]:
    """The run's batch; with so many packs of the same size that every GPU has one, where it has fewer packs than GPUs."""
    batch = run.batch
    if batch.packs >= gpus:
        return batch, False
    per_pack = -(-batch.samples // batch.packs)
    return replace(batch, packs=gpus, samples=per_pack * gpus), True


def usual_shape(run: Run, samples: int, cameras: int) -> PackShape:
    """A pack of so many samples with `cameras` images each and a text of usual length."""
    tokens = samples * sample_tokens(run.policy, cameras)
    return PackShape(tokens=-(-tokens // ROUND_TOKENS) * ROUND_TOKENS, samples=samples, images=samples * cameras)


def one_update(
    run: Run, model: nn.Module, optimizer: Any, packs: list[PackedBatch], here: World, recorder: Recorder | None = None
) -> None:
    """What the training loop does in one step, without its reports."""
    if recorder:
        recorder.enter("forward")
    update(run, model, StepPacks(0, packs), here, StopRequest())
    if recorder:
        recorder.enter("update")
    clipped_step(optimizer, run.optimizer.learning_rate, run.optimizer.clip_norm)


@contextlib.contextmanager
def fake_world(size: int, rank: int, shard: int) -> Iterator[World]:
    """A world in which this process is rank `rank` and the others do not exist: collectives return at once."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the back end "fake"

    if dist.is_initialized():
        raise DrivetrainError("a dry run needs a process of its own: it cannot run under torchrun.")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        device = torch.device("cpu")
        yield World(rank, size, device, make_mesh(device, size, shard))
    finally:
        dist.destroy_process_group()


def fake_pack(run: Run, shape: PackShape) -> PackedBatch:
    """The shapes of a pack; under a FakeTensorMode it takes no memory."""
    config, draws = run.policy, run.batch.draws
    t, b, i, size = shape.tokens, shape.samples, shape.images, config.vision.image_size
    chunk = (config.horizon, config.action_width)
    return PackedBatch(
        tokens=torch.zeros(t, dtype=torch.long),
        positions=torch.zeros(t, dtype=torch.long),
        cu_tokens=torch.zeros(b + 2, dtype=torch.int32),
        images=torch.zeros(i, size, size, 3, dtype=torch.uint8),
        image_tokens=torch.zeros(i * tokens_per_image(config), dtype=torch.long),
        state=torch.zeros(b, config.state_width),
        actions=torch.zeros(b, *chunk),
        action_mask=torch.ones(b, *chunk, dtype=torch.bool),
        noise=torch.zeros(b, draws, *chunk),
        time=torch.zeros(b, draws),
        embodiment=torch.zeros(b, dtype=torch.long),
        weight=torch.ones(b),
        sample=torch.zeros(b, dtype=torch.long),
        epoch=torch.zeros(b, dtype=torch.long),
        max_tokens=t,
    )


@contextlib.contextmanager
def recording(model: nn.Module, optimizer: Any, packs: list[PackedBatch]) -> Iterator[Recorder]:
    """Record what happens inside, on real tensors or fake ones. Backward passes are noticed where the loop starts them."""
    state = [t for t in tree_leaves(dict(optimizer.state)) if isinstance(t, Tensor)]
    masters, held = [*model.parameters(), *model.buffers()], [t for p in packs for t in _tensors(p)]
    recorder, backward = Recorder({"masters": masters, "optimizer": state, "batch": held}), Tensor.backward

    def marked(self: Tensor, *args: Any, **options: Any) -> None:
        recorder.enter("backward")
        backward(self, *args, **options)
        recorder.enter("forward")

    Tensor.backward = marked  # type: ignore[method-assign]
    try:
        with recorder.watching():
            yield recorder
    finally:
        Tensor.backward = backward  # type: ignore[method-assign]


def _tensors(batch: PackedBatch) -> list[Tensor]:
    return [t for f in fields(batch) if isinstance(t := getattr(batch, f.name), Tensor)]


def _writers(tensor: Tensor, gpus: int) -> int:
    """How many ranks write a part of a tensor: copies are written once, and spread over those that hold them."""
    return gpus if isinstance(tensor, DTensor) else 1


def traffic(collectives: tuple[Collective, ...]) -> dict[tuple[str, str, int, int], tuple[int, int]]:
    """(kind, phase, ranks, stride) -> (how many, bytes of all)."""
    found: dict[tuple[str, str, int, int], tuple[int, int]] = {}
    for c in collectives:
        key = (c.kind, c.phase, c.ranks, c.stride)
        count, size = found.get(key, (0, 0))
        found[key] = count + 1, size + c.bytes
    return found


def _text(d: DryRun) -> str:
    layout = f"{d.gpus // d.shard} copies of the parameters, each over {d.shard}"
    shape = f"{d.shape.tokens:,} tokens, {d.shape.samples} samples, {d.shape.images} images"
    lines = [
        f"{d.recipe} as rank {d.rank} of {d.gpus:,} GPUs: {layout}",
        f"  parameters   {d.parameters / 1e6:,.1f} M, {d.trained / 1e6:,.1f} M trained",
        f"  batch        {d.samples:,} samples; this rank: {d.packs} pack{'s' * (d.packs > 1)} of {shape}",
    ]
    if d.scaled:
        lines.append(
            "               (the recipe's packs are fewer than the GPUs: every GPU is given one of their size)"
        )
    lines += ["", f"memory at its peak, in the {d.peak_phase} pass          GiB"]
    for kind, size in sorted(d.memory.items(), key=lambda item: -item[1]):
        lines.append(f"  {kind:<40} {size / GIB:9.2f}")
    lines.append(f"  {'all':<40} {sum(d.memory.values()) / GIB:9.2f}")
    lines.append(
        "  Activations are those of uncompiled blocks. Kernels' workspaces and fragmentation are not known here."
    )
    lines += ["", "collectives of one update         phase     ranks  stride  count          MB"]
    for (kind, phase, ranks, stride), (count, size) in traffic(d.collectives).items():
        lines.append(f"  {kind:<30} {phase:<9} {ranks:>6,} {stride:>7,} {count:>6,} {size / 1e6:>11,.1f}")
    lines += [
        "",
        f"checkpoint     {d.checkpoint_bytes / 1e9:,.1f} GB in all, {d.checkpoint_share / 1e6:,.1f} MB by this rank",
        f"start-up       {d.weights_bytes / 1e9:,.1f} GB of weights in bfloat16, which every process reads in full",
        f"               counted in {d.seconds:.0f} s",
    ]
    return "\n".join(lines)
