"""Workers of a campaign come from one process that has done once what all of them need."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from equivcheck.campaign.events import Event, Ticked
from equivcheck.campaign.findings.store import FindingStore
from equivcheck.campaign.plan import Plan
from equivcheck.campaign.supervisor import fuzz
from support.processes import children_of, end_soon


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere workers are not forked")
def test_workers_are_copies_of_one_process_and_end_with_the_campaign(tmp_path: Path) -> None:
    """What checks every layout once leaves no thread behind, so that it can be copied; and no process is left at the end."""
    before = set(children_of(os.getpid()))
    families: list[tuple[int, tuple[int, ...]]] = []

    def look(event: Event) -> None:
        if isinstance(event, Ticked) and event.seconds and not families:
            families.extend((pid, tuple(children_of(pid))) for pid in set(children_of(os.getpid())) - before)

    summary = fuzz(Plan(num_checks=4, seed=0, num_workers=2, layouts=("ddp",)), FindingStore(tmp_path / "findings"), [look])
    assert summary.tally.num_checks == 4
    [(server, workers)] = [(pid, children) for pid, children in families if children]
    assert len(workers) == 2
    assert end_soon(server, *workers)
