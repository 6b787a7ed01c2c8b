"""A campaign's findings: written to the store as they come, and assigned to workers for shrinking."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from equivcheck.campaign.events import KeptFinding
from equivcheck.campaign.findings.example import adds_information, is_better_example
from equivcheck.campaign.findings.finding import StoreFailed
from equivcheck.campaign.findings.fingerprint import fingerprint
from equivcheck.campaign.findings.store import FindingStore, Kept
from equivcheck.oracle.verdict.description import failure_line
from equivcheck.oracle.verdict.verdict import CaseVerdict


class KeptFindings:
    """The campaign's findings: for each fingerprint, the best case so far."""

    def __init__(self, store: FindingStore) -> None:
        self._store = store
        self._found: dict[str, KeptFinding] = {}
        self.unkept = ""
        """Reason why some findings could not be kept; empty if all were."""

    def __len__(self) -> int:
        return len(self._found)

    @property
    def all(self) -> tuple[KeptFinding, ...]:
        """All findings, oldest first."""
        return tuple(self._found.values())

    def verdict(self, mark: str) -> CaseVerdict:
        """Return the verdict on the finding with the fingerprint `mark`."""
        return self._found[mark].verdict

    def keep(self, verdict: CaseVerdict) -> KeptFinding | None:
        """Keep a failing verdict if its fault is new, its case is a better example, or it adds a diagnosis or confirmation.

        Returns the finding, or None if the verdict was not kept.
        """
        mark = fingerprint(verdict)
        kept = self._stored(verdict)
        before = self._found.get(mark)
        if before is not None:
            adds = adds_information(verdict, before.verdict)
            if not adds and not is_better_example(verdict, before.verdict):
                return None
            kept = before.kept if (adds or kept is Kept.BETTER) and kept is not Kept.UNKEPT else kept
        self._found[mark] = KeptFinding(fingerprint=mark, path=self._store.folder(mark), verdict=verdict, kept=kept)
        return self._found[mark]

    def try_again(self) -> None:
        """Try again to write findings, if they could not be written before."""
        self.unkept = ""
        for mark, finding in self._found.items():
            if finding.kept is Kept.UNKEPT:
                self._found[mark] = replace(finding, kept=self._stored(finding.verdict))

    def _stored(self, verdict: CaseVerdict) -> Kept:
        try:
            return self._store.keep(verdict)
        except StoreFailed as error:
            self.unkept = str(error)
        except Exception as error:
            self.unkept = failure_line("keeping a finding", error)
        return Kept.UNKEPT


Place = tuple[int, int]
"""Worker number, and how many processes this worker has had before."""


class Shrinkers:
    """Remembers which worker shrinks which finding, so that each finding is shrunk once."""

    def __init__(self) -> None:
        self._at: dict[str, Place] = {}
        self._left = deque[str]()

    def claim(self, mark: str, place: Place) -> bool:
        """Reserve the finding with the fingerprint `mark` for a worker. Returns False if another worker has it."""
        return self._at.setdefault(mark, place) == place

    def of(self, place: Place) -> tuple[str, ...]:
        """Return the fingerprints of the findings that a worker shrinks or has shrunk."""
        return tuple(mark for mark, other in self._at.items() if other == place)

    def leave(self, mark: str) -> None:
        """Release a finding whose worker is lost. Another worker may then reserve it by `claim` or `take`."""
        del self._at[mark]
        self._left.append(mark)

    def take(self, place: Place) -> str | None:
        """Reserve one of the released findings for a worker: the finding that was released first.

        Returns its fingerprint, or None if no released finding is left.
        """
        while self._left:
            if self.claim(mark := self._left.popleft(), place):
                return mark
        return None
