"""Rules of what is installed: one top-level package, the same by a wheel, by the sdist and by an editable install."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from configparser import ConfigParser
from pathlib import Path, PurePosixPath

import pytest

import equivcheck
from equivcheck.oracle.known_issues.known import all_known_issues

ROOT = Path(__file__).parents[2]
DIST_INFO = "equivcheck-*.dist-info"
REAL_CODE = {f"equivcheck/strategies/{file.name}" for file in (ROOT / "strategies").glob("*.py")}


def built(source: Path, target: str, directory: Path) -> Path:
    """What hatchling builds of a source tree, as `pip` would ask it to."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(directory)]
    subprocess.run(command, cwd=source, check=True, timeout=600, capture_output=True)
    (archive,) = directory.iterdir()
    return archive


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this tree."""
    return built(ROOT, "wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A site directory with the wheel in it."""
    return unpacked(wheel, tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="module")
def editable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A site directory with an editable install in it."""
    archive = built(ROOT, "wheel:editable", tmp_path_factory.mktemp("editable"))
    return unpacked(archive, tmp_path_factory.mktemp("editable-site"))


def unpacked(wheel: Path, site: Path) -> Path:
    """Install a wheel of pure Python into a site directory."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    return site


def contents(wheel: Path) -> dict[str, bytes]:
    """The files of a wheel but for its list of them."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith(".dist-info/RECORD")}


def run_in(site: Path, code: str) -> str:
    """What `code` prints where `site` is the first site directory, and what this package depends on lies in the next."""
    dependencies = dict.fromkeys((sysconfig.get_path("purelib"), sysconfig.get_path("platlib")))
    start = f"import site, sys; site.addsitedir({str(site)!r}); sys.path += {list(dependencies)!r}\n"
    command = [sys.executable, "-I", "-S", "-c", start + code]
    result = subprocess.run(command, cwd=site, check=False, timeout=600, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_a_wheel_has_one_top_level_package(wheel: Path) -> None:
    """Nobody else's `strategies`, and no tests, are written over."""
    tops = {PurePosixPath(name).parts[0] for name in contents(wheel)}
    assert "equivcheck" in tops
    (information,) = tops - {"equivcheck"}
    assert PurePosixPath(information).match(DIST_INFO)
    names = [part for name in contents(wheel) for part in PurePosixPath(name).parts]
    assert not [name for name in names if name.startswith(("test_", "conftest")) or name in {"tests", "__pycache__"}]


def test_a_wheel_has_all_that_is_needed(wheel: Path) -> None:
    """The strategies are real files, and what is no Python code is there as well."""
    files = contents(wheel)
    assert {name for name in files if name.startswith("equivcheck/strategies/")} == REAL_CODE
    assert b"def scenarios(" in files["equivcheck/strategies/scenario.py"]
    assert {"equivcheck/py.typed", "equivcheck/oracle/known_issues/known.toml"} <= files.keys()
    assert {f"equivcheck/oracle/known_issues/scripts/{issue.id}.py" for issue in all_known_issues()} <= files.keys()


def test_a_wheel_declares_its_entry_points(wheel: Path) -> None:
    """The command, the pytest plugin and the Hypothesis profiles are found once it is installed."""
    (text,) = [value for name, value in contents(wheel).items() if name.endswith(".dist-info/entry_points.txt")]
    declared = ConfigParser()
    declared.read_string(text.decode())
    assert {group: dict(declared[group]) for group in declared.sections()} == {
        "console_scripts": {"equivcheck": "equivcheck.cli:main"},
        "pytest11": {"equivcheck": "equivcheck.pytest_plugin"},
        "hypothesis": {"equivcheck": "equivcheck.system.profiles:register_profiles"},
    }


def test_the_sdist_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    """Who builds from the sdist gets what is in the wheel."""
    with tarfile.open(built(ROOT, "sdist", tmp_path / "sdist")) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.glob("equivcheck-*")
    assert not [name for name in ("docs/conf.py", "CONTRIBUTING.md", "CITATION.cff", "README.md") if not (source / name).exists()]
    assert contents(built(source, "wheel", tmp_path / "wheel")) == contents(wheel)


def test_a_wheel_is_imported_without_torch(installed: Path) -> None:
    """What is imported at the start of a run waits for no torch, and the strategies come from the package alone."""
    code = (
        "from importlib.util import find_spec\n"
        "import equivcheck, equivcheck.pytest_plugin, equivcheck.cli, equivcheck.system.profiles\n"
        "import equivcheck.strategies as strategies\n"
        "print('torch' in sys.modules, find_spec('strategies'), strategies.__file__)"
    )
    assert run_in(installed, code) == f"False None {installed / 'equivcheck/strategies/__init__.py'}"


def test_an_editable_install_is_this_tree(editable: Path) -> None:
    """It imports the strategies by the name that a wheel has for them."""
    assert run_in(editable, "import equivcheck.strategies as strategies; print(strategies.__file__)") == str(
        ROOT / "equivcheck/strategies/__init__.py"
    )


def test_an_editable_install_hides_no_other_strategies(editable: Path, tmp_path: Path) -> None:
    """This tree comes last in the path: the project that owns the name `strategies` keeps it."""
    (path_file,) = editable.glob("*.pth")
    (tmp_path / path_file.name).write_text(path_file.read_text())
    (tmp_path / "strategies.py").write_text("theirs = True")
    assert run_in(tmp_path, "import strategies, equivcheck.strategies; print(strategies.theirs)") == "True"


def test_versions_are_said_alike() -> None:
    """That of the package where it is cited, that of ruff where it runs before a commit."""
    assert f"\nversion: {equivcheck.__version__}\n" in (ROOT / "CITATION.cff").read_text("utf-8")
    pinned = re.findall(r"^ruff==.*$", (ROOT / "constraints.txt").read_text("utf-8"), re.MULTILINE)
    assert pinned == sorted(set(re.findall(r"ruff==[\d.]+", (ROOT / ".pre-commit-config.yaml").read_text("utf-8"))))
