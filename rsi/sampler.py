"""The embedded engine: samples for many sandboxes at once and keeps what it has read between their turns.

Batching is continuous: `Sampler.submit` gives a slot its new ids, `Sampler.advance` prefills what was submitted and
decodes until a turn ends, so a slot that waits for its command holds no row of the decode batch and one that is ready
joins the others at once.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from rsi.architecture import FULL, ModelConfig
from rsi.deltanet import DeltaState, Recur, recur
from rsi.draws import draw, uniforms
from rsi.model import LayerWeights, Mixing, Transformer, apply_layer, causal_attention, rms_norm, rotary
from rsi.packing import linear, pack

Turn = tuple[list[int], list[float]]
"""The ids of one turn and the log-prob of each."""
Cache = tuple[Tensor, ...]
"""What one layer keeps of every row: keys and values in one tensor, or the two of a `DeltaState`."""

LENGTH_STEP = 16
"""Decoding reads the cache up to the longest active row, rounded up to this."""
PREFILL_STEP = 16
"""New ids are padded to a multiple of this."""
PREFILL_TOKENS = 4096
"""Padded tokens in one prefill call, at most."""
MASK_ELEMENTS = 2**27
"""Elements of a prefill's mask, at most: where the cache is long, new ids are read a few hundred at a time."""
BATCH_SIZES = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Decode batches; never under 8 rows, where matrix products round differently."""


@dataclass
class _Slot:
    """One attempt: its row of the caches, how many of its ids lie there, those that do not yet, the turn under way."""

    row: int
    seed: int = 0
    taken: bool = False
    length: int = 0
    pending: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    max_tokens: int = 0

    def room(self, max_len: int) -> int:
        """Tokens that the turn may still have."""
        return min(self.max_tokens - len(self.ids), max_len - self.length - len(self.pending))


class Sampler:
    """Batched sampling from a `Transformer` with static caches: keys and values, or a recurrent state.

    The weights are read from the model whenever sampling begins with no turn under way: an optimizer step in between
    is seen at once (what was cached before it stays as it is). Given the same calls the results are bit-identical;
    the tokens of a request do not depend on its place in the list, nor on what else is in the batch.

    slots: attempts that can be open at once. max_len: ids of one attempt, at most.
    """

    def __init__(self, model: Transformer, slots: int, max_len: int) -> None:
        if slots < 1 or max_len < 2:
            raise ValueError(f"slots {slots} and max_len {max_len}: at least 1 slot of 2 ids is needed")
        self.model, self.max_len = model, max_len
        self.rows = _batch_size(slots)
        # One position more than any attempt uses: padding and dummy rows write there, and no query looks.
        self.capacity = _round_up(max_len + 1, LENGTH_STEP)
        device = model.head_weight.device
        self.caches = [
            _attention_cache(model.config, self.rows, self.capacity, model.head_weight)
            if kind == FULL
            else _delta_cache(model.config, self.rows, model.head_weight)
            for kind in model.config.kinds
        ]
        # Where each head's keys and values begin in an attention cache seen as [rows * 2K * capacity, C].
        heads = torch.arange(self.rows * 2 * model.config.num_key_value_heads, device=device)
        self.heads = heads.view(self.rows, -1, 1) * self.capacity
        positions = torch.arange(self.capacity, device=device)
        self.cos, self.sin = rotary(positions, model.config, model.head_weight.dtype)
        self.slots = [_Slot(row) for row in range(slots)]
        self.slot_of_row: list[_Slot | None] = [*self.slots, *[None] * (self.rows - slots)]
        self.waiting: list[int] = []
        self.active: list[int] = []
        self.window: tuple[int, int] = 0, 0
        self.views: list[tuple[Tensor, Tensor] | None] = []
        self.weights: list[LayerWeights] = []
        self.norm, self.head = model.model.norm.weights(), model.head_weight

    def open(self, seed: int) -> int:
        """Take a free slot for one attempt, whose draws are those of `seed`; returns the slot."""
        for index, slot in enumerate(self.slots):
            if not slot.taken:
                self.slots[index] = self.slot_of_row[slot.row] = _Slot(slot.row, seed, taken=True)
                return index
        raise ValueError(f"all {len(self.slots)} slots are taken: close one, or make a Sampler with more")

    def close(self, slot: int) -> None:
        """Give the slot back; a turn under way is dropped."""
        self._slot(slot).taken = False
        for places in (self.waiting, self.active):
            if slot in places:
                places.remove(slot)

    @property
    def busy(self) -> bool:
        """Whether a turn is under way or waits to begin."""
        return bool(self.waiting or self.active)

    def submit(self, slot: int, new_ids: Sequence[int], max_tokens: int) -> None:
        """Ask for one turn of at most `max_tokens` ids after `new_ids`, which follow all the slot has seen before.

        The ids of the last turn are known to the slot already: pass only what comes after them.
        """
        state = self._slot(slot)
        if slot in self.waiting or slot in self.active:
            raise ValueError(f"slot {slot} has a turn under way: it can sample one at a time")
        if not state.pending and not new_ids:
            raise ValueError("a request without ids: the first call of a slot needs its prompt")
        if max_tokens < 1:
            raise ValueError(f"max_tokens {max_tokens} must be at least 1")
        state.pending.extend(new_ids)
        state.ids, state.logprobs, state.max_tokens = [], [], max_tokens
        self.waiting.append(slot)

    @torch.inference_mode()
    def advance(
        self, stops: Collection[int], temperature: float, top_p: float = 1.0, top_k: int = 0
    ) -> dict[int, Turn]:
        """Prefill what was submitted and decode until at least one turn ends; returns those that did, by slot.

        A turn's ids include the one of `stops` that ended it; its log-probs are under softmax(logits / temperature).
        It also ends at its `max_tokens`, or where the attempt has `max_len` ids (a prompt that leaves no room gives
        an empty turn). With nothing submitted and nothing under way the result is empty.
        Raises FloatingPointError when the model's logits are not finite.
        """
        if temperature < 0 or not 0 < top_p <= 1 or top_k < 0:
            raise ValueError(
                f"temperature {temperature} must be at least 0, top_p {top_p} in (0, 1], top_k {top_k} at least 0"
            )
        full = {i for i in self.waiting if self.slots[i].length + len(self.slots[i].pending) >= self.max_len}
        fresh = [index for index in self.waiting if index not in full]
        self.waiting = []
        if not self.active:
            self.weights = self.model.model.layer_weights()
            self.norm, self.head = self.model.model.norm.weights(), pack(self.model.head_weight)
        going = [self.slots[index] for index in self.active]
        self.active += fresh
        if self.active:
            size = _batch_size(len(self.active))
            self._move_to_front([self.slots[index] for index in self.active], size)
            logits = self._next_logits(going, [self.slots[index] for index in fresh], size)
            self._decode(logits, stops, temperature, top_p, top_k)
        ended = full | {index for index in self.active if self._has_ended(self.slots[index], stops)}
        self.active = [index for index in self.active if index not in ended]
        return {index: (self.slots[index].ids, self.slots[index].logprobs) for index in sorted(ended)}

    def _slot(self, index: int) -> _Slot:
        if not 0 <= index < len(self.slots) or not self.slots[index].taken:
            raise ValueError(f"slot {index} is not open: use a slot that open() returned")
        return self.slots[index]

    def _has_ended(self, slot: _Slot, stops: Collection[int]) -> bool:
        return bool(slot.ids) and (slot.ids[-1] in stops or slot.room(self.max_len) <= 0)

    def _next_logits(self, going: list[_Slot], fresh: list[_Slot], size: int) -> Tensor:
        """Logits [size, V] for the next token of every row: one more id decoded, or all pending ones prefilled."""
        logits = None
        if going:
            ids = torch.zeros(size, dtype=torch.int64)
            ids[[slot.row for slot in going]] = torch.tensor([slot.pending[0] for slot in going])
            position = self._positions(going, size)
            logits = self._decode_step(ids.to(position.device), position, max(slot.length for slot in going) + 1)
            for slot in going:
                slot.length, slot.pending = slot.length + 1, []
        if fresh:
            first = self._prefill(fresh)
            if logits is None:
                logits = torch.zeros(size, first.shape[1], dtype=first.dtype, device=first.device)
            logits[torch.tensor([slot.row for slot in fresh], device=first.device)] = first
        assert logits is not None
        return logits

    def _positions(self, slots: list[_Slot], size: int) -> Tensor:
        """Where the next id of each row goes [size]; that of a dummy to the last position."""
        position = torch.full((size,), self.capacity - 1)
        position[[slot.row for slot in slots]] = torch.tensor([slot.length for slot in slots])
        return position.to(self.cos.device)

    def _prefill(self, fresh: list[_Slot]) -> Tensor:
        """Put every slot's pending ids into the caches; returns the logits [slots, V] after the last of each."""
        weight = self.model.head_weight
        last = torch.empty(len(fresh), self.model.config.hidden_size, dtype=weight.dtype, device=weight.device)
        for width, group in _prefill_groups(fresh):
            last[group] = self._prefill_group([fresh[index] for index in group], width)
        for slot in fresh:
            slot.length, slot.pending = slot.length + len(slot.pending), []
        return self._logits(F.pad(last, (0, 0, 0, _batch_size(len(fresh)) - len(fresh))))[: len(fresh)]

    def _prefill_group(self, group: list[_Slot], width: int) -> Tensor:
        """Hidden states [slots, D] after the last pending id of each."""
        device = self.cos.device
        ids = torch.tensor([slot.pending + [0] * (width - len(slot.pending)) for slot in group], device=device)
        count = torch.tensor([len(slot.pending) for slot in group], device=device)
        start = torch.tensor([slot.length for slot in group], device=device)
        rows = torch.tensor([slot.row for slot in group], device=device)
        positions = (start[:, None] + torch.arange(width, device=device)).clamp_(max=self.capacity - 1)
        longest = max(slot.length + len(slot.pending) for slot in group)
        fresh = all(slot.length == 0 for slot in group)
        shape = self.model.config
        masked = len(group) * shape.num_attention_heads // shape.num_key_value_heads * longest  # elements for a new id
        piece = width if fresh else max(1, MASK_ELEMENTS // (masked * PREFILL_STEP)) * PREFILL_STEP
        last = torch.empty(len(group), shape.hidden_size, dtype=self.cos.dtype, device=device)
        for first in range(0, width, piece):
            part = slice(first, first + piece)
            here = (count - first).clamp(0, piece)
            hidden = self._run(ids[:, part], positions[:, part], rows, here, longest, fresh)
            ends = ((count > first) & (count <= first + piece)).nonzero()[:, 0]
            last[ends] = hidden[ends, here[ends] - 1]
        return last

    def _decode(self, logits: Tensor, stops: Collection[int], temperature: float, top_p: float, top_k: int) -> None:
        """Sample until a turn ends; rows without one under way are dummies. Leaves the last ids in `pending`."""
        device, size = logits.device, len(logits)
        slots = [self.slots[index] for index in self.active]
        rows = torch.tensor([slot.row for slot in slots], device=device)
        position = self._positions(slots, size)
        ending = torch.tensor(sorted(stops), dtype=torch.int64, device=device)
        lengths = [slot.length for slot in slots]
        steps = min(slot.room(self.max_len) for slot in slots)
        uniform = torch.zeros(steps, size, dtype=torch.float64, device=device)
        uniform[:, rows] = uniforms([slot.seed for slot in slots], lengths, steps).T.to(device)
        found: list[tuple[Tensor, Tensor]] = []
        for step in range(steps):
            found.append(draw(logits, uniform[step], temperature, top_p, top_k))
            chosen = found[-1][0]
            if step + 1 == steps or bool(torch.isin(chosen[rows], ending).any()):
                break
            logits = self._decode_step(chosen, position, max(lengths) + step + 1)
        ids, logprobs = (torch.stack(drawn, 1)[rows] for drawn in zip(*found, strict=True))
        if not bool(logprobs.isfinite().all()):
            raise FloatingPointError("the model's logits are not finite: its weights have diverged")
        for slot, new_ids, new_logprobs in zip(slots, ids.tolist(), logprobs.tolist(), strict=True):
            slot.ids += new_ids
            slot.logprobs += new_logprobs
            slot.length += len(new_ids) - 1
            slot.pending = new_ids[-1:]

    def _decode_step(self, ids: Tensor, position: Tensor, longest: int) -> Tensor:
        """Logits [N, V] after one more id in each of the first N rows of the caches, whose `position` [N] moves on.

        Dummies leave the caches as they are. longest: ids of the longest row, this one included.
        """
        is_live = (position < self.capacity - 1).long()
        hidden = self._run(ids[:, None], position[:, None], slice(len(ids)), is_live, longest)
        position += is_live
        return self._logits(hidden[:, 0])

    def _run(
        self,
        ids_BT: Tensor,
        position_BT: Tensor,
        rows: Tensor | slice,
        count: Tensor,
        longest: int,
        fresh: bool = False,
    ) -> Tensor:
        """Hidden states [B, T, D] of ids that follow what the `rows` of the caches hold, which take up `count` of each.

        longest: ids of the longest row, these included. fresh: all rows begin here.
        """
        config = self.model.config
        span = min(self.capacity, _round_up(longest, LENGTH_STEP))
        mask = _mask(position_BT, 0 if fresh else span, self.model)
        places = (self.heads[rows] + position_BT[:, None]).flatten()
        cos_sin = self.cos[position_BT].unsqueeze(1), self.sin[position_BT].unsqueeze(1)
        hidden = self.model.model.embed_tokens(ids_BT)
        views = self._views(rows, span)
        for weights, cache, view in zip(self.weights, self.caches, views, strict=True):

            def attend(
                q: Tensor, k: Tensor, v: Tensor, cache: Cache = cache, view: tuple[Tensor, Tensor] | None = view
            ) -> Tensor:
                (kept,) = cache
                new = torch.cat((k, v), 1).view(-1, config.head_dim)
                kept.view(-1, config.head_dim).index_copy_(0, places, new)
                if fresh:
                    return causal_attention(q, k, v)
                return _attend_cached(q, *(view or _read(kept, rows, span)), mask)

            go_on = _recurrence(cache, rows, count, fresh)
            hidden = apply_layer(weights, hidden, cos_sin, config, Mixing(attend, go_on))
        return hidden

    def _views(self, rows: Tensor | slice, span: int) -> Sequence[tuple[Tensor, Tensor] | None]:
        """What a step of decoding `_read`s, by layer: views, which serve until rows or span change.

        Nothing for a layer without attention, and nothing for chosen rows: theirs are copies.
        """
        if not isinstance(rows, slice):
            return [None] * len(self.caches)
        if self.window != (rows.stop, span):
            self.window = rows.stop, span
            kinds = self.model.config.kinds
            self.views = [
                _read(cache[0], rows, span) if kind == FULL else None
                for kind, cache in zip(kinds, self.caches, strict=True)
            ]
        return self.views

    def _logits(self, hidden_ND: Tensor) -> Tensor:
        """`Transformer.logits` of what the last layer gave."""
        return linear(rms_norm(hidden_ND, self.norm), self.head).float()

    def _move_to_front(self, active: Sequence[_Slot], size: int) -> None:
        """Exchange rows of the caches so that every active slot lies below `size`."""
        used = {slot.row for slot in active}
        moving = [slot.row for slot in active if slot.row >= size]
        if not moving:
            return
        holes = [row for row in range(size) if row not in used][: len(moving)]
        span = min(self.capacity, max(slot.length for slot in self.slots))
        to, of = holes + moving, moving + holes
        for kind, cache in zip(self.model.config.kinds, self.caches, strict=True):
            for kept in cache:
                used_part = kept[:, :, :span] if kind == FULL else kept
                used_part[to] = used_part[of]
        for low, high in zip(holes, moving, strict=True):
            self.slot_of_row[low], self.slot_of_row[high] = self.slot_of_row[high], self.slot_of_row[low]
        for row in holes + moving:
            slot = self.slot_of_row[row]
            if slot is not None:
                slot.row = row


def _attention_cache(config: ModelConfig, rows: int, capacity: int, like: Tensor) -> Cache:
    """The keys of one layer, then its values: [rows, 2K, capacity, C]."""
    return (like.new_zeros(rows, 2 * config.num_key_value_heads, capacity, config.head_dim),)


def _delta_cache(config: ModelConfig, rows: int, like: Tensor) -> Cache:
    """The `DeltaState` of every row of one layer."""
    inputs = like.new_zeros(rows, config.linear_conv_kernel_dim - 1, config.linear_channels)
    shape = config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim
    return inputs, like.new_zeros(rows, *shape, dtype=torch.float32)


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


def _recurrence(cache: Cache, rows: Tensor | slice, count: Tensor, fresh: bool = False) -> Recur:
    """A DeltaNet layer's `recur` from the state in the cache's `rows` (none if `fresh`), which it moves on by `count`
    tokens each."""

    def go_on(qkv: Tensor, taps: Tensor, gate: Tensor, beta: Tensor, config: ModelConfig) -> Tensor:
        state = None if fresh else DeltaState(cache[0][rows], cache[1][rows])
        out, state = recur(qkv, taps, gate, beta, config, state, count)
        cache[0][rows], cache[1][rows] = state
        return out

    return go_on


def _attend_cached(q_BHTC: Tensor, keys_BKLC: Tensor, values_BKLC: Tensor, mask_B1SL: Tensor) -> Tensor:
    """Attention over a cache, the heads of one key/value head folded into the query axis (S = H / K * T): out_BTHC."""
    rows, _, width, channels = q_BHTC.shape
    folded = q_BHTC.reshape(rows, keys_BKLC.shape[1], -1, channels)
    out = F.scaled_dot_product_attention(folded, keys_BKLC, values_BKLC, mask_B1SL)
    return out.reshape(rows, -1, width, channels).transpose(1, 2)


def _read(kept: Tensor, rows: Tensor | slice, span: int) -> tuple[Tensor, Tensor]:
    """Keys and values [B, K, span, C] of an attention cache's rows."""
    heads = kept.shape[1] // 2
    return kept[rows, :heads, :span], kept[rows, heads:, :span]


def _mask(position_BT: Tensor, span: int, model: Transformer) -> Tensor:
    """[B, 1, S, span] for `_attend_cached`: 0 where a query at its position may look, -inf beyond."""
    group = model.config.num_attention_heads // model.config.num_key_value_heads
    position_BS = position_BT.repeat(1, group)
    hidden = torch.arange(span, device=position_BT.device) > position_BS[:, None, :, None]
    return torch.where(hidden, -torch.inf, 0.0).to(model.head_weight.dtype)


def _batch_size(count: int) -> int:
    return next((size for size in BATCH_SIZES if size >= count), _round_up(count, 128))


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
