"""The embedded engine: samples for many sandboxes at once and keeps their keys and values between turns.

One call of `Sampler.generate` is one lock-step round: the new ids of every slot are prefilled in batches of
similar length, then all slots decode together until each has ended its turn. Rows that have ended are dropped
in steps of `BATCH_SIZES`, so that stragglers do not pay for a full batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rsi.model import LayerWeights, Mixing, Transformer, apply_layer, causal_attention, rotary

LENGTH_STEP = 32
"""Decoding reads the cache up to the longest active row, rounded up to this."""
PREFILL_STEP = 16
"""New ids are padded to a multiple of this."""
PREFILL_TOKENS = 4096
"""Padded tokens in one prefill call, at most."""
BATCH_SIZES = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Decode batches; never under 8 rows, where matrix products round differently."""

_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def uniforms(seeds: Sequence[int], first: Sequence[int], count: int) -> Tensor:
    """float64 [len(seeds), count] in [0, 1): the draw of each seed at positions first, first + 1, ...

    Counter based (splitmix64, Steele et al. 2014): a draw depends on seed and position alone.
    """
    state = _mix(np.array([seed % 2**64 for seed in seeds], dtype=np.uint64) + _GAMMA)
    position = np.array(first, dtype=np.uint64)[:, None] + np.arange(1, count + 1, dtype=np.uint64)
    bits = _mix(state[:, None] + position * _GAMMA)
    return torch.from_numpy((bits >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def _mix(value: np.ndarray) -> np.ndarray:
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def draw(logits_NV: Tensor, uniform_N: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Token ids [N] by the inverse distribution function of softmax(logits / temperature), and their log-probs.

    Temperature 0 takes the most likely token, with its log-prob at temperature 1. A token of probability 0 in
    float32 is never chosen, however close `uniform_N` comes to 1.
    """
    scaled = logits_NV / temperature if temperature > 0 else logits_NV
    log_total = scaled.logsumexp(-1, keepdim=True)
    if temperature > 0:
        cumulative = (scaled - log_total).exp_().cumsum(-1, dtype=torch.float64)
        total = cumulative[:, -1]
        target = torch.minimum(uniform_N * total, torch.nextafter(total, torch.zeros_like(total)))
        chosen = torch.searchsorted(cumulative, target[:, None], right=True)
        # NaN logits find no place; they are reported by the caller, who sees a NaN log-prob.
        chosen = chosen.clamp_(max=logits_NV.shape[1] - 1)
    else:
        chosen = scaled.argmax(-1, keepdim=True)
    return chosen[:, 0], (scaled.gather(1, chosen) - log_total)[:, 0]


@dataclass
class _Slot:
    """One attempt: its row of the cache, how many of its ids lie there, and the ids that do not yet."""

    row: int
    seed: int = 0
    taken: bool = False
    length: int = 0
    pending: list[int] = field(default_factory=list)


class Sampler:
    """Batched sampling from a `Transformer` with a static key/value cache.

    The weights are read from the model at every call: an optimizer step in between is seen at once (keys and
    values cached before it stay as they are). Given the same calls the results are bit-identical; the tokens of
    a request do not depend on its place in the list.

    slots: attempts that can be open at once. max_len: ids of one attempt, at most.
    """

    def __init__(self, model: Transformer, slots: int, max_len: int) -> None:
        if slots < 1 or max_len < 2:
            raise ValueError(f"slots {slots} and max_len {max_len}: at least 1 slot of 2 ids is needed")
        config = model.config
        self.model, self.max_len = model, max_len
        self.rows = _batch_size(slots)
        # One position more than any attempt uses: padding and dummy rows write there, and no query looks.
        self.capacity = _round_up(max_len + 1, LENGTH_STEP)
        weight = model.head_weight
        shape = (config.num_hidden_layers, self.rows, config.num_key_value_heads)
        # Keys with the position last: the products of decoding read them in order, 1.4 times as fast.
        self.keys = torch.zeros(*shape, config.head_dim, self.capacity, dtype=weight.dtype, device=weight.device)
        self.values = torch.zeros(*shape, self.capacity, config.head_dim, dtype=weight.dtype, device=weight.device)
        positions = torch.arange(self.capacity, device=weight.device)
        self.cos, self.sin = rotary(positions, config)
        self.slots = [_Slot(row) for row in range(slots)]
        self.slot_of_row: list[_Slot | None] = [*self.slots, *[None] * (self.rows - slots)]

    def open(self, seed: int) -> int:
        """Take a free slot for one attempt, whose draws are those of `seed`; returns the slot."""
        for index, slot in enumerate(self.slots):
            if not slot.taken:
                slot.taken, slot.seed, slot.length, slot.pending = True, seed, 0, []
                return index
        raise ValueError(f"all {len(self.slots)} slots are taken: close one, or make a Sampler with more")

    def close(self, slot: int) -> None:
        """Give the slot back."""
        self._slot(slot).taken = False

    @torch.no_grad()
    def generate(
        self, requests: Sequence[tuple[int, Sequence[int]]], max_tokens: int, stop: int, temperature: float
    ) -> list[tuple[list[int], list[float]]]:
        """Sample one turn for each (slot, new ids): the ids that follow all the slot has seen before.

        The ids of the last turn are known to the slot already: pass only what comes after them. Returns, in the
        order of the requests, the sampled ids (`stop` included) and their log-probs under
        softmax(logits / temperature). A turn ends with `stop`, at `max_tokens`, or where the attempt has
        `max_len` ids (a prompt that leaves no room gives an empty turn).
        Raises FloatingPointError when the model's logits are not finite.
        """
        if max_tokens < 1 or temperature < 0:
            raise ValueError(f"max_tokens {max_tokens} must be at least 1, temperature {temperature} at least 0")
        slots = [self._slot(index) for index, _ in requests]
        if len({id(slot) for slot in slots}) < len(slots):
            raise ValueError("a slot appears twice in one call: it can sample one turn at a time")
        for slot, (_, new_ids) in zip(slots, requests, strict=True):
            slot.pending.extend(new_ids)
            if not slot.pending:
                raise ValueError("a request without ids: the first call of a slot needs its prompt")
        running = [index for index, slot in enumerate(slots) if slot.length + len(slot.pending) < self.max_len]
        turns: list[tuple[list[int], list[float]]] = [([], []) for _ in requests]
        if not running:
            return turns
        active = [slots[index] for index in running]
        self._move_to_front(active, _batch_size(len(active)))
        weights = self.model.model.layer_weights()
        logits = self._prefill(weights, active)
        ids, logprobs = self._decode(weights, active, logits, max_tokens, stop, temperature)
        for index, slot, turn_ids, turn_logprobs in zip(running, active, ids, logprobs, strict=True):
            turns[index] = turn_ids, turn_logprobs
            slot.length += len(turn_ids) - 1
            slot.pending = turn_ids[-1:]
        return turns

    def _slot(self, index: int) -> _Slot:
        if not 0 <= index < len(self.slots) or not self.slots[index].taken:
            raise ValueError(f"slot {index} is not open: use a slot that open() returned")
        return self.slots[index]

    def _prefill(self, weights: list[LayerWeights], active: list[_Slot]) -> Tensor:
        """Put every slot's pending ids into the cache; returns the logits [slots, V] after the last of each."""
        last = torch.empty(len(active), self.model.config.hidden_size, dtype=self.keys.dtype, device=self.keys.device)
        for width, group in _prefill_groups(active):
            last[group] = self._prefill_group(weights, [active[index] for index in group], width)
        for slot in active:
            slot.length += len(slot.pending)
        return self.model.logits(_pad_rows(last, _batch_size(len(active))))[: len(active)]

    def _prefill_group(self, weights: list[LayerWeights], group: list[_Slot], width: int) -> Tensor:
        device = self.keys.device
        ids = torch.tensor([slot.pending + [0] * (width - len(slot.pending)) for slot in group], device=device)
        count = torch.tensor([len(slot.pending) for slot in group], device=device)
        start = torch.tensor([slot.length for slot in group], device=device)
        rows = torch.tensor([slot.row for slot in group], device=device)
        positions = (start[:, None] + torch.arange(width, device=device)).clamp_(max=self.capacity - 1)
        span = min(self.capacity, _round_up(max(slot.length + len(slot.pending) for slot in group), LENGTH_STEP))
        fresh = all(slot.length == 0 for slot in group)
        bias = _bias(positions, 0 if fresh else span, self.keys.dtype)
        cos_sin = self.cos[positions], self.sin[positions]
        hidden = self.model.model.embed_tokens(ids)
        for layer, layer_weights in enumerate(weights):

            def attend(q: Tensor, k: Tensor, v: Tensor, layer: int = layer) -> Tensor:
                keys, values = self.keys[layer], self.values[layer]
                keys[rows[:, None], :, :, positions] = k
                values[rows[:, None], :, positions] = v
                if fresh:
                    return causal_attention(q, k, v)
                return _attend_cached(q, keys[rows, :, :, :span], values[rows, :, :span], bias)

            hidden = apply_layer(layer_weights, hidden, cos_sin, self.model.config, Mixing(attend))
        hidden = hidden[torch.arange(len(group), device=device), count - 1]
        return self.model.model.final_norm(hidden)

    def _decode(
        self,
        weights: list[LayerWeights],
        active: list[_Slot],
        first_logits: Tensor,
        max_tokens: int,
        stop: int,
        temperature: float,
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Sample until every slot has ended; request numbers beyond the last are dummy rows."""
        device, requests = self.keys.device, len(active)
        max_tokens = min(max_tokens, self.max_len - min(slot.length for slot in active))
        uniform = torch.zeros(requests + 1, max_tokens, dtype=torch.float64)
        uniform[:requests] = uniforms([slot.seed for slot in active], [slot.length for slot in active], max_tokens)
        uniform = uniform.to(device)
        ids = torch.full((requests + 1, max_tokens), -1, device=device)
        logprobs = torch.zeros(requests + 1, max_tokens, device=device)
        size = _batch_size(requests)
        request = torch.full((size,), requests, device=device)
        position = torch.full((size,), self.capacity - 1, device=device)
        rows = torch.tensor([slot.row for slot in active], device=device)
        request[rows] = torch.arange(requests, device=device)
        position[rows] = torch.tensor([slot.length for slot in active], device=device)
        logits = _pad_rows(first_logits, requests + 1)[request]
        for step in range(max_tokens):
            chosen, logprob = draw(logits, uniform[request, step], temperature)
            ids[request, step], logprobs[request, step] = chosen, logprob
            ended = (request == requests) | (chosen == stop) | (position + 1 >= self.max_len)
            remaining = size - int(ended.sum())
            if remaining == 0 or step + 1 == max_tokens:
                break
            request = torch.where(ended, requests, request)
            feed = torch.where(ended, self.capacity - 1, position)
            if _batch_size(remaining) < size:
                size = _batch_size(remaining)
                still = [active[index] for index in request.tolist() if index < requests]
                order = torch.tensor(self._move_to_front(still, size, step)[:size], device=device)
                request, feed, chosen = request[order], feed[order], chosen[order]
            logits = self._decode_step(weights, chosen, feed)
            position = feed + 1
        ids, logprobs = ids[:requests].cpu(), logprobs[:requests].cpu()
        counts = (ids >= 0).sum(1).tolist()
        if not bool(logprobs.isfinite().all()):
            raise FloatingPointError("the model's logits are not finite: its weights have diverged")
        return (
            [row[:count] for row, count in zip(ids.tolist(), counts, strict=True)],
            [row[:count] for row, count in zip(logprobs.tolist(), counts, strict=True)],
        )

    def _decode_step(self, weights: list[LayerWeights], ids: Tensor, position: Tensor) -> Tensor:
        """Logits [N, V] after one more id in each of the first N rows of the cache."""
        size, model = len(ids), self.model
        rows = torch.arange(size, device=ids.device)
        longest = int(torch.where(position < self.capacity - 1, position, 0).max()) + 1
        span = min(self.capacity, _round_up(longest, LENGTH_STEP))
        bias = _bias(position[:, None], span, self.keys.dtype)
        cos_sin = self.cos[position][:, None], self.sin[position][:, None]
        hidden = model.model.embed_tokens(ids)[:, None]
        for layer, layer_weights in enumerate(weights):

            def attend(q: Tensor, k: Tensor, v: Tensor, layer: int = layer) -> Tensor:
                keys, values = self.keys[layer], self.values[layer]
                keys[rows, :, :, position], values[rows, :, position] = k[:, 0], v[:, 0]
                return _attend_cached(q, keys[:size, ..., :span], values[:size, :, :span], bias)

            hidden = apply_layer(layer_weights, hidden, cos_sin, model.config, Mixing(attend))
        return model.logits(model.model.final_norm(hidden[:, 0]))

    def _move_to_front(self, active: Sequence[_Slot], size: int, decoded: int = 0) -> list[int]:
        """Exchange rows of the cache so that every active slot lies below `size`.

        decoded: ids in the cache beyond each slot's `length`. Returns, for each row, the row it held before.
        """
        order = list(range(self.rows))
        used = {slot.row for slot in active}
        moving = [slot.row for slot in active if slot.row >= size]
        if not moving:
            return order
        holes = [row for row in range(size) if row not in used][: len(moving)]
        span = min(self.capacity, max(slot.length for slot in self.slots) + decoded)
        to, of = holes + moving, moving + holes
        self.keys[:, to, :, :, :span] = self.keys[:, of, :, :, :span]
        self.values[:, to, :, :span] = self.values[:, of, :, :span]
        for low, high in zip(holes, moving, strict=True):
            order[low], order[high] = high, low
            self.slot_of_row[low], self.slot_of_row[high] = self.slot_of_row[high], self.slot_of_row[low]
        for row in holes + moving:
            slot = self.slot_of_row[row]
            if slot is not None:
                slot.row = row
        return order


def _prefill_groups(active: Sequence[_Slot]) -> list[tuple[int, list[int]]]:
    """Padded width and indices of the slots of each prefill call, whatever the order of the slots."""
    by_width: dict[tuple[bool, int], list[int]] = {}
    for index in sorted(range(len(active)), key=lambda index: (active[index].length, active[index].seed)):
        slot = active[index]
        by_width.setdefault((slot.length > 0, _round_up(len(slot.pending), PREFILL_STEP)), []).append(index)
    groups = []
    for (_, width), indices in sorted(by_width.items()):
        size = max(1, PREFILL_TOKENS // width)
        groups += [(width, indices[first : first + size]) for first in range(0, len(indices), size)]
    return groups


def _attend_cached(q_BTHC: Tensor, keys_BKCL: Tensor, values_BKLC: Tensor, bias_BTL: Tensor) -> Tensor:
    """Attention over a cache, the heads of one key/value head folded into the query axis: out_BTHC."""
    rows, width, heads, channels = q_BTHC.shape
    kv_heads, span = keys_BKCL.shape[1], keys_BKCL.shape[3]
    group = heads // kv_heads
    folded = (q_BTHC * channels**-0.5).unflatten(2, (kv_heads, group)).transpose(1, 2)
    scores = torch.bmm(folded.reshape(rows * kv_heads, width * group, channels), keys_BKCL.flatten(0, 1))
    scores.view(rows, kv_heads, width, group, span).add_(bias_BTL[:, None, :, None])
    out = torch.bmm(scores.softmax(-1), values_BKLC.flatten(0, 1))
    out = out.view(rows, kv_heads, width, group, channels).transpose(1, 2)
    return out.reshape(rows, width, heads, channels)


def _bias(position_BT: Tensor, span: int, dtype: torch.dtype) -> Tensor:
    """[B, T, span]: 0 where a query at its position may look, -inf beyond."""
    hidden = torch.arange(span, device=position_BT.device) > position_BT[..., None]
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)


def _pad_rows(values: Tensor, rows: int) -> Tensor:
    return F.pad(values, (0, 0, 0, rows - len(values)))


def _batch_size(count: int) -> int:
    return next((size for size in BATCH_SIZES if size >= count), _round_up(count, 128))


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
