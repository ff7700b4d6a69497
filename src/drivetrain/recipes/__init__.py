"""Recipes: functions that return a whole Run. A variant calls another recipe and replaces what differs."""

from __future__ import annotations

from collections.abc import Callable

from drivetrain.recipes.groot import groot_demo, groot_finetune, groot_finetune_tiny
from drivetrain.recipes.pi05 import (
    pi05_expert_only,
    pi05_expert_only_tiny,
    pi05_finetune,
    pi05_finetune_tiny,
    pi05_libero,
    pi05_libero_tiny,
)
from drivetrain.run import Run

RECIPES: dict[str, Callable[[], Run]] = {
    f.__name__: f
    for f in (
        groot_demo,
        groot_finetune,
        groot_finetune_tiny,
        pi05_finetune,
        pi05_finetune_tiny,
        pi05_expert_only,
        pi05_expert_only_tiny,
        pi05_libero,
        pi05_libero_tiny,
    )
}
