"""Run and check terminal tasks: `python -m rsi_sandbox run TASK... --agent oracle|nop|"COMMAND"`."""

import argparse
import datetime
import json
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path

from . import SandboxError, Task, TaskError, docker_modules, load_task, open_backend
from .dockerfile import STAND_INS
from .interface import Backend
from .shell import clean
from .trial import Trial, new_trial, run_trial, summary


def main(arguments: list[str]) -> int:
    """Exit status: 0 all went well, 1 a task failed, 2 wrong use or a machine that cannot do it."""
    options = _parser().parse_args(arguments)
    try:
        for pair in getattr(options, "base", []):
            name, separator, local = pair.partition("=")
            if not (name and separator and local):
                raise TaskError(f"--base {pair}: not of the form NAME=LOCAL; write ubuntu:24.04=rsi-base:bookworm")
            STAND_INS[name] = local
        commands: dict[str, Callable[[argparse.Namespace], int]] = {
            "image": _image, "run": _run, "check": _check, "list": _list, "reap": _list,
        }  # fmt: skip
        return commands[options.command](options)
    except (SandboxError, TaskError) as error:
        print(f"rsi_sandbox: {_line(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("rsi_sandbox: interrupted; its sandboxes are removed", file=sys.stderr)
        return 130


def _line(text: str) -> str:
    """What a task, an agent or a test said, fit for one line of a terminal."""
    return " ".join(clean(text).split())


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m rsi_sandbox", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    image = commands.add_parser("image", help="make the base image of the built-in tasks")
    image.add_argument("--toolchain", action="store_true", help="also the offline pytest for imported tasks")
    run = commands.add_parser("run", help="one trial a task, each into a folder in Harbor's layout")
    run.add_argument("--agent", default="oracle", help="oracle, nop, or a command run in the sandbox (oracle)")
    run.add_argument("--out", type=Path, default=Path("jobs"), help="where the job's folder goes (jobs/)")
    run.add_argument("--verifier", choices=("artifacts", "snapshot"), help="judge otherwise than the task asks")
    check = commands.add_parser("check", help="the oracle passes, a no-op fails, the image leaks nothing")
    for command in (run, check):
        command.add_argument("tasks", nargs="+", type=Path, metavar="TASK", help="task folders")
        command.add_argument("--sandbox", choices=("auto", "local", "docker"), default="auto")
        command.add_argument("--jobs", type=_count, default=2, help="trials at once (2)")
        command.add_argument("--base", action="append", default=[], metavar="NAME=LOCAL", help="stand-in for an image")
    commands.add_parser("list", help="docker sandboxes on this machine, and whether their owners live")
    commands.add_parser("reap", help="remove the docker sandboxes whose owners are dead")
    return parser


def _image(options: argparse.Namespace) -> int:
    docker_modules().make_images(options.toolchain)
    return 0


def _run(options: argparse.Namespace) -> int:
    tasks = [load_task(folder) for folder in options.tasks]
    if options.verifier:
        only = "a snapshot can be made by docker only" if options.verifier == "snapshot" else ""

        def judged(task: Task) -> Task:
            steps = tuple(map(judged, task.steps))
            return replace(task, mode=options.verifier, docker_only=task.docker_only or only, steps=steps)

        tasks = list(map(judged, tasks))
    folder = options.out / datetime.datetime.now().strftime("%Y-%m-%d__%H-%M-%S.%f")
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise TaskError(f"--out {options.out}: {error.strerror}; give a folder that can be written") from None
    settings = {"agent": options.agent, "sandbox": options.sandbox, "jobs": options.jobs}
    (folder / "config.json").write_text(json.dumps(settings | {"tasks": [str(t.folder) for t in tasks]}, indent=2))
    trials = [new_trial(task, options.agent) for task in tasks]
    with open_backend(options.sandbox, "run", starts=2) as backend:
        _go(backend, trials, options.jobs, lambda trial: run_trial(backend, trial, folder))
    (folder / "result.json").write_text(json.dumps(summary(trials), indent=2))
    passed = sum(trial.outcome == "passed" for trial in trials)
    print(f"{passed} of {len(trials)} passed; {folder}/result.json")
    return 0 if passed == len(trials) else 1


def _check(options: argparse.Namespace) -> int:
    trials = [new_trial(load_task(folder), agent) for folder in options.tasks for agent in ("oracle", "nop")]
    with open_backend(options.sandbox, "check", starts=2) as backend:
        _go(backend, trials, options.jobs, lambda trial: run_trial(backend, trial, search=trial.agent == "nop"))
    good = []
    for oracle, nop in zip(trials[::2], trials[1::2], strict=True):
        wrong = [f"the oracle {oracle.outcome}"] if oracle.outcome != "passed" else []
        wrong += [f"a no-op {nop.outcome}"] if nop.outcome not in ("failed", "agent_timeout") else []
        wrong += [f"leak: {leak}" for leak in nop.leaks]
        good.append(not wrong)
        told = [*oracle.task.notes, oracle.error, nop.error]
        if oracle.verdict and nop.verdict and not wrong:
            found, left = oracle.verdict.checks, sum(nop.verdict.checks.values())
            counts = (f" ({len(found)} checks)", f" ({left} of them pass)") if found else ("", "")
            wrong = [f"oracle {oracle.verdict.reward:g}{counts[0]}, no-op fails{counts[1]}"]
            if oracle.task.checks not in (0, len(found)):
                told.append(f"metadata.checks is {oracle.task.checks}, the report names {len(found)}")
        print(f"{'ok' if good[-1] else 'FAILED':7}" + _line(f"{oracle.task.name}: {'; '.join(wrong)}"))
        for line in filter(None, dict.fromkeys(told)):
            print(f"       {_line(line)}")
    return 0 if all(good) else 1


def _go(backend: Backend, trials: list[Trial], jobs: int, work: Callable[[Trial], Trial]) -> None:
    """Run the trials, `jobs` at once: a line for each that ends and, on a terminal, a live one for each under way."""
    print(f"sandbox {backend.kind}: {backend.reason}")
    shown, live = 0, sys.stdout.isatty()
    pool = ThreadPoolExecutor(jobs)
    try:
        left = {pool.submit(work, trial): trial for trial in trials}
        while left:
            done, _ = wait(left, 0.2 if live else None, FIRST_COMPLETED)
            rows = [_row(left.pop(each), each.result().seconds) for each in done]
            busy = [trial for trial in left.values() if live and trial.phases]
            rows += [_row(trial, time.time() - min([*trial.phases.values()])[0]) for trial in busy]
            print(f"\033[{shown}F\033[J" if shown else "", *(f"{row}\n" for row in rows), sep="", end="", flush=True)
            shown = len(busy)
    except BaseException:
        backend.close()  # what runs ends now, not at its time limit
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _row(trial: Trial, seconds: float) -> str:
    reward = f"{trial.verdict.reward:.2f}" if trial.verdict else "    "
    told = trial.error or (trial.verdict.note or " ".join(trial.verdict.tampered) if trial.verdict else "")
    outcome = f"{trial.outcome[:20]:20} {reward} {seconds:6.1f} s"
    return f"{trial.name:42} {_line(trial.agent)[:10]:10} {outcome}  {_line(told)[:60]}".rstrip()


def _list(options: argparse.Namespace) -> int:
    with docker_modules().DockerBackend("asked for", "list", 1, reap=False) as backend:
        if options.command == "reap":
            for name, run in backend.reap().items():
                print(f"removed {name} of run {run!r}")
            return 0
        for name, run, owner, state in backend.all():
            print(f"{name}  run {run!r}  owner {owner}  {state}")
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main(sys.argv[1:]))
