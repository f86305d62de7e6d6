"""The processes of a run: one by itself, or those that torchrun started."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist

TIMEOUT = timedelta(minutes=10)  # of one collective: a rank that is missing for longer is an error, not a hang


def start() -> None:
    """Join the process group that torchrun describes, or make one of this process alone."""
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=TIMEOUT)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=TIMEOUT)


def stop() -> None:
    """Leave the process group, all ranks together: one that leaves early kills the others at their exit."""
    dist.barrier()
    dist.destroy_process_group()
