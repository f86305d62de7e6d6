"""Every op as torch sees it: opcheck, torch.compile without a graph break, DTensors, implementations by name."""

import importlib
import socket
import warnings

import pytest
import torch
import torch.distributed as dist
from rsi_kernels import (
    dispatch,
    flags_from,
    gated_delta_rule,
    linear_logprob,
    ppo_loss,
    tb_gae,
    tb_gae_with_moments,
    value_loss,
)
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

OPS = {
    name: importlib.import_module(f"rsi_kernels.{name}")
    for name in ("tb_gae", "linear_logprob", "ppo_loss", "value_loss")
}
IMPLS = ["torch", "triton"]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def leaf(*shape: int, device: str = DEVICE) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(device).requires_grad_()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("tokens", [0, 5])
def test_opcheck(impl, tokens):
    x, target = leaf(tokens, 3), torch.arange(tokens, device=DEVICE) % 7
    target[:1] = -100
    head = (x, leaf(7, 3), target, torch.tensor([0.7], device=DEVICE), -100, impl)
    torch.library.opcheck(OPS["linear_logprob"]._forward, head)
    turned = (leaf(3, tokens).detach().T.requires_grad_(), leaf(3, 7).detach().T.requires_grad_(), *head[2:])
    torch.library.opcheck(OPS["linear_logprob"]._forward, turned)
    _, entropy, log_total = (x.detach() for x in OPS["linear_logprob"]._forward(*head))
    for needs in ((True, True), (False, True), (True, False)):
        saved = (x.detach(), head[1].detach(), *head[2:4], entropy, log_total, -100, *needs, impl)
        torch.library.opcheck(OPS["linear_logprob"]._backward, (entropy, None, *saved))
    numbers = [leaf(tokens), *(leaf(tokens).detach() for _ in range(2))]
    torch.library.opcheck(
        OPS["ppo_loss"]._op, (*numbers, numbers[1] > 0, None, numbers[2], 0.2, 0.3, 3.0, 0.1, "k3", impl)
    )
    critic = (x, leaf(3), leaf(1), numbers[1], numbers[2], None, 0.2, impl)
    torch.library.opcheck(OPS["value_loss"]._op, critic)
    row = numbers[1].view(1, -1)
    turn = torch.zeros(1, tokens, dtype=torch.int64, device=DEVICE)
    turned_row = leaf(tokens, 2).detach().T
    for given in ((row > -9, turn, None), (None, None, flags_from(row > -9, turn))):
        factors = (0.99, 0.95, 1.0, 1.0, True, impl)
        torch.library.opcheck(OPS["tb_gae"]._op, (row, row, *given, None, None, *factors))
    turned = (turned_row, turned_row, turned_row > -9, turn.expand(2, tokens), None, None, None, *factors)
    torch.library.opcheck(OPS["tb_gae"]._op, turned)
    torch.library.opcheck(OPS["value_loss"]._op, (leaf(3, tokens).detach().T.requires_grad_(), *critic[1:]))


def whole_step(hidden, weight, bias, target, old, advantage, action, turn):  # type: ignore[no-untyped-def]
    """Every op of a PPO step in one graph."""
    logprob, entropy = linear_logprob(hidden, weight, target, 0.8)
    gae, returns, moments = tb_gae_with_moments(advantage[None], old[None], action[None], turn[None])
    policy = ppo_loss(logprob, old, gae[0] - moments[1].float(), dual_clip=3.0)
    critic = value_loss(hidden, weight[0], bias, old, returns[0])
    return policy.loss.sum() - 0.01 * entropy.sum() + critic.loss


def test_compiles_without_a_graph_break_and_without_recompiling_by_length(monkeypatch):
    torch.compiler.reset()
    monkeypatch.setattr(torch._dynamo.config, "error_on_recompile", True)
    compiled = torch.compile(whole_step, fullgraph=True, dynamic=True)
    for tokens in (4, 9, 17):
        leaves = [leaf(tokens, 3), leaf(7, 3), leaf(1)]
        place = torch.arange(tokens, device=DEVICE)
        target, turn, action = place % 7, place // 3, place >= 0
        rest = (target, leaf(tokens).detach(), leaf(tokens).detach() / 3, action, turn)
        found = []
        for step in (whole_step, compiled):
            loss = step(*leaves, *rest)
            found.append((loss, *torch.autograd.grad(loss, leaves)))
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b)


