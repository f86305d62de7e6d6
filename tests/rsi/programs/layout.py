"""Three steps of everything that trains, on invented attempts, on however many ranks: `layout.py OUT MODEL OPTION…`."""

import random
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from rsi import distributed
from rsi.checkpoint import Progress, open_run
from rsi.config import parse
from rsi.metrics import Log
from rsi.model import Critic, ModelConfig, Transformer
from rsi.rpr import Loop, Step, make_learner
from rsi.rsr import train
from rsi.session import Session
from rsi.stages import schedule
from rsi.trajectory import Trajectory

sys.path.insert(0, str(Path(__file__).parents[1]))
from tiny_models import HYBRID

VOCABULARY = 61
DENSE = ModelConfig(VOCABULARY, 32, 64, 2, 4, 2, 8)
MODELS = {
    "tied": DENSE,
    "untied": replace(DENSE, tie_word_embeddings=False),
    "hybrid": replace(HYBRID, vocab_size=VOCABULARY),
}


def attempts(count: int) -> list[Trajectory]:
    rng = random.Random(0)
    records = []
    for number in range(count):
        record = Trajectory("task", "family", "core", "terminus", number, end="done")
        for turn in range(rng.randint(1, 4)):
            record.extend([rng.randrange(VOCABULARY) for _ in range(rng.randint(2, 30))])
            ids = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 12))]
            record.extend(ids, turn, [-6.0] * len(ids))
        record.checks = {"a": rng.random() < 0.5, "b": rng.random() < 0.5}
        record.strict = all(record.checks.values())
        records.append(record)
    return records


def gradients_of(network: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The clipped gradients of the last step."""
    parameters = ((name, parameter.grad) for name, parameter in network.named_parameters())
    return {
        name.replace("_checkpoint_wrapped_module.", ""): grad.full_tensor() if isinstance(grad, DTensor) else grad
        for name, grad in parameters
        if grad is not None
    }


def main(out: Path, model: str, *extra: str) -> None:
    torch.set_num_threads(1)
    distributed.start()
    options = ["--runs", str(out), "--rsr.batch", "7", "--rsr.epochs", "1", *extra]
    # One small update a step: where a gradient is next to nothing Adam makes a step of its rounding.
    options += ["--rpr.minibatches", "1", "--rpr.critic-only-epochs", "1", "--rpr.whiten"]
    config = parse([*options, "--rsr.lr", "1e-4", "--rpr.actor-lr", "1e-4", "--rpr.critic-lr", "1e-4"])
    run, rsr1, rpr1 = open_run(config), *schedule(config)[1:3]
    session = Session(run, Log(run.folder, distributed.rank()), None, distributed.find_device(), {}, {})  # type: ignore[arg-type]
    # A vocabulary that the attempts use up: Adam takes a row without a gradient to speak of as far as any other.
    chat: Any = SimpleNamespace(pad=0)
    torch.manual_seed(0)
    whole = Transformer(MODELS[model])
    actor = distributed.copy_of(whole, Transformer, config)
    records = attempts(19)
    session.progress = Progress.of(run, rsr1.name, run.begin(rsr1))
    train(session, rsr1, actor, chat, records)
    session.progress.flush()
    session.progress = Progress.of(run, rpr1.name, run.begin(rpr1))
    critic = distributed.copy_of(actor, Critic, config)
    loop = Loop(session, rpr1, make_learner(config, rpr1, actor, critic), chat)
    loop.scale = {"family": 2.0}
    found, gradients = [], gradients_of(actor)
    for phase in ("warmup", "calibration", "joint"):
        for number in range(3):
            found.append(loop.learn(Step(phase, number, 3, ("core",), len(records)), records))  # type: ignore[arg-type]
    weights = {
        "actor": dict(distributed.copy_of(actor, Transformer).state_dict()),
        "critic": dict(distributed.copy_of(critic, Critic).state_dict()),
        "gradients": gradients
        | {f"actor {name}": grad for name, grad in gradients_of(actor).items()}
        | {f"critic {name}": grad for name, grad in gradients_of(critic).items()},
    }
    if distributed.first():
        torch.save({"metrics": found, **weights}, out / "result.pt")
    distributed.meet("the end")
    distributed.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
