"""Terminal tasks in Harbor's folder format (schema 1.0 to 1.4) and, through `legacy`, Terminal-Bench 1's.

    task.toml  instruction.md  environment/Dockerfile (+ files)  tests/test.sh (+ files)  solution/solve.sh
    steps/<name>/{instruction.md, tests/, solution/, workdir/} in a task of several steps

Source: Harbor 0.26 (`harbor/models/task/config.py`). Keys that are not read are named in `Task.notes`.
"""

import os
import re
import tomllib
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from .dockerfile import Image, check_links, is_clean_path, read_dockerfile, read_folder, read_text
from .records import File, TaskError

Pairs = tuple[tuple[str, str], ...]
WORKDIR = "/app"  # where neither task nor Dockerfile names one


@dataclass(frozen=True)
class Healthcheck:
    """A command that must succeed before the agent begins. Times in seconds."""

    command: str
    interval: float = 5.0
    timeout: float = 30.0
    start_period: float = 0.0
    retries: int = 3


@dataclass(frozen=True)
class Task:
    """One task. `environment` holds the files that COPY puts into the image and `variables` its ENV; `tests`
    holds the files of tests/, which no agent's sandbox ever sees.

    `docker_only` says why only docker can run it (a Dockerfile line that needs a real build, say), or is empty.
    `mode` is where the tests run: in the clean environment with the declared `artifacts` (those matching
    `excluded` left out), or in a snapshot of the agent's whole system. `image` and `verifier_image` name prebuilt
    images, `verifier_folder` a Dockerfile of the verifier's own, tests baked in. Timeouts are seconds, "" and ()
    mean unset. `family`, `suite` and `checks` come from [metadata] ("" / "" / 0 when absent).

    `steps` are tasks that follow each other in one sandbox, each with its own instruction, tests, limits and
    `workdir_files`; below a step's `min_reward` the rest is skipped. `notes` says what was tolerated on reading.
    """

    folder: Path
    name: str
    instruction: str
    workdir: str
    agent_timeout: float
    verifier_timeout: float
    artifacts: tuple[str, ...]
    tests: tuple[File, ...] = field(repr=False)
    variables: Pairs
    base: str
    docker_only: str
    environment: tuple[File, ...] = field(default=(), repr=False)
    memory_mb: int = 2048
    network: bool = False
    family: str = ""
    suite: str = ""
    checks: int = 0
    mode: Literal["artifacts", "snapshot"] = "artifacts"
    excluded: tuple[str, ...] = ()
    cpus: float = 0.0
    build_timeout: float = 600.0
    build_folder: Path | None = None
    image: str = ""
    verifier_image: str = ""
    verifier_folder: Path | None = None
    verifier_variables: Pairs = ()
    solution_variables: Pairs = ()
    agent_user: str = ""
    verifier_user: str = ""
    healthcheck: Healthcheck | None = None
    steps: tuple["Task", ...] = ()
    min_reward: Pairs | float | None = None
    workdir_files: tuple[File, ...] = field(default=(), repr=False)
    final_step_counts: bool = False
    solution: tuple[File, ...] = field(default=(), repr=False)
    notes: tuple[str, ...] = ()


def load_task(folder: Path) -> Task:
    """Read a task folder; raises TaskError("<file>: <field>: ...") for anything missing or malformed."""
    folder = Path(folder)
    if not folder.is_dir():
        raise TaskError(f"{folder}: folder: not a directory; give a folder that holds task.toml or task.yaml")
    if (folder / "task.yaml").exists() or (folder / "task.toml").exists():
        check_links(folder)
    if (folder / "task.yaml").is_file() and not (folder / "task.toml").exists():
        from .legacy import load_legacy

        return load_legacy(folder)
    config = folder / "task.toml"
    try:
        document = tomllib.loads(read_text(config))
    except tomllib.TOMLDecodeError as error:
        raise TaskError(f"{config}: TOML: {error}; correct the syntax") from None
    return _Reader(folder, config).task(document)


