"""What torch keeps to itself while a command runs: its remarks on generated scenarios are no news to anybody.

Environment variables, so that every process that a command starts is as quiet; what the user has set stays. Errors are printed.
"""

from __future__ import annotations

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
        try:
            yield
        finally:
            for name in added:
                os.environ.pop(name, None)
