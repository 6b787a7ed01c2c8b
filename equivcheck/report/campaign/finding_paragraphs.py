"""Findings in a campaign's summary: one paragraph for each cause."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from equivcheck.campaign.events import KeptFinding, Summary
from equivcheck.campaign.findings.example import is_shrunk
from equivcheck.campaign.findings.fingerprint import what_is_wrong
from equivcheck.campaign.findings.folder import DEFAULT_STORE
from equivcheck.campaign.findings.size import Size, size_of
from equivcheck.campaign.findings.store import Kept
from equivcheck.oracle.verdict.description import error_in_words, shorten_to_line
from equivcheck.oracle.verdict.sentences import ranks_with_value
from equivcheck.oracle.verdict.verdict import CaseVerdict, Outcome
from equivcheck.programs.nouns import TensorProgram
from equivcheck.report.terminal import own_command
from equivcheck.scenario.file_format.codec import to_json
from equivcheck.scenario.scenario import count, describe_case
from equivcheck.system.printable import shorten, wrap
from equivcheck.worlds.trace.differences import Divergence

_UNFINISHED = "unfinished"
"""Group for findings that were neither shrunk nor explained before the campaign was over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingGroup:
    """Findings with the same cause, in one or several layouts."""

    findings: tuple[KeptFinding, ...]
    """At least one finding. The best example is first: exactly explained ones, then small ones."""

    @property
    def example(self) -> KeptFinding:
        """The finding printed for the group.

        Findings with an exact cause come before others, then those with a shrunk case, then smaller ones.
        """
        return self.findings[0]

    @property
    def layouts(self) -> tuple[str, ...]:
        """The group's layout names, each once."""
        return tuple(dict.fromkeys(finding.verdict.case.summary_row[0] for finding in self.findings))


def group_findings(findings: Iterable[KeptFinding]) -> tuple[FindingGroup, ...]:
    """Group findings with the same cause, in the order of discovery."""
    found: dict[Hashable, list[KeptFinding]] = {}
    for finding in findings:
        found.setdefault(_cause_of(finding.verdict), []).append(finding)
    return tuple(FindingGroup(findings=tuple(sorted(members, key=_order))) for members in found.values())


def _cause_of(verdict: CaseVerdict) -> Hashable:
    """Return the diagnosed cause as a key. Without a diagnosis, findings with the same error or difference share a key."""
    if verdict.outcome is Outcome.DIVERGED and verdict.diagnosis is not None:
        return verdict.diagnosis.cause
    return what_is_wrong(verdict) if is_shrunk(verdict) else _UNFINISHED


def _order(finding: KeptFinding) -> tuple[bool, bool, Size]:
    verdict = finding.verdict
    is_exact = verdict.diagnosis is not None and verdict.diagnosis.exact
    return not is_exact, not is_shrunk(verdict), size_of(verdict.case)


KEPT = {Kept.NEW: "new", Kept.BETTER: "seen before, now with a smaller case", Kept.SEEN: "seen before"}
_SECTIONS = {False: "trainings", True: "tensor programs"}
_LABEL = "  first: "
"""Width of the widest label. Continuation lines are indented by this width."""
_LONGEST_IN_SHORT = 150
_NAMED_LAYOUTS = 3


def finding_lines(summary: Summary, room: int) -> list[str]:
    """Describe a campaign's findings in at most `room` lines if possible, findings in trainings first.

    If they need more lines, the last paragraphs are shortened first. If this is not enough, the last findings are only counted.
    """
    groups = sorted(group_findings(summary.findings), key=_is_of_program)
    if not groups:
        return ["no findings"]
    choices = [(num_full, len(groups)) for num_full in range(len(groups), 0, -1)]
    choices += [(1, num_shown) for num_shown in range(len(groups) - 1, 0, -1)]
    for num_full, num_shown in choices:
        lines = list(_lines(summary, groups, num_full, num_shown))
        if len(lines) <= room:
            break
    return lines


def _is_of_program(group: FindingGroup) -> bool:
    return isinstance(group.example.verdict.case, TensorProgram)


