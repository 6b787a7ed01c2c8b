"""`equivcheck report` and `fuzz --html` write a page about a run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from equivcheck.campaign import supervisor
from equivcheck.campaign.events import Listener, Summary
from equivcheck.campaign.findings.store import FindingStore
from equivcheck.campaign.history.history import FILE, History
from equivcheck.campaign.plan import Plan
from equivcheck.campaign.tally import Tally
from equivcheck.cli import main
from unit.campaign import fakes
from unit.campaign.history.runs import run as run_of
from unit.report.html_page import HtmlPage, require_sound
from unit.report.pages import campaign

pytestmark = pytest.mark.usefixtures("workers_are_forked")


def run(*arguments: object) -> Result:
    """Run a command line."""
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store with two runs; the first has a finding."""
    store = tmp_path / "findings"
    campaign(store, 0, found=(fakes.diverged(fakes.scenario()),))
    campaign(store, 1)
    return store


def test_the_last_run_is_reported_unless_another_is_named(store: Path, tmp_path: Path) -> None:
    """Stdout names the run and the page."""
    page = tmp_path / "page.html"
    result = run("report", "--store", store, "-o", page)
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{page}: run {1:016x}, nightly, began 2031-01-01T00:00:00 UTC\n"
    assert "✓ nothing found" in page.read_text("utf-8")
    assert run("report", "--store", store, "--run", f"{0:016x}", "-o", page).exit_code == 0
    assert "✗ fails: 1 finding" in page.read_text("utf-8")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("--run", "beef"), "run 'beef' is not valid: no run in"),
        (("--run", "0"), "run '0' is not valid: ids of 2 runs in"),
        (("-o", "missing/page.html"), "folder missing does not exist"),
        (("--store", "empty"), "has no run. Expected a store that `equivcheck fuzz` has used"),
    ],
)
def test_what_cannot_be_reported_is_one_line(store: Path, tmp_path: Path, arguments: Sequence[str], error: str) -> None:
    """The exit code is 2, and no page is written."""
    page = tmp_path / "page.html"
    result = run("report", "--store", store, "-o", page, *arguments)
    assert result.exit_code == 2
    assert error in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert not page.exists()


def test_a_history_that_is_none_is_one_line(store: Path, tmp_path: Path) -> None:
    """The exit code is 3, because the file is broken."""
    store.joinpath(FILE).write_text("not a database " * 100)
    result = run("report", "--store", store, "-o", tmp_path / "page.html")
    assert result.exit_code == 3
    assert "cannot be used: file is not a database" in result.stderr


@pytest.fixture
def fuzz_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """End campaigns before their first check."""

    def fuzz(plan: Plan, store: FindingStore, listeners: Sequence[Listener], _crew: object = None) -> Summary:
        summary = Summary(plan=plan, seconds=1.0, tally=Tally(), findings=(), store=store.path)
        for listener in listeners:
            listener(summary)
        return summary

    monkeypatch.setattr(supervisor, "fuzz", fuzz)


@pytest.mark.usefixtures("fuzz_at_once")
def test_fuzz_writes_the_page_of_its_run(tmp_path: Path) -> None:
    """`report` writes the same page later."""
    store, page, again = tmp_path / "findings", tmp_path / "page.html", tmp_path / "again.html"
    result = run("fuzz", "--seconds", 1, "--seed", 3, "--store", store, "--html", page)
    assert result.exit_code == 0, result.output
    assert "no findings" in result.stdout
    assert run("report", "--store", store, "-o", again).exit_code == 0
    assert "There was no control." in page.read_text("utf-8")
    assert page.read_text("utf-8") == again.read_text("utf-8")


@pytest.mark.usefixtures("fuzz_at_once")
def test_a_page_that_cannot_be_written_costs_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stderr has the reason. If it is known before the campaign, nothing starts."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("equivcheck.report.run_page.page.replace_text", full)
    store = tmp_path / "findings"
    result = run("fuzz", "--seconds", 1, "--store", store, "--html", tmp_path / "page.html")
    assert result.exit_code == 0
    assert "no findings" in result.stdout
    assert f"{tmp_path / 'page.html'} is not written: [Errno 28] No space left on device" in result.stderr
    result = run("fuzz", "--seconds", 1, "--store", tmp_path / "other", "--html", tmp_path / "missing" / "page.html")
    assert result.exit_code == 2
    assert not tmp_path.joinpath("other").exists()


