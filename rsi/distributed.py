"""The processes of a run: one by itself, or those that torchrun started; on a CPU (gloo) or on GPUs (NCCL).

Every process ("rank") makes its share of the attempts with a whole copy of the actor, and trains on its share
of the micro-batches with networks that FSDP2 spreads over all ranks. What is planned is planned from what all
ranks know, so that all take the same number of passes and none waits for another that never comes.
"""

import functools
import math
import os
import warnings
from datetime import timedelta
from typing import Any, Literal, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from rsi.model import Critic, Transformer

TIMEOUT = timedelta(minutes=10)  # of one collective: a rank that is missing for longer is an error, not a hang
ROLLOUT_TIMEOUT = timedelta(hours=6)  # between the first and the last rank that has made its attempts
Value = TypeVar("Value")
Network = TypeVar("Network", bound=Transformer | Critic)
Precision = Literal["float32", "bfloat16"]


class RankMissing(RuntimeError):
    """A rank did not come to a meeting point in time."""


def find_device() -> torch.device:
    """This rank's GPU where there is one, else the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def start() -> None:
    """Join the process group that torchrun describes, or make one of this process alone."""
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=TIMEOUT)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=TIMEOUT)


def stop() -> None:
    """Leave the process group."""
    dist.destroy_process_group()
    gloo_group.cache_clear()


@functools.cache
def gloo_group(purpose: Literal["meeting", "saving"]) -> dist.ProcessGroup:
    """All ranks, on the CPU whatever trains: for meetings, which gloo alone can name the missing of, and for what
    saves in the background, whose messages would in a common group meet those of training."""
    group = dist.new_group(backend="gloo", timeout=TIMEOUT)
    assert isinstance(group, dist.ProcessGroup), purpose
    return group


def rank() -> int:
    """This process's number, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    """How many processes there are."""
    return dist.get_world_size() if dist.is_initialized() else 1


def first() -> bool:
    """Whether this is the process that speaks and writes for all."""
    return rank() == 0


def meet(what: str, timeout: timedelta = TIMEOUT) -> None:
    """Wait for every rank.

    Raises:
        RankMissing: naming `what` all were to meet for, and the rank that did not come.
    """
    if world() == 1:
        return
    try:
        dist.monitored_barrier(gloo_group("meeting"), timeout)
    except RuntimeError as problem:
        raise RankMissing(f"{what}: {str(problem).splitlines()[0]}") from problem


def gather(what: str, value: Value, timeout: timedelta = TIMEOUT) -> list[Value]:
    """Every rank's `value` (anything that pickles), in the order of ranks, on every rank."""
    if world() == 1:
        return [value]
    meet(what, timeout)
    found: list[Any] = [None] * world()
    dist.all_gather_object(found, value, gloo_group("meeting"))
    return found


def spread(
    model: Transformer | Critic, precision: Precision = "float32", recompute: bool = False, offload: bool = False
) -> None:
    """Spread the network's weights, gradients and, made after this, optimizer moments over all ranks.

    Gradients of the ranks are averaged: a loss is divided by the global normaliser over `world()`. Weights and
    reductions stay in float32; `precision` is that of the passes. With `recompute` only the layers' inputs are
    kept for the backward pass, with `offload` weights and moments lie in the CPU's memory. One process that asks
    for none of this stays as it is.
    """
    if recompute:
        for number, layer in enumerate(model.model.layers):
            model.model.layers[number] = checkpoint_wrapper(layer)
    if world() == 1 and precision == "float32" and not offload:
        return
    # No operation here writes into a network's output, which is what this warning is about.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
    offloading = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if offload else OffloadPolicy()
    policy = MixedPrecisionPolicy(param_dtype=getattr(torch, precision), reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy, offload_policy=offloading)
    if isinstance(model, Critic):  # its head works in float32 whatever the rest does
        head = MixedPrecisionPolicy(reduce_dtype=torch.float32)
        fully_shard(model.value_head, mp_policy=head, offload_policy=offloading)
    fully_shard(model, mp_policy=policy, reshard_after_forward=False, offload_policy=offloading)


def sum_gradients(model: nn.Module) -> None:
    """Add up the gradients of a network that every rank holds whole."""
    if world() > 1:
        for parameter in model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)


def whole(model: Network) -> Network:
    """The network with all its weights on this rank: itself where it is not spread, else a copy. All ranks call."""
    if not any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        return model
    plain = Critic if isinstance(model, Critic) else Transformer  # fully_shard made a class of its own of it
    with torch.device("meta"):
        copy = cast(Network, plain(model.config))
    copy.to_empty(device=next(model.parameters()).device)
    with torch.no_grad():
        wanted = copy.state_dict()
        for name, tensor in model.state_dict().items():
            wanted[name].copy_(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor)
    return copy


def optimizer_step(model: nn.Module, optimizer: torch.optim.Optimizer, max_norm: float) -> float:
    """Clip the gradient's norm over all ranks and step; returns the norm before clipping.

    Where it is not finite the step is not taken: neither weights nor moments change.
    """
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    found = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    if math.isfinite(found):
        optimizer.step()
    return found
