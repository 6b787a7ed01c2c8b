"""Facts about two runs, apart from their tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from equivcheck.recording.compare.runs import RecordedRun
from equivcheck.recording.compare.samples import StepSamples
from equivcheck.recording.compare.scalars import Losses
from equivcheck.recording.compare.settings import OtherSetting

Gap = tuple[str, str]
"""Important part for which a trace has no evidence, and the next thing to try."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Facts:
    """Two recorded runs, with their samples, losses and optimizer settings."""

    first: RecordedRun
    """Run A."""
    second: RecordedRun
    """Run B."""
    steps: Sequence[int]
    """Steps in both runs."""
    settings: Sequence[OtherSetting]
    """Optimizer and clipping settings whose values differ in run B."""
    samples: Mapping[int, StepSamples | None]
    """Both runs' samples, by step; None if at least one run recorded no samples."""
    losses: Mapping[int, Losses | None]
    """Both runs' losses, by step; None if at least one run recorded no losses."""

    @property
    def runs(self) -> tuple[RecordedRun, RecordedRun]:
        """Run A and run B."""
        return self.first, self.second