def test_a_run_that_goes_on_can_be_looked_at(tmp_path: Path) -> None:
    """A running campaign has a page from its start."""
    History(tmp_path).begin(run_of(0))
    page = tmp_path / "page.html"
    assert run("report", "--store", tmp_path, "-o", page).exit_code == 0
    assert "the run was killed, or still goes on" in page.read_text("utf-8")


def test_an_issue_has_the_findings_that_make_a_run_fail(store: Path, tmp_path: Path) -> None:
    """The issue has a title, an empty line, and a text with a script, on stdout or in a file."""
    result = run("report", "--store", store, "--run", f"{0:016x}", "--format", "issue")
    assert result.exit_code == 0, result.output
    title, empty, *text = result.stdout.splitlines()
    assert title == "nightly: 1 finding on torch 2.0.0: ddp diverged"
    assert empty == ""
    assert "```python" in text
    file = tmp_path / "issue.md"
    assert run("report", "--store", store, "--run", f"{0:016x}", "--format", "issue", "-o", file).stdout == ""
    assert file.read_text("utf-8").startswith(title)


def test_the_parts_of_a_night_have_one_issue(tmp_path: Path) -> None:
    """Each finding is in it once; earlier findings are not."""
    before, first, both = (fakes.diverged(fakes.scenario(), tensor=name) for name in ("a", "b", "c"))
    campaign(tmp_path, 0, found=(before,))
    campaign(tmp_path, 1, found=(first, both))
    campaign(tmp_path, 2, found=(both,))
    issue = ("report", "--store", tmp_path, "--format", "issue", "--since")
    title, _, *text = run(*issue, "2031-01-01").stdout.splitlines()
    assert title == "nightly: 2 findings on torch 2.1.0, 2.2.0: ddp diverged, ddp diverged"
    assert sum(line.startswith("| run | nightly, began") for line in text) == 2
    told = json.loads(run(*issue, "2032-01-01T00:00", "--json").stdout)
    assert (told["runs"], told["title"]) == ([f"{2:016x}"], None)
    assert "no run" in run(*issue, "2033-01-01").stderr


@pytest.mark.parametrize("others", [("--run", "0"), ("--format", "html"), ("beef",)])
def test_an_issue_about_several_runs_is_no_page(store: Path, others: Sequence[str]) -> None:
    """`--since` works neither for pages nor with `--run`."""
    assert "--since is only valid with --format issue" in run("report", "--store", store, "--since", "2031-01-01", *others).stderr


def test_a_run_that_does_not_fail_has_no_issue(store: Path) -> None:
    """Stderr has one line."""
    result = run("report", "--store", store, "--format", "issue")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "no finding that makes it fail" in result.stderr
    assert json.loads(run("report", "--store", store, "--format", "issue", "--json").stdout)["title"] is None


def test_a_finding_has_a_page_of_its_own(store: Path, tmp_path: Path) -> None:
    """The page has the verdict, the tensors and calls from another run, the script, and the commands."""
    (mark,) = FindingStore(store).fingerprints()
    page = tmp_path / "finding.html"
    result = run("report", mark[:6], "--store", store, "-o", page)
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{page}: {mark} ddp, diverged\n"
    found = HtmlPage(page.read_text("utf-8"))
    require_sound(found)
    assert "import torch" in found.said("again")
    assert f"equivcheck replay {store / mark}" in found.said("again")
    assert "the drawings show a second run, in which no value differs" in found.said("found")
    assert found.root.findall(".//svg[@class='lanes']")


@pytest.mark.parametrize("arguments", [("--run", "0"), ("--format", "issue")])
def test_a_finding_is_no_run(store: Path, arguments: Sequence[str]) -> None:
    """Finding and run together give exit code 2."""
    result = run("report", "abc", "--store", store, *arguments)
    assert result.exit_code == 2
    assert "a finding is not valid with --run or --format issue" in result.stderr


def test_json_says_what_was_written(store: Path, tmp_path: Path) -> None:
    """For a page, JSON has path and run; for an issue, title and text."""
    page = tmp_path / "page.html"
    written = json.loads(run("report", "--store", store, "-o", page, "--json").stdout)
    assert (written["path"], written["run"], written["mode"]) == (str(page), f"{1:016x}", "nightly")
    issue = json.loads(run("report", "--store", store, "--run", f"{0:016x}", "--format", "issue", "--json").stdout)
    assert issue["title"].startswith("nightly: 1 finding")
    assert "```python" in issue["text"]
