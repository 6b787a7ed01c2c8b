"""Invalid files and folders are refused in one line, whoever made them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from equivcheck.campaign.findings.finding import load_finding
from equivcheck.campaign.findings.fingerprint import fingerprint
from equivcheck.campaign.findings.store import FindingStore
from equivcheck.cli import main
from equivcheck.cli.options import print_json
from equivcheck.report.verdict_text import print_verdict
from equivcheck.scenario.file_format.codec import to_json
from equivcheck.system.files import MAX_BYTES
from unit.campaign import fakes

READERS = ("check", "dry-run", "export")
"""Commands that read a scenario file."""
OF_FINDINGS = ("replay", "bisect", "export")
"""Commands that read a finding's folder."""
MANY_RANKS = {"layout": {"mesh": {"axes": [{"name": "dp", "size": 4096}]}}, "training": {"data": {"microbatches": [4096]}}}


def run(*arguments: object) -> Result:
    """Run a command line."""
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def refused(result: Result) -> str:
    """Return the only line, short and printable, for bad input."""
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert line.isprintable()
    assert len(line) < 600
    return line


def merged(value: Any, changes: Any) -> Any:
    """JSON with some values replaced."""
    if not (isinstance(value, dict) and isinstance(changes, dict)):
        return changes
    return value | {name: merged(value.get(name), inner) for name, inner in changes.items()}


def scenario_with(changes: Any) -> str:
    """A scenario's JSON with some values replaced."""
    return json.dumps(merged(json.loads(to_json(fakes.scenario())), changes))


def layout_of(**options: object) -> dict[str, Any]:
    """Replace DDP's options."""
    return {"layout": {"parallelisms": [{"kind": "ddp", **options}]}}


def axis(name: str) -> dict[str, Any]:
    """Rename the axis."""
    return {"layout": {"mesh": {"axes": [{"name": name, "size": 2}]}}}


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """Folder of a finding."""
    store = FindingStore(tmp_path / "findings")
    verdict = fakes.diverged(fakes.scenario(width=3))
    store.keep(verdict)
    return store.folder(fingerprint(verdict))


