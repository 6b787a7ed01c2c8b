"""Filters torch's log lines and warnings on ranks."""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import warnings
from collections.abc import Iterator

_PLAN_KEY = r"Parallelize plan key '(.*)' could not be resolved: no submodule matching token '(.*)' in module (\w+)"
"""Warning from `parallelize_module` in torch 2.9 to 2.15: key, the missing submodule, and its parent's class."""


@contextlib.contextmanager
def quiet_ranks() -> Iterator[list[str]]:
    """Inside the context, suppress warnings of simulated ranks, and show a log line once if several ranks print it.

    Yields a list of notes, filled when the context ends. Each note names a key in a `parallelize_module` plan that matches no
    submodule.
    """
    notes: list[str] = []
    once = _LoggedOnce()
    handlers = {handler for logger in _loggers_of_torch() for handler in logger.handlers}
    for handler in handlers:
        handler.addFilter(once)
    warned: list[warnings.WarningMessage] = []
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("ignore")
            warnings.filterwarnings("always", _PLAN_KEY)
            yield notes
    finally:
        for handler in handlers:
            handler.removeFilter(once)
        keys = dict.fromkeys(found.groups() for each in warned if (found := re.match(_PLAN_KEY, str(each.message))))
        notes += [
            f"torch skipped key '{key}' in your plan for parallelize_module, because {parent} has no submodule '{token}'"
            for key, token, parent in keys
        ]


def _loggers_of_torch() -> Iterator[logging.Logger]:
    """Yield the root logger and torch's own loggers, because torch's lines may reach handlers on both."""
    yield logging.root
    for name, logger in [*logging.root.manager.loggerDict.items()]:
        if name.startswith("torch") and isinstance(logger, logging.Logger):
            yield logger


class _LoggedOnce(logging.Filter):
    """Drops torch's lines if another thread, and so another rank, has logged them before."""

    def __init__(self) -> None:
        super().__init__()
        self._threads: dict[tuple[str, str], int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        here = threading.get_ident()
        return not record.name.startswith("torch") or here == self._threads.setdefault((record.name, record.getMessage()), here)
