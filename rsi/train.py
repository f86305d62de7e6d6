"""Entry: `torchrun --standalone --nproc-per-node 1 -m rsi.train --stage all`.

Runs the stages that are missing up to `--stage`, each from the weights of the one before, and ends with
the stage table. The same command goes on where a killed run stopped: from the last step that it saved.
"""

import contextlib
import dataclasses
import math
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rsi.config import Config, UserError, fail, parse
from rsi.stages import Stage, schedule

if TYPE_CHECKING:  # torch takes seconds to import; a wrong option is answered before that
    from tokenizers import Tokenizer

    from rsi.model import Transformer
    from rsi.session import Session

PRETRAIN_UNIT = 20  # pretraining steps that are logged, and saved, as one


def main() -> None:
    """Read the command line before anything slow is imported, then run."""
    # Threads that spin for long while they wait make everything ten times slower where anything else wants
    # the cores, threads that never spin a fifth slower where nothing does.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    try:
        config = parse(sys.argv[1:])
        if config.dry_run:
            from rsi.plan import print_plan

            print_plan(config)
            return
        run(config)
    except (UserError, OSError) as problem:  # what the machine refuses before there is a log to say it in
        fail(problem)
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            print("rsi: stopped; the same command goes on from the last saved step", file=sys.stderr)
        raise SystemExit(130) from None


def run(config: Config) -> None:
    """All missing stages, then the table and the plot."""
    from rsi import distributed, plan
    from rsi.checkpoint import Run, open_run
    from rsi.guards import FAILURES, CannotGoOn
    from rsi.metrics import Log
    from rsi.report import stage_table, table_text, write_plot
    from rsi.session import Interrupted, open_session, prepare_tasks

    distributed.start(config.timeout)
    stages = Run(config.folder, config).missing()
    plan.check_here(config, stages)
    run_folder = open_run(config)
    stages = run_folder.missing()  # the folder's last owner may have gone on until now
    log = Log(run_folder.folder, distributed.rank())
    try:
        if stages:
            device, ranks = distributed.find_device(), distributed.world()
            log.say(f"{run_folder.folder}: stages {', '.join(stage.name for stage in stages)}; {ranks} × {device.type}")
            log.say(config.share(ranks))
            train, evaluation = prepare_tasks(config)
            with distributed.naming_missing(), open_session(run_folder, log, device, train, evaluation) as session:
                signal.signal(signal.SIGINT, lambda *_: ask_to_stop(session))
                signal.signal(signal.SIGTERM, lambda *_: stop_now(session))
                for stage in stages:
                    run_stage(session, stage)
        records = run_folder.write_stages()
        title = f"{run_folder.folder.name}: success over the stages"
        log.console.print(stage_table(records, title))
        log.write(table_text(records))
        if distributed.first():
            write_plot(records, run_folder.folder / "stages.svg", title)
        log.say(f"plot: {run_folder.folder / 'stages.svg'}")
        distributed.meet("the end")  # a rank that leaves early kills the others at their exit
    except Interrupted:
        log.say("stopped as asked, everything is saved; the same command goes on from here")
        distributed.meet("the end")
    except FAILURES as problem:
        where = "" if str(run_folder.folder) in str(problem) else f"{run_folder.folder}: "
        message = f"rsi: error: {where}{problem}; the same command goes on from the last saved step"
        log.fail(message, own=not isinstance(problem, CannotGoOn))
        raise SystemExit(1) from problem
    finally:
        log.close()
    distributed.stop()


def ask_to_stop(session: "Session") -> None:
    """The first Ctrl-C finishes the step under way and saves it, the second stops at once."""
    if session.stopping:
        stop_now(session)
    session.stopping = True
    with contextlib.suppress(OSError):  # what showed the screen may have been interrupted too
        # Past every buffer: the signal may have come in the middle of another line's writing.
        os.write(2, b"rsi: stopping: the step under way is finished and saved; Ctrl-C once more stops now\n")


def stop_now(session: "Session") -> None:
    """Stop without waiting for the commands and verifiers under way, and leave no sandbox behind."""
    session.backend.close()
    raise KeyboardInterrupt


