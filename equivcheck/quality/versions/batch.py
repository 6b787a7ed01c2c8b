"""Many tasks for one process with another interpreter. A task that ends the process loses only its own result."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from equivcheck.quality.versions.environments import Installation, run_python
from equivcheck.system.commands import FinishedCommand
from equivcheck.system.temporary_folder import temporary_folder

_START_SECONDS = 120.0
"""Limit for starting a process."""
_MOST_ENDS = 3
"""Maximum number of processes that may end early. After that, the remaining tasks are not run."""
_NAMES = "tasks.jsonl", "results.jsonl"


def run_tasks(
    installation: Installation, module: str, tasks: Sequence[str], *, seconds: float, ended: Callable[[str], Any]
) -> list[Any]:
    """Run tasks with another interpreter, and return their JSON results in the order of `tasks`.

    The interpreter imports `module` and calls its `main()`, which calls `serve_tasks`. Tasks get `seconds` each, on average. If
    the process ends during a task, `ended(reason)` returns this task's result.
    """
    with temporary_folder() as folder:
        results = _start(Path(folder), tasks)
        for _ in range(_MOST_ENDS):
            left = len(tasks) - _num_lines(results)
            if not left:
                break
            command = ("-W", "ignore", "-c", f"from {module} import main; main()", folder)
            ran = run_python(installation.python, command, seconds=_START_SECONDS + seconds * left)
            if _num_lines(results) < len(tasks):
                _write(results, ended(_how_it_ended(ran)))
        while _num_lines(results) < len(tasks):
            _write(results, ended(f"not run: the process ended {_MOST_ENDS} times before"))
        return [json.loads(line) for line in results.read_text("utf-8").splitlines()]


def serve_tasks(do: Callable[[str], Any]) -> None:
    """Call `do` for each task without a result, and write its JSON result. It runs in a process started by `run_tasks`."""
    tasks, results = (Path(sys.argv[1], name) for name in _NAMES)
    for task in tasks.read_text("utf-8").splitlines()[_num_lines(results) :]:
        _write(results, do(task))


def _start(folder: Path, tasks: Sequence[str]) -> Path:
    first, results = (Path(folder, name) for name in _NAMES)
    first.write_text("".join(f"{task}\n" for task in tasks), encoding="utf-8")
    results.touch()
    return results


def _how_it_ended(ran: FinishedCommand) -> str:
    return "not done in time" if ran.code is None else f"the process ended with exit code {ran.code}: {ran.last_line}"


def _num_lines(file: Path) -> int:
    return file.read_text("utf-8").count("\n")


def _write(file: Path, result: Any) -> None:
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(result) + "\n")
