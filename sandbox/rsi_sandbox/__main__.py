"""`python -m rsi_sandbox image` makes the base image; `check TASK...` runs the oracle and a no-op on tasks."""

import argparse
import sys
from pathlib import Path
from typing import Literal

from . import SandboxError, TaskError, load_task, open_backend, verify
from .task import read_folder


def main(arguments: list[str]) -> int:
    """Exit status: 0 done, 1 a task failed its check, 2 wrong use or a machine that cannot do it."""
    parser = argparse.ArgumentParser(prog="python -m rsi_sandbox", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("image", help="make the base image of the built-in tasks")
    check = commands.add_parser("check", help="the solution must pass and a no-op must fail")
    check.add_argument("tasks", nargs="+", type=Path, metavar="TASK", help="task folders")
    check.add_argument("--sandbox", choices=("auto", "local", "docker"), default="auto")
    options = parser.parse_args(arguments)
    try:
        if options.command == "image":
            from .image import make_base

            print(make_base())
            return 0
        return _check(options.tasks, options.sandbox)
    except (SandboxError, TaskError) as error:
        print(f"rsi_sandbox: {error}", file=sys.stderr)
        return 2


def _check(folders: list[Path], kind: Literal["auto", "local", "docker"]) -> int:
    failed = 0
    with open_backend(kind, "check") as backend:
        print(f"sandbox {backend.kind}: {backend.reason}")
        for folder in folders:
            task = load_task(folder)
            rewards = {}
            for agent in ("oracle", "no-op"):
                with backend.start(task) as sandbox:
                    if agent == "oracle":
                        for file in read_folder(task.folder / "solution", "/solution"):
                            if file.data is not None:
                                sandbox.write(file.path, file.data)
                        sandbox.run("bash /solution/solve.sh", task.agent_timeout)
                    rewards[agent] = verify(backend, task, sandbox)
            good = rewards["oracle"].strict and not rewards["no-op"].strict
            failed += not good
            passed = sum(rewards["oracle"].checks.values()), len(rewards["oracle"].checks)
            print(
                f"{'ok' if good else 'FAILED':7}{task.name}: oracle {rewards['oracle'].reward:g} "
                f"({passed[0]}/{passed[1]} checks), no-op {rewards['no-op'].reward:g}"
            )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
