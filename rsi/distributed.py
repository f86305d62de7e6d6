"""The processes of a run: one by itself, or those that torchrun started; on a CPU (gloo) or on GPUs (NCCL).

Every process ("rank") makes its share of the attempts with a whole copy of the actor, and trains on its share
of the micro-batches with networks that FSDP2 spreads over all ranks. What is planned is planned from what all
ranks know, so that all take the same number of passes and none waits for another that never comes.
"""

import math
import os
import re
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from rsi.architecture import ModelConfig
from rsi.config import Config, UserError
from rsi.deltanet import DeltaNet
from rsi.model import Critic, Transformer

Purpose = Literal["meeting", "saving", "failing"]
GROUPS: dict[Purpose, dist.ProcessGroup] = {}
"""All ranks, on the CPU whatever trains: for meetings, which gloo alone can name the missing of, for what saves in the
background, whose messages would in a common group meet those of training, and for the time after another one failed."""
_limit = timedelta(minutes=Config.timeout)  # of one collective
Value = TypeVar("Value")
Network = TypeVar("Network", Transformer, Critic)


class RankMissing(ConnectionError):
    """A rank did not come to a meeting point in time."""


def find_device() -> torch.device:
    """This rank's GPU where there is one, else the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def rank_memory() -> int:
    """Bytes that a rank may use: its GPU's, or its share of what this machine has free; the least that any has.

    On a CPU a control group's limit counts where it is lower. All ranks call.
    """
    if torch.cuda.is_available():
        found = torch.cuda.get_device_properties(find_device()).total_memory
    else:
        free = re.findall(r"MemAvailable: *(\d+) kB", Path("/proc/meminfo").read_text(encoding="utf-8"))
        group = re.findall(r"^0::/(.*)$", Path("/proc/self/cgroup").read_text(encoding="utf-8"), re.MULTILINE)
        folder = Path("/sys/fs/cgroup", *group)
        places = [parent / "memory.max" for parent in (folder, *folder.parents)]
        places.append(Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))  # version 1
        limits = [place.read_text(encoding="utf-8").strip() for place in places if place.is_file()]
        found = min([1024 * int(free[0]), *(int(text) for text in limits if text.isdigit())])
        found //= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return min(gather("memory", found))


def start(minutes: float = Config.timeout) -> None:
    """Join the process group that torchrun describes, or make one of this process alone.

    A rank that is missing from one collective for longer than `minutes` is an error, not a hang.

    Raises:
        UserError: torchrun is to restart ranks on several nodes with a store that would make them hang then.
    """
    global _limit
    _limit = timedelta(minutes=minutes)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    store, number, ranks = (
        next(rendezvous("env://", timeout=_limit)) if "RANK" in os.environ else (dist.HashStore(), 0, 1)
    )
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # torchrun's store outlives a restart, and with it the addresses of the processes that were killed. Nodes do
        # not count restarts alike.
        nodes = int(os.environ["GROUP_WORLD_SIZE"])
        if nodes > 1 and os.environ["TORCHELASTIC_MAX_RESTARTS"] != "0":
            raise UserError(
                f"torchrun --max-restarts on {nodes} nodes needs TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 set for it"
            )
        store = dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
    dist.init_process_group(backend, store=store, rank=number, world_size=ranks, timeout=_limit)
    GROUPS.update({purpose: dist.new_group(backend="gloo", timeout=_limit) for purpose in get_args(Purpose)})


def stop() -> None:
    """Leave the process group."""
    dist.destroy_process_group()
    GROUPS.clear()


def rank() -> int:
    """This process's number, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    """How many processes there are."""
    return dist.get_world_size() if dist.is_initialized() else 1


def first() -> bool:
    """Whether this is the process that speaks and writes for all."""
    return rank() == 0


def meet(what: str, minutes: float | None = None, group: Purpose = "meeting") -> None:
    """Wait for every rank, for `minutes` or as long as one collective may take.

    Raises:
        RankMissing: naming `what` all were to meet for, and the rank that did not come.
    """
    if world() == 1:
        return
    try:
        dist.monitored_barrier(GROUPS[group], timedelta(minutes=minutes) if minutes else _limit)
    except RuntimeError as problem:
        raise RankMissing(f"{what}: {str(problem).splitlines()[0]}") from problem


def gather(what: str, value: Value, minutes: float | None = None) -> list[Value]:
    """Every rank's `value` (anything that pickles), in the order of ranks, on every rank. Raises as `meet`."""
    if world() == 1:
        return [value]
    meet(what, minutes)
    found: list[Any] = [None] * world()
    with naming_missing(what):
        dist.all_gather_object(found, value, GROUPS["meeting"])
    return found


@contextmanager
def naming_missing(what: str = "") -> Iterator[None]:
    """Of a collective that fails, say which it was (`what`, or torch's function and ours) and who is missing.

    The ranks that came to it all fail, and meet here. (NCCL's watchdog ends a process itself, with a line of its own.)

    Raises:
        RankMissing: naming both.
    """
    try:
        yield
    except RuntimeError as problem:
        # torch has no class of its own for what gloo could not exchange.
        is_collective = "gloo" in str(problem) or isinstance(problem, dist.DistError)
        if world() == 1 or not is_collective:
            raise
        frames = traceback.extract_tb(problem.__traceback__)
        inner = {part: x.name for x in frames for part in ("rsi", "distributed") if part in Path(x.filename).parts}
        what = what or f"{inner.get('distributed', frames[-1].name)} in {inner['rsi']}"
        meet(what, group="failing")
        raise RankMissing(f"{what}: {str(problem).splitlines()[0]}") from problem