class Fields:
    """Typed look-up in one table; `unread` names the keys nobody asked for."""

    def __init__(self, file: Path, table: dict[str, Any], prefix: str = ""):
        self.file, self.fields, self.prefix = file, table, prefix
        self.read: set[str] = set()
        self.below: list[Fields] = []

    def table(self, key: str) -> "Fields":
        found = Fields(self.file, self.value(key, dict, {}), f"{self.prefix}{key}.")
        self.below.append(found)
        return found

    def value(self, key: str, kind: type, default: Any) -> Any:
        self.read.add(key)
        value = self.fields.get(key, default)
        if value is not default and (not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)):
            names = {str: "text", int: "a whole number", dict: "a table", list: "a list", bool: "true or false"}
            raise self.error(key, value, f"is not {names[kind]}", "correct it or leave it out")
        return value

    def positive(self, key: str, default: float, whole: bool = False) -> float:
        self.read.add(key)
        value = self.fields.get(key, default)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not default and not (number and 0 < value < float("inf") and (not whole or value == int(value))):
            raise self.error(key, value, f"is not a {'whole ' * whole}number above 0", "correct it")
        return float(value)

    def choice(self, key: str, default: str, *allowed: str) -> str:
        value: str = self.value(key, str, default)
        if value not in (default, *allowed):
            raise self.error(key, value, "is unknown", f"use {' or '.join(repr(name) for name in allowed)}")
        return value

    def variables(self, key: str) -> Pairs:
        """A table of environment variables, `${NAME}` and `${NAME:-default}` filled from this process's own."""
        pairs = []
        for name, value in self.value(key, dict, {}).items():
            if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
                raise self.error(key, name, "is not a variable's name", "use letters, digits and _")
            if not isinstance(value, str | int | float) or isinstance(value, bool) or "\0" in str(value):
                raise self.error(f"{key}.{name}", value, "is not text", "put it in quotes")
            pairs.append(
                (name, re.sub(r"\$\{(\w+)(?::-([^}]*))?\}", partial(self._from_host, f"{key}.{name}"), str(value)))
            )
        return tuple(pairs)

    def _from_host(self, key: str, found: re.Match[str]) -> str:
        value = os.environ.get(found[1], found[2])
        if value is None:
            raise self.error(key, found[0], "is not set here", f"export {found[1]} or give a default with :-")
        return value

    def error(self, key: str, value: Any, what: str, remedy: str) -> TaskError:
        return TaskError(f"{self.file}: {self.prefix}{key}: {value!r} {what}; {remedy}")

    def unread(self) -> list[str]:
        own = [f"{self.prefix}{key}" for key in self.fields if key not in self.read]
        return own + [name for table in self.below for name in table.unread()]