@pytest.mark.parametrize("command", READERS)
@pytest.mark.parametrize(
    ("make", "names"),
    [
        (os.mkfifo, "is a FIFO. Expected a regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "is a character device. Expected a regular file"),
        (lambda path: path.symlink_to(path.name), "Too many levels of symbolic links"),
        (lambda path: path.write_bytes(b" " * (MAX_BYTES + 1)), "is too large. Expected at most 16,777,216 bytes"),
        (lambda path: path.write_text(to_json(fakes.scenario()), "utf-16"), "UTF-8"),
        (lambda path: path.write_text(to_json(fakes.scenario()), "utf-8-sig"), "BOM"),
    ],
    ids=["FIFO", "device", "loop", "large", "UTF-16", "BOM"],
)
def test_what_is_no_file_of_text_is_refused(tmp_path: Path, command: str, make: Callable[[Path], object], names: str) -> None:
    """The command neither waits for input nor reads forever."""
    path = tmp_path / "it"
    make(path)
    if command == "export" and not path.is_file():
        assert "finding" in refused(run(command, path))
    else:
        assert names in refused(run(command, path))


def test_fields_that_occur_twice_are_found_in_one_pass(tmp_path: Path) -> None:
    """200,000 fields take no longer than reading them, because a quadratic search would take an hour."""
    (path := tmp_path / "it").write_text("{" + "".join(f'"k{number}": 1, ' for number in range(200_000)) + '"k199999": 2}')
    assert 'field "k199999" occurs twice' in refused(run("check", path))


REFUSED: dict[str, tuple[str, str]] = {
    "a long name of an axis": (scenario_with(axis("a" * 10**6)), "1 to 64 printable characters"),
    "an unprintable name of an axis": (scenario_with(axis("\x1b[2J")), "1 to 64 printable characters"),
    "no name of an axis": (scenario_with(axis("")), "1 to 64 printable characters"),
    "a surrogate": (scenario_with(axis("\ud800")), "1 to 64 printable characters"),
    "a long field": (scenario_with({"a" * 10**6: 1}), "unknown field"),
    "an unprintable field": (scenario_with({"\x1b[2J\n": 1}), "unknown field"),
    "a bucket beyond bytes": (scenario_with(layout_of(bucket_cap_mb=1.7e308)), "0.0 to 1048576.0"),
    "a long number": (scenario_with({"training": {"steps": 10**4000}}), "1 to 10"),
    "long rows": (scenario_with({"training": {"data": {"microbatches": [10**4000]}}}), "1 to 65536"),
    "many parallelisms": (
        scenario_with({"layout": {"parallelisms": [{"kind": "ddp"}] * 10_000}}),
        "one for each of the axes ['dp']",
    ),
    "many ranks": (scenario_with(MANY_RANKS), "Expected 1 to 64"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_values_that_nothing_can_run_are_refused_in_short(tmp_path: Path, case: str) -> None:
    """The error has the valid values; the quoted value is shortened and escaped."""
    text, names = REFUSED[case]
    (path := tmp_path / "it").write_text(text)
    assert names in refused(run("check", path))


@pytest.mark.parametrize("command", [("check", "--world", "gloo"), ("export",)])
def test_too_many_ranks_are_bad_input_wherever_they_would_run(tmp_path: Path, command: tuple[str, ...]) -> None:
    """No rank is started, and an isolated check passes the refusal on."""
    (path := tmp_path / "it").write_text(scenario_with(MANY_RANKS))
    assert "size 4,096 is not valid" in refused(run(*command, path))


def changed(file: str, **values: object) -> Callable[[Path], None]:
    """Return a function that replaces values in a finding's file."""

    def change(folder: Path) -> None:
        path = folder / file
        path.write_text(json.dumps(merged(json.loads(path.read_text()), values)))

    return change


def replaced(file: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    """Return a function that replaces a finding's file by something else."""

    def change(folder: Path) -> None:
        (folder / file).unlink(missing_ok=True)
        make(folder / file)

    return change


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "unknown world": (changed("verdict.json", world="zz"), "Expected one of sim, gloo"),
    "no data in its world": (changed("verdict.json", world="fake"), "Expected one of sim, gloo"),
    "no finding": (changed("verdict.json", outcome="equivalent"), "Expected diverged, crashed or hung"),
    "no step": (changed("verdict.json", divergence={"step": 10**9}), "divergence.step"),
    "no moment": (changed("verdict.json", followers=["zz"]), "followers"),
    "a reason without end": (changed("verdict.json", reason="a " * 10**6), "at most 100,000"),
    "no version": (changed("environment.json", torch="zz"), "not a version number"),
    "code in a version": (changed("environment.json", torch='2.13.0"""\nimport os\n"""'), "environment.json"),
    "an unprintable date": (changed("environment.json", date="\x1b[31m"), "printable"),
    "a long date": (changed("environment.json", date="1" * 10**6), "printable"),
    "a FIFO": (replaced("verdict.json", os.mkfifo), "is a FIFO"),
    "a device": (replaced("environment.json", lambda path: path.symlink_to("/dev/zero")), "is a character device"),
    "a FIFO of versions": (replaced("versions.json", os.mkfifo), "is a FIFO"),
    "a loop of versions": (replaced("versions.json", lambda path: path.symlink_to(path)), "symbolic links"),
    "no versions": (
        replaced("versions.json", lambda path: path.write_text('{"by": "script", "versions": [], "measured": []}')),
        "at least one",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_finding_that_no_check_makes_is_refused(kept: Path, case: str) -> None:
    """All commands refuse an impossible finding. In a store, it is a line on stderr."""
    change, names = BROKEN[case]
    change(kept)
    for command in OF_FINDINGS:
        assert names in refused(run(command, kept))
    all_of_them = run("replay", "--all", "--store", kept.parent)
    assert names in all_of_them.stderr
    assert all_of_them.stderr.isprintable() or all_of_them.stderr.replace("\n", "").isprintable()


def test_what_a_finding_says_is_printed_without_escapes(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A terminal obeys no escape sequence from a file."""
    red = "\x1b[31m\x07\u202ered"
    changed("verdict.json", reason=red, drift=red, confirmed=red, followers=[f"step 0 update {red}"])(kept)
    changed("verdict.json", divergence={"tensor": red, "expected": red, "actual": red})(kept)
    verdict = load_finding(kept).verdict
    from equivcheck.campaign.findings.readme import readme
    from equivcheck.cli.options import console

    print_verdict(console(), verdict)
    print(verdict.describe())
    print(readme(kept.name, verdict, load_finding(kept).environment))
    print_json({"reason": verdict.reason})
    printed = capsys.readouterr().out
    assert "\\x1b[31m\\x07\\u202ered" in printed
    assert printed.replace("\n", "").replace("\t", "").isprintable()


def test_names_of_folders_are_printed_without_escapes(kept: Path) -> None:
    """Each name has its own line and is escaped."""
    shutil.move(kept, kept.with_name("a\n\x1b[31mb"))
    (kept.parent / "c\rd").mkdir()
    for command in (("replay", "--all"), ("replay", "zz")):
        result = run(*command, "--store", kept.parent)
        assert (result.stdout + result.stderr).replace("\n", "").isprintable()


@pytest.mark.parametrize("path", ["x" * 5000, "\udc80", "/dev/null/x", "a\nb"])
@pytest.mark.parametrize("command", ["check", "replay", "bisect", "export", "dry-run"])
def test_paths_that_name_nothing_are_refused(command: str, path: str) -> None:
    """Paths that are too long, undecodable, or below a file give one line each."""
    result = run(command, path)
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (("versions", "--output", "/dev/null"), "regular file"),
        (("versions", "--output", "nowhere/matrix.json"), "folder nowhere does not exist"),
        (("coverage", "--seconds", "1", "--legal", "nowhere/pairs.json"), "folder nowhere does not exist"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_there_is_anything_to_write(
    arguments: tuple[str, ...], names: str
) -> None:
    """A device must not be replaced by a file."""
    assert names in refused(run(*arguments))
