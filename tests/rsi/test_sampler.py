"""The embedded sampler: its log-probs are the model's, its draws depend on seed and position alone."""

from dataclasses import replace

import pytest
import torch
from tiny_models import FAMILIES, TINY, perturbed, sample

from rsi.draws import draw, uniforms
from rsi.model import Transformer
from rsi.sampler import PREFILL_STEP, Sampler

CONFIG = replace(TINY, vocab_size=64, num_hidden_layers=2)
STOP = 1
STOPS = (STOP,)
Turns = list[tuple[list[int], list[float]]]


@pytest.fixture(scope="module", params=FAMILIES)
def actor(request: pytest.FixtureRequest) -> Transformer:
    layers = 4 if request.param == "qwen3_5" else 2
    return perturbed(replace(FAMILIES[request.param], vocab_size=64, num_hidden_layers=layers))


def prompts(count: int, longest: int = 40, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest, (count,), generator=generator).tolist()
    return [torch.randint(2, 64, (length,), generator=generator).tolist() for length in lengths]


def full_logprobs(actor: Transformer, ids: list[int], temperature: float) -> torch.Tensor:
    """The trainer's formula: log-prob of each of ids[1:]."""
    with torch.no_grad():
        logits = actor.logits(actor(torch.tensor([ids]))[0])
    logprobs = torch.log_softmax(logits / temperature, -1)
    return logprobs[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def run(
    sampler: Sampler, asked: list[list[int]], seeds: list[int], temperature: float = 1.0, tokens: int = 24
) -> Turns:
    slots = [sampler.open(seed) for seed in seeds]
    turns = sample(sampler, list(zip(slots, asked, strict=True)), tokens, STOPS, temperature)
    for slot in slots:
        sampler.close(slot)
    return turns


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
@pytest.mark.parametrize("count", [1, 7, 40])
def test_logprobs_over_turns_equal_a_full_forward(actor: Transformer, temperature: float, count: int) -> None:
    sampler = Sampler(actor, slots=count + 3, max_len=256)
    slots = [sampler.open(seed) for seed in range(count)]
    histories: list[list[int]] = [[] for _ in slots]
    expected: list[list[tuple[int, float]]] = [[] for _ in slots]
    for turn in range(3):
        asked = [
            (place, new) for place, new in enumerate(prompts(count, seed=turn)) if (place + turn) % 4 or count == 1
        ]
        turns = sample(sampler, [(slots[place], new) for place, new in asked], 30, STOPS, temperature)
        for (place, new), (ids, logprobs) in zip(asked, turns, strict=True):
            histories[place] += new
            expected[place] += list(zip(range(len(histories[place]), 999), logprobs, strict=False))
            histories[place] += ids
            assert 1 <= len(ids) <= 30 and STOP not in ids[:-1]
    assert any(STOP in history for history in histories) or temperature == 0 or count == 1
    for history, sampled in zip(histories, expected, strict=True):
        if sampled:
            logprobs = full_logprobs(actor, history, temperature or 1.0)
            for position, logprob in sampled:
                assert abs(logprob - logprobs[position - 1]) < 1e-4


def test_kept_prefix_equals_starting_again(actor: Transformer) -> None:
    first, second = prompts(20, seed=1), prompts(20, seed=2)
    sampler = Sampler(actor, slots=20, max_len=200)
    slots = [sampler.open(seed) for seed in range(20)]
    opening = sample(sampler, list(zip(slots, first, strict=True)), 20, STOPS, 1.0)
    kept = sample(sampler, list(zip(slots, second, strict=True)), 20, STOPS, 1.0)
    whole = [a + ids + b for a, (ids, _), b in zip(first, opening, second, strict=True)]
    again = run(Sampler(actor, slots=20, max_len=200), whole, list(range(20)), tokens=20)
    assert [ids for ids, _ in kept] == [ids for ids, _ in again]
    for (_, one), (_, other) in zip(kept, again, strict=True):
        assert one == pytest.approx(other, abs=1e-4)


def test_a_later_turn_prefills_its_new_ids_alone(actor: Transformer) -> None:
    sampler = Sampler(actor, slots=1, max_len=200)
    slot, read = sampler.open(0), []
    hook = actor.model.embed_tokens.register_forward_hook(lambda _, ids, __: read.append(ids[0].shape))
    try:
        for new in ([2] * 100, [3, 4, 5]):
            (turn,) = sample(sampler, [(slot, new)], 4, (), 1.0)
            assert len(turn[0]) == 4
    finally:
        hook.remove()
    steps = [(8, 1)] * 3
    # Padded to a multiple of 16; the last id of the first turn comes with the second's.
    assert read == [(1, 112), *steps, (1, 16), *steps]


def test_where_the_mask_would_be_large_new_ids_are_read_in_pieces(
    actor: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = Sampler(actor, slots=3, max_len=200)
    slots = [sampler.open(seed) for seed in range(3)]
    asked = [prompts(3, seed=turn) for turn in range(2)]
    asked[1] = [new * count for new, count in zip(asked[1], (1, 2, 4), strict=True)]
    first = sample(sampler, list(zip(slots, asked[0], strict=True)), 5, (), 1.0)
    monkeypatch.setattr("rsi.sampler.MASK_ELEMENTS", 1)
    widths = []
    run = Sampler._run
    monkeypatch.setattr(Sampler, "_run", lambda self, ids, *rest: widths.append(ids.shape[1]) or run(self, ids, *rest))
    second = sample(sampler, list(zip(slots, asked[1], strict=True)), 5, (), 1.0)
    assert set(widths) == {1, PREFILL_STEP} and widths.count(PREFILL_STEP) > 5
    for new, (before, _), (ids, logprobs), start in zip(asked[1], first, second, asked[0], strict=True):
        expected = full_logprobs(actor, [*start, *before, *new, *ids], 1.0)[-len(ids) :]
        torch.testing.assert_close(torch.tensor(logprobs), expected, atol=1e-4, rtol=0)


def test_repeats_are_bit_identical_and_seeds_matter(actor: Transformer) -> None:
    asked = [prompts(1)[0]] * 12
    seeds = [0, 0, *range(1, 11)]
    first = run(Sampler(actor, slots=12, max_len=128), asked, seeds)
    assert first == run(Sampler(actor, slots=12, max_len=128), asked, seeds)
    assert first[0] == first[1]
    assert len({tuple(ids) for ids, _ in first}) > 6


@pytest.mark.parametrize("others", [0, 5, 60])
def test_tokens_do_not_depend_on_place_or_company(actor: Transformer, others: int) -> None:
    asked, seeds = prompts(24, seed=4), list(range(100, 124))
    wanted = [ids for ids, _ in run(Sampler(actor, slots=24, max_len=128), asked, seeds)]
    generator = torch.Generator().manual_seed(others)
    company = prompts(others, seed=5)
    order = torch.randperm(24 + others, generator=generator).tolist()
    mixed = [(asked + company)[index] for index in order]
    mixed_seeds = [(seeds + list(range(others)))[index] for index in order]
    turns = run(Sampler(actor, slots=24 + others, max_len=128), mixed, mixed_seeds)
    found = dict(zip(order, (ids for ids, _ in turns), strict=True))
    assert [found[index] for index in range(24)] == wanted


def test_turns_that_join_and_leave_at_any_time_are_the_same(actor: Transformer) -> None:
    """Continuous batching: three turns each, begun as soon as the slot's last one has ended, some later still."""
    asked = [prompts(14, seed=turn) for turn in range(3)]
    seeds = list(range(14))
    together = Sampler(actor, slots=14, max_len=256)
    slots = [together.open(seed) for seed in seeds]
    wanted = [sample(together, list(zip(slots, new, strict=True)), 20, STOPS, 1.0) for new in asked]

    sampler = Sampler(actor, slots=14, max_len=256)
    slots = [sampler.open(seed) for seed in seeds]
    found: dict[int, list[tuple[list[int], list[float]]]] = {slot: [] for slot in slots}
    late = slots[9:]
    for slot in slots[:9]:
        sampler.submit(slot, asked[0][slot], 20)
    while any(len(turns) < 3 for turns in found.values()):
        ended = sampler.advance(STOPS, 1.0)
        if late:
            sampler.submit(late[0], asked[0][late.pop(0)], 20)
        for slot, turn in ended.items():
            found[slot].append(turn)
            if len(found[slot]) < 3:
                sampler.submit(slot, asked[len(found[slot])][slot], 20)
    assert sampler.advance(STOPS, 1.0) == {}
    for slot in slots:
        for (ids, logprobs), turns in zip(found[slot], wanted, strict=True):
            assert ids == turns[slot][0]
            assert logprobs == pytest.approx(turns[slot][1], abs=1e-4)


def test_greedy_follows_the_largest_logit(actor: Transformer) -> None:
    asked = prompts(9, seed=6)
    for prompt, (ids, _) in zip(asked, run(Sampler(actor, 9, 128), asked, [3] * 9, temperature=0.0), strict=True):
        with torch.no_grad():
            best = actor.logits(actor(torch.tensor([prompt + ids]))[0]).argmax(-1).tolist()
        assert ids == best[len(prompt) - 1 : -1]


def test_limits_on_the_draw_reach_it(actor: Transformer) -> None:
    asked, never = prompts(5, seed=7), ()
    found = []
    for limits in ((0.0,), (1.0, 1e-9), (1.0, 1.0, 1), (5.0, 1.0, 64), (5.0, 1.0, 1000)):
        sampler = Sampler(actor, slots=5, max_len=64)
        for seed, prompt in enumerate(asked):
            sampler.submit(sampler.open(seed), prompt, 12)
        found.append([ids for ids, _ in sampler.advance(never, *limits).values()])
    assert found[0] == found[1] == found[2] != found[3] == found[4]


def test_turns_end_at_max_tokens_and_max_len(actor: Transformer) -> None:
    sampler = Sampler(actor, slots=4, max_len=50)
    slots = [sampler.open(seed) for seed in range(4)]
    lengths = [1, 45, 49, 50]
    asked = [(slot, [2] * length) for slot, length in zip(slots, lengths, strict=True)]
    never = ()
    turns = sample(sampler, asked, 10, never, 1.0)
    assert [len(ids) for ids, _ in turns] == [10, 5, 1, 0]
    again = sample(sampler, [(slot, [3]) for slot in slots], 1000, never, 1.0)
    assert [len(ids) for ids, _ in again] == [38, 0, 0, 0]
    history = [2, *turns[0][0], 3, *again[0][0]]
    assert len(history) == 50
    expected = full_logprobs(actor, history, 1.0)[11:]
    assert again[0][1] == pytest.approx(expected.tolist(), abs=1e-4)


def test_a_slot_closed_under_way_leaves_no_trace(actor: Transformer) -> None:
    first, second, third = prompts(3, seed=11)
    sampler = Sampler(actor, slots=2, max_len=128)
    kept, dropped = sampler.open(0), sampler.open(1)
    sampler.submit(kept, first, 3)
    sampler.submit(dropped, second, 24)
    ((ids, _),) = sampler.advance((), 1.0).values()
    sampler.close(dropped)
    assert not sampler.busy and sampler.open(7) == dropped
    turns = sample(sampler, [(kept, [5]), (dropped, third)], 24, (), 1.0)
    for history, (new, logprobs) in zip(([*first, *ids, 5], third), turns, strict=True):
        expected = full_logprobs(actor, [*history, *new], 1.0)[-24:]
        assert len(new) == 24 and logprobs == pytest.approx(expected.tolist(), abs=1e-4)


def test_turns_of_idle_slots_survive_the_work_of_others(actor: Transformer) -> None:
    """Rows are exchanged as others end; a slot that waits must find its prefix again."""
    sampler = Sampler(actor, slots=70, max_len=160)
    asked = prompts(70, seed=8)
    slots = [sampler.open(seed) for seed in range(70)]
    opening = sample(sampler, list(zip(slots, asked, strict=True)), 6, STOPS, 1.0)
    for start in (0, 30, 55):
        busy = [(slot, [5, 6]) for slot in slots[start : start + 15]]
        sample(sampler, busy, 40, STOPS, 1.0)
    idle = [place for place in range(70) if not any(start <= place < start + 15 for start in (0, 30, 55))]
    turns = sample(sampler, [(slots[place], [7]) for place in idle], 5, STOPS, 1.0)
    for place, (ids, logprobs) in zip(idle, turns, strict=True):
        history = [*asked[place], *opening[place][0], 7, *ids]
        expected = full_logprobs(actor, history, 1.0)[-len(ids) :]
        assert logprobs == pytest.approx(expected.tolist(), abs=1e-4)


def test_new_weights_are_seen_at_once() -> None:
    actor = perturbed(CONFIG)
    sampler = Sampler(actor, slots=8, max_len=128)
    asked = prompts(8, seed=9)
    before = run(sampler, asked, list(range(8)))
    with torch.no_grad():
        for parameter in actor.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    after = run(sampler, asked, list(range(8)))
    assert before != after
    for prompt, (ids, logprobs) in zip(asked, after, strict=True):
        expected = full_logprobs(actor, prompt + ids, 1.0)[-len(ids) :]
        assert logprobs == pytest.approx(expected.tolist(), abs=1e-4)


def test_training_works_after_sampling(actor: Transformer) -> None:
    run(Sampler(actor, slots=2, max_len=64), prompts(2), [0, 1])
    actor.logits(actor(torch.tensor([[1, 2, 3]]))).sum().backward()
    assert all(parameter.grad is not None for parameter in actor.parameters())
    actor.zero_grad()


def test_sampled_tokens_follow_the_softmax() -> None:
    count, vocabulary = 20_000, 12
    logits = torch.linspace(-2, 2, vocabulary).expand(count, -1).contiguous()
    for temperature in (1.0, 0.5):
        chosen, logprobs = draw(logits, uniforms(range(count), [17] * count, 1)[:, 0], temperature)
        expected = torch.softmax(logits[0] / temperature, -1)
        observed = torch.bincount(chosen, minlength=vocabulary)
        chi_square = ((observed - count * expected) ** 2 / (count * expected)).sum()
        assert chi_square < 31.3  # 11 degrees of freedom, p = 0.001
        assert torch.allclose(logprobs, expected.log()[chosen], atol=1e-6)


def test_top_k_and_top_p_limit_the_draw_alone() -> None:
    probability = torch.tensor([0.4, 0.05, 0.3, 0.15, 0.1])
    logits = probability.log().expand(5000, -1)
    uniform = uniforms([3], [0], 5000)[0]
    for top_p, top_k, allowed in (
        (1.0, 2, {0, 2}),
        (0.7, 0, {0, 2}),
        (0.71, 0, {0, 2, 3}),
        (0.01, 0, {0}),
        (0.9, 3, {0, 2, 3}),
        (1.0, 9, {0, 1, 2, 3, 4}),
    ):
        chosen, logprob = draw(logits, uniform, 1.0, top_p, top_k)
        assert set(chosen.tolist()) == allowed
        assert torch.allclose(logprob, probability.log()[chosen], atol=1e-6)
        kept = probability[sorted(allowed)] / probability[sorted(allowed)].sum()
        observed = torch.bincount(chosen, minlength=5)[sorted(allowed)] / 5000
        assert (observed - kept).abs().max() < 0.03


def test_uniforms_are_uniform_over_seeds_and_positions() -> None:
    grid = uniforms(range(100), [5] * 100, 200)
    assert 0 <= grid.min() and grid.max() < 1
    for values in (grid.flatten(), grid.diff(dim=0).flatten() % 1, grid.diff(dim=1).flatten() % 1):
        observed = torch.histc(values.float(), 50, 0, 1)
        assert ((observed - observed.mean()) ** 2 / observed.mean()).sum() < 85.4  # 49 degrees, p = 0.001
    assert torch.equal(uniforms([3], [5], 10)[:, 4:], uniforms([3], [9], 6))
    assert torch.equal(uniforms([-1], [0], 1), uniforms([2**64 - 1], [0], 1))


def test_impossible_tokens_are_never_drawn() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, 0.0, -torch.inf, -200.0]])
    for uniform in (0.0, 0.5, 1 - 2**-53, 1.0):
        chosen, logprob = draw(logits, torch.tensor([uniform], dtype=torch.float64), 1.0)
        assert chosen.item() in (1, 2) and logprob.item() == pytest.approx(-0.6931472)
    assert draw(logits, torch.tensor([0.0], dtype=torch.float64), 1.0)[0].item() == 1


