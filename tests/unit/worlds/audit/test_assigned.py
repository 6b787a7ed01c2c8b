"""Persistent variables are found in the code of functions."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from equivcheck.worlds.audit.assigned import assigned_variables

SOURCE = """
counter = 0
class Holder:
    entered = False
    total = 0
    other = 0
    def method(self):
        self.own = 1
        self.__class__.other = 2
    @classmethod
    def enter(cls):
        cls.entered = True
holder = Holder()
def count():
    global counter
    counter += 1
def add():
    def inner():
        Holder.total += 1
    inner()
def attach():
    holder.late = 1
    count.calls = 1
    local = Holder()
    local.lost = 1
"""


def test_assignments_that_outlive_a_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finds globals and attributes of classes, functions and module objects at any depth, but not those of local objects."""
    (tmp_path / "assigning.py").write_text(SOURCE, "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    module = __import__("assigning")
    monkeypatch.delitem(sys.modules, "assigning")
    assert set(assigned_variables(module)) == {
        (module, "counter"),
        (module.Holder, "entered"),
        (module.Holder, "total"),
        (module.Holder, "other"),
        (module.holder, "late"),
        (module.count, "calls"),
    }
