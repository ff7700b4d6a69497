"""Stopping on request: SIGTERM (preemption) and SIGINT (Ctrl-C) let the run save first."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass
class StopRequest:
    """signal: the first one that came; 0 until then."""

    signal: int = 0


@contextlib.contextmanager
def stop_on_signal(grace: float) -> Iterator[StopRequest]:
    """Within, SIGTERM and SIGINT only fill in what is yielded, for the loop to act on.

    grace: seconds from the signal after which the process ends all the same, with exit code 128 + signal: a rank whose
    peers are gone waits for them in vain. A second Ctrl-C acts at once; under torchrun it is ignored, because torchrun
    itself forwards what the terminal has already sent.
    """
    request, over = StopRequest(), threading.Event()

    def note(number: int, frame: object) -> None:
        if request.signal:
            if "RANK" not in os.environ:
                raise KeyboardInterrupt
            return
        request.signal = number
        os.write(2, f"{signal.Signals(number).name}: finishing the update, then saving\n".encode())
        threading.Thread(target=give_up, args=(number,), name="grace", daemon=True).start()

    def give_up(number: int) -> None:
        due = time.monotonic() + grace
        if not over.wait(max(0.0, due - time.monotonic())):
            print(f"not saved within {grace:.0f} s of the signal: giving up", file=sys.stderr, flush=True)
            os._exit(128 + number)

    if threading.current_thread() is not threading.main_thread():  # Python hands signals to the main thread alone
        yield request
        return
    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield request
    finally:
        over.set()
        for number, handler in before.items():
            signal.signal(number, handler)