def test_diverged_weights_are_reported() -> None:
    actor = perturbed(CONFIG)
    with torch.no_grad():
        actor.model.norm.weight.fill_(torch.nan)
    sampler = Sampler(actor, slots=1, max_len=32)
    with pytest.raises(FloatingPointError, match="not finite"):
        sample(sampler, [(sampler.open(0), [2, 3])], 4, STOPS, 1.0)


def test_misuse_is_refused(actor: Transformer) -> None:
    with pytest.raises(ValueError, match="slots 0"):
        Sampler(actor, slots=0, max_len=32)
    sampler = Sampler(actor, slots=2, max_len=32)
    slot = sampler.open(0)
    with pytest.raises(ValueError, match="without ids"):
        sampler.submit(slot, [], 4)
    with pytest.raises(ValueError, match="max_tokens 0"):
        sampler.submit(slot, [2], 0)
    with pytest.raises(ValueError, match="slot 1 is not open"):
        sampler.submit(1, [2], 4)
    sampler.submit(sampler.open(0), [2], 4)
    with pytest.raises(ValueError, match="slot 1 has a turn under way"):
        sampler.submit(1, [2], 4)
    for limits, message in (((-1.0,), "temperature -1"), ((1.0, 0), "top_p 0 in"), ((1.0, 1, -1), "top_k -1")):
        with pytest.raises(ValueError, match=message):
            sampler.advance(STOPS, *limits)
    with pytest.raises(ValueError, match="all 2 slots are taken"):
        sampler.open(0)
    for index in (0, 1):
        sampler.close(index)
    assert sampler.open(5) == slot
    assert not sampler.busy and sampler.advance(STOPS, 1.0) == {}
