"""Script for every process of a world of two: the first waits for the second in vain."""

from equivcheck import World
from equivcheck.worlds.failure import RanksFailed
from unit.worlds.torchrun.programs import wait_on_first

try:
    World("torchrun").run(wait_on_first, deadline=2.0)
except RanksFailed as failed:
    print(failed, [report.pending for report in failed.failure.reports])
