"""The process that examines one mutant after the other, by their names."""

from __future__ import annotations

from equivcheck.mutants.registry import mutant
from equivcheck.quality.selftest.examine import examine
from equivcheck.quality.selftest.row import Row
from equivcheck.quality.selftest.worker import serve


def main(fd: int) -> None:
    """Serve the supervisor at the other end of `fd` until it ends."""
    serve(fd, lambda name, effort, tell: examine(mutant(name), effort, tell), lambda name: Row.of(mutant(name)))
