"""What a run needs: `--dry-run` prints it, without a GPU, a download or a byte written, and a run that needs more than
a rank has is refused.

Parameters are counted on a model built on the meta device; activations are what one layer of each kind keeps for its
backward pass, caught while it runs on tensors without storage.
"""

import dataclasses
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from rsi_kernels.linear_logprob import GPU_TILE_BYTES
from rsi_sandbox import SandboxError, open_backend
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from rsi.architecture import PUBLISHED, ModelConfig
from rsi.checkpoint import Run, require_same
from rsi.config import Config, UserError, to_record
from rsi.distributed import find_device, gather, is_spread, rank_memory, world
from rsi.model import Critic, Layer, Mixing, Transformer, rotary
from rsi.packing import packs
from rsi.sampler import Sampler
from rsi.session import check_backend, prepare_tasks
from rsi.stages import Stage
from rsi.weights import check_files, find_folder, load_chat, read_config

GIB = 2**30
FLOAT32, STATE = 4, 16  # bytes a parameter: its weight; weight, gradient and two moments
SAMPLES = 512, 1024  # tokens for which activations are counted; those of other numbers lie on the same line


@dataclass(frozen=True)
class Memory:
    """Bytes of one network on one rank. What is `resident` is there all the time, sharded over all ranks along the
    parameters' first dimension; the rest comes and goes with a micro-batch, the root's reduction at its end.
    """

    resident: int
    gathered: int
    activations: int
    head: int
    reduction: int

    @property
    def passing(self) -> int:
        return max(self.gathered + self.activations + self.head, self.reduction)


def model_config(config: Config) -> ModelConfig:
    """The model that a run would train. Raises UserError where an attempt may be longer than it has positions."""
    model = _find_model(config)
    if config.rollout.max_length > model.max_position_embeddings:
        raise UserError(
            f"--rollout.max-length {config.rollout.max_length}: the model has {model.max_position_embeddings} positions"
        )
    return model


def _find_model(config: Config) -> ModelConfig:
    """The model of the run's base stage where that is done; else the embedded one, a folder's, or a published one."""
    shape, done = config.model, Run(config.folder, config).path("base") / "actor"
    name, is_hub = config.init.removeprefix("hub:"), config.init.startswith("hub:")
    try:
        if done.is_dir():
            return read_config(done)
        if is_hub and name in PUBLISHED:
            return PUBLISHED[name]
        if is_hub and config.dry_run:
            raise ValueError("its sizes are not known here; download it and give the folder")
        if config.init:
            return read_config(find_folder(config.init))
        return ModelConfig(
            shape.vocab_size, shape.hidden_size, shape.intermediate_size, shape.layers, shape.heads, shape.kv_heads,
            shape.head_dim,
        )  # fmt: skip
    except ValueError as problem:
        raise UserError(f"{f'--init {config.init}' if config.init else '--model'}: {problem}") from problem


def build(model: ModelConfig) -> tuple[Transformer, Critic]:
    """Both networks, without storage."""
    with torch.device("meta"):
        return Transformer(model), Critic(model)


def parameters_by_part(network: nn.Module) -> dict[str, int]:
    """Parameter counts of embedding, attention, DeltaNet, MLP, norms and heads."""
    names = {
        "embed_tokens": "embedding",
        "self_attn": "attention",
        "linear_attn": "DeltaNet",
        "mlp": "MLP",
        "lm_head": "output head",
        "value_head": "value head",
    }
    counts: dict[str, int] = {}
    for name, parameter in network.named_parameters():
        part = next((label for word, label in names.items() if word in name.split(".")), "norms")
        counts[part] = counts.get(part, 0) + parameter.numel()
    return counts


