"""Files with cuts and names for the command `equivcheck record`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from equivcheck.cli import main
from equivcheck.recording.trace_file import read_trace

SCRIPT = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(4, 3)).sum().backward()
optimizer.step()
"""


def test_files_reach_the_recording(tmp_path: Path) -> None:
    """The mesh has one rank, so the cut weight is all of it."""
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "names.toml").write_text('"first.*" = "0.*"\n"last.weight" = {name = "1.weight", transpose = true}\n')
    (tmp_path / "cuts.toml").write_text('mesh = {tp = 1}\n[cuts]\n"0.weight" = [[0, "tp"]]\n"none" = [[0, "tp"]]\n')
    files = ["--names", tmp_path / "names.toml", "--cuts", tmp_path / "cuts.toml"]
    command = ["record", "-o", tmp_path / "trace", *files, "--", sys.executable, tmp_path / "train.py"]
    subprocess.run([sys.executable, "-m", "equivcheck", *map(str, command)], check=True)
    (trace,) = read_trace(tmp_path / "trace")
    assert {entry.piece.name for entry in trace.steps[0].entries} == {"first.weight", "first.bias", "last.weight", "1.bias"}
    assert trace.header.notes == ("no tensor is called none, which cuts or names mention",)


@pytest.mark.parametrize(
    ("option", "text", "error"),
    [
        ("--cuts", "[mesh\n", "Expected a TOML file"),
        ("--cuts", "steps = 3\n", "Expected only the tables [mesh] and [cuts]"),
        ("--cuts", '[cuts]\nw = [[0, "tp"]]\n', "cuts without mesh is not valid"),
        ("--names", "", "Expected a TOML file"),
        ("--names", '"a" = 3\n', "names['a']: 3 is not valid"),
        ("--names", 'a.b = "c"\n', "put names with dots in quotes"),
        ("--names", '"a" = "c"\n"b" = "c"\n', "Expected one new name for each tensor"),
    ],
)
def test_a_file_that_is_not_valid_is_refused(tmp_path: Path, option: str, text: str, error: str) -> None:
    """In one line, before the command runs."""
    file = tmp_path / "file.toml"
    if text:
        file.write_text(text)
    command = ["record", "-o", str(tmp_path / "trace"), option, str(file), "--", "no-such-program"]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 2
    assert error in result.output
    assert result.output.count("\n") == 1
