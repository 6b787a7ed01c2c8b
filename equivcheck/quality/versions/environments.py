"""Environments with another version of torch: those that a user has, and those that are made in a cache folder."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from filelock import FileLock
from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from equivcheck.errors import EquivCheckError, UsageError
from equivcheck.quality.versions.process import run_python
from equivcheck.quality.versions.releases import RELEASED, asks_for_newer, chosen, listed, names_nightlies
from equivcheck.system.commands import run

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""PyTorch's own index of builds for CPU, which torch alone is installed from: others have builds for CUDA, of several GB."""
OWN_INDEX = "default"
"""Stands for the index that pip or uv is configured with."""
_COMPLETE, _CONSTRAINTS = "complete.json", "constraints.txt"
_NOT_HERE = ("PIP_CONSTRAINT", "UV_CONSTRAINT")
"""Settings of the environment that this process is in, which may hold torch at its own version."""
_ASK_SECONDS = 60.0
_ASK = (
    "import importlib.metadata as m, json, sys\n"
    "there = {(d.metadata['Name'] or '').lower(): d.version for d in m.distributions()}\n"
    "print(json.dumps({name: there.get(name) for name in sys.argv[1:]}))"
)


class NoEnvironment(EquivCheckError):
    """An environment with a version of torch cannot be made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    """An interpreter beside which a version of torch is installed."""

    torch: str
    """Its version, as installed: ``2.13.0+cpu``."""
    python: Path
    """The interpreter."""

    @property
    def version(self) -> Version:
        """Its version without what tells builds of one version apart."""
        return Version(Version(self.torch).public)


@dataclass(frozen=True, slots=True, kw_only=True)
class Environments:
    """Where installations come from."""

    given: Mapping[Version, Installation]
    """Those that the user has."""
    cache: Path
    """Folder of those that are made, one a version."""
    index_url: str = CPU_INDEX
    """Index that torch is installed from; `OWN_INDEX` for the one that pip or uv is configured with."""
    tell: Callable[[str], None]
    """Takes a line about what is being made."""

    def installation(self, release: Version) -> Installation:
        """The one that was given with this version, or else one in the cache, made if need be. Raises `NoEnvironment`."""
        found = self.given.get(release)
        return self._made(release) if found is None else found

    @property
    def index_arguments(self) -> tuple[str, ...]:
        """What tells pip and uv where torch is."""
        return () if self.index_url == OWN_INDEX else ("--index-url", self.index_url)

    def _made(self, release: Version) -> Installation:
        """An environment is complete once a file in it says so; one that was interrupted is made anew."""
        name = f"{release}-python{sys.version_info.major}.{sys.version_info.minor}"
        try:
            self.cache.mkdir(parents=True, exist_ok=True)
            with FileLock(self.cache / f"{name}.lock"):
                return self._complete(self.cache / name, release)
        except OSError as error:
            raise NoEnvironment(f"torch {release}: no environment in {self.cache}: {type(error).__name__}: {error}") from error

    def _complete(self, folder: Path, release: Version) -> Installation:
        wanted, marker = dependencies(), folder / _COMPLETE
        python = folder / "bin" / "python"
        there = json.loads(marker.read_text("utf-8")) if marker.is_file() else {}
        if there.get("dependencies") != wanted:
            self._make(folder, release, wanted)
            there = {"torch": ask(python, ("torch",))["torch"], "dependencies": wanted}
            partial = marker.with_suffix(".new")
            partial.write_text(json.dumps(there, indent=2) + "\n", encoding="utf-8")
            partial.replace(marker)
        return Installation(torch=there["torch"], python=python)

    def _make(self, folder: Path, release: Version, wanted: Mapping[str, str]) -> None:
        self.tell(f"torch {release}: making an environment in {folder} ...")
        shutil.rmtree(folder, ignore_errors=True)
        uv = shutil.which("uv")
        self._run(release, _new(uv, folder))
        install = _install(uv, folder / "bin" / "python")
        self.tell(f"torch {release}: installing torch ...")
        self._run(release, (*install, f"torch=={release}", *self.index_arguments))
        constraints = folder / _CONSTRAINTS
        constraints.write_text("".join(f"{name}=={pinned}\n" for name, pinned in wanted.items()), encoding="utf-8")
        self.tell(f"torch {release}: installing what equivcheck needs ...")
        self._run(release, (*install, "--constraint", str(constraints), *wanted))

    def named(self, text: str) -> tuple[Version, ...]:
        """The versions that a text such as ``2.9..2.15`` names; the index is asked which are out if that matters."""
        if not asks_for_newer(text):
            return chosen(text, RELEASED, self.given)
        nightlies = ("--pre",) if names_nightlies(text) else ()
        return chosen(text, RELEASED + listed((*self.index_arguments, *nightlies)), self.given)

    @staticmethod
    def _run(release: Version, command: tuple[str, ...]) -> None:
        environment = {name: value for name, value in os.environ.items() if name not in _NOT_HERE}
        ran = run(command, seconds=None, environment=environment)
        if ran.code:
            errors = [line for line in ran.errors.splitlines() if line.lower().startswith("error")] or [ran.last_line]
            raise NoEnvironment(f"torch {release}: `{' '.join(command)}` failed: {errors[-1]}")


def default_cache() -> Path:
    """The folder of environments below the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "equivcheck" / "torch"


