"""Default values by name. Does not import torch.

Presets of real checkpoints: published for Terminal-RSI are the learning rates of the 27B preset's actor (5e-7, then
1e-7) and critic (1.5e-5), one epoch of warm-up and 4 calibration steps. Its ancestor T1 published 512 attempts a step,
one a task, 60 turns, 84k tokens of context and no KL penalty. Everything else is chosen here.
"""

from collections.abc import Callable
from dataclasses import replace

from rsi.config import Config, Evaluate, ModelShape, Pretrain, Rollout, Rpr, Rsr


def smoke() -> Config:
    """All five stages in under a minute: every part runs, nothing is claimed to be learnt."""
    return Config(
        preset="smoke",
        train_tasks=32,
        families=2,
        model=ModelShape(hidden_size=64, layers=2, heads=2, kv_heads=1, intermediate_size=192),
        pretrain=Pretrain(steps=350, habit=0.3, short_share=1.0),
        rollout=Rollout(slots=32, max_turns=5, max_turn_tokens=20, max_length=256),
        evaluate=Evaluate(tasks=6),
        rsr=Rsr(tasks=8, executions=1),
        rpr=Rpr(warmup_batch=8, calibration_steps=4, steps=(4, 2), attempts=32, critic_lr=3e-3),
    )


def qwen3_8_27b() -> Config:
    """Qwen3.8-27B with the published learning rates: 64 GPUs of 180 GB, or of 141 GB with --offload."""
    return Config(
        preset="qwen3.8-27b",
        init="hub:Qwen/Qwen3.8-27B",
        sandbox="auto",
        micro_batch_tokens=86016,
        precision="bfloat16",
        recompute=True,
        rollout=Rollout(
            slots=512,
            workers=64,
            lockstep=False,
            max_length=86016,
            max_turns=60,
            max_turn_tokens=8192,
            command_timeout=180.0,
            prompt_style="full",
            thinking=True,
        ),
        rsr=Rsr(samples=4, executions=4, detour=1.5, epochs=2, batch=128, lr=1e-5),
        rpr=Rpr(
            warmup_batch=512,
            steps=(110, 110),
            attempts=512,
            actor_lr=5e-7,
            actor_lr_later=1e-7,
            critic_lr=1.5e-5,
            kl_coefficient=0.0,
        ),
    )


def qwen3_8b() -> Config:
    """Qwen3-8B, thinking off: 8 GPUs of 141 GB, or of 80 GB with --offload --rollout.slots 64.

    Twice the 27B preset's learning rates for the actor.
    """
    large = qwen3_8_27b()
    return replace(
        large,
        preset="qwen3-8b",
        init="hub:Qwen/Qwen3-8B",
        micro_batch_tokens=32768,
        rollout=replace(large.rollout, slots=128, max_length=32768, max_turns=40, max_turn_tokens=2048, thinking=False),
        rpr=replace(large.rpr, warmup_batch=128, attempts=128, actor_lr=1e-6, actor_lr_later=2e-7),
    )


def qwen3_0_6b() -> Config:
    """Qwen3-0.6B, thinking off: one GPU of 80 GB."""
    small = qwen3_8b()
    return replace(
        small,
        preset="qwen3-0.6b",
        init="hub:Qwen/Qwen3-0.6B",
        micro_batch_tokens=16384,
        rollout=replace(small.rollout, slots=24, max_length=16384, max_turns=20, max_turn_tokens=1024),
        rpr=replace(small.rpr, warmup_batch=64, attempts=64, actor_lr=2e-6, actor_lr_later=4e-7),
    )


PRESETS: dict[str, Callable[[], Config]] = {
    "tiny": Config,  # the embedded default: all five stages in minutes on two CPU cores
    "smoke": smoke,
    "qwen3-0.6b": qwen3_0_6b,
    "qwen3-8b": qwen3_8b,
    "qwen3.8-27b": qwen3_8_27b,
}
