"""Jobs that end badly keep the steps before, and no recording breaks a job."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import equivcheck
from equivcheck.cli import main
from equivcheck.recording.trace_file import TraceWriter, read_trace

ENDS = """
import json, os, resource, signal, sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

import equivcheck


class Rows(nn.Module):
    "A data set that calls modules, as transforms do."

    def __init__(self):
        super().__init__()
        self.transform = nn.Linear(3, 3)

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return self.transform(torch.ones(3)).detach()


def train(folder, end):
    torch.manual_seed(0)
    model, rows = nn.Linear(3, 300), Rows()
    optimizer = torch.optim.AdamW(model.parameters())
    with equivcheck.record(folder):
        for step in range(4):
            (batch,) = DataLoader(rows, batch_size=4, num_workers=1, multiprocessing_context="fork")
            optimizer.zero_grad()
            model(batch).square().sum().backward()
            optimizer.step()
            if step == 2:
                end(Path(folder, "rank0.ecr"))


def limit_size(file, action):
    signal.signal(signal.SIGXFSZ, action)
    limit = file.stat().st_size + 200
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))


ENDINGS = {
    "killed": lambda file: os.kill(os.getpid(), signal.SIGKILL),
    "killed while it writes": lambda file: limit_size(file, signal.SIG_DFL),
    "disk is full": lambda file: limit_size(file, signal.SIG_IGN),
    "left at once": lambda file: os._exit(5),
    "exit code": lambda file: sys.exit(7),
}
found = {}
for name, end in ENDINGS.items():
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:  # so that torch is imported once
        os.dup2(writing, 2)
        try:
            train(sys.argv[1] + "/" + name, end)
        except SystemExit as error:
            os._exit(error.code)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as stream:
        found[name] = (stream.read(), os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, tuple[str, int]]]:
    """Folders of jobs that ended badly, with their output and exit codes by name."""
    folder = tmp_path_factory.mktemp("ends")
    ran = subprocess.run([sys.executable, "-c", ENDS, str(folder)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return folder, json.loads(ran.stdout)


@pytest.mark.parametrize(
    ("name", "code", "steps", "line"),
    [
        ("killed", -signal.SIGKILL, 2, ""),
        ("killed while it writes", -signal.SIGXFSZ, 2, ""),
        ("disk is full", 0, 2, "equivcheck: recording ended at step 2: OSError: [Errno 27] File too large\n"),
        ("left at once", 5, 2, ""),
        ("exit code", 7, 3, ""),
    ],
)
def test_a_job_that_ends_badly_keeps_its_steps(
    ends: tuple[Path, dict[str, tuple[str, int]]], name: str, code: int, steps: int, line: str
) -> None:
    """The exit code is that of the job, and a full disk is one line. Workers that load data write nothing."""
    folder, found = ends
    assert found[name] == [line, code]
    (trace,) = read_trace(folder / name)
    assert [each.step for each in trace.steps] == [*range(steps)]
    assert trace.is_cut_off == (name in {"killed while it writes", "disk is full"})
    lines = (folder / name / "rank0.ecr").read_text().split("\n")
    assert len([each for each in lines if each.startswith('{"step":1')]) == 1


def train(folder: Path, steps: int, end: Callable[[], object]) -> None:
    """Record some steps. `end` is called after the last one; an exception that it returns is raised."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters())
    with equivcheck.record(folder):
        for _ in range(steps):
            model(torch.ones(4, 3)).sum().backward()
            optimizer.step()
        if isinstance(error := end(), BaseException):
            raise error


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_exception_of_the_job_ends_the_recording(tmp_path: Path, error: type[BaseException]) -> None:
    """It is the job's, and all steps before are there."""
    with pytest.raises(error):
        train(tmp_path, 2, error)
    assert [each.step for each in read_trace(tmp_path)[0].steps] == [0, 1]


def test_an_interrupt_inside_the_recorder_reaches_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user may press Ctrl-C while a step is written. Nothing is written after it."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, 2, lambda: monkeypatch.setattr(TraceWriter, "write", interrupt))
    monkeypatch.undo()
    assert [each.step for each in read_trace(tmp_path)[0].steps] == [0]


def test_two_jobs_do_not_share_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The second one says so in one line, trains on, and leaves the file of the first."""
    train(tmp_path, 1, lambda: None)
    before = (tmp_path / "rank0.ecr").read_bytes()
    train(tmp_path, 2, lambda: None)
    assert (tmp_path / "rank0.ecr").read_bytes() == before
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        f"equivcheck: recording ended at step 0: file {tmp_path / 'rank0.ecr'} is not valid: it already exists"
    )


@pytest.mark.parametrize(
    ("command", "option"),
    [
        (["python", "-I", "train.py"], "-I"),
        (["/usr/bin/python3.11", "-uS", "train.py"], "-S"),
        (["python3", "-B", "-E", "-m", "train"], "-E"),
    ],
)
def test_a_command_that_ignores_startup_files_is_bad_input(tmp_path: Path, command: list[str], option: str) -> None:
    """In one line, before it runs."""
    result = CliRunner().invoke(main, ["record", "-o", str(tmp_path), "--", *command])
    assert result.exit_code == 2
    assert f"with {option}, Python does not import the `sitecustomize`" in result.stderr
    assert result.stderr.count("\n") == 1


def run(folder: Path, *command: object, **variables: str) -> subprocess.CompletedProcess[str]:
    """A recorded command."""
    own = [sys.executable, "-m", "equivcheck", "record", "-o", str(folder), "--", *map(str, command)]
    return subprocess.run(own, capture_output=True, text=True, check=False, env=os.environ | variables)


def test_a_python_without_what_a_recording_needs_runs_the_job(tmp_path: Path) -> None:
    """One line says so."""
    (tmp_path / "torch.py").write_text("")
    ran = run(tmp_path / "trace", sys.executable, "-c", "import torch; print('done')", PYTHONPATH=f"{tmp_path}:{os.getcwd()}")
    assert (ran.returncode, ran.stdout) == (0, "done\n")
    assert ran.stderr.startswith("equivcheck: recording cannot start: ")
    assert ran.stderr.count("\n") == 1


SCRIPT = """#!{python}
import subprocess, sys, sitecustomize
import torch
from torch import nn
from torch.utils.data import DataLoader

if __name__ == "__main__":
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for batch in DataLoader(torch.ones(4, 3), batch_size=4, num_workers=1, multiprocessing_context="spawn"):
            optimizer.zero_grad()
            model(batch).square().sum().backward()
            optimizer.step()
    subprocess.run([sys.executable, "-c", "import torch; torch.nn.Linear(2, 2)(torch.ones(1, 2))"], check=True)
    print(sitecustomize.NAME, [parameter.tolist() for parameter in model.parameters()], torch.rand(1).item())
    sys.exit(3)
"""


def test_a_script_with_workers_and_a_startup_file_runs_unchanged(tmp_path: Path) -> None:
    """Started by its shebang: the same output to the last digit, and processes that do not train write nothing."""
    (script := tmp_path / "train").write_text(SCRIPT.format(python=sys.executable))
    script.chmod(0o755)
    (tmp_path / "sitecustomize.py").write_text("NAME = 'own startup file'")
    path = f"{tmp_path}:{os.getcwd()}"
    plain = subprocess.run([script], capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": path})
    ran = run(tmp_path / "trace", script, PYTHONPATH=path)
    assert plain.stdout.startswith("own startup file")
    assert (ran.returncode, ran.stdout, ran.stderr) == (3, plain.stdout, plain.stderr)
    assert [file.name for file in (tmp_path / "trace").iterdir()] == ["rank0.ecr"]
    assert [each.step for each in read_trace(tmp_path / "trace")[0].steps] == [0, 1]


RESTARTED = """
import os, sys
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Linear(3, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    optimizer.zero_grad()
    model(torch.ones(4, 3)).square().sum().backward()
    optimizer.step()
    if step == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        sys.exit(1)
"""


def test_a_restarted_job_is_recorded_from_its_restart(tmp_path: Path) -> None:
    """Under torchrun, a rank replaces the file that it wrote before."""
    (script := tmp_path / "train.py").write_text(RESTARTED)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", "--max-restarts", "1"]
    ran = run(tmp_path / "trace", *torchrun, script)
    assert ran.returncode == 0, ran.stderr
    assert "equivcheck" not in ran.stderr
    (trace,) = read_trace(tmp_path / "trace")
    assert [each.step for each in trace.steps] == [0, 1, 2]
