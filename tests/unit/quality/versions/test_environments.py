"""Environments with other versions of torch, and processes in them."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.version import Version

import equivcheck
from equivcheck.errors import UsageError
from equivcheck.quality.versions import environments as module
from equivcheck.quality.versions.environments import (
    Environments,
    Installation,
    NoEnvironment,
    dependencies,
    parse_environment,
    run_python,
)
from equivcheck.system.commands import FinishedCommand, run
from support.processes import end_soon

HERE = Path(sys.executable)
TORCH = version("torch")
RELEASE = Version(Version(TORCH).public)


def environments(cache: Path, *installations: Installation, told: list[str] | None = None) -> Environments:
    """Environments in a folder, beside some that are given."""
    tell = (lambda _line: None) if told is None else told.append
    return Environments(given={found.version: found for found in installations}, cache=cache, tell=tell)


def test_an_interpreter_is_asked_for_its_torch() -> None:
    """What is given is used as it is, with the version as installed."""
    assert parse_environment(f"{RELEASE}={HERE}") == Installation(torch=TORCH, python=HERE)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"2.1.0={HERE}", rf"has torch {RELEASE}.*Expected torch 2\.1\.0"),
        (str(HERE), "no torch version before"),
        ("2.1.0", "no interpreter after"),
        ("2.1.0=/no/such/python", "no interpreter after"),
        ("2.1.0=/bin/false", "interpreter /bin/false cannot be asked for its packages: exit code 1"),
    ],
)
def test_an_environment_that_is_not_what_was_said_is_refused(text: str, words: str) -> None:
    """In one line that says what is wrong."""
    with pytest.raises(UsageError, match=words):
        parse_environment(text)


def test_what_is_given_is_not_made(tmp_path: Path) -> None:
    """An installation that the user has is the one for its version, and leaves the cache alone."""
    mine = Installation(torch=TORCH, python=HERE)
    assert environments(tmp_path / "cache", mine).installation(RELEASE) == mine
    assert not (tmp_path / "cache").exists()


def test_equivcheck_brings_its_dependencies_but_torch() -> None:
    """At the versions that are installed here."""
    needed = dependencies()
    assert "torch" not in needed
    assert needed["hypothesis"] == version("hypothesis")


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The commands by which environments are made, none of which runs, but `python -m venv` makes its folder."""
    found: list[tuple[str, ...]] = []

    def run_nothing(command: tuple[str, ...], *, seconds: float | None, environment: dict[str, str]) -> FinishedCommand:
        found.append(command)
        if "venv" in command:
            Path(command[-1]).mkdir()
        return FinishedCommand(code=0, printed="", errors="")

    monkeypatch.setattr(module, "run", run_nothing)
    monkeypatch.setattr(module.shutil, "which", lambda _name: None)
    monkeypatch.setattr(module, "ask", lambda _python, _names: {"torch": "2.11.0+cpu"})
    return found


def test_an_environment_is_made_once(tmp_path: Path, commands: list[tuple[str, ...]]) -> None:
    """Torch from the index for CPU, then what equivcheck needs at the versions of here; the second time it is there."""
    told: list[str] = []
    found = environments(tmp_path, told=told).installation(Version("2.11.0"))
    folder = found.python.parents[1]
    assert found == Installation(torch="2.11.0+cpu", python=folder / "bin" / "python")
    _, torch, rest = commands
    assert torch[1:] == ("-m", "pip", "install", "torch==2.11.0", "--index-url", module.CPU_INDEX)
    assert {"--constraint", "cattrs", "hypothesis"} <= set(rest)
    assert f"cattrs=={version('cattrs')}\n" in (folder / "constraints.txt").read_text("utf-8")
    assert len(told) == 3
    assert environments(tmp_path).installation(Version("2.11.0")) == found
    assert len(commands) == 3


