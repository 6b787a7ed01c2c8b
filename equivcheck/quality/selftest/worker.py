"""The process that does one job after the other, and tells how far it is."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from equivcheck.worlds.sim.interruption import abandoned_threads
from equivcheck.worlds.workers.link import Link

_TELL_SECONDS = 0.2
"""How often a result is sent while it grows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDone:
    """From the process: the answer to a job. Results that it sends before are not yet complete."""

    result: Any
    """Complete, or with the reason why it is not."""
    is_spent: bool = False
    """Whether a rank that could not be stopped still runs in the process, so that it is of no use any more."""


class _Job:
    """Remembers the result of one job as it grows, and tells the supervisor of it."""

    def __init__(self, result: Any, link: Link) -> None:
        self._result, self._link, self._told = result, link, 0.0

    def complete(self, do: Callable[[Callable[[Any], None]], Any]) -> Any:
        """The whole result, or what is known of it when the job raises."""
        try:
            return do(self._tell)
        except Exception as error:
            return replace(self._result, broken=f"{type(error).__name__}: {error}".splitlines()[0])

    def _tell(self, result: Any) -> None:
        self._result = result
        if time.monotonic() - self._told >= _TELL_SECONDS:
            self._told = time.monotonic()
            self._link.send(result)


def serve(fd: int, do: Callable[[Any, Any, Callable[[Any], None]], Any], blank: Callable[[Any], Any]) -> None:
    """Answer the supervisor at the other end of `fd` until it ends: `do` gets a job, the effort, and whom to tell."""
    link = Link(fd)
    while True:
        job = link.next()
        result = _Job(blank(job), link).complete(partial(do, job, link.task))
        link.send(JobDone(result=result, is_spent=bool(abandoned_threads())))
