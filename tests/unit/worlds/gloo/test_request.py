"""Copies of a user's functions for other processes."""

from __future__ import annotations

import importlib.util
import pickle
import sys
from pathlib import Path

import pytest

from equivcheck.worlds.gloo.request import pickle_copy

SOURCE = """
from functools import lru_cache

@lru_cache(maxsize=3)
def cached():
    return object()

def both():
    return cached(), cached()
"""


def test_a_function_with_a_cache_is_copied_from_a_module_that_ranks_cannot_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy has an empty cache with the same limit."""
    file = tmp_path / "training_of_a_user.py"
    file.write_text(SOURCE)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, file.stem, module)
    spec.loader.exec_module(module)
    used = module.cached()
    copied = pickle_copy((module.both, module.cached))
    monkeypatch.delitem(sys.modules, file.stem)
    both, cached = pickle.loads(copied)
    first, second = both()
    assert first is second is cached()
    assert first is not used
    assert cached.cache_parameters()["maxsize"] == 3
