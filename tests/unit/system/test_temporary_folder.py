"""Tests for temporary folders."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from equivcheck.system import temporary_folder as module
from equivcheck.system.temporary_folder import NoSpace, clear_abandoned, require_space, temporary_folder

HOLDS = """
from equivcheck.system.temporary_folder import temporary_folder
with temporary_folder() as folder:
    open(f"{folder}/file", "w").close()
    print(folder, flush=True)
    input()
"""

ENDS_WHILE_ONE_IS_MADE = """
import os, sys, tempfile, threading
from equivcheck.system.temporary_folder import clear_own, temporary_folder

make, is_made = tempfile.mkdtemp, threading.Event()

def slow(**options):
    folder = make(**options)
    print(folder, flush=True)
    is_made.set()
    input()
    return folder

def keep_making():
    while True:
        with temporary_folder():
            pass

tempfile.mkdtemp = slow
threading.Thread(target=keep_making, daemon=True).start()
is_made.wait()
print("ending", flush=True)
clear_own()
os._exit(0)
"""


@pytest.fixture(autouse=True)
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Folder for temporary files in this process and its children."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    module._clear_at_first_use.cache_clear()
    return tmp_path


@pytest.fixture
def holder() -> Iterator[subprocess.Popen[str]]:
    """Process that holds a temporary folder with a file."""
    with subprocess.Popen([sys.executable, "-c", HOLDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def folder_of(process: subprocess.Popen[str]) -> Path:
    """Folder that the process holds."""
    assert process.stdout is not None
    folder = Path(process.stdout.readline().strip())
    assert folder.is_dir()
    return folder


def killed(process: subprocess.Popen[str]) -> None:
    """Kill the process so that it cannot clean up."""
    process.kill()
    process.wait()


def test_a_folder_is_gone_after_its_context_however_that_ends(place: Path) -> None:
    """The folder is removed, even after an error."""
    with temporary_folder() as folder:
        Path(folder, "file").touch()
    with pytest.raises(ZeroDivisionError), temporary_folder():
        _ = 1 / 0
    assert list(place.iterdir()) == []


def test_what_a_killed_process_left_is_cleared_by_the_next_that_makes_a_folder(
    place: Path, holder: subprocess.Popen[str]
) -> None:
    """The next process removes the folder."""
    folder = folder_of(holder)
    killed(holder)
    assert folder.is_dir()
    with temporary_folder() as mine:
        assert list(place.iterdir()) == [Path(mine)]


def test_the_folder_of_a_process_that_runs_stays(holder: subprocess.Popen[str]) -> None:
    """Folders in use stay, in this and in other processes."""
    folder = folder_of(holder)
    with temporary_folder() as mine:
        clear_abandoned()
        assert (folder / "file").exists()
        assert Path(mine).is_dir()


def test_a_process_that_ends_while_it_makes_a_folder_leaves_none(place: Path) -> None:
    """A folder that another thread has just created is removed too, and no other is created."""
    command = [sys.executable, "-c", ENDS_WHILE_ONE_IS_MADE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert [process.stdout.readline().strip(), process.stdout.readline().strip()] == [str(*place.iterdir()), "ending"]
        process.communicate("\n" * 3, timeout=120)
    assert process.returncode == 0
    assert list(place.iterdir()) == []


@pytest.mark.parametrize("name", ["equivcheck-temporary-", "equivcheck-temporary-mine", "equivcheck-abcdefgh", "findings"])
def test_other_folders_stay(place: Path, name: str) -> None:
    """Only folders with matching names are removed."""
    (place / name).mkdir()
    clear_abandoned()
    assert (place / name).is_dir()


def test_a_file_of_that_name_and_a_link_are_let_be(place: Path) -> None:
    """Files and links with a matching name stay."""
    (place / "equivcheck-temporary-abcdefgh").touch()
    (place / "precious").mkdir()
    (place / "equivcheck-temporary-abcdefgi").symlink_to(place / "precious")
    clear_abandoned()
    assert len(list(place.iterdir())) == 3


def test_a_full_disk_is_named(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    """The message names place and reason. With free space nothing is raised and no file stays."""
    require_space()
    assert list(place.iterdir()) == []
    monkeypatch.setattr(tempfile, "TemporaryFile", partial(open, "/dev/full", "wb"))
    with pytest.raises(NoSpace, match=rf"{place} \(TMPDIR\): No space left on device"):
        require_space()


def test_a_place_that_takes_no_folder_is_named(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    """The message is the same if a folder cannot be created."""
    monkeypatch.setattr(tempfile, "tempdir", str(place / "nowhere"))
    with pytest.raises(NoSpace, match="nowhere"), temporary_folder():
        pass
