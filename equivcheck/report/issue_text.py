"""Writes title and body for a GitHub issue about failed campaigns, in Markdown that stands alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from equivcheck.campaign.findings.finding import Finding
from equivcheck.campaign.history.run import Run
from equivcheck.campaign.history.standing import Record
from equivcheck.report.standing_text import where_seen
from equivcheck.scenario.file_format.codec import to_json
from equivcheck.scenario.scenario import count
from equivcheck.system.printable import escape_unprintable

_LONGEST_TITLE = 200
_LONGEST_TEXT = 65_000
"""Maximum characters in an issue. GitHub refuses issues with more than 65,536."""
_BACKTICKS = re.compile(r"`{3,}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported:
    """A finding in the issue, with its script."""

    record: Record
    """The finding's history over all campaigns."""
    finding: Finding
    """The finding, loaded from the store."""
    script: str = ""
    """Torch-only script that reproduces the finding; empty if there is none."""
    why_no_script: str = ""
    """Reason why there is no script; empty if there is one."""


def issue_title(runs: Sequence[Run], reported: Sequence[Reported]) -> str:
    """Return the issue's title, such as ``nightly: 2 findings on torch 2.14.0: ddp diverged, fsdp2 crashed``."""
    modes, versions = _in_a_row(run.mode.value for run in runs), _in_a_row(run.torch for run in runs)
    named = ", ".join(f"{each.record.name} {each.record.outcome.value}" for each in reported)
    title = escape_unprintable(f"{modes}: {count(len(reported), 'finding')} on torch {versions}: {named}")
    return title if len(title) <= _LONGEST_TITLE else f"{title[: _LONGEST_TITLE - 3]}..."


def issue_text(runs: Sequence[Run], reported: Sequence[Reported]) -> str:
    """Return the issue's body: the campaigns, then each finding's text, versions, script, and scenario as JSON.

    If there is not enough room, some findings come without script and scenario. If there is still not enough, they have only one
    line.
    """
    head, texts = "\n".join(_of_runs(runs)), [_in_a_line(each) for each in reported]
    room = _LONGEST_TEXT - len(head) - sum(len(text) + 1 for text in texts)
    for form in (_in_brief, _in_full):
        for index, each in enumerate(reported):
            longer = form(each)
            if (more := len(longer) - len(texts[index])) <= room:
                texts[index], room = longer, room - more
    return "\n".join((head, *texts))


def _of_runs(runs: Sequence[Run]) -> Iterator[str]:
    yield "| | |\n|---|---|"
    for run in runs:
        shard = f", shard {run.shard}" if run.shard else ""
        yield f"| run | {run.mode.value}, began {run.began[:19]} UTC, seed {run.seed}{shard} |"
    yield f"| torch | {_in_a_row(_built(run) for run in runs)} |"
    yield f"| equivcheck | {_in_a_row(run.equivcheck for run in runs)} |"
    yield f"| on | {escape_unprintable(_in_a_row(run.platform for run in runs))} |"
    if revisions := _in_a_row(run.revision for run in runs):
        yield f"| repository | {revisions} |"


def _built(run: Run) -> str:
    return f"{run.torch} (commit {run.torch_commit})" if run.torch_commit else run.torch


def _in_a_row(values: Iterable[str]) -> str:
    """Join different values that are not empty."""
    return ", ".join(filter(None, dict.fromkeys(values)))


def _in_full(each: Reported) -> str:
    return "\n".join((*_of_finding(each), *_of_case(each)))


def _in_brief(each: Reported) -> str:
    mark = each.finding.fingerprint
    commands = f"`equivcheck export {mark}`, `equivcheck replay {mark}`"
    return "\n".join((*_of_finding(each), f"There is no room here for its script and its scenario. Run {commands}\n"))


def _in_a_line(each: Reported) -> str:
    mark = each.finding.fingerprint
    return f"\n## {_heading(each.record)}\n\nThere is no room here for more. `equivcheck report {mark}` writes a page about it.\n"


def _heading(record: Record) -> str:
    return f"{record.standing.value}: {escape_unprintable(record.name)} {record.outcome.value}"


def _of_finding(each: Reported) -> Iterator[str]:
    record = each.record
    yield f"\n## {_heading(record)}\n"
    yield f"First seen {where_seen(record.first)}; last seen {where_seen(record.last)}.\n"
    yield _fenced(each.finding.verdict.describe())
    yield f"\n{_versions(each.finding)}\n"


def _of_case(each: Reported) -> Iterator[str]:
    """Yield the script, and the scenario as JSON."""
    verdict = each.finding.verdict
    if each.script:
        yield _folded("A script that needs only torch", _fenced(each.script, "python"))
    else:
        yield f"There is no torch-only script: {escape_unprintable(each.why_no_script)}\n"
    beyond = " --beyond" if verdict.beyond else ""
    command = f"`equivcheck check scenario.json --world {verdict.world}{beyond}`"
    yield _folded("scenario.json", f"{command}\n\n{_fenced(to_json(verdict.case), 'json')}")


def _versions(finding: Finding) -> str:
    if finding.shown_in is None:
        return f"Not bisected yet: `equivcheck bisect {finding.fingerprint}`"
    return f"From torch {finding.shown_in.versions[0]} to {finding.shown_in.versions[-1]}, it {finding.shown_in}."


def _fenced(text: str, language: str = "") -> str:
    """Return a code block with a fence that is longer than any fence in the text."""
    fence = "`" * max([3, *(len(found) + 1 for found in _BACKTICKS.findall(text))])
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def _folded(title: str, text: str) -> str:
    return f"<details><summary>{title}</summary>\n\n{text}\n\n</details>\n"
