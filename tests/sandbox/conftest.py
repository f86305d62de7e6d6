from collections.abc import Iterator
from pathlib import Path

import pytest
from rsi_sandbox import Backend, Sandbox, Task, load_task
from sandbox_tasks import open_or_skip, write_task


@pytest.fixture(scope="session", params=["local", pytest.param("docker", marks=pytest.mark.docker)])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    with open_or_skip(request.param) as opened:
        yield opened


@pytest.fixture
def task(tmp_path: Path) -> Task:
    return load_task(write_task(tmp_path / "sort-words"))


@pytest.fixture
def sandbox(backend: Backend, task: Task) -> Iterator[Sandbox]:
    with backend.start(task) as started:
        yield started
