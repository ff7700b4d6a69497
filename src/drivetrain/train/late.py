"""Numbers that the device computes, read one update later: the host never waits for the update it has just queued."""

from __future__ import annotations

import torch


class Late:
    """Holds one vector of numbers on its way from the device."""

    def __init__(self) -> None:
        self.copied: tuple[torch.Tensor, torch.cuda.Event | None] | None = None

    def swap(self, values: torch.Tensor | None) -> list[float] | None:
        """Start the copy of `values` [n]; return those of the call before, or None the first time."""
        before, self.copied = self.copied, None
        if values is not None and values.is_cuda:
            host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            host.copy_(values, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self.copied = host, event
        elif values is not None:
            self.copied = values, None
        if before is None:
            return None
        numbers, event = before
        if event is not None:
            event.synchronize()  # of the update before; the one just queued keeps the device busy meanwhile
        return numbers.tolist()
