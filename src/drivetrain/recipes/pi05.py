"""Recipes for pi-0.5."""

from __future__ import annotations

from dataclasses import replace

from drivetrain.policies.pi05.config import Pi05Config, tiny
from drivetrain.run import Batch, Optimizer, Run


def pi05_finetune() -> Run:
    """The published fine-tune of everything: vision tower, language model and action expert.

    AdamW 2.5e-5, betas (0.9, 0.95), weight decay 0.01, clip 1.0, 1,000 warm-up updates, cosine to 2.5e-6 at update
    30,000, as LeRobot has it. Weights stay float32 under bfloat16 products.
    """
    return Run(
        recipe="pi05_finetune",
        policy=Pi05Config(),
        weights="lerobot/pi05_base",
        steps=30_000,
        batch=Batch(samples=32, packs=2),
        optimizer=Optimizer(
            learning_rate=2.5e-5,
            betas=(0.9, 0.95),
            weight_decay=0.01,
            warmup_steps=1_000,
            final_learning_rate=2.5e-6,
        ),
        save_every=1_000,
    )


def pi05_finetune_tiny() -> Run:
    """`pi05_finetune` on a CPU: the same code and the same settings at a few million parameters, for a few updates."""
    return _tiny(pi05_finetune())


def pi05_expert_only() -> Run:
    """The action expert alone, 430 million of 3.35 billion parameters: vision tower and language model stay frozen."""
    run = pi05_finetune()
    return replace(run, recipe="pi05_expert_only", policy=replace(run.policy, tune_vision=False, tune_language=False))


def pi05_expert_only_tiny() -> Run:
    """`pi05_expert_only` on a CPU."""
    return _tiny(pi05_expert_only())


def pi05_libero() -> Run:
    """openpi's LIBERO fine-tune: chunks of 10 actions, no state in the prompt, all 32 action dimensions in the loss.

    Batch 256, rate 5e-5 reached after 10,000 updates and then constant, weight decay 1e-10, 30,000 updates.
    """
    run = pi05_finetune()
    return replace(
        run,
        recipe="pi05_libero",
        policy=replace(run.policy, horizon=10, state_in_prompt=False, loss_over="all"),
        batch=Batch(samples=256, packs=16),
        optimizer=replace(
            run.optimizer,
            learning_rate=5e-5,
            final_learning_rate=5e-5,
            warmup_steps=10_000,
            weight_decay=1e-10,
        ),
    )


def pi05_libero_tiny() -> Run:
    """`pi05_libero` on a CPU."""
    return _tiny(pi05_libero())


def _tiny(run: Run) -> Run:
    """A recipe at the tiny size, with everything that makes it what it is."""
    small, full = tiny(min(run.policy.horizon, 16)), run.policy
    assert isinstance(full, Pi05Config)
    return replace(
        run,
        recipe=f"{run.recipe}_tiny",
        weights="",
        policy=replace(full, vision=small.vision, gemma=small.gemma, horizon=small.horizon),
        steps=20,
        batch=Batch(samples=8, packs=2),
        optimizer=replace(run.optimizer, warmup_steps=1),
        precision="float32",
        save_every=10,
        log_every=1,
        workers=0,
        threads=1,
    )