def given(text: str) -> Installation:
    """The environment that a user names, as ``2.15.0=/path/to/python``. Raises `UsageError` if it is not what the text says."""
    named, _, path = text.partition("=")
    try:
        wanted, python = Version(named), Path(path).absolute()
    except InvalidVersion:
        raise UsageError(f"environment {text!r} names no version of torch; allowed: such as 2.15.0=/path/to/bin/python") from None
    if not path or not os.access(python, os.X_OK) or python.is_dir():
        raise UsageError(f"environment {text!r} names no interpreter; allowed: such as 2.15.0=/path/to/bin/python")
    there = ask(python, ("torch", *dependencies()))
    torch = there.pop("torch")
    if torch is None or Version(torch).public != wanted.public:
        raise UsageError(f"environment {text!r} has {f'torch {torch}' if torch else 'no torch'}; allowed: torch {wanted}")
    if lacks := sorted(name for name, installed in there.items() if installed is None):
        raise UsageError(f"environment {text!r} lacks {', '.join(lacks)}; allowed: one that has what equivcheck needs")
    return Installation(torch=torch, python=python)


def dependencies() -> dict[str, str]:
    """What equivcheck needs but torch, at the versions installed here. Raises `NoEnvironment` where nothing says it."""
    try:
        needed = [Requirement(text) for text in requires("equivcheck") or ()]
    except PackageNotFoundError:
        raise NoEnvironment("equivcheck is not installed here, so nothing says what it needs; allowed: pip install it") from None
    names = (found.name for found in needed if found.marker is None or found.marker.evaluate({"extra": ""}))
    return {name.lower(): version(name) for name in sorted(names) if name != "torch"}


def ask(python: Path, names: tuple[str, ...]) -> dict[str, str | None]:
    """The versions of packages that an interpreter has beside it, None where it has none. Raises `UsageError`."""
    ran = run_python(python, ("-c", _ASK, *names), seconds=_ASK_SECONDS)
    if ran.code != 0:
        raise UsageError(f"interpreter {python} cannot be asked for its packages: {ran.last_line or f'exit code {ran.code}'}")
    found: dict[str, str | None] = json.loads(ran.printed)
    return found


def _new(uv: str | None, folder: Path) -> tuple[str, ...]:
    return (uv, "venv", "--python", sys.executable, str(folder)) if uv else (sys.executable, "-m", "venv", str(folder))


def _install(uv: str | None, python: Path) -> tuple[str, ...]:
    return (uv, "pip", "install", "--python", str(python)) if uv else (str(python), "-m", "pip", "install")
