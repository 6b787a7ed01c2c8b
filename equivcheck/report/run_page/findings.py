"""Findings on the page about a campaign."""

from __future__ import annotations

import html
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from equivcheck.campaign.findings.finding import BrokenFinding
from equivcheck.campaign.findings.store import FindingStore
from equivcheck.campaign.history.run import Run
from equivcheck.campaign.history.standing import Record, fails
from equivcheck.errors import UsageError
from equivcheck.oracle.verdict.verdict import CaseVerdict
from equivcheck.system.printable import shorten

_LONGEST_TEXT = 12_000
"""Maximum characters in a finding's text, or in its case."""
_LONGEST_NOTE = 300
_MOST_TEXT = 300_000
"""Maximum characters in all findings shown in full."""
_MARKUP = 1_200
"""Characters for a finding's markup, without its texts."""
_MOST_NAMED = 500
"""Maximum number of findings that are shown with one line each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownFinding:
    """A finding with all details, for the page about a campaign."""

    record: Record
    """The finding's history over all campaigns."""
    fails: bool
    """Whether the finding makes the campaign fail."""
    cause: str
    """The cause in a sentence, or the first difference if no cause is known."""
    text: str = ""
    """The verdict's description without the case; may be empty."""
    code: str = ""
    """Smallest case, as code; may be empty."""
    commands: tuple[str, ...] = ()
    """Commands for the reader: check the finding again, and write a page and a script."""
    note: str = ""
    """Reason why some details are missing; empty if none are."""

    @property
    def size(self) -> int:
        """Approximate number of characters that the finding needs in HTML."""
        accepted = self.record.accepted.reason if self.record.accepted else ""
        texts = (self.text, self.code, self.cause, self.note, accepted, *self.commands)
        return _MARKUP + sum(len(html.escape(text)) for text in texts)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownFindings:
    """A campaign's findings. Those that make the campaign fail come first."""

    shown: tuple[ShownFinding, ...]
    """Findings with all details."""
    named: tuple[Record, ...]
    """Findings shown by name only, because the page has no more room."""
    num_more: int
    """How many further findings there are."""


def shown_findings(store: Path, run: Run, decided: Sequence[Record], unkept: Mapping[str, Any]) -> ShownFindings:
    """Return the findings for a campaign's page.

    `decided` contains the findings about which the campaign gave a definite answer. `unkept` has the cases of findings that could
    not be stored, as JSON values.
    """
    order = sorted(decided, key=lambda record: (not fails(run, record), not record.standing.shows))
    shown, room = [], _MOST_TEXT
    for record in order:
        found = _shown(FindingStore(store), run, record, unkept)
        room -= found.size
        if room < 0:
            break
        shown.append(found)
    rest = order[len(shown) :]
    return ShownFindings(shown=tuple(shown), named=tuple(rest[:_MOST_NAMED]), num_more=max(0, len(rest) - _MOST_NAMED))


def _shown(store: FindingStore, run: Run, record: Record, unkept: Mapping[str, Any]) -> ShownFinding:
    shown = ShownFinding(record=record, fails=fails(run, record), cause=shorten(record.reason, _LONGEST_NOTE))
    if not record.standing.shows:
        return replace(shown, commands=_commands(store, record))
    if record.fingerprint in unkept:
        code = shorten(json.dumps(unkept[record.fingerprint], indent=2), _LONGEST_TEXT)
        return replace(shown, code=code, note="the store could not keep it; save this case as FILE and run equivcheck check FILE")
    try:
        verdict = store.load(record.fingerprint).verdict
    except BrokenFinding as error:
        return replace(shown, note=shorten(str(error), _LONGEST_NOTE))
    except UsageError:
        return replace(shown, note=f"it is no longer in the store {store.path}")
    return _with_verdict(replace(shown, commands=_commands(store, record)), verdict)


def _with_verdict(shown: ShownFinding, verdict: CaseVerdict) -> ShownFinding:
    code = verdict.code()
    text = verdict.describe().removesuffix(code).rstrip()
    cause = shown.cause if verdict.diagnosis is None else verdict.diagnosis.sentence
    return replace(shown, cause=cause, text=shorten(text, _LONGEST_TEXT), code=shorten(code, _LONGEST_TEXT))


def _commands(store: FindingStore, record: Record) -> tuple[str, ...]:
    where = f"{record.fingerprint} --store {shlex.quote(str(store.path))}"
    page = f"equivcheck report {where} -o {record.fingerprint}.html"
    return f"equivcheck replay {where}", page, f"equivcheck export {where} -o repro.py"
