"""What a step does to memory and to the network, written down operation by operation while it runs.

Works on real tensors and on fake ones alike; nothing here is a formula of what sharding ought to do.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class Collective:
    """One collective operation.

    kind:   "all-gather", "reduce-scatter", "all-reduce", "broadcast", ...
    phase:  "forward", "backward" or "update" (clip and optimizer).
    bytes:  of the larger side: what an all-gather puts together, what a reduction takes in.
    ranks:  processes that take part.   stride: between their numbers; 1: neighbours, as a node numbers its own.
    """

    kind: str
    phase: str
    bytes: int
    ranks: int
    stride: int


@dataclass
class Allocation:
    """The life of a storage. start, end: positions in the log of operations; end None: it outlives the log."""

    bytes: int
    start: int
    kind: str
    end: int | None = None


# c10d operation -> what it is called, and which argument holds the larger side
_KINDS = {
    "_allgather_base_": ("all-gather", 0),
    "allgather_": ("all-gather", 0),
    "allgather_into_tensor_coalesced_": ("all-gather", 0),
    "_reduce_scatter_base_": ("reduce-scatter", 1),
    "reduce_scatter_": ("reduce-scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce-scatter", 1),
    "allreduce_": ("all-reduce", 0),
    "allreduce_coalesced_": ("all-reduce", 0),
    "broadcast_": ("broadcast", 0),
    "scatter_": ("scatter", 1),
    "reduce_": ("reduce", 0),
    "all_gather_into_tensor": ("all-gather", None),
    "all_gather_into_tensor_out": ("all-gather", None),
    "reduce_scatter_tensor": ("reduce-scatter", 0),
    "all_reduce": ("all-reduce", 0),
    "all_reduce_": ("all-reduce", 0),
    "all_reduce_coalesced": ("all-reduce", 0),
    "broadcast": ("broadcast", 0),
    "all_to_all_single": ("all-to-all", 0),
    "alltoall_base_": ("all-to-all", 0),
}
_SILENT = {"_wrap_tensor_autograd", "wait_tensor", "barrier", "monitored_barrier_"}


class Recorder(TorchDispatchMode):
    """Records while it is active. `phase` is set from outside: "forward", "backward", "update".

    known: tensors that were there before, by the kind that their memory is counted under.
    """

    def __init__(self, known: dict[str, list[Tensor]]) -> None:
        super().__init__()
        self.collectives: list[Collective] = []
        self.allocations: list[Allocation] = []
        self.phase, self.clock, self._imagined = "forward", 0, False
        self.marks: dict[str, int] = {}
        self._live: dict[int, Allocation] = {}
        for kind, tensors in known.items():
            for tensor in tensors:
                self._see(tensor, kind)

    def enter(self, phase: str) -> None:
        """The next operations belong to `phase`."""
        self.phase = phase
        self.marks.setdefault(phase, self.clock)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes back as operations on this process's part, with the collectives they need
        if self._imagined:
            return func(*args, **(kwargs or {}))
        self.clock += 1
        out = func(*args, **(kwargs or {}))
        space, _, name = func.name().partition("::")
        name = name.partition(".")[0]
        if space in ("c10d", "_c10d_functional") and name not in _SILENT:
            self.collectives.append(_collective(name, self.phase, args, out))
        kind = "gathered" if space == "fsdp" else self.phase
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._see(tensor, kind)
        return out

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Record inside, storages that are resized in place too: FSDP frees and restores what it gathers in that way."""
        resize, infer = torch.UntypedStorage.resize_, ShardingPropagator._propagate_tensor_meta_non_cached

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            self._forget(storage._cdata)
            done = resize(storage, size)
            self._hold(storage, "gathered")
            return done

        def inferred(*args: Any) -> Any:
            """DTensor runs each operation once on fake whole tensors, to learn its shapes. No process does that work."""
            self._imagined = True
            try:
                return infer(*args)
            finally:
                self._imagined = False

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign]
        ShardingPropagator._propagate_tensor_meta_non_cached = inferred  # type: ignore[method-assign]
        try:
            with self:
                yield
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
            ShardingPropagator._propagate_tensor_meta_non_cached = infer  # type: ignore[method-assign]

    def _see(self, tensor: Tensor, kind: str) -> None:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        if storage._cdata not in self._live:
            self._hold(storage, kind)
            weakref.finalize(storage, self._forget, storage._cdata)

    def _hold(self, storage: torch.UntypedStorage, kind: str) -> None:
        if storage.nbytes() or kind == "gathered":
            made = Allocation(storage.nbytes(), self.clock, kind)
            self._live[storage._cdata] = made
            self.allocations.append(made)

    def _forget(self, key: int) -> None:
        if gone := self._live.pop(key, None):
            gone.end = self.clock


def _collective(name: str, phase: str, args: tuple, out: Any) -> Collective:
    if name not in _KINDS:
        raise NotImplementedError(f"the recorder does not know the collective {name}; name it in {__name__}._KINDS")
    kind, side = _KINDS[name]
    held = [t for t in tree_leaves(out if side is None else args[side]) if isinstance(t, Tensor)]
    ranks = dist.get_process_group_ranks(_group(args))
    stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    return Collective(kind, phase, sum(t.nbytes for t in held), len(ranks), stride)


def _group(args: tuple) -> dist.ProcessGroup:
    """The process group of a collective: an object among its arguments, or a name."""
    for argument in args:
        if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
            return dist.ProcessGroup.unbox(argument)
    named = [argument for argument in args if isinstance(argument, str)]
    return _resolve_process_group(named[-1])  # type: ignore[arg-type]


def peak(allocations: list[Allocation], marks: dict[str, int]) -> tuple[int, dict[str, int]]:
    """(position of the peak, bytes there by kind).

    Kinds that are not known from outside follow from when a storage was born and whether it outlived its phase:
    activations live from the forward pass into the backward pass, gradients from there into the update.
    """
    changes: dict[int, int] = {}
    for a in allocations:
        changes[a.start] = changes.get(a.start, 0) + a.bytes
        if a.end is not None:
            changes[a.end] = changes.get(a.end, 0) - a.bytes
    held, top, at = 0, -1, 0
    for position in sorted(changes):
        held += changes[position]
        if held > top:
            top, at = held, position
    kinds: dict[str, int] = {}
    for a in allocations:
        if a.start <= at and (a.end is None or a.end > at):
            kind = _kind(a, marks)
            kinds[kind] = kinds.get(kind, 0) + a.bytes
    return at, kinds


def _kind(a: Allocation, marks: dict[str, int]) -> str:
    if a.kind not in ("forward", "backward", "update"):
        return a.kind
    backward, update = marks["backward"], marks["update"]
    if a.kind == "forward" and (a.end is None or a.end >= backward):
        return "activations"
    if a.kind == "backward" and (a.end is None or a.end >= update):
        return "gradients"
    return "temporary"
