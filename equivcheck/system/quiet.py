"""Silence torch's warnings and log messages while a command runs, because they say nothing about the user's training.

Environment variables silence child processes too; variables that the user has set stay. Errors are printed, except those that
torch logs and then raises: a refused operation is part of the verdict.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

_QUIET = {
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # remarks of C++, as DDP's on find_unused_parameters
    "TORCH_LOGS": "-distributed",  # torch.distributed's loggers from ERROR on
    "PYTHONWARNINGS": "ignore",
}

_LOGS_WHAT_IT_RAISES = "torch._subclasses.fake_tensor"
"""Logger with a traceback for each operation with data-dependent output shapes."""


def quiet_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return `environment` with further variables, with which a new process prints no messages from torch.

    Variables in `environment` keep their values.
    """
    return _QUIET | dict(environment)


@contextmanager
def quiet_torch() -> Iterator[None]:
    """Inside this context, torch prints no warnings and log messages, in this process and its child processes.

    torch must not have been imported before.
    """
    added = {name: value for name, value in _QUIET.items() if name not in os.environ}
    with warnings.catch_warnings():
        if not sys.warnoptions:
            warnings.simplefilter("ignore")
        os.environ.update(added)
        logging.getLogger(_LOGS_WHAT_IT_RAISES).addFilter(_is_not_raised)
        try:
            yield
        finally:
            logging.getLogger(_LOGS_WHAT_IT_RAISES).removeFilter(_is_not_raised)
            for name in added:
                os.environ.pop(name, None)


def _is_not_raised(record: logging.LogRecord) -> bool:
    return record.exc_info is None