def _lines(summary: Summary, groups: list[FindingGroup], num_full: int, num_shown: int) -> Iterator[str]:
    numbered = enumerate(groups)
    for is_of_program, members in itertools.groupby(numbered, key=lambda pair: _is_of_program(pair[1])):
        section = list(members)
        num_findings = sum(len(group.findings) for _, group in section)
        causes = "" if num_findings == len(section) else f", {count(len(section), 'cause')}"
        yield f"{count(num_findings, 'finding')} in {_SECTIONS[is_of_program]}{causes}:"
        for number, group in section:
            if number < num_full or group.example.kept is Kept.UNKEPT:
                yield from ("", *_paragraph(summary, group))
            elif number < num_shown:
                yield from _paragraph_in_short(summary, group)
    if num_shown < len(groups):
        yield f"and {count(len(groups) - num_shown, 'more cause')}: {own_command('triage', *store_option(summary))}"


def _paragraph(summary: Summary, group: FindingGroup) -> Iterator[str]:
    verdict = group.example.verdict
    yield from wrap(f"{verdict.outcome.value.upper()}: {describe_case(verdict.case)}", "  ")
    for label, text in _evidence(verdict):
        yield from wrap(f"  {label}:".ljust(len(_LABEL)) + text, " " * len(_LABEL))
    yield from wrap(f"  {'seen:':<7}{_seen(summary, group)}", " " * len(_LABEL))
    yield _more(summary, group.example)


def _paragraph_in_short(summary: Summary, group: FindingGroup) -> Iterator[str]:
    verdict = group.example.verdict
    label, text = next(_evidence(verdict))
    line = f"{verdict.outcome.value.upper()}: {_layouts(group)}: {label}: {text}"
    yield from wrap(shorten(line, _LONGEST_IN_SHORT), "  ")
    yield _more(summary, group.example)


def _evidence(verdict: CaseVerdict) -> Iterator[tuple[str, str]]:
    """Yield labels and texts: why it failed, what was found, and what is missing."""
    if verdict.diagnosis is not None:
        yield "why", shorten_to_line(verdict.diagnosis.sentence)
    elif verdict.drift:
        yield "why", shorten_to_line(verdict.unexplained_text)
    if verdict.divergence is None:
        yield "what", shorten_to_line(verdict.reason)
    else:
        yield "first", _first(verdict.divergence)
    if verdict.unfinished:
        yield "note", verdict.unfinished


def _first(first: Divergence) -> str:
    """Describe a difference, such as ``step 0, gradient of layers.0.weight[0, 0] on rank 1: expected 0.529, actual 1.059``."""
    index = list(first.index) if first.index else ""
    where = f"step {first.step}, {first.phase.value} of {first.tensor}{index} {ranks_with_value(first)}"
    expected, actual = _in_few_digits(first.expected, first.actual)
    return f"{where}: expected {expected}, actual {actual} ({error_in_words(first)})"


def _in_few_digits(*values: str) -> Sequence[str]:
    """Shorten numbers to six digits. Texts, and numbers that differ only in later digits, stay unchanged."""
    try:
        short = [f"{float(value):.6g}" for value in values]
    except ValueError:
        return values
    return short if len(set(short)) == len(values) else values


def _seen(summary: Summary, group: FindingGroup) -> str:
    """``in 12 checks of ddp, ddp x expert_parallel; new``."""
    checks = sum(summary.tally.fingerprints[finding.fingerprint] for finding in group.findings)
    kept = KEPT.get(group.example.kept, f"not kept: {summary.unkept}")
    return f"in {count(checks, 'check')} of {_layouts(group)}; {kept}"


def _layouts(group: FindingGroup) -> str:
    names = group.layouts
    more = len(names) - _NAMED_LAYOUTS
    return ", ".join(names[:_NAMED_LAYOUTS]) + (f" and {count(more, 'more layout')}" if more > 0 else "")


def _more(summary: Summary, finding: KeptFinding) -> str:
    """Return a command that shows more, or the case itself if the store does not have it."""
    if finding.kept is Kept.UNKEPT:
        return f"  case:  {to_json(finding.verdict.case)}"
    return f"  more:  {own_command('replay', finding.fingerprint, *store_option(summary))}"


def store_option(summary: Summary) -> tuple[str, ...]:
    """Return the command-line option ``--store PATH``. Empty if the findings are in the default folder."""
    return () if summary.store == DEFAULT_STORE else ("--store", str(summary.store))