def run_stage(session: "Session", stage: Stage) -> None:
    """One stage: weights in, work, weights out, evaluation, record."""
    from rsi import distributed
    from rsi.chat import Chat
    from rsi.checkpoint import Progress
    from rsi.evaluate import evaluate
    from rsi.rpr import refine
    from rsi.rsr import rewrite
    from rsi.weights import find_folder, load_actor, load_chat, load_critic, save_model, sha256

    run, source, config = session.run, stage.source, session.config
    folder = run.begin(stage)
    session.progress = Progress.of(run, stage.name, folder)
    session.stop_if_asked()
    funnel = critic = None
    tokenizer: Tokenizer | Path
    if stage.kind == "base" and not config.init:
        actor, tokenizer = build_base(session)
        chat = Chat(tokenizer, actor.config)
    else:
        tokenizer = find_folder(config.init) if stage.kind == "base" else run.path(source) / "actor"
        actor = load_actor(tokenizer, config)
        chat = load_chat(tokenizer, actor.config, config.rollout.thinking)
    if stage.kind == "rsr":
        earlier = [run.path(entry.name) / "kept.jsonl" for entry in schedule(config)
                   if entry.kind == "rsr" and entry.round < stage.round]  # fmt: skip
        funnel = rewrite(session, stage, actor, chat, folder, earlier)
        if stage.critic == "pass" and distributed.first():
            shutil.copytree(run.path(source) / "critic", folder / "critic", dirs_exist_ok=True)
    if stage.kind == "rpr":
        inherited = load_critic(run.path(source) / "critic", config) if stage.critic == "inherit" else None
        critic = refine(session, stage, actor, inherited, chat)
    session.progress.flush()
    if critic is not None:
        save_model(folder / "critic", critic, tokenizer)
    save_model(folder / "actor", actor, tokenizer)
    distributed.meet("weights written")
    evaluation = evaluate(session, stage.name, source, actor, chat, folder)
    record: dict[str, Any] = {"stage": stage.name, "source": source or None, "seconds": session.progress.seconds()}
    if distributed.first():
        record["actor_sha256"] = sha256(folder / "actor")
        record["critic_sha256"] = sha256(folder / "critic") if (folder / "critic").is_dir() else None
    record["evaluation"] = evaluation
    if funnel is not None:
        record["funnel"] = funnel
    run.finish(stage, record)
    rates = "  ".join(f"{suite} {100 * of['strict']:.1f}" for suite, of in evaluation["suites"].items())
    session.log.say(f"{stage.name} done in {record['seconds']:.0f} s  {rates}  mean {100 * evaluation['mean']:.1f} %")


def build_base(session: "Session") -> tuple["Transformer", "Tokenizer"]:
    """The embedded model, pretrained from scratch on synthetic transcripts."""
    import torch

    from rsi.guards import CannotGoOn
    from rsi.model import Transformer
    from rsi.plan import model_config
    from rsi.tiny import build_tokenizer, optimizers, pretrain

    config = session.config
    torch.manual_seed(session.seed("model"))
    tokenizer = build_tokenizer(config.model.vocab_size)
    size, end = tokenizer.get_vocab_size(), tokenizer.token_to_id("<|im_end|>")
    shape = dataclasses.replace(model_config(config), vocab_size=size, eos_token_id=end)
    actor = Transformer(shape).to(session.device)
    count = sum(parameter.numel() for parameter in actor.parameters())
    session.log.say(f"base: {count:,} parameters, {size} tokens")
    chosen, of = optimizers(actor, config.pretrain), config.pretrain.steps
    parts = {"actor": (actor, chosen)}
    start, seed = min(PRETRAIN_UNIT * session.progress.load(parts), of), session.seed("pretrain")
    with session.log.progress("base pretraining") as report:
        for step, loss in pretrain(actor, chosen, tokenizer, config.pretrain, seed, config.families, start):
            report(step, of)
            if not math.isfinite(loss):
                raise CannotGoOn(f"the loss of pretraining step {step} is {loss}: lower --pretrain.muon-lr or adamw-lr")
            if step % PRETRAIN_UNIT == 0 or step == of:
                metrics = {"actor/sft_loss": loss}
                session.log.step("base", "pretrain", step, of, metrics)
                session.finished(-(-step // PRETRAIN_UNIT), -(-of // PRETRAIN_UNIT), parts, metrics)
    return actor, tokenizer


if __name__ == "__main__":
    main()
