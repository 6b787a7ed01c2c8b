"""Text about ranks that crashed or hung."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from equivcheck.oracle.verdict.description import MAX_GROUPS
from equivcheck.scenario.scenario import count
from equivcheck.system.printable import screen_width, wrap
from equivcheck.user.frames import module_in, place_lines, without_module
from equivcheck.worlds.failure import CAUSED_BY, Failure, FailureKind, RankReport, RankState

LONGEST_MESSAGE = 5000
"""Maximum characters in an error message, because wrapping takes time."""
MAX_LINES = 12
"""Maximum lines for an error message, or for a dead process's last output."""


def failure_lines(failure: Failure) -> list[str]:
    """Describe how ranks crashed or hung: the reason, and for each rank its call or error, with the line in the user's code.

    Ranks that failed or wait in the same place share a paragraph.
    """
    groups: dict[tuple[str, ...], list[RankReport]] = defaultdict(list)
    for report in sorted(failure.reports, key=lambda report: report is not failure.culprit):
        place = place_lines(report.stack) if failure.hung or report.state is RankState.RAISED else []
        groups[_what(report), *place].append(report)
    lines = [_why_hung(failure)] if failure.hung else []
    for (_, *place), reports in [*groups.items()][:MAX_GROUPS]:
        what = _what(reports[0], is_plural=len(reports) > 1)
        lines += [f"{_ranks(report.rank for report in reports)} {what}", *(f"  {line}" for line in place), *_message(reports)]
    rest = sum(map(len, [*groups.values()][MAX_GROUPS:]))
    lines += [f"and {count(rest, 'more rank')} elsewhere"] if rest else []
    return [*lines, f"note:  {failure.remark}"] if failure.remark else lines


def stack_lines(failure: Failure) -> Iterator[str]:
    """Yield the lines of all ranks' stacks. Ranks with equal stacks share one."""
    stacks: dict[str, list[RankReport]] = defaultdict(list)
    for report in failure.reports:
        stacks[report.stack].append(report)
    for stack, reports in stacks.items():
        if stack:
            yield f"stack on {_ranks(report.rank for report in reports)}:"
            yield from (f"  {line}" for line in stack.rstrip().splitlines())


def _why_hung(failure: Failure) -> str:
    summary = failure.summary.removesuffix(f" ({failure.remark})").removesuffix(f"; {failure.remark}")
    if failure.kind is FailureKind.MISMATCH:
        return _short_groups(summary)
    why = summary.partition(": rank ")[0]
    return f"the run was given up: {why}" if failure.kind is FailureKind.TIMEOUT else why


def _what(report: RankReport, *, is_plural: bool = False) -> str:
    """Return verb and object of a sentence about one rank or several ranks."""
    s = "" if is_plural else "s"
    match report.state:
        case RankState.RAISED:
            module = module_in(report.stack)
            return f"raised {report.error.partition(':')[0]}{module and f' in {module}'}"
        case RankState.DIED:
            return f"died: {report.error}"
        case RankState.WAITING:
            return f"wait{s} in {_short_groups(report.pending)}" if report.pending else f"wait{s} for a turn"
        case RankState.RUNNING:
            return f"still run{s}"
        case RankState.FINISHED:
            return "finished"


def _ranks(ranks: Iterable[int]) -> str:
    """Format rank numbers: ``rank 1``, ``ranks 0, 3``, or ``ranks 0 to 3`` for three or more consecutive ranks."""
    first, *others = sorted(ranks)
    if not others:
        return f"rank {first}"
    in_a_row = others == list(range(first + 1, first + 1 + len(others))) and len(others) > 1
    return f"ranks {first} to {others[-1]}" if in_a_row else f"ranks {', '.join(map(str, (first, *others)))}"


def _short_groups(text: str) -> str:
    """Replace groups in calls that `Call.describe` wrote: ``on ranks (0, 1, 2, 3)`` becomes ``on ranks 0 to 3``."""
    return re.sub(r"ranks \((\d[\d, ]*)\)", lambda found: _ranks(map(int, re.findall(r"\d+", found[1]))), text)


def _message(reports: Sequence[RankReport]) -> list[str]:
    """Return the first rank's error message, or the last lines that its dead process printed."""
    first = reports[0]
    if first.state is RankState.DIED:
        label, lines = "printed: ", first.stack.rstrip().splitlines()[-MAX_LINES:]
    else:
        text = _error_text(first.error)
        is_equal = all(_error_text(report.error) == text for report in reports)
        label = "error: " if is_equal else f"error on rank {first.rank}: "
        width = screen_width() - len(f"  {label}")
        lines = [part for line in text[:LONGEST_MESSAGE].splitlines() for part in wrap(line, "", width)]
        lines = [*lines[:MAX_LINES], *(["..."] if len(lines) > MAX_LINES or len(text) > LONGEST_MESSAGE else [])]
    return [f"{' ' * len(label) if index else label}{line}" for index, line in enumerate(lines)]


def _error_text(error: str) -> str:
    """Return the error message without its type, and without causes that the message repeats."""
    text, *causes = without_module(error).split(CAUSED_BY)
    message = text.partition(":")[2].strip()
    others = [cause for cause in causes if cause.partition(": ")[2].strip() not in message]
    return CAUSED_BY.join([message, *others])
