"""Exit codes, stdout and stderr of commands."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from equivcheck import cli
from equivcheck.campaign import plan
from equivcheck.campaign.findings.finding import StoreFailed, load_finding
from equivcheck.campaign.findings.fingerprint import fingerprint
from equivcheck.campaign.findings.store import FindingStore
from equivcheck.campaign.workers import process
from equivcheck.cli import main
from equivcheck.oracle.verdict.verdict import Outcome, Verdict
from equivcheck.scenario import Scenario
from equivcheck.scenario.file_format.codec import to_json
from unit.campaign import fakes

pytestmark = pytest.mark.usefixtures("workers_are_forked")


def run(*arguments: object, stdin: str | bytes | None = None) -> Result:
    """Run a command line."""
    return CliRunner().invoke(main, [str(argument) for argument in arguments], input=stdin)


def the_object(result: Result) -> dict[str, Any]:
    """Parse the only JSON object on stdout."""
    (line,) = result.stdout.splitlines()
    value = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert isinstance(value, dict)
    return value


def give(monkeypatch: pytest.MonkeyPatch, outcome: Outcome) -> None:
    """Give every check in this process this outcome."""

    def check(scenario: Scenario, *, world: str, deadline: float, **_options: object) -> Verdict:
        verdict = fakes.diverged(scenario, world=world)
        return verdict if outcome is Outcome.DIVERGED else replace(verdict, outcome=outcome, divergence=None)

    monkeypatch.setattr("equivcheck.checking.check.check", check)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file with a scenario."""
    path = tmp_path / "scenario.json"
    path.write_text(to_json(fakes.scenario()))
    return path


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """Folder of a finding."""
    store = FindingStore(tmp_path / "findings")
    verdict = fakes.diverged(fakes.scenario(width=3))
    store.keep(verdict)
    return store.folder(fingerprint(verdict))