class _Reader:
    """Reads one Harbor folder."""

    def __init__(self, folder: Path, config: Path):
        self.folder, self.config = folder, config
        self.notes: list[str] = []

    def task(self, document: dict[str, Any]) -> Task:
        root = Fields(self.config, document)
        for key in ("version", "schema_version", "source"):
            root.value(key, str, "")
        about, metadata = root.table("task"), Fields(self.config, root.value("metadata", dict, {}), "metadata.")
        about.read |= {"version", "description", "authors", "keywords"}
        environment, agent, verifier = root.table("environment"), root.table("agent"), root.table("verifier")
        image, prebuilt = self._image(environment)
        paths, excluded = self._artifacts(root, image.workdir)
        own = verifier.table("environment")
        has_own = "environment" in verifier.fields or (self.folder / "tests" / "Dockerfile").is_file()
        where = verifier.choice("environment_mode", "", "shared", "separate")
        if where == "shared" and has_own:
            raise verifier.error("environment_mode", where, "contradicts its own environment", "use 'separate'")
        several = root.value("steps", list, [])
        folder = self.folder.resolve()
        tests = self._scripts(self.folder / "tests", "/tests")
        task = Task(
            folder=folder,
            name=about.value("name", str, folder.name) or folder.name,
            instruction="" if several else self._instruction(self.folder),
            workdir=image.workdir,
            agent_timeout=agent.positive("timeout_sec", 600.0),
            verifier_timeout=verifier.positive("timeout_sec", 600.0),
            artifacts=paths,
            memory_mb=self._memory(environment),
            network=self._network(environment),
            environment=tuple(image.files),
            tests=tuple(tests) if several else self._tests(self.folder, tests),
            variables=(*(() if image.docker_only else image.variables.items()), *environment.variables("env")),
            base=image.base,
            docker_only=image.docker_only,
            family=metadata.value("family", str, ""),
            suite=metadata.value("suite", str, ""),
            checks=metadata.value("checks", int, 0),
            mode="snapshot" if where == "shared" else "artifacts",
            excluded=excluded,
            cpus=environment.positive("cpus", 0.0),
            build_timeout=environment.positive("build_timeout_sec", 600.0),
            build_folder=folder / "environment",
            image=prebuilt,
            verifier_image=own.value("docker_image", str, ""),
            verifier_folder=folder / "tests" if (self.folder / "tests" / "Dockerfile").is_file() else None,
            verifier_variables=verifier.variables("env"),
            solution_variables=root.table("solution").variables("env"),
            agent_user=self._user(agent),
            verifier_user=self._user(verifier),
            healthcheck=self._healthcheck(environment),
            solution=tuple(self._scripts(self.folder / "solution", "/solution")),
            final_step_counts=root.choice("multi_step_reward_strategy", "mean", "mean", "final") == "final",
        )
        task = replace(task, docker_only=task.docker_only or self._docker_only(task))
        if several:
            steps = tuple(self._step(task, root, number, entry) for number, entry in enumerate(several))
            names = [step.name.lower() for step in steps]
            if twice := {name for name in names if names.count(name) > 1}:
                raise root.error("steps", sorted(twice), "are names of several steps", "give each its own")
            task = replace(task, steps=steps)
        unread = [f"{self.config.name}: {name}: not read" for name in root.unread()]
        return replace(task, notes=(*self.notes, *unread))

    def _docker_only(self, task: Task) -> str:
        needs = {
            "environment.docker_image": task.image,
            "verifier.environment": task.verifier_image or task.verifier_folder,
            "verifier.environment_mode": task.mode == "snapshot",
            "agent.user": task.agent_user,
            "verifier.user": task.verifier_user,
        }
        fields = [f"{self.config}: {name}: only docker can do this; use docker" for name, need in needs.items() if need]
        return fields[0] if fields else ""

    def _step(self, task: Task, root: Fields, number: int, entry: Any) -> Task:
        if not isinstance(entry, dict):
            raise root.error(f"steps[{number}]", entry, "is not a table", "write [[steps]] with a name")
        step = Fields(self.config, entry, f"steps[{number}].")
        root.below.append(step)
        name = step.value("name", str, "")
        folder = self.folder / "steps" / name
        if not re.fullmatch(r"[\w.-]+", name) or name.startswith(".") or not folder.is_dir():
            raise step.error("name", name, "names no folder below steps/", "give the step's folder name")
        agent, verifier = step.table("agent"), step.table("verifier")
        tests = [*task.tests, *self._scripts(folder / "tests", "/tests")]
        paths, excluded = self._artifacts(step, task.workdir) if "artifacts" in entry else (task.artifacts, ())
        return replace(
            task,
            name=name,
            instruction=self._instruction(folder),
            agent_timeout=agent.positive("timeout_sec", task.agent_timeout),
            verifier_timeout=verifier.positive("timeout_sec", task.verifier_timeout),
            verifier_variables=(*task.verifier_variables, *verifier.variables("env")),
            healthcheck=self._healthcheck(step),
            artifacts=paths,
            excluded=excluded or task.excluded,
            tests=self._tests(folder, tests),
            workdir_files=tuple(self._scripts(folder / "workdir", task.workdir)),
            solution=tuple(self._scripts(folder / "solution", "/solution")) or task.solution,
            min_reward=self._min_reward(step),
        )

    def _min_reward(self, step: Fields) -> Pairs | float | None:
        step.read.add("min_reward")
        value = step.fields.get("min_reward")
        if value is None:
            return None
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        if isinstance(value, dict) and all(isinstance(least, int | float) for least in value.values()):
            return tuple((key, str(least)) for key, least in value.items())
        raise step.error("min_reward", value, "is neither a number nor a table of numbers", "correct it")

    def _image(self, environment: Fields) -> tuple[Image, str]:
        """(what the Dockerfile says, the prebuilt image's name)."""
        prebuilt = environment.value("docker_image", str, "")
        folder = self.folder / "environment"
        for name in ("docker-compose.yaml", "docker-compose.yml"):
            if (folder / name).exists():
                raise TaskError(f"{folder / name}: file: several services are not supported; use one Dockerfile")
        if environment.choice("os", "linux", "linux", "windows") == "windows":
            raise environment.error("os", "windows", "is not supported", "use a Linux task")
        if environment.value("gpus", int, 0):
            raise environment.error("gpus", environment.fields["gpus"], "cannot be given", "use a task without a GPU")
        for key in ("storage_mb", "storage"):
            if environment.fields.get(key):
                environment.read.add(key)
                self.notes.append(f"task.toml: environment.{key}: not enforced by docker; local has a fixed quota")
        if prebuilt and not (folder / "Dockerfile").exists():
            image = Image(prebuilt)
        else:
            image = read_dockerfile(folder)
        image.workdir = environment.value("workdir", str, "") or image.workdir
        if not image.workdir:
            image.workdir = WORKDIR
            if prebuilt or image.docker_only:
                self.notes.append(
                    f"task.toml: environment.workdir: not given: it is {WORKDIR}, whatever the image's is"
                )
        if not is_clean_path(image.workdir):
            raise environment.error("workdir", image.workdir, "is not a directory below /", "use /app")
        return image, prebuilt

    def _memory(self, environment: Fields) -> int:
        text = environment.value("memory", str, "")
        if "memory_mb" in environment.fields or not text:
            return int(environment.positive("memory_mb", 2048, whole=True))
        found = re.fullmatch(r"(\d+)\s*([MG])i?B?", text.strip(), re.IGNORECASE)
        if not found or int(found[1]) == 0:
            raise environment.error("memory", text, "is not a size", "write '2G' or memory_mb = 2048")
        return int(found[1]) * (1024 if found[2] in "Gg" else 1)

    def _network(self, environment: Fields) -> bool:
        mode = environment.choice("network_mode", "", "no-network", "public", "allowlist")
        allowed = environment.value("allow_internet", bool, False)
        if mode == "allowlist":
            raise environment.error("network_mode", mode, "cannot be enforced", "use 'no-network' or 'public'")
        return mode == "public" or (not mode and allowed)

    def _user(self, table: Fields) -> str:
        table.read.add("user")
        user = table.fields.get("user", "")
        named = isinstance(user, str | int) and not isinstance(user, bool)
        if not (named and re.fullmatch(r"[\w.-]*(:[\w.-]+)?", f"{user}")):
            raise table.error("user", user, "is not a user", "give a name or a number")
        return "" if str(user) in ("root", "0") else str(user)

    def _healthcheck(self, environment: Fields) -> Healthcheck | None:
        if "healthcheck" not in environment.fields:
            return None
        table = environment.table("healthcheck")
        command = table.value("command", str, "")
        if not command:
            raise table.error("command", command, "is empty", "give the command that must succeed")
        return Healthcheck(
            command,
            table.positive("interval_sec", 5.0),
            table.positive("timeout_sec", 30.0),
            max(table.positive("start_period_sec", 0.0), table.positive("start_interval_sec", 0.0)),
            int(table.positive("retries", 3, whole=True)),
        )

    def _artifacts(self, table: Fields, workdir: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """(paths, patterns left out)."""
        paths, excluded = [], list[str]()
        for number, entry in enumerate(table.value("artifacts", list, []) or [workdir]):
            fields = entry if isinstance(entry, dict) else {"source": entry}
            one = Fields(self.config, fields, f"{table.prefix}artifacts[{number}].")
            table.below.append(one)
            path = one.value("source", str, "")
            if not is_clean_path(path):
                raise one.error("source", path, "is not an absolute path below / without '..'", "correct it")
            if one.value("service", str, "main") != "main":
                raise one.error("service", fields["service"], "is another service", "use 'main'")
            excluded += [f"{path.rstrip('/')}/{pattern}" for pattern in one.value("exclude", list, [])]
            paths.append(path.rstrip("/"))
        return tuple(paths), tuple(excluded)

    def _instruction(self, folder: Path) -> str:
        lines = read_text(folder / "instruction.md").removeprefix("\ufeff").splitlines()
        while lines and (not lines[0].strip() or ("canary" in lines[0].lower() and lines[0].startswith(("#", "<!--")))):
            lines.pop(0)
        if not lines:
            raise TaskError(f"{folder / 'instruction.md'}: instruction: empty; write what the agent has to do")
        return "\n".join(lines).strip()

    def _tests(self, folder: Path, files: list[File]) -> tuple[File, ...]:
        """The tests of a task or step; of files at one path, the last."""
        tests = {file.path: file for file in files}
        if "/tests/test.sh" not in tests:
            raise TaskError(f"{folder / 'tests' / 'test.sh'}: file: missing; it must write /logs/verifier/reward.txt")
        return tuple(tests.values())

    def _scripts(self, folder: Path, destination: str) -> list[File]:
        """The folder's files, shell scripts with newlines as Linux needs them."""
        if not folder.is_dir():
            return []
        files = read_folder(folder, destination)
        for number, file in enumerate(files):
            if file.path.endswith(".sh") and file.data and b"\r\n" in file.data:
                files[number] = replace(file, data=file.data.replace(b"\r\n", b"\n"))
                self.notes.append(f"{file.path.lstrip('/')}: Windows line ends were replaced")
        return files
