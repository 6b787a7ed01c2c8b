"""Commands on tensor programs and their findings."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result

from equivcheck.campaign.findings.finding import load_finding
from equivcheck.campaign.findings.store import FindingStore
from equivcheck.campaign.workers import process
from equivcheck.checking.cases import check_case
from equivcheck.cli import main
from equivcheck.programs.check import check_program
from equivcheck.programs.nouns import Leaf, Operation, Redistribution, TensorProgram
from equivcheck.programs.run.faults import FAULTS
from equivcheck.scenario.file_format.codec import to_json

pytestmark = pytest.mark.usefixtures("workers_are_forked")

PROGRAM = TensorProgram(
    mesh=(2,),
    statements=(Leaf(shape=(4, 6), placements=("S(0)",)), Redistribution(placements=("R",)), Operation(name="square")),
)
NEGATIVE_SCAN = TensorProgram(mesh=(2,), statements=(Leaf(shape=(4, 6), placements=("S(0)",)), Operation(name="cumsum", dim=-2)))


def run(*arguments: object, stdin: str | None = None) -> Result:
    """Run a command line."""
    return CliRunner().invoke(main, [str(argument) for argument in arguments], input=stdin)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file with a correct program."""
    path = tmp_path / "program.json"
    path.write_text(to_json(PROGRAM))
    return path


@pytest.fixture
def finding(tmp_path: Path) -> Path:
    """Folder of a finding with a planted fault."""
    store = FindingStore(tmp_path / "store")
    store.keep(check_program(PROGRAM, target=FAULTS["doubled_backward"]))
    (mark,) = store.fingerprints()
    return store.folder(mark)


@pytest.fixture
def _check_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check in this process, because a new one takes longer."""
    monkeypatch.setattr(process, "check_isolated", check_case)


def test_a_file_of_a_program_is_checked(file: Path) -> None:
    """Text and JSON work, and so does standard input."""
    result = run("check", file)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("EQUIVALENT: tensor program on 2 ranks, 3 statements: square, in sim")
    told = json.loads(run("check", "-", "--json", stdin=file.read_text()).stdout)
    assert told["outcome"] == "equivalent"
    assert told["program"] == json.loads(to_json(PROGRAM))


@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "FILE", "--comm"),
        ("check", "FILE", "--beyond"),
        ("dry-run", "FILE"),
        ("export", "FILE", "--numbers", "drawn"),
        ("fuzz", "--programs", "--layout", "ddp", "--seconds", "1"),
        ("fuzz", "--programs", "--with-programs", "--seconds", "1"),
        ("coverage", "--programs", "--layout", "ddp", "--seconds", "1"),
    ],
)
@pytest.mark.usefixtures("_check_here")
def test_what_a_program_does_not_have_is_refused(arguments: tuple[str, ...], file: Path) -> None:
    """The error is one line with the valid choices; the exit code is 2."""
    result = run(*(str(file) if each == "FILE" else each for each in arguments))
    assert result.exit_code == 2, result.output
    assert re.search("allowed|Expected", result.stderr)
    assert "Traceback" not in result.stderr


def test_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    """The error lists the known kinds."""
    path = tmp_path / "file.json"
    path.write_text('{"kind": "song", "format": 1}')
    result = run("check", path)
    assert result.exit_code == 2
    assert "Expected scenario or tensor_program" in result.stderr


@pytest.mark.usefixtures("_check_here")
def test_a_finding_is_replayed_and_listed(finding: Path) -> None:
    """It no longer shows, because the fault is not planted."""
    result = run("replay", finding)
    assert result.exit_code == 0, result.output
    assert "no longer shows" in result.stdout
    result = run("replay", "--all", "--store", finding.parent)
    assert "tensor_program: no longer shows" in result.stdout
    assert load_finding(finding).verdict.case == PROGRAM


def test_a_finding_is_exported_and_has_a_page(finding: Path, tmp_path: Path) -> None:
    """The page has verdict, program and script; the script needs only torch."""
    result = run("export", finding, "-o", tmp_path / "repro.py")
    assert result.exit_code == 0, result.output
    script = (tmp_path / "repro.py").read_text()
    compile(script, "repro.py", "exec")
    assert "import equivcheck" not in script
    assert "DTensors against the same operations on one device: diverged on torch" in script
    page = tmp_path / "page.html"
    result = run("report", finding, "-o", page)
    assert result.exit_code == 0, result.output
    text = "".join(ElementTree.fromstring(page.read_text()).itertext())
    for part in (
        "v1 into square",
        "Redistribution(placements=('R',))",
        "torchrun --standalone --nproc-per-node 2",
        "equivcheck replay",
    ):
        assert part in text


@pytest.mark.torch(">=2.12", "earlier versions have no flip of DTensors, which the backward of cumsum calls")
@pytest.mark.slow
@pytest.mark.usefixtures("_check_here")
def test_a_script_shows_what_is_on_file(tmp_path: Path) -> None:
    """On processes, it exits with 1."""
    path = tmp_path / "program.json"
    path.write_text(to_json(NEGATIVE_SCAN))
    result = run("export", path, "--run")
    assert result.exit_code == 1, result.output
    assert "v1\non one device:" in result.stdout


@pytest.mark.slow
def test_coverage_of_programs_names_overloads() -> None:
    """Overloads with a sharding rule are counted, reached or not."""
    result = run("coverage", "--programs", "--seconds", "2", "--seed", "1", "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert "aten.add.Tensor" in told["overloads"]["reached"]
    assert "aten._fused_rms_norm.default" in told["overloads"]["missing"] or told["overloads"]["registered"] < 1000
    assert told["overloads"]["registered"] == len(told["overloads"]["reached"]) + len(told["overloads"]["missing"])