@pytest.mark.parametrize("outcome", list(Outcome))
def test_the_exit_code_of_a_check_says_whether_something_was_found(
    file: Path, outcome: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1 for a finding, 0 for every other outcome, which is printed."""
    give(monkeypatch, outcome)
    result = run("check", file)
    assert result.exit_code == int(outcome in (Outcome.DIVERGED, Outcome.CRASHED, Outcome.HUNG))
    assert outcome.name in result.stdout


def test_a_check_is_real(file: Path) -> None:
    """A scenario from a file is trained on simulated ranks, and the verdict is one JSON object."""
    result = run("check", file, "--json")
    assert result.exit_code == 0
    verdict = the_object(result)
    assert verdict["outcome"] == "equivalent"
    assert verdict["scenario"] == json.loads(file.read_text())


def test_a_check_has_a_page(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the page cannot be written, stderr has a line, and the result is printed anyway."""
    page = tmp_path / "page.html"
    assert run("check", file, "--html", page).exit_code == 0
    assert f"equivcheck check {file}" in page.read_text("utf-8")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("equivcheck.report.finding_page.page.replace_text", full)
    result = run("check", file, "--json", "--html", page)
    assert the_object(result)["outcome"] == "equivalent"
    assert f"{page} is not written: [Errno 28] No space left on device" in result.stderr


@pytest.mark.slow
def test_a_finding_is_confirmed_on_request(file: Path, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If `--confirm` is given, a finding also runs on processes. Other outcomes do not."""
    give(monkeypatch, Outcome.DIVERGED)
    assert the_object(run("check", file, "--confirm", "--json"))["confirmed"] == "diverged on gloo too"
    assert "diverged on gloo too" in run("check", file, "--confirm").stdout
    assert the_object(run("check", file, "--json"))["confirmed"] == ""
    give(monkeypatch, Outcome.EQUIVALENT)
    assert the_object(run("check", file, "--confirm", "--json"))["confirmed"] == ""
    use_checks(monkeypatch, fakes.wide_diverges_in_sim)
    replayed = the_object(run("replay", kept, "--confirm", "--json"))
    assert replayed["verdict"]["confirmed"] == "not seen on gloo: equivalent there"


def test_a_scenario_comes_from_standard_input_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dash means standard input."""
    give(monkeypatch, Outcome.EQUIVALENT)
    assert run("check", "-", stdin=to_json(fakes.scenario())).exit_code == 0


BAD_INPUTS: dict[str, tuple[tuple[str, ...], str | bytes | None, str]] = {
    "unknown command": (("frobnicate",), None, "frobnicate"),
    "unknown option": (("check", "-", "--frob"), None, "--frob"),
    "missing file": (("check", "nowhere.json"), None, "nowhere.json"),
    "folder": (("check", "."), None, "is a folder"),
    "no argument": (("check",), None, "FILE"),
    "empty": (("check", "-"), "", "standard input"),
    "no JSON": (("check", "-"), "{", "invalid JSON"),
    "no object": (("check", "-"), "[]", "an object"),
    "no text": (("check", "-"), b"\xff\xfe", "UTF-8"),
    "newer format": (("check", "-"), '{"format": 99}', "newer"),
    "deep": (("check", "-"), "[" * 100_000, "invalid JSON"),
    "unknown field": (("check", "-"), to_json(fakes.scenario()).replace('"steps"', '"stairs"'), "stairs"),
    "out of range": (("check", "-"), to_json(fakes.scenario()).replace('"steps": 1', '"steps": 0'), "Expected"),
    "unknown world": (("check", "-", "--world", "moon"), None, "gloo"),
    "world that nobody has started": (("check", "-", "--world", "torchrun"), None, "RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT"),
    "world that runs one check": (("fuzz", "--checks", "1", "--world", "torchrun"), None, "`check FILE --world torchrun`"),
    "replay of all on a world of one size": (("replay", "--all", "--world", "torchrun"), None, "one finding"),
    "deadline": (("check", "-", "--deadline", "0"), None, "--deadline"),
    "no end": (("fuzz",), None, "--checks"),
    "no checks": (("fuzz", "--checks", "0"), None, "--checks"),
    "seconds": (("fuzz", "--seconds", "-1"), None, "--seconds"),
    "seconds are NaN": (("fuzz", "--seconds", "nan"), None, "seconds"),
    "unknown layout": (
        ("fuzz", "--seconds", "1", "--layout", "nope"),
        None,
        "ddp, replicate, fsdp1, fsdp2, tensor_parallel, spmd",
    ),
    "ranks": (("fuzz", "--seconds", "1", "--max-ranks", "9"), None, "--max-ranks"),
    "workers": (("fuzz", "--seconds", "1", "--workers", "0"), None, "--workers"),
    "unknown finding": (("replay", "abc", "--store", "nowhere"), None, "nowhere"),
    "finding that is a missing folder": (("replay", "nowhere/abc"), None, "nowhere/abc is not valid: no such folder"),
}


@pytest.mark.parametrize("case", BAD_INPUTS)
def test_bad_input_is_one_clear_line(case: str) -> None:
    """Exit code 2, an empty stdout, and one line on stderr that names the error or the valid choices."""
    arguments, stdin, names = BAD_INPUTS[case]
    result = run(*arguments, stdin=stdin)
    assert result.exit_code == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert names in line


def test_a_broken_finding_is_bad_input(kept: Path) -> None:
    """The error names the damaged file."""
    (kept / "verdict.json").write_text("{")
    result = run("replay", kept)
    assert result.exit_code == 2
    assert "verdict.json" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def use_checks(monkeypatch: pytest.MonkeyPatch, check: plan.Check) -> None:
    """Make campaigns and isolated checks use a fake check, and do not shrink."""
    monkeypatch.setitem(plan.Plan.__init__.__kwdefaults__, "check", check)
    monkeypatch.setitem(plan.Plan.__init__.__kwdefaults__, "shrink_seconds", 1.0)
    monkeypatch.setitem(process.check_isolated.__kwdefaults__, "check", check)


@pytest.mark.parametrize(
    ("check", "shows", "code"),
    [(fakes.wide_diverges, "still", 1), (fakes.fine, "no_longer", 0), (fakes.wide_dies, "differently", 1)],
    ids=["still", "no longer", "differently"],
)
def test_replay_says_whether_a_finding_still_shows(
    kept: Path, check: plan.Check, shows: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 0 only if the finding no longer shows; it may also fail in another way."""
    use_checks(monkeypatch, check)
    result = run("replay", kept.name[:5], "--store", kept.parent, "--json")
    assert result.exit_code == code
    replayed = the_object(result)
    assert replayed["shows"] == shows
    assert replayed["fingerprint"] == kept.name
    assert run("replay", kept).exit_code == code


def test_fuzz_prints_one_object(tmp_path: Path) -> None:
    """A short campaign over real scenarios counts by layout and outcome."""
    result = run(
        "fuzz",
        "--checks",
        "12",
        "--seed",
        "1",
        "--workers",
        "1",
        "--layout",
        "ddp",
        "--max-ranks",
        "2",
        "--store",
        tmp_path,
        "--json",
    )
    summary = the_object(result)
    assert result.exit_code == int(bool(summary["findings"]))
    assert summary["checks"] == summary["budget_checks"] == 12
    assert set(summary["outcomes"]) == {outcome.value for outcome in Outcome}
    assert sum(summary["outcomes"].values()) == summary["checks"]
    assert set(summary["layouts"]) == {"ddp"}
    assert summary["layouts"]["ddp"]["outcomes"] == summary["outcomes"]
    assert summary["checks_per_second"] == pytest.approx(summary["checks"] / summary["seconds"], rel=0.01)
    assert "1 process" in result.stderr
    assert summary["control"]["caught"]
    assert 0 < summary["control"]["examples"] <= 200


def test_fuzz_tells_of_its_findings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each finding is listed with its folder and a replay command; the exit code is 1."""
    use_checks(monkeypatch, fakes.wide_diverges)
    layouts = ("--layout", "ddp", "--layout", "replicate")
    arguments = ("fuzz", "--checks", "20", "--seed", "1", "--workers", "1", *layouts, "--store", tmp_path)
    result = run(*arguments, "--json")
    assert result.exit_code == 1
    for finding in the_object(result)["findings"]:
        kept = load_finding(Path(finding["path"]))
        assert finding["outcome"] == kept.verdict.outcome.value == "diverged"
        assert finding["ranks"] == kept.verdict.scenario.layout.mesh.num_ranks
    text = run(*arguments)
    assert text.exit_code == 1
    assert "DIVERGED" in text.stdout
    assert "equivcheck replay" in text.stdout
    assert "seen before" in text.stdout


@pytest.mark.slow
def test_a_run_whose_control_survives_is_exit_code_3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checker that misses its control proves nothing, but it keeps and prints its findings."""
    use_checks(monkeypatch, fakes.wide_diverges_but_blind)
    arguments = ("fuzz", "--checks", "20", "--seed", "1", "--workers", "1", "--layout", "ddp", "--store", tmp_path)
    result = run(*arguments, "--json")
    assert result.exit_code == 3
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    summary = the_object(result)
    assert summary["findings"]
    assert not summary["control"]["caught"]
    assert summary["control"]["examples"] > 10
    assert summary["control"]["name"] in line


def test_findings_that_are_nowhere_but_on_stdout_are_exit_code_3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If findings cannot be stored, the exit code says so, because scripts look for them in the store."""
    use_checks(monkeypatch, fakes.wide_diverges)

    def keep(_store: FindingStore, _verdict: Verdict) -> None:
        raise StoreFailed("findings cannot be kept: No space left on device")

    monkeypatch.setattr(FindingStore, "keep", keep)
    result = run("fuzz", "--checks", "20", "--seed", "1", "--workers", "1", "--layout", "ddp", "--store", tmp_path, "--json")
    assert result.exit_code == 3
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert "No space left on device" in line
    assert the_object(result)["findings"][0]["verdict"]["scenario"]["kind"] == "scenario"


def test_a_checker_that_breaks_is_exit_code_3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in the checker goes to stderr and is no finding; the JSON object is still complete."""
    use_checks(monkeypatch, fakes.raises)
    result = run("fuzz", "--checks", "20", "--workers", "1", "--store", tmp_path, "--json")
    assert result.exit_code == 3
    assert "RuntimeError: no such thing" in result.stderr
    assert the_object(result)["findings"] == []


def test_a_missing_torch_is_exit_code_3(file: Path) -> None:
    """If torch is missing, the error is one line."""
    code = f"import sys; sys.modules['torch'] = None; from equivcheck.cli import main; main(['check', {str(file)!r}])"
    environment = {"PYTHONPATH": ":".join(sys.path)}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, check=False, capture_output=True, text=True)
    assert ended.returncode == 3
    assert "torch" in ended.stderr.splitlines()[-1]


def test_help_and_version_need_no_torch() -> None:
    """Help is quick, because no command imports torch for it."""
    load = "import sys; from equivcheck.cli import main; list(main.commands.values())"
    code = f"{load}; sys.exit('torch' in sys.modules or 'hypothesis' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}, check=False).returncode == 0
    assert run("--version").stdout == f"equivcheck, version {cli.equivcheck.__version__}\n"
    for command in main.commands:
        assert run(command, "--help").exit_code == 0


def test_help_shows_whole_sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    """On 80 columns, no command's summary is cut off, and each command is in one section."""
    monkeypatch.setenv("COLUMNS", "80")
    printed = run("--help").stdout
    assert "..." not in printed.partition("Options:")[2]
    for name in main.commands:
        assert printed.count(f"\n  {name} ") == 1


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (("fuzz", "--seconds", "1", "--layout", "dpp"), "ddp"),
        (("sweep", "--operation", "matmul_share"), "matmul_shared"),
        (("bisect", "--id", "adafactor_norm_of_shards"), "adafactor_norm_of_shard"),
        (("selftest", "--mutants", "reduction_mising"), "reduction_missing"),
    ],
)
def test_similar_names_are_suggested(arguments: tuple[str, ...], meant: str) -> None:
    """Layouts, operations, known issues and mutants have suggestions."""
    result = run(*arguments)
    assert result.exit_code == 2
    assert f"Did you mean {meant}" in result.stderr
