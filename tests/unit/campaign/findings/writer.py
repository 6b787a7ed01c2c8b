"""What a process that writes to a store runs; in a module of its own, as it is imported by name."""

from pathlib import Path

from equivcheck.campaign.findings.store import FindingStore
from unit.campaign.fakes import diverged, scenario


def keep_all(path: Path, first: int) -> None:
    """Keep forty verdicts of four fingerprints."""
    store = FindingStore(path)
    for number in range(40):
        store.keep(diverged(scenario(width=3, ranks=1 + (number // 4 + first) % 8), tensor=f"kind_{'abcd'[number % 4]}"))
