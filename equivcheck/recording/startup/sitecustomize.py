"""Starts the recording in a Python process that `equivcheck record` runs, as soon as torch has been imported.

Python imports the first `sitecustomize` on its path at startup. This module then runs the `sitecustomize` that it hides, if there
is one.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType

_HERE = os.path.dirname(os.path.abspath(__file__))


class _AfterTorch(MetaPathFinder):
    """Finds torch as usual, and starts the recording after its import."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Recording(spec.loader)
        return spec


class _Recording(Loader):
    def __init__(self, own: Loader) -> None:
        self._own = own

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._own.exec_module(module)
        if module.__spec__ is not None:
            module.__spec__.loader = module.__loader__ = self._own
        try:
            _start()
        except Exception as error:
            print(f"equivcheck: recording cannot start: {type(error).__name__}: {error}", file=sys.stderr)


def _start() -> None:
    # A checkout is not on the command's path. At the end, so that nothing in it hides a module of the command.
    sys.path.append(str(Path(_HERE).parents[2]))
    from equivcheck.recording.watch.record import record

    recording = record(**json.loads(os.environ["EQUIVCHECK_RECORD"]))
    recording.__enter__()
    atexit.register(recording.__exit__, None, None, None)


def _run_hidden() -> None:
    """Import the `sitecustomize` that this module hides, in this module's place."""
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != _HERE]
    hidden = PathFinder.find_spec("sitecustomize", sys.path)
    if hidden is not None and hidden.loader is not None:
        sys.modules["sitecustomize"] = module_from_spec(hidden)
        hidden.loader.exec_module(sys.modules["sitecustomize"])


if "EQUIVCHECK_RECORD" in os.environ:
    sys.meta_path.insert(0, _AfterTorch())
_run_hidden()