def memory(network: Transformer | Critic, config: Config) -> Memory:
    """What one rank of `config.ranks` needs for a training step of the network with AdamW.

    Its micro-batches have `micro_batch_tokens` tokens, or those of an attempt of full length where that is longer.
    """
    shape, dtype = network.config, getattr(torch, config.precision)
    tokens = max(config.micro_batch_tokens, config.rollout.max_length)
    sharded = sum(-(-p.shape[0] // config.ranks) * (p.numel() // p.shape[0]) for p in network.parameters())
    layers = [layer for layer in network.model.layers if isinstance(layer, Layer)]
    largest = max(sum(p.numel() for p in layer.parameters()) for layer in layers)
    root = sum(p.numel() for p in network.parameters()) - sum(p.numel() for layer in layers for p in layer.parameters())
    gathered = reduction = 0
    if is_spread(config, config.ranks):  # as FSDP2 does it (bench/scaling.py --simulate)
        # Root and its gradient; two layers, one at work, one on its way; a layer's gradient and that in float32.
        gathered = dtype.itemsize * (2 * root + 3 * largest) + FLOAT32 * largest
        reduction = (dtype.itemsize + FLOAT32) * root
    kept = {kind: kept_bytes(shape, kind, tokens, dtype) for kind in set(shape.kinds)}
    activations = sum(kept[kind] for kind in shape.kinds)
    if config.recompute:
        activations = dtype.itemsize * tokens * shape.hidden_size * shape.num_hidden_layers + max(kept.values())
    # Logits exist a tile at a time, beside the hidden states' gradient (`rsi_kernels.linear_logprob`).
    tile = min(GPU_TILE_BYTES, FLOAT32 * tokens * shape.vocab_size)
    head = FLOAT32 * tokens * shape.hidden_size + 2 * tile if isinstance(network, Transformer) else 0
    return Memory(STATE * sharded, gathered, activations, head, reduction)


def kept_bytes(config: ModelConfig, kind: str, tokens: int, dtype: torch.dtype) -> int:
    """`saved_bytes` of any number of tokens: weights that were reordered do not grow with them, all else does alike
    (attention scores are not kept), the first chunk of the delta rule apart, which reads no state.
    """
    few, more = (saved_bytes(config, kind, sample, dtype) for sample in SAMPLES)
    return more + (more - few) * (tokens - SAMPLES[1]) // (SAMPLES[1] - SAMPLES[0])


@cache
def saved_bytes(config: ModelConfig, kind: str, tokens: int, dtype: torch.dtype = torch.float32) -> int:
    """Bytes that one layer keeps for its backward pass over one sequence of `tokens` tokens."""
    storages: dict[object, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage.nbytes()
        held.append(tensor)  # alive, so that no later storage takes its place
        return tensor

    held: list[Tensor] = []
    with torch.device("meta"):
        layer = Layer(config, kind).to(dtype)
    with FakeTensorMode(allow_non_fake_inputs=True):
        layer.to_empty(device="cpu")
        weights = {parameter.untyped_storage()._cdata for parameter in layer.parameters()}
        hidden = torch.empty(1, tokens, config.hidden_size, dtype=dtype, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            layer(hidden, rotary(torch.arange(tokens), config, dtype), Mixing())
        return sum(count for storage, count in storages.items() if storage not in weights)


def sampler_memory(actor: Transformer, config: Config) -> dict[str, int]:
    """Bytes of what one rank samples with: the actor whole where it is spread, its weights joined, caches.

    Of ranks that run here bfloat16 weights are packed on a CPU (`rsi.packing`); other machines are taken to have GPUs.
    """
    slots = config.rank_slots(config.ranks)
    with torch.device("meta"):
        copy = Transformer(actor.config).to(getattr(torch, config.precision))
    sampler = Sampler(copy, slots, config.rollout.max_length)
    copied = sum(p.nbytes for p in copy.parameters()) if is_spread(config, config.ranks) else 0
    weights = [leaf for leaf in tree_leaves(copy.model.layer_weights()) if isinstance(leaf, Tensor)]
    # Where they are packed, every matrix is a copy, the output's too; else only those that are joined.
    own = {parameter.untyped_storage()._cdata for parameter in copy.parameters()}
    packed = are_here(config) and packs(find_device(), copy.head_weight.dtype)
    made = [t for t in weights if t.untyped_storage()._cdata not in own or (packed and t.is_leaf and t.dim() == 2)]
    joined = sum(tensor.nbytes for tensor in made) + (copy.head_weight.nbytes if packed else 0)
    caches = sum(tensor.nbytes for tensor in tree_leaves(sampler.caches))
    return {"whole actor": copied, "joined weights": joined, f"caches of {slots} slots": caches}


@dataclass(frozen=True)
class Need:
    """Bytes of one rank. Training the `networks` and sampling take turns, each beside all shards."""

    networks: dict[str, Memory]
    sampler: dict[str, int]
    resident: int

    @property
    def training(self) -> int:
        return self.resident + max((network.passing for network in self.networks.values()), default=0)

    @property
    def sampling(self) -> int:
        return self.resident + sum(self.sampler.values())


def need(actor: Transformer, critic: Critic, config: Config, stages: Sequence[Stage]) -> Need:
    """What `stages` need on each of `config.ranks` ranks; of a device whose networks are offloaded no shards."""
    networks, kinds = {"actor": memory(actor, config)}, {stage.kind for stage in stages}
    weights = networks["actor"].resident * FLOAT32 // STATE
    if "rpr" in kinds:
        networks["critic"] = memory(critic, config)
    elif "rsr" not in kinds:
        networks = {}
    resident = sum(network.resident for network in networks.values()) or weights
    if "rpr" in kinds and config.rpr.kl_coefficient:
        resident += weights  # the reference's
    return Need(networks, sampler_memory(actor, config), 0 if config.offload else resident)


def are_here(config: Config) -> bool:
    """Whether the plan's ranks are as many as run here."""
    return config.ranks == int(os.environ.get("WORLD_SIZE", "1"))


def limit(config: Config) -> float | None:
    """GiB that a rank has: as the user says, or as found where the ranks are here."""
    if config.rank_gib is not None:
        return config.rank_gib
    return rank_memory() / GIB if are_here(config) else None


def check(wanted: Need, gib: float | None) -> None:
    """Raises UserError where a rank needs more than the `gib` that it has (None: not known)."""
    most = max(wanted.training, wanted.sampling) / GIB
    if gib is not None and most > gib:
        raise UserError(
            f"a rank needs {most:.2f} GiB ({wanted.training / GIB:.2f} to train, {wanted.sampling / GIB:.2f} to sample"
            f" from a whole actor beside its shards) and has {gib:.2f}: take more ranks, --recompute,"
            " --precision bfloat16, --offload, fewer --micro-batch-tokens or --rollout.slots"
        )


def check_here(config: Config, stages: Sequence[Stage]) -> None:
    """Refuse, before anything is written, what a run of `stages` on the ranks that there are cannot do. All ranks call.

    That is another configuration than the folder's, networks that do not fit, a checkpoint that is damaged or knows
    no ChatML, tasks that cannot be read, sandboxes that cannot be had.
    """
    require_same(config)
    if not stages:
        return
    config, problem = dataclasses.replace(config, ranks=world()), ""
    check(need(*build(model_config(config)), config, stages), limit(config))
    try:
        if config.init and stages[0].kind == "base":
            folder = find_folder(config.init)
            load_chat(folder, read_config(folder))
            check_files(folder)
        with open_backend(config.sandbox, run=config.folder.name) as backend:
            if config.tasks:
                check_backend(backend, *prepare_tasks(config))
    except (SandboxError, ValueError) as found:
        problem = str(found)
    if problems := [each for each in gather("what was given", problem) if each]:
        raise UserError(problems[0])


def print_plan(config: Config) -> None:
    """The resolved configuration and what would run; nothing is written. Raises UserError where it does not fit."""
    require_same(config)
    print(json.dumps(to_record(config), indent=1))
    actor, critic = build(model_config(config))
    stages = Run(config.folder, config).missing()
    for label, line in lines(config, actor, critic, stages):
        print(f"{label:<13}{line}")
    check(need(actor, critic, config, stages), limit(config))


def lines(config: Config, actor: Transformer, critic: Critic, stages: Sequence[Stage]) -> Iterator[tuple[str, str]]:
    """The plan, a label and its text a line."""
    yield "run folder", str(config.folder)
    yield "stages", ", ".join(stage.name for stage in stages) or "all done"
    model = actor.config
    source = config.init or "embedded, pretrained here"
    yield "model", f"{source} ({model.model_type}, {model.num_hidden_layers} layers)"
    for name, network in (("actor", actor), ("critic", critic)):
        counts = parameters_by_part(network)
        parts = ", ".join(f"{part} {count:,}" for part, count in counts.items())
        yield name, f"{sum(counts.values()):,} parameters: {parts}"
    wanted = need(actor, critic, config, stages)
    for name, of in wanted.networks.items():
        parts = ", ".join(f"{part} {count / GIB:.2f}" for part, count in vars(of).items())
        yield f"{name} GiB", f"{(of.resident + of.passing) / GIB:.2f} a rank of {config.ranks}: {parts}"
    parts = ", ".join(f"{part} {count / GIB:.2f}" for part, count in wanted.sampler.items())
    yield "sampler GiB", f"{sum(wanted.sampler.values()) / GIB:.2f} a rank: {parts}"
    found = limit(config)
    has = f"it has {found:.2f}" if found else "compared with what a rank has where that is given: --rank-gib"
    recomputed = need(actor, critic, dataclasses.replace(config, recompute=True), stages).training
    hint = "" if config.recompute else f" ({recomputed / GIB:.2f} with --recompute)"
    yield "rank GiB", f"{wanted.training / GIB:.2f} to train{hint}, {wanted.sampling / GIB:.2f} to sample; {has}"
    yield "shares", config.share(config.ranks)
    tasks = f"built-in, {config.train_tasks} a suite to train on, {config.evaluate.tasks} to evaluate on"
    if config.tasks:
        pools = [", ".join(f"{suite} {len(of)}" for suite, of in pool.items()) for pool in prepare_tasks(config)]
        tasks = f"{config.tasks}: {pools[0]} to train on; {pools[1]} to evaluate on"
    yield "tasks", tasks
    yield "sandbox", config.sandbox