def test_uv_makes_it_where_it_is_there(tmp_path: Path, commands: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the same arguments as pip, and is told the interpreter; the index that it is configured with needs no name."""
    monkeypatch.setattr(module.shutil, "which", lambda name: f"/bin/{name}")
    own = replace(environments(tmp_path), index_url=module.OWN_INDEX)
    python = own.installation(Version("2.11.0")).python
    new, torch, rest = commands
    assert new == ("/bin/uv", "venv", "--python", sys.executable, str(python.parents[1]))
    assert torch == ("/bin/uv", "pip", "install", "--python", str(python), "torch==2.11.0")
    assert rest[: len(torch) - 1] == torch[:-1]


def test_an_environment_that_was_interrupted_is_made_anew(tmp_path: Path, commands: list[tuple[str, ...]]) -> None:
    """Without the file that says that it is complete, nothing of a folder is kept."""
    folder = environments(tmp_path).installation(Version("2.11.0")).python.parents[1]
    (folder / "complete.json").unlink()
    (folder / "left over").touch()
    environments(tmp_path).installation(Version("2.11.0"))
    assert len(commands) == 6
    assert not (folder / "left over").exists()


def test_other_dependencies_need_another_environment(tmp_path: Path, commands: list[tuple[str, ...]]) -> None:
    """What equivcheck is tried with there is what it runs with here."""
    folder = environments(tmp_path).installation(Version("2.11.0")).python.parents[1]
    marker = folder / "complete.json"
    marker.write_text(json.dumps(json.loads(marker.read_text()) | {"dependencies": {"click": "1.0"}}))
    environments(tmp_path).installation(Version("2.11.0"))
    assert len(commands) == 6


def test_what_cannot_be_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The version, the command and its error; nothing claims to be complete."""
    failed = FinishedCommand(code=1, printed="", errors="ERROR: no matching distribution\nnotice: more")
    monkeypatch.setattr(module, "run", lambda *_command, **_options: failed)
    with pytest.raises(NoEnvironment, match=r"torch 2\.11\.0: .* failed: ERROR: no matching distribution"):
        environments(tmp_path).installation(Version("2.11.0"))
    assert not list(tmp_path.rglob("complete.json"))


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("2.13.0", []),
        ("2.13..2.15", [("--index-url", module.CPU_INDEX)]),
        ("2.16.0.dev20261102", [("--index-url", module.CPU_INDEX, "--pre")]),
    ],
)
def test_the_index_is_asked_where_it_matters(
    text: str, asked: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For what is out since this version of equivcheck was, and for nightly builds."""
    arguments: list[object] = []

    def list_one(pip_arguments: tuple[str, ...]) -> tuple[Version, ...]:
        arguments.append(pip_arguments)
        return Version("2.15.1"), Version("2.16.0.dev20261102")

    monkeypatch.setattr(module, "list_releases", list_one)
    found = environments(tmp_path).find_versions(text)
    assert arguments == asked
    assert str(found[-1]) == {"2.13..2.15": "2.15.1"}.get(text, text)


def test_another_interpreter_finds_this_equivcheck(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checker that asks is the one that runs, wherever the process is started and whatever else is installed there."""
    (tmp_path / "equivcheck").mkdir()
    (tmp_path / "equivcheck" / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    ran = run_python(HERE, ("-c", "import os, equivcheck.strategies as s; print(os.path.realpath(s.__file__))"), seconds=60)
    assert Path(ran.printed.strip()) == Path(equivcheck.__path__[0], "strategies", "__init__.py").resolve()


def test_what_a_process_does_is_told() -> None:
    """Its exit code, what it printed, and the last line of its errors."""
    ran = run_python(HERE, ("-c", "import sys; print('out'); print('a\\nb', file=sys.stderr); sys.exit(7)"), seconds=60)
    assert (ran.code, ran.printed, ran.last_line) == (7, "out\n", "b")


FORKS = "import os, time; os.fork(); print(os.getpid(), flush=True); time.sleep(600)"


@pytest.mark.slow
def test_a_process_past_its_limit_is_ended_with_what_it_started() -> None:
    """The whole group is; what had been printed is there."""
    ran = run([str(HERE), "-c", FORKS], seconds=3, environment=os.environ)
    assert ran.code is None
    assert len(ran.printed.split()) == 2
    assert end_soon(*map(int, ran.printed.split()))
