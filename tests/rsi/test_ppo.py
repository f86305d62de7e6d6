"""PPO's formulas by hand, and on the real model: one normaliser, exact first ratios, clipping, gradients."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rsi import ppo
from rsi.batch import MicroBatch, collate, count_actions, gather_predictors, plan_micro_batches
from rsi.model import Critic, ModelConfig, Transformer
from rsi.trajectory import Trajectory

VOCABULARY = 40


def config() -> ModelConfig:
    return ModelConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=256,
    )  # fmt: skip


def actor() -> Transformer:
    torch.manual_seed(0)
    return Transformer(config())


def critic() -> Critic:
    torch.manual_seed(1)
    model = Critic(config())
    torch.nn.init.normal_(model.value_head.weight, std=0.3)
    return model


def trajectories(count: int = 9, seed: int = 0) -> list[Trajectory]:
    """Of unequal lengths; one in four never acts."""
    rng = random.Random(seed)

    def ids(low: int, high: int) -> list[int]:
        return [rng.randrange(VOCABULARY) for _ in range(rng.randint(low, high))]

    records = []
    for index in range(count):
        record = Trajectory(task=f"t{index}", family="f", suite="core", harness="terminus", seed=index)
        record.extend(ids(3, 20))
        for turn in range(0 if index % 4 == 3 else rng.randint(1, 3)):
            sampled = ids(1, 8)
            record.extend(sampled, turn, [-1.0] * len(sampled))
            record.extend(ids(0, 12))
        records.append(record)
    return records


def gradients(model: torch.nn.Module) -> list[Tensor]:
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]


def token_noise(batch: MicroBatch, stream: int) -> Tensor:
    """Numbers that belong to a token of a trajectory, wherever the packing puts it."""
    parts = []
    for actions, index in zip(batch.action_T.split(batch.cu_seqlens.diff().tolist()), batch.indices, strict=False):
        generator = torch.Generator().manual_seed(1000 * stream + index)
        parts.append(torch.randn(int(actions.sum()), generator=generator))
    return torch.cat(parts) if parts else torch.zeros(0)


Loss = Callable[[MicroBatch, int], tuple[Tensor, ppo.Metrics]]


def step_gradients(model: torch.nn.Module, loss: Loss, plan: Sequence[Sequence[int]], dummies: int = 0):
    records = trajectories()
    normaliser = count_actions(records, [index for group in plan for index in group])
    model.zero_grad()
    sums, total = [], 0.0
    batches = [collate(records, group, 0) for group in plan] + [collate([], [], 0)] * dummies
    for batch in batches:
        value, metrics = loss(batch, normaliser)
        assert value.requires_grad and value.isfinite()
        value.backward()
        total += float(value.detach())
        sums.append(metrics)
    return gradients(model), total, ppo.average_metrics(sums, normaliser)


def policy(model: Transformer) -> Loss:
    def loss(batch: MicroBatch, normaliser: int) -> tuple[Tensor, ppo.Metrics]:
        logprob, entropy = ppo.action_logprobs(model, batch)
        old_logprob = logprob.detach() + 0.3 * token_noise(batch, 1)
        return ppo.policy_loss(
            logprob, old_logprob, token_noise(batch, 2), None, normaliser, dual_clip=3.0,
            entropy=entropy, entropy_bonus=0.01, reference_logprob=token_noise(batch, 3) - 3.0, kl_coefficient=0.1,
        )  # fmt: skip

    return loss


def value(model: Critic) -> Loss:
    def loss(batch: MicroBatch, normaliser: int) -> tuple[Tensor, ppo.Metrics]:
        values = ppo.action_values(model, batch)
        old_value = values.detach() + 0.3 * token_noise(batch, 1)
        return ppo.value_loss(values, old_value, token_noise(batch, 2), None, normaliser)

    return loss


def supervised(model: Transformer) -> Loss:
    return lambda batch, normaliser: ppo.supervised_loss(ppo.action_logprobs(model, batch)[0], None, normaliser)


SPLITS = [
    plan_micro_batches([len(record.ids) for record in trajectories()], 100),
    [[index] for index in range(9)],
    [[3, 7], [0, 1, 2, 4, 5, 6, 8]],
    [[8, 0, 4, 2], [], [6, 1, 3, 5, 7]],
]


@pytest.mark.parametrize("plan", SPLITS)
@pytest.mark.parametrize(("build", "loss"), [(actor, policy), (critic, value), (actor, supervised)])
def test_one_normaliser_any_split_gives_the_same_step(build, loss, plan):
    """The third split has a micro-batch without any action token, the last an empty one."""
    model = build()
    whole, whole_loss, whole_metrics = step_gradients(model, loss(model), [list(range(9))])
    split, split_loss, split_metrics = step_gradients(model, loss(model), [group for group in plan if group], dummies=2)
    assert any(gradient.abs().max() > 1e-4 for gradient in whole)
    for one, other in zip(whole, split, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    assert split_loss == pytest.approx(whole_loss, rel=1e-5)
    assert split_metrics == pytest.approx(whole_metrics, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize(("build", "loss"), [(actor, policy), (critic, value), (actor, supervised)])
def test_a_micro_batch_without_actions_is_zero_and_in_the_graph(build, loss):
    model = build()
    for batch in (collate([], [], 0), collate(trajectories(), [3, 7], 0)):
        model.zero_grad()
        total, metrics = loss(model)(batch, 0)
        assert float(total.detach()) == 0.0 and all(float(metric) == 0.0 for metric in metrics.values())
        total.backward()
        touched = [parameter.grad for parameter in model.parameters()]
        assert all(gradient is not None and not gradient.any() for gradient in touched)


def test_the_first_ratio_is_exactly_one():
    model = actor()
    for group in SPLITS[0]:
        batch = collate(trajectories(), group, 0)
        with torch.no_grad():
            old_logprob, _ = ppo.action_logprobs(model, batch, 0.7)
        logprob, _ = ppo.action_logprobs(model, batch, 0.7)
        assert torch.equal(logprob, old_logprob)
        _, metrics = ppo.policy_loss(logprob, old_logprob, token_noise(batch, 0), None, 1)
        assert metrics["actor/pg_clipfrac"] == 0 and metrics["actor/ppo_kl"] == 0


def test_four_updates_at_a_high_learning_rate_clip():
    model = actor()
    batch = collate(trajectories(), range(9), 0)
    with torch.no_grad():
        old_logprob, _ = ppo.action_logprobs(model, batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    fractions = []
    for _ in range(4):
        logprob, _ = ppo.action_logprobs(model, batch)
        loss, metrics = ppo.policy_loss(logprob, old_logprob, token_noise(batch, 2), None, batch.action_count)
        fractions.append(ppo.average_metrics([metrics], batch.action_count)["actor/pg_clipfrac"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert fractions[0] == 0.0 and all(fraction > 0 for fraction in fractions[1:])


def test_zero_advantages_give_zero_gradients():
    model = actor()
    batch = collate(trajectories(), range(9), 0)
    logprob, entropy = ppo.action_logprobs(model, batch)
    old_logprob = logprob.detach() + token_noise(batch, 1)
    loss, metrics = ppo.policy_loss(
        logprob, old_logprob, torch.zeros_like(logprob), None, 10, dual_clip=3.0, entropy=entropy
    )
    loss.backward()
    assert not any(gradient.any() for gradient in gradients(model))
    assert metrics["actor/pg_clipfrac"] == 0 and metrics["actor/entropy"] > 0


def test_log_probs_belong_to_the_token_and_the_temperature():
    """Row by row, without padding or batching, from a full softmax at every position."""
    model, records = actor(), trajectories()
    batch = collate(records, range(9), 0)
    logprob, entropy = ppo.action_logprobs(model, batch, 0.6)
    rows = []
    for record in records:
        logits = model.logits(model(torch.tensor([record.ids]))[0]) / 0.6
        chosen = [t for t in range(len(record.ids)) if record.action[t]]
        for t in chosen:
            probability = logits[t - 1].softmax(-1)
            rows.append((probability[record.ids[t]].log(), -(probability * probability.log()).sum()))
    torch.testing.assert_close(logprob, torch.stack([row[0] for row in rows]))
    torch.testing.assert_close(entropy, torch.stack([row[1] for row in rows]))
    assert logprob.dtype == entropy.dtype == torch.float32
    with pytest.raises(ValueError, match="temperature must be above 0"):
        ppo.action_logprobs(model, batch, 0.0)


def test_values_are_those_of_the_state_before_the_token():
    model = critic()
    records = trajectories()
    values = ppo.action_values(model, collate(records, range(9), 0))
    alone = []
    for record in records:
        output = model(torch.tensor([record.ids]))[0]
        alone += [output[t - 1] for t in range(len(record.ids)) if record.action[t]]
    torch.testing.assert_close(values, torch.stack(alone))


def test_policy_loss_by_hand():
    """Ratios 1.5, 0.5 with both signs of the advantage: clipped only where it would go further."""
    ratio = torch.tensor([1.5, 0.5, 1.5, 0.5, 1.1])
    advantage = torch.tensor([1.0, 1.0, -1.0, -1.0, 2.0])
    logprob = (ratio.log() - 1.0).requires_grad_()
    loss, metrics = ppo.policy_loss(logprob, torch.full((5,), -1.0), advantage, None, 10, 0.2, 0.3)
    wanted = torch.tensor([-1.3, -0.5, 1.5, 0.8, -2.2])
    torch.testing.assert_close(loss, wanted.sum() / 10)
    torch.testing.assert_close(metrics["actor/pg_loss"], wanted.sum())
    torch.testing.assert_close(metrics["actor/ppo_kl"], -ratio.log().sum())
    assert metrics["actor/pg_clipfrac"] == 2
    loss.backward()
    kept = torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0])
    torch.testing.assert_close(logprob.grad, -advantage * ratio * kept / 10)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_ratio_exactly_at_the_bound_keeps_its_gradient(sign):
    """1.5 and 0.5 are exact, so ratio == bound bit for bit: a tie is not clipped."""
    log_ratio = math.log(1.5) if sign > 0 else math.log(0.5)
    logprob = torch.tensor([log_ratio], dtype=torch.float64, requires_grad=True)
    edge = float(logprob.detach().exp())
    low, high = (0.2, edge - 1.0) if sign > 0 else (1.0 - edge, 0.2)
    assert (1.0 + high if sign > 0 else 1.0 - low) == edge
    advantage = torch.tensor([sign], dtype=torch.float64)
    loss, metrics = ppo.policy_loss(logprob, torch.zeros(1).double(), advantage, None, 1, low, high)
    loss.backward()
    assert metrics["actor/pg_clipfrac"] == 0
    assert logprob.grad is not None and logprob.grad.item() == -sign * edge
    beyond = torch.tensor([log_ratio + sign * 1e-9], dtype=torch.float64, requires_grad=True)
    loss, metrics = ppo.policy_loss(beyond, torch.zeros(1).double(), advantage, None, 1, low, high)
    loss.backward()
    assert metrics["actor/pg_clipfrac"] == 1 and beyond.grad is not None and beyond.grad.item() == 0.0


def test_dual_clip_bounds_the_loss_of_a_negative_advantage():
    logprob = torch.tensor([2.0, 2.0, 0.5, -40.0], requires_grad=True)
    advantage = torch.tensor([-1.0, 1.0, -1.0, -1.0])
    loss, metrics = ppo.policy_loss(logprob, torch.zeros(4), advantage, None, 1, dual_clip=3.0)
    torch.testing.assert_close(loss.detach(), torch.tensor(3.0 - 1.2 + math.exp(0.5) + 0.8))
    assert metrics["actor/pg_clipfrac_lower"] == 1
    loss.backward()
    assert logprob.grad is not None and logprob.grad[0] == 0 and logprob.grad[2] > 0


def test_extreme_log_ratios_stay_finite():
    logprob = torch.tensor([90.0, -90.0], requires_grad=True)
    reference = torch.tensor([-30.0, 30.0])
    for kind in ("k1", "k2", "k3"):
        loss, metrics = ppo.policy_loss(
            logprob, torch.tensor([-90.0, 90.0]), torch.tensor([-1.0, 1.0]), None, 2,
            reference_logprob=reference, kl_coefficient=1.0, kl_kind=kind,
        )  # fmt: skip
        loss.backward()
        assert all(math.isfinite(float(x)) for x in (loss.detach(), *metrics.values()))
    assert logprob.grad is not None and logprob.grad.isfinite().all()


def test_masked_slots_are_never_read():
    keep = torch.tensor([1, 0, 1, 0])
    numbers = torch.tensor([-0.5, math.nan, -0.2, math.inf])
    clean = numbers[keep.bool()]
    logprob, short = numbers.clone().requires_grad_(), clean.clone().requires_grad_()
    ours, metrics = ppo.policy_loss(
        logprob, numbers * 1.1, numbers, keep, 2, dual_clip=2.0, importance_weight=numbers, entropy=numbers,
        entropy_bonus=0.1, reference_logprob=numbers * 0.9, kl_coefficient=0.1,
    )  # fmt: skip
    theirs, wanted = ppo.policy_loss(
        short, clean * 1.1, clean, None, 2, dual_clip=2.0, importance_weight=clean, entropy=clean,
        entropy_bonus=0.1, reference_logprob=clean * 0.9, kl_coefficient=0.1,
    )  # fmt: skip
    ours.backward()
    theirs.backward()
    torch.testing.assert_close(ours, theirs)
    assert {k: float(v) for k, v in metrics.items()} == pytest.approx({k: float(v) for k, v in wanted.items()})
    assert logprob.grad is not None and short.grad is not None
    torch.testing.assert_close(logprob.grad[keep.bool()], short.grad)
    assert not logprob.grad[~keep.bool()].any()
    masked, _ = ppo.value_loss(numbers, numbers * 2, numbers * 3, keep, 2)
    torch.testing.assert_close(masked, ppo.value_loss(clean, clean * 2, clean * 3, None, 2)[0])
    torch.testing.assert_close(ppo.supervised_loss(numbers, keep, 2)[0], ppo.supervised_loss(clean, None, 2)[0])


def test_value_loss_by_hand():
    """Inside the band; moved too far towards the return (clipped, no gradient); moved away (not clipped)."""
    values = torch.tensor([0.1, 0.9, -0.9], requires_grad=True)
    loss, metrics = ppo.value_loss(values, torch.zeros(3), torch.ones(3), None, 2, 0.2)
    errors = torch.tensor([0.9, 0.8, 1.9])
    torch.testing.assert_close(loss, 0.5 * errors.square().sum() / 2)
    assert metrics["critic/vf_clipfrac"] == 1
    torch.testing.assert_close(metrics["critic/values/mean"], torch.tensor(0.1))
    loss.backward()
    torch.testing.assert_close(values.grad, torch.tensor([-0.45, 0.0, -0.95]))
    free, _ = ppo.value_loss(values, torch.zeros(3), torch.ones(3), None, 2, math.inf)
    torch.testing.assert_close(free, 0.5 * (values - 1).square().sum() / 2)


@settings(deadline=None, max_examples=100, derandomize=True)
@given(st.floats(-2, 2), st.floats(-2, 2), st.floats(-2, 2), st.floats(0.01, 1))
def test_value_loss_is_the_larger_error(new, old, target, clip):
    new_value, old_value, returns = (torch.tensor([x], dtype=torch.float64) for x in (new, old, target))
    loss, _ = ppo.value_loss(new_value, old_value, returns, None, 1, clip)
    held = old + min(max(new - old, -clip), clip)
    assert float(loss) == pytest.approx(0.5 * max((new - target) ** 2, (held - target) ** 2))


def test_truncated_importance_weights():
    sampler = torch.tensor([-1.0, -1.0, -1.0, -90.0])
    old = torch.tensor([-1.0, -2.0, -0.1, 0.0], requires_grad=True)
    weights = ppo.importance_weights(old, sampler, 2.0)
    torch.testing.assert_close(weights, torch.tensor([1.0, math.exp(-1.0), 2.0, 2.0]))
    assert not weights.requires_grad
    logprob = old.detach().clone().requires_grad_()
    loss, _ = ppo.policy_loss(logprob, old, torch.ones(4), None, 1, importance_weight=weights)
    loss.backward()
    torch.testing.assert_close(logprob.grad, -weights)


def test_explained_variance():
    returns = torch.tensor([0.0, 1.0, 2.0, 3.0])
    assert ppo.explained_variance(returns, returns) == 1.0
    assert ppo.explained_variance(torch.zeros(4), returns) == pytest.approx(0.0)
    assert ppo.explained_variance(returns + 5.0, returns) == pytest.approx(1.0)
    assert ppo.explained_variance(-returns, returns) == pytest.approx(-3.0)
    mask = torch.tensor([1, 1, 1, 1, 0])
    poisoned = torch.cat([returns, torch.tensor([math.nan])])
    assert ppo.explained_variance(poisoned, poisoned, mask) == 1.0
    assert math.isnan(ppo.explained_variance(returns, torch.ones(4)))
    assert math.isnan(ppo.explained_variance(torch.zeros(0), torch.zeros(0)))


def test_whitening():
    advantage = torch.tensor([1.0, 2.0, 3.0, 10.0])
    white = ppo.whiten(advantage)
    torch.testing.assert_close(white, (advantage - 4.0) / advantage.std(correction=0))
    assert white.dtype == torch.float32
    assert ppo.whiten(torch.tensor([3.0])).tolist() == [0.0]
    assert ppo.whiten(torch.zeros(0)).shape == (0,)


def test_metrics_add_up():
    parts = [{"a": torch.tensor(3.0), "b": torch.tensor(2)}, {"a": torch.tensor(1.0)}, {}]
    assert ppo.average_metrics(parts, 8) == {"a": 0.5, "b": 0.25}
    assert ppo.average_metrics([], 0) == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dual_clip": 1.0}, "dual_clip must be above 1, got 1.0"),
        ({"clip_low": 1.0}, "clip_low"),
        ({"clip_high": -0.1}, "clip_high"),
        ({"entropy_bonus": 0.1}, "needs `entropy`"),
        ({"kl_coefficient": 0.1}, "needs `reference_logprob`"),
    ],
)
def test_mistakes_are_named(options, message):
    zeros = torch.zeros(2)
    with pytest.raises(ValueError, match=message):
        ppo.policy_loss(zeros, zeros, zeros, None, 1, **options)
    with pytest.raises(ValueError, match=r"value clip must be above 0"):
        ppo.value_loss(zeros, zeros, zeros, None, 1, 0.0)
    with pytest.raises(ValueError, match="cap must be above 0"):
        ppo.importance_weights(zeros, zeros, 0.0)


def memory_of(loss: Callable[[], Tensor]) -> tuple[int, int]:
    """Bytes of what is kept for the backward pass, and of the largest allocation of forward and backward."""
    storages: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.profiler.profile(profile_memory=True) as profile:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            total = loss()
        total.backward()
    return sum(storages.values()), max(event.self_cpu_memory_usage for event in profile.events())


def test_logits_of_a_whole_batch_are_neither_kept_nor_made() -> None:
    torch.manual_seed(0)
    model = Transformer(replace(config(), vocab_size=50_000))
    batch = collate(trajectories(40), range(40), 0)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    logits = 4 * batch.action_count * 50_000
    assert logits > 8 * weights
    kept, largest = memory_of(lambda: ppo.action_logprobs(model, batch)[0].sum())
    assert kept < logits / 2 and largest < logits / 2

    def naive() -> Tensor:
        logits_NV = model.logits(gather_predictors(model(batch.ids_T[None], batch.cu_seqlens)[0], batch))
        return logits_NV.log_softmax(-1).gather(1, batch.target_N[:, None]).sum()

    kept, largest = memory_of(naive)
    assert kept >= logits and largest >= logits
