"""Python environments with other torch versions: the user's own environments, and new environments in a cache folder."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from filelock import FileLock
from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

import equivcheck
from equivcheck.errors import EquivCheckError, UsageError
from equivcheck.quality.versions.releases import RELEASED, chosen_releases, list_releases, names_nightlies, needs_index
from equivcheck.system.commands import FinishedCommand, run
from equivcheck.system.temporary_folder import temporary_folder

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""PyTorch's index of CPU builds. Other indexes have CUDA builds with several GB."""
OWN_INDEX = "default"
"""Value for `index_url` if the index comes from the pip or uv configuration."""
_COMPLETE, _CONSTRAINTS = "complete.json", "constraints.txt"
_NOT_HERE = ("PIP_CONSTRAINT", "UV_CONSTRAINT")
"""Variables that may pin torch to this environment's version."""
_ASK_SECONDS = 60.0
_ASK = (
    "import importlib.metadata as m, json, sys\n"
    "there = {(d.metadata['Name'] or '').lower(): d.version for d in m.distributions()}\n"
    "print(json.dumps({name: there.get(name) for name in sys.argv[1:]}))"
)


class NoEnvironment(EquivCheckError):
    """No Python environment with this torch version can be created."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    """Python interpreter with an installed torch version."""

    torch: str
    """Installed version: ``2.13.0+cpu``."""
    python: Path
    """Path to the interpreter."""

    @property
    def version(self) -> Version:
        """Return the version without its local part, such as ``+cpu``."""
        return Version(Version(self.torch).public)


@dataclass(frozen=True, slots=True, kw_only=True)
class Environments:
    """Finds a Python environment for each torch version: the user's own environment, or a new one."""

    given: Mapping[Version, Installation]
    """Installations named by the user."""
    cache: Path
    """Folder for new environments, one per version."""
    index_url: str = CPU_INDEX
    """Index for torch; `OWN_INDEX` for the pip or uv configuration."""
    tell: Callable[[str], None]
    """Function that gets lines about the progress."""

    def installation(self, release: Version) -> Installation:
        """Return a release's installation: the user's own, or an environment in the cache, which is created if needed.

        Raises `NoEnvironment` if it cannot be created.
        """
        found = self.given.get(release)
        return self._made(release) if found is None else found

    @property
    def index_arguments(self) -> tuple[str, ...]:
        """Return options to tell pip and uv which package index to use."""
        return () if self.index_url == OWN_INDEX else ("--index-url", self.index_url)

    def _made(self, release: Version) -> Installation:
        """Create an environment. A file in it marks it as complete; an interrupted environment is created again."""
        name = f"{release}-python{sys.version_info.major}.{sys.version_info.minor}"
        try:
            self.cache.mkdir(parents=True, exist_ok=True)
            with FileLock(self.cache / f"{name}.lock"):
                return self._complete(self.cache / name, release)
        except OSError as error:
            raise NoEnvironment(
                f"torch {release}: no environment can be created in {self.cache}: {type(error).__name__}: {error}"
            ) from error

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
        self.tell(f"torch {release}: installing equivcheck's dependencies ...")
        self._run(release, (*install, "--constraint", str(constraints), *wanted))

    def find_versions(self, text: str) -> tuple[Version, ...]:
        """Return the versions named by a text such as ``2.9..2.15``.

        If they depend on the latest releases, pip looks these up in the package index.
        """
        if not needs_index(text):
            return chosen_releases(text, RELEASED, self.given)
        nightlies = ("--pre",) if names_nightlies(text) else ()
        return chosen_releases(text, RELEASED + list_releases((*self.index_arguments, *nightlies)), self.given)

    @staticmethod
    def _run(release: Version, command: tuple[str, ...]) -> None:
        environment = {name: value for name, value in os.environ.items() if name not in _NOT_HERE}
        ran = run(command, seconds=None, environment=environment)
        if ran.code:
            errors = [line for line in ran.errors.splitlines() if line.lower().startswith("error")] or [ran.last_line]
            raise NoEnvironment(f"torch {release}: `{' '.join(command)}` failed: {errors[-1]}")


def default_cache() -> Path:
    """Return the folder for environments in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "equivcheck" / "torch"


def parse_environment(text: str) -> Installation:
    """Parse ``2.15.0=/path/to/python``. Raises `UsageError` if the interpreter does not have this torch or another dependency."""
    named, _, path = text.partition("=")
    example = "Expected VERSION=PATH, such as 2.15.0=/path/to/bin/python"
    try:
        wanted, python = Version(named), Path(path).absolute()
    except InvalidVersion:
        raise UsageError(f"environment {text!r} is not valid: no torch version before '='. {example}") from None
    if not path or not os.access(python, os.X_OK) or python.is_dir():
        raise UsageError(f"environment {text!r} is not valid: no interpreter after '='. {example}")
    there = ask(python, ("torch", *dependencies()))
    torch = there.pop("torch")
    if torch is None or Version(torch).public != wanted.public:
        found = f"torch {torch}" if torch else "no torch"
        raise UsageError(f"environment {text!r} is not valid: it has {found}. Expected torch {wanted}")
    if lacks := sorted(name for name, installed in there.items() if installed is None):
        raise UsageError(
            f"environment {text!r} is not valid: {', '.join(lacks)} not installed. Expected all dependencies of equivcheck"
        )
    return Installation(torch=torch, python=python)


def dependencies() -> dict[str, str]:
    """Return equivcheck's dependencies except torch, with their installed versions.

    Raises `NoEnvironment` if equivcheck is not installed.
    """
    try:
        needed = [Requirement(text) for text in requires("equivcheck") or ()]
    except PackageNotFoundError:
        raise NoEnvironment("equivcheck is not installed here, so its dependencies are unknown. Install it with pip") from None
    names = (found.name for found in needed if found.marker is None or found.marker.evaluate({"extra": ""}))
    return {name.lower(): version(name) for name in sorted(names) if name != "torch"}


def ask(python: Path, names: tuple[str, ...]) -> dict[str, str | None]:
    """Return package versions in another interpreter's environment; None for a missing package.

    Raises `UsageError` if the interpreter cannot run.
    """
    ran = run_python(python, ("-c", _ASK, *names), seconds=_ASK_SECONDS)
    if ran.code != 0:
        raise UsageError(f"interpreter {python} cannot be asked for its packages: {ran.last_line or f'exit code {ran.code}'}")
    found: dict[str, str | None] = json.loads(ran.printed)
    return found


def _new(uv: str | None, folder: Path) -> tuple[str, ...]:
    return (uv, "venv", "--python", sys.executable, str(folder)) if uv else (sys.executable, "-m", "venv", str(folder))


def _install(uv: str | None, python: Path) -> tuple[str, ...]:
    return (uv, "pip", "install", "--python", str(python)) if uv else (str(python), "-m", "pip", "install")


_NOT_FOR_OTHERS = ("PYTHONHOME", "PYTHONSTARTUP", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")
"""Variables for this interpreter only."""


def run_python(python: Path, arguments: Sequence[str], *, seconds: float) -> FinishedCommand:
    """Run another environment's interpreter. It can import this equivcheck, but no other package from this environment.

    The process and its children end after `seconds`, or if this process is interrupted.
    """
    with temporary_folder() as folder:
        Path(folder, "equivcheck").symlink_to(Path(equivcheck.__path__[0]).resolve(), target_is_directory=True)
        inherited = {name: value for name, value in os.environ.items() if name not in _NOT_FOR_OTHERS}
        path = {"PYTHONPATH": folder, "PYTHONSAFEPATH": "1"}
        return run([str(python), *arguments], seconds=seconds, environment=inherited | path)
