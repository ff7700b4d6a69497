"""Recipes for GR00T-N1.5."""

from __future__ import annotations

from dataclasses import replace

from drivetrain.policies.groot.config import GrootConfig, tiny
from drivetrain.run import Batch, Optimizer, Run


def groot_finetune() -> Run:
    """The published fine-tune: projectors and diffusion head trained, vision tower and language model frozen.

    AdamW 1e-4, betas (0.95, 0.999), weight decay 1e-5, clip 1.0, 5 % warm-up, cosine to zero, 10,000 updates.
    """
    return Run(
        recipe="groot_finetune",
        policy=GrootConfig(),
        weights="nvidia/GR00T-N1.5-3B",
        steps=10_000,
        batch=Batch(samples=128, packs=2),
        optimizer=Optimizer(learning_rate=1e-4, warmup_steps=500),
        save_every=1000,
    )


def groot_finetune_tiny() -> Run:
    """`groot_finetune` on a CPU: the same code and the same settings at a few million parameters, for a few updates."""
    return replace(
        groot_finetune(),
        recipe="groot_finetune_tiny",
        policy=replace(tiny(), tune_llm=False, tune_visual=False),
        weights="",
        steps=20,
        batch=Batch(samples=8, packs=2),
        optimizer=Optimizer(learning_rate=1e-4, warmup_steps=1),
        precision="float32",
        save_every=10,
        log_every=1,
        workers=0,
        threads=1,
    )


def groot_demo() -> Run:
    """A tiny GR00T trained from nothing, all of it, in about two minutes on two CPU cores."""
    return Run(
        recipe="groot_demo",
        policy=tiny(horizon=8),
        steps=450,
        batch=Batch(samples=32, packs=2, draws=4),
        optimizer=Optimizer(learning_rate=1.5e-3, betas=(0.9, 0.95), weight_decay=1e-4, warmup_steps=30),
        precision="float32",
        save_every=75,
        log_every=20,
        workers=0,
        threads=1,
    )
