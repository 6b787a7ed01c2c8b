"""Torch-only scripts, and their results on another torch version."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from equivcheck.campaign.findings.finding import Finding
from equivcheck.campaign.findings.fingerprint import blur
from equivcheck.export.script import script_of
from equivcheck.layouts.base.script.draft import CannotExport
from equivcheck.layouts.base.script.form import form_of
from equivcheck.layouts.base.script.numbers import Numbers
from equivcheck.oracle.known_issues.issue_script import issue_script
from equivcheck.oracle.known_issues.known import KnownIssue
from equivcheck.oracle.known_issues.showing import Showing, Shows, judge_output, showing
from equivcheck.oracle.verdict.verdict import CaseVerdict, Verdict
from equivcheck.programs.run.script import script_of_verdict
from equivcheck.programs.verdict import ProgramVerdict
from equivcheck.quality.versions.environments import Installation, run_python
from equivcheck.system.temporary_folder import temporary_folder
from equivcheck.worlds.failure import FailureKind
from equivcheck.worlds.trace.differences import Phase

_NAME = "repro.py"
_RUN = (
    "import sys; from pathlib import Path; from equivcheck.export.forked import run_forked\n"
    "code, printed = run_forked(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[1]).parent, float(sys.argv[3]))\n"
    "print(printed); sys.exit(code)"
)
_OF_STATEMENT = re.compile(r"^.*StatementFailed: [^:]*: ")
"""Prefix of a tensor program's error, before torch's own error."""
_PHASES = {Phase.GRADIENT: "gradient", Phase.CLIPPING: "clipped gradient", Phase.UPDATE: "parameter"}
"""Names in scripts' output for the parts of a step with parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A torch-only script that shows one failure."""

    text: str
    """Source code."""
    ranks: int
    """How many processes the script needs."""
    judge: Callable[[int, str], Showing]
    """Function that decides from exit code and output whether the failure shows."""

    def run(self, installation: Installation, seconds: float) -> Showing:
        """Run the script with an installation, for at most `seconds`. Return whether the failure shows."""
        with temporary_folder() as folder:
            path = Path(folder, _NAME)
            path.write_text(self.text, encoding="utf-8")
            ran = run_python(installation.python, ("-c", _RUN, str(path), str(self.ranks), str(seconds)), seconds=seconds)
        if ran.code is None:
            return Showing(shows=Shows.CANNOT_RUN, reason=f"did not finish within {seconds:.0f} s")
        return self.judge(ran.code, f"{ran.printed}\n{ran.errors}")


def of_issue(issue: KnownIssue) -> Script:
    """Return a known issue's script."""
    return Script(text=issue_script(issue), ranks=issue.ranks, judge=lambda code, printed: showing(issue.error, code, printed))


def of_finding(finding: Finding) -> Script | None:
    """Return a script that shows a finding, with the same numbers as the finding.

    None if no script can reproduce the finding, or if a script's output would not prove it, such as for a hang.
    """
    verdict = finding.verdict
    if not isinstance(verdict, Verdict):
        return _of_program(finding)
    try:
        text = script_of(verdict.scenario, verdict=verdict, numbers=Numbers.EXACT, name=_NAME, seen_on=finding.environment.torch)
    except CannotExport:
        return None
    evidence = _evidence(verdict, text)
    if evidence is None:
        return None
    return Script(
        text=text,
        ranks=verdict.scenario.layout.mesh.num_ranks,
        judge=lambda code, printed: judge_output(code, printed, has_evidence=evidence(printed)),
    )


def _of_program(finding: Finding) -> Script | None:
    verdict = finding.verdict
    assert isinstance(verdict, ProgramVerdict)
    first = verdict.divergence
    if first is None:
        evidence = _of_failure(verdict)
    else:
        name = r"gradient of v\d+" if first.phase is Phase.GRADIENT else first.tensor.partition(" ")[0]
        line = re.compile(rf"^{name}$", re.MULTILINE)
        evidence = lambda printed: bool(line.search(printed))  # noqa: E731
    if evidence is None:
        return None
    return Script(
        text=script_of_verdict(verdict, name=_NAME, seen_on=finding.environment.torch),
        ranks=verdict.program.num_ranks,
        judge=lambda code, printed: judge_output(code, printed, has_evidence=evidence(printed)),
    )


def _evidence(verdict: Verdict, text: str) -> Callable[[str], bool] | None:
    if verdict.divergence is not None:
        place, tolerance = _place(verdict), float(re.search(r"^TOLERANCE = (\S+)", text, re.MULTILINE)[1])  # type: ignore[index]
        line = re.compile(rf"^{re.escape(place)}: max difference (\S+)$", re.MULTILINE)
        return lambda printed: any(not float(number) <= tolerance for number in line.findall(printed))
    return _of_failure(verdict)


def _of_failure(verdict: CaseVerdict) -> Callable[[str], bool] | None:
    if verdict.failure is None or verdict.failure.kind is not FailureKind.RAISED:
        return None
    raised = next((report.error for report in verdict.failure.reports if report.error), "").partition(", caused by ")[0]
    error = blur(_OF_STATEMENT.sub("", raised))
    return (lambda printed: error in blur(printed)) if error else None


def _place(verdict: Verdict) -> str:
    """Return the script's name for the first tensor that differs: ``step 0 gradient 0.weight``."""
    divergence = verdict.divergence
    assert divergence is not None
    if divergence.phase not in _PHASES or divergence.tensor == "norm":
        return f"step {divergence.step} {divergence.tensor}"
    return f"step {divergence.step} {_PHASES[divergence.phase]} {form_of(verdict.scenario).name_of(divergence.tensor)}"
