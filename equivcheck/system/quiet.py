"""What torch keeps to itself while a command runs: its remarks on generated scenarios are no news to anybody.

Environment variables, so that every process that a command starts is as quiet; what the user has set stays. Errors are printed,
but not those that torch logs and then raises: where ranks refuse an operation, that is part of the verdict.
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
"""Of torch, the logger that has a traceback for each operation that tells no shape of what it gives."""


def quiet(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment under which a process that has not imported torch yet prints no remarks of torch's."""
    return _QUIET | dict(environment)


@contextmanager
def quiet_torch() -> Iterator[None]:
    """While entered, this process and those that it starts are quiet; torch must not have been imported before."""
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