def test_tb_gae_is_one_op_for_every_tracer():
    """Called eagerly it goes round the dispatcher; what it computes is the same."""
    batch = (
        leaf(2, 6).detach(),
        leaf(2, 6).detach(),
        leaf(2, 6).detach() > -1,
        torch.zeros(2, 6, device=DEVICE).long(),
    )
    graph = make_fx(lambda *x: tb_gae(*x))(*batch)
    assert [node.target for node in graph.graph.nodes if node.op == "call_function"].count(
        torch.ops.rsi_kernels.tb_gae.default
    ) == 1
    for ours, eager in zip(graph(*batch), tb_gae(*batch), strict=True):
        assert torch.equal(ours, eager)
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(x) for x in batch]
        assert tb_gae(*fake)[0].shape == (2, 6)
    assert tb_gae(*fake)[1].shape == (2, 6)
    assert tb_gae(*(x.to("meta") for x in batch))[0].device.type == "meta"


def test_the_gated_delta_rule_compiles_without_a_graph_break():
    """Plain torch, so there is no op of its own to check."""
    gate, beta = -leaf(1, 9, 4).detach().abs(), leaf(1, 9, 4).detach().sigmoid()
    inputs = [leaf(1, 9, 2, 4), leaf(1, 9, 2, 4), leaf(1, 9, 4, 3), gate.requires_grad_(), beta.requires_grad_()]
    found = []
    for rule in (gated_delta_rule, torch.compile(gated_delta_rule, fullgraph=True)):
        out, state = rule(*inputs)
        found.append((out, state, *torch.autograd.grad(out.square().sum() + state.sum(), inputs)))
    for ours, wanted in zip(*found, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-5)


def test_triton_is_refused_where_it_cannot_run(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    x = torch.zeros(3)
    with pytest.raises(ValueError, match='impl="triton" needs CUDA tensors, got one on cpu'):
        ppo_loss(x, x, x, impl="triton")
    with pytest.raises(ValueError, match="float64"):
        ppo_loss(x.double(), x, x, impl="triton")
    with pytest.raises(ValueError, match="impl must be auto, triton or torch, got 'gpu'"):
        ppo_loss(x, x, x, impl="gpu")
    monkeypatch.setattr(dispatch, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="needs the package triton"):
        ppo_loss(x, x, x, impl="triton")
    dispatch._has_triton.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert not dispatch._has_triton() and not dispatch._has_triton()
    dispatch._has_triton.cache_clear()
    assert len(caught) == 1


def test_replicated_dtensors_are_accepted_and_sharded_ones_refused():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        hidden, weight, target = leaf(4, 3, device="cpu"), leaf(7, 3, device="cpu"), torch.arange(4)
        wanted = linear_logprob(hidden, weight, target).logprob
        replicated = distribute_tensor(weight.detach(), mesh, [Replicate()]).requires_grad_()
        found = linear_logprob(hidden, replicated, target).logprob
        assert torch.equal(found, wanted)
        found.sum().backward()
        wanted.sum().backward()
        assert torch.equal(replicated.grad.to_local(), weight.grad)
        sharded = distribute_tensor(weight.detach(), mesh, [Shard(0)])
        with pytest.raises(ValueError, match=r"weight is a DTensor with placements .*Shard.*full_tensor"):
            linear_logprob(hidden, sharded, target)
        zeros = torch.zeros(4)
        with pytest.raises(ValueError, match="hidden is a DTensor"):
            value_loss(distribute_tensor(hidden.detach(), mesh, [Shard(0)]), zeros[:3], zeros[:1], zeros, zeros)
    finally:
        dist.destroy_process_group()
