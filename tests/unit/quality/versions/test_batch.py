"""What one process of another interpreter does of many tasks, whatever happens in one of them."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from equivcheck.quality.versions import batch
from equivcheck.quality.versions.batch import run_tasks, serve_tasks
from equivcheck.quality.versions.environments import Installation
from equivcheck.system.commands import FinishedCommand
from equivcheck.system.torch_version import installed_torch

HERE = Installation(torch=str(installed_torch()), python=Path(sys.executable))
TASKS = ("a", "b", "c", "d")


def test_a_process_that_ends_costs_one_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next process goes on after it."""
    runs = iter([FinishedCommand(code=-11, printed="", errors="boom"), FinishedCommand(code=None, printed="", errors="")])
    monkeypatch.setattr(batch, "run_python", lambda _python, arguments, seconds: one_more(arguments, next(runs)))
    found = run_tasks(HERE, "module", TASKS, seconds=1.0, ended=lambda why: why)
    assert found == ["did a", "the process ended with exit code -11: boom", "did c", "not done in time"]


def test_a_process_that_never_starts_is_not_tried_for_each_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left says that it was not run."""
    tried, ended = [], FinishedCommand(code=1, printed="", errors="ImportError: x")
    monkeypatch.setattr(batch, "run_python", lambda *_, **__: tried.append(1) or ended)
    found = run_tasks(HERE, "module", TASKS, seconds=1.0, ended=lambda why: why)
    assert len(tried) == 3
    assert found == [*["the process ended with exit code 1: ImportError: x"] * 3, "not run: the process ended 3 times before"]


def test_without_tasks_no_process_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is nothing to import torch for."""
    monkeypatch.setattr(batch, "run_python", None)
    assert run_tasks(HERE, "module", (), seconds=1.0, ended=lambda why: why) == []


def test_results_are_kept_one_by_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A process goes on after the tasks that have a result, and one that is torn loses only what it was at."""
    (tmp_path / "tasks.jsonl").write_text("a\nb\nc\nd\n", "utf-8")
    (tmp_path / "results.jsonl").write_text('"old"\n', "utf-8")
    monkeypatch.setattr(sys, "argv", ["", str(tmp_path)])

    def do(task: str) -> str:
        if task == "d":
            raise KeyboardInterrupt
        return f"did {task}"

    with pytest.raises(KeyboardInterrupt):
        serve_tasks(do)
    assert (tmp_path / "results.jsonl").read_text("utf-8") == '"old"\n"did b"\n"did c"\n'


def one_more(arguments: Sequence[str], ran: FinishedCommand) -> FinishedCommand:
    """A process that does the next task and ends in the one after it."""
    tasks, results = (Path(arguments[-1], name) for name in ("tasks.jsonl", "results.jsonl"))
    next_task = tasks.read_text("utf-8").splitlines()[results.read_text("utf-8").count("\n")]
    with results.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(f"did {next_task}") + "\n")
    return ran
