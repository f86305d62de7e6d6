"""`linear_logprob` where two processes hold the model together: FSDP2 (gloo, CPU) and DTensors.

Run as a program, this file is one of the two processes.
"""

import os
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from rsi_kernels import linear_logprob, reference, value_loss
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

RANKS, WIDTH, VOCABULARY = 2, 6, 21  # neither dimension divides by the number of processes


class Model(nn.Module):
    """Embedding, one layer, head; the op runs inside the forward of the module that owns the head."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.op = linear_logprob
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        logprob, entropy = self.op(self.layer(self.embedding(ids)).tanh(), self.head.weight, target, 0.8)
        return logprob, entropy


def make(tied: bool) -> Model:
    torch.manual_seed(0)
    return Model(tied)


def batch() -> tuple[Tensor, Tensor, Tensor]:
    """ids, targets and upstream gradients of 13 tokens; the last five are ignored: one process counts none of its."""
    generator = torch.Generator().manual_seed(1)
    ids, target = (torch.randint(0, VOCABULARY, (13,), generator=generator) for _ in range(2))
    target[8:] = -100
    return ids, target, torch.randn(2, 13, generator=generator)


def backward(model: nn.Module, part: slice, scale: float) -> None:
    ids, target, upstream = (x[..., part] for x in batch())
    logprob, entropy = model(ids, target)
    ((logprob * upstream[0]).sum() + (entropy * upstream[1]).sum()).mul(scale).backward()


def check_fsdp(rank: int, tied: bool, reshard: bool, half: bool) -> None:
    """Each process its own tokens: the averaged gradients times the number of processes are one process's."""
    whole, model = make(tied), make(tied)
    whole.op = reference.linear_logprob
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if half else None, reduce_dtype=torch.float32)
    fully_shard(model.layer, mp_policy=precision)
    fully_shard(model, mp_policy=precision, reshard_after_forward=reshard)
    parts = [slice(0, 8), slice(8, 13)]
    for _ in range(2):  # gradients of a second step add up; its forward gathers the weights again
        backward(whole, slice(0, 13), 1.0)
        backward(model, parts[rank], RANKS)
    assert isinstance(model, FSDPModule) and isinstance(model.head.weight, DTensor)
    for (name, wanted), found in zip(whole.named_parameters(), model.parameters(), strict=True):
        gradient = found.grad.full_tensor()
        size = float(wanted.grad.abs().max())
        tolerance = 2e-2 if half else 1e-5
        torch.testing.assert_close(gradient, wanted.grad, rtol=0, atol=tolerance * size, msg=lambda m, n=name: n + m)


def refused(call, words: str) -> None:  # type: ignore[no-untyped-def]
    try:
        call()
    except ValueError as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"not refused: {words}")


def check_tensors(rank: int, mesh: DeviceMesh) -> None:
    """Replicated DTensors are taken, sharded ones refused, and what the refusal advises is right."""
    model = fully_shard(make(tied=False))
    hidden, target = torch.randn(13, WIDTH, generator=torch.Generator().manual_seed(2)), batch()[1]
    plain = make(tied=False).head.weight
    wanted = linear_logprob(hidden, plain, target).logprob
    wanted.sum().backward()
    refused(
        lambda: linear_logprob(hidden, model.head.weight, target), "weight is a DTensor with placements (Shard(dim=0)"
    )
    split = distribute_tensor(hidden, mesh, [Shard(1)])
    refused(lambda: linear_logprob(split, plain, target), "hidden is a DTensor with placements (Shard(dim=1)")
    zeros = torch.zeros(13)
    refused(lambda: value_loss(split, plain[0], zeros[:1], zeros, zeros), "hidden is a DTensor")
    replicated = distribute_tensor(plain.detach(), mesh, [Replicate()]).requires_grad_()
    for states in (hidden, distribute_tensor(hidden, mesh, [Replicate()])):
        replicated.grad = None
        found = linear_logprob(states, replicated, target).logprob
        assert type(found) is Tensor and torch.equal(found, wanted)
        found.sum().backward()
        assert torch.equal(replicated.grad.to_local(), plain.grad)
    part = [slice(0, 8), slice(8, 13)][rank]
    gathered = model.head.weight.full_tensor(grad_placements=[Partial()])
    linear_logprob(hidden[part], gathered, target[part]).logprob.sum().backward()
    torch.testing.assert_close(model.head.weight.grad.full_tensor(), plain.grad)


def main(rank: int, meeting: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    for tied in (False, True):
        for reshard in (False, True):
            check_fsdp(rank, tied, reshard, half=False)
    check_fsdp(rank, tied=True, reshard=True, half=True)
    check_tensors(rank, mesh)
    dist.destroy_process_group()


def test_two_processes_equal_one(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONWARNINGS": "ignore"}
    programs = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), str(tmp_path / "meeting")],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
        )
        for rank in range(RANKS)
    ]  # fmt: skip
    outputs = [program.communicate(timeout=120)[0] for program in programs]
    assert [program.returncode for program in programs] == [0] * RANKS, "\n".join(outputs)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