def is_spread(config: Config, ranks: int) -> bool:
    """Whether networks are FSDP2's: one process that asks for nothing of it has them as they are."""
    return ranks > 1 or config.precision != "float32" or config.offload


def spread(model: Transformer | Critic, config: Config) -> None:
    """Spread the network's weights, gradients and, made after this, optimizer moments over all ranks.

    Gradients of the ranks are averaged: a loss is divided by the global normaliser over `world()`. Weights and
    reductions stay in float32; `config.precision` is that of the passes. With `recompute` only the layers' inputs
    are kept for the backward pass, with `offload` weights and moments lie in the CPU's memory.
    """
    if config.recompute:
        for number, layer in enumerate(model.model.layers):
            model.model.layers[number] = checkpoint_wrapper(layer)
    if not is_spread(config, world()):
        return
    # No operation here writes into a network's output, which is what this warning is about.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
    offloading = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if config.offload else OffloadPolicy()
    policy = MixedPrecisionPolicy(param_dtype=getattr(torch, config.precision), reduce_dtype=torch.float32)
    exact = MixedPrecisionPolicy(reduce_dtype=torch.float32)  # whatever the rest does
    for layer in model.model.layers:
        delta_nets = [module for module in layer.modules() if isinstance(module, DeltaNet)]
        decays = {parameter for module in delta_nets for parameter in module.decay}
        fully_shard(layer, mp_policy=policy, offload_policy=offloading, ignored_params=decays)
        for module in delta_nets:
            others = set(module.parameters()) - decays
            fully_shard(
                module, reshard_after_forward=False, mp_policy=exact, offload_policy=offloading, ignored_params=others
            )
    if isinstance(model, Critic):
        fully_shard(model.value_head, mp_policy=exact, offload_policy=offloading)
    fully_shard(model, mp_policy=policy, reshard_after_forward=False, offload_policy=offloading)


def empty(
    kind: type[Network],
    shape: ModelConfig,
    device: torch.device,
    config: Config | None = None,
    dtype: torch.dtype = torch.float32,
) -> Network:
    """A network whose weights have yet to be written: whole, or spread over all ranks as `config` says."""
    with torch.device("meta"):
        network = kind(shape).to(dtype)
        for module in network.modules():
            if isinstance(module, DeltaNet):  # as the trainer's passes have them
                module.A_log, module.dt_bias = (nn.Parameter(parameter.float()) for parameter in module.decay)
    if config is not None:
        spread(network, config)
    return network.to_empty(device="cpu" if config is not None and config.offload else device)


@torch.no_grad()
def copy_of(
    source: Transformer | Critic, kind: type[Network], config: Config | None = None, dtype: torch.dtype = torch.float32
) -> Network:
    """A network of `kind` with the weights of `source`, spread as `config` says or without one whole. All ranks call.

    Both spread: each rank copies its own part. A critic made of an actor has the head that every new critic has, so
    the same actor always gives the same critic.
    """
    network = empty(kind, source.config, find_device(), config, dtype)
    found = Critic.first_head(source.config) | source.state_dict()
    for name, target in network.state_dict().items():
        tensor = found[name]
        copy_part(target, tensor.full_tensor() if config is None and isinstance(tensor, DTensor) else tensor)
    return network


def copy_part(target: Tensor, source: Any) -> None:
    """Copy into `target`, of a DTensor into this rank's part, what belongs there of a tensor or a file's slice."""
    if not isinstance(target, DTensor) or isinstance(source, DTensor):
        target.copy_(source if isinstance(source, Tensor) else source[:])
        return
    shape, offset = compute_local_shape_and_global_offset(target.shape, target.device_mesh, target.placements)
    local = target.to_local()
    if local.numel():
        local.copy_(source[tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))])


def sum_gradients(model: nn.Module) -> None:
    """Add up the gradients of a network that every rank holds whole."""
    if world() > 1:
        for parameter in model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)


def whole(model: Transformer, config: Config) -> Transformer:
    """The actor with all its weights on this rank: itself where it is not spread, else a copy in the precision of the
    trainer's passes, so that both see the same policy. All ranks call."""
    spread_out = any(isinstance(parameter, DTensor) for parameter in model.parameters())
    return copy_of(model, Transformer, dtype=getattr(torch, config.precision)) if spread_out else model


def backward(loss: Tensor) -> None:
    """The backward pass of a loss. Of one that is not finite all gradients are NaN, so that no rank takes the step."""
    loss.backward(torch.where(loss.detach().isfinite(), 1.0, torch.nan).to(loss.dtype))


def optimizer_step(model: nn.Module, optimizer: torch.optim.Optimizer, max_norm: float) -> float:
    """Clip the gradient's norm over all ranks and step; returns the norm before clipping.

    Where it is not finite the step is not taken: neither weights nor moments change.
    """
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    found = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    if math.isfinite(found):
        optimizer.step()
    return found
