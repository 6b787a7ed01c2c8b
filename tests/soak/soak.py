"""A long campaign over all layouts, watched for what grows: `python tests/soak/soak.py --checks 20000`.

Prints one JSON object: what came of the checks, and of each worker its memory, threads and open files in both halves of its
life. Each finding is to be judged by hand; of a build of torch whose issues are on file there should be none.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import linear_regression, median
from typing import Any

import psutil
from rich.console import Console

from equivcheck.campaign.control import applicable_mutants
from equivcheck.campaign.events import Event, Summary, Ticked
from equivcheck.campaign.findings.store import FindingStore
from equivcheck.campaign.plan import Plan, frontier_scenarios
from equivcheck.campaign.supervisor import fuzz
from equivcheck.report.campaign.progress import ProgressLine
from equivcheck.report.campaign.summary_object import summary_object

NUM_SAMPLES = 200
"""How often workers are looked at, about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What one process uses at some moment."""

    checks: int
    """Of the whole campaign so far."""
    megabytes: float
    """Resident memory."""
    threads: int
    """Of the process."""
    files: int
    """Descriptors that it has open."""


class Watch:
    """Listens to a campaign and looks at its workers, at what they have started, and at the folder of temporary files."""

    def __init__(self, num_checks: int) -> None:
        self._step, self._next = max(1, num_checks // NUM_SAMPLES), 0
        self._others = {process.pid for process in psutil.Process().children()}
        self.workers: dict[int, list[Sample]] = {}
        self.processes: list[int] = []
        self.temporary: list[int] = []

    def __call__(self, event: Event) -> None:
        """Take a sample now and then."""
        if isinstance(event, Ticked) and event.tally.num_checks >= self._next and event.seconds:
            self._next = event.tally.num_checks + self._step
            for worker in _workers():
                if worker.pid not in self._others:
                    self._look(worker, event.tally.num_checks)
            self.processes.append(len(psutil.Process().children(recursive=True)))
            self.temporary.append(len(os.listdir(tempfile.gettempdir())))

    def _look(self, worker: psutil.Process, checks: int) -> None:
        try:
            with worker.oneshot():
                megabytes, threads, files = worker.memory_info().rss / 2**20, worker.num_threads(), worker.num_fds()
        except psutil.Error:
            return
        sample = Sample(checks=checks, megabytes=round(megabytes, 1), threads=threads, files=files)
        self.workers.setdefault(worker.pid, []).append(sample)

    def report(self) -> dict[str, Any]:
        """What the samples come to."""
        return {
            "usage_of_workers": {pid: _usage(samples) for pid, samples in self.workers.items() if len(samples) > 1},
            "processes": _ends(self.processes),
            "temporary_files": _ends(self.temporary),
        }


def _workers() -> Iterator[psutil.Process]:
    """The children of this process, and those of the one that workers are forked from, if there is one."""
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            is_server = any("equivcheck.worlds.workers.forking" in argument for argument in child.cmdline())
            yield from child.children() if is_server else (child,)


def _usage(samples: list[Sample]) -> dict[str, Any]:
    """What a worker used in both halves of its life, and how fast its memory grew in the second."""
    earlier, later = samples[: len(samples) // 2], samples[len(samples) // 2 :]
    slope = 0.0
    if len({sample.checks for sample in later}) > 1:
        slope = linear_regression([sample.checks for sample in later], [sample.megabytes for sample in later]).slope
    return {
        "checks": [samples[0].checks, samples[-1].checks],
        "earlier": _medians(earlier),
        "later": _medians(later),
        "most_megabytes": max(sample.megabytes for sample in samples),
        "megabytes_per_1000_checks": round(1000 * slope, 2),
    }


def _medians(samples: list[Sample]) -> dict[str, float]:
    """Of all that is used: one look may fall into an import, which has files open for a moment."""
    return {used: median(asdict(sample)[used] for sample in samples) for used in ("megabytes", "threads", "files")}


def _ends(numbers: list[int]) -> dict[str, int]:
    return {"first": numbers[0], "most": max(numbers), "last": numbers[-1]} if numbers else {}


def soak(plan: Plan, store: Path) -> tuple[Summary, Watch]:
    """Run a campaign and watch it."""
    assert plan.num_checks is not None
    watch = Watch(plan.num_checks)
    with ProgressLine(Console(stderr=True)) as progress:
        return fuzz(plan, FindingStore(store), [watch, progress]), watch


def main() -> None:
    """Read the command line; exit code 1 if there are findings."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checks", type=int, default=20_000, help="how many checks")
    parser.add_argument("--seed", type=int, default=0, help="of the scenarios")
    parser.add_argument("--workers", type=int, default=2, help="worker processes")
    parser.add_argument("--store", type=Path, default=Path(".equivcheck/soak"), help="folder of the findings")
    given = parser.parse_args()
    plan = Plan(
        num_checks=given.checks,
        seed=given.seed,
        num_workers=given.workers,
        frontier=frontier_scenarios,
        controls=applicable_mutants,
    )
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        os.environ["TMPDIR"] = tempfile.tempdir = folder  # of this campaign alone: other programs leave temporary files as well
        summary, watch = soak(plan, given.store)
    print(json.dumps(summary_object(summary) | watch.report(), indent=1))
    sys.exit(bool(summary.findings) or bool(summary.broken))


if __name__ == "__main__":
    main()
