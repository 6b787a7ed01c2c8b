"""`equivcheck dry-run` reports shards and calls at large sizes."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from equivcheck.cli import main
from equivcheck.scenario.file_format.codec import to_json
from unit.checking.dry_run.examples import fsdp2_over_tensor_parallel


@pytest.fixture
def file(tmp_path: Path) -> str:
    """A file with a scenario."""
    path = tmp_path / "scenario.json"
    path.write_text(to_json(fsdp2_over_tensor_parallel()), "utf-8")
    return str(path)


def test_a_dry_run_shows_shards_and_calls(file: str) -> None:
    """The text has the shards of two ranks, the calls of one, and the result of the comparison."""
    result = CliRunner().invoke(main, ["dry-run", file, "--ranks", "4096"])
    assert result.exit_code == 0, result.output
    assert "fsdp2 x tensor_parallel on 4,096 ranks (dp 2048 x tp 2)" in result.output
    assert "layers.0.linear.weight  32 x 16  1 x 16  0 x 16" in result.output
    assert "as many calls as in a simulated world of 4 ranks (dp 2 x tp 2)" in result.output


def test_a_dry_run_as_json(file: str) -> None:
    """JSON has the same facts as the text."""
    result = CliRunner().invoke(main, ["dry-run", file, "--ranks", "64", "--json"])
    found = json.loads(result.stdout)
    assert result.exit_code == 0
    assert found["problems"] == []
    assert [plan["rank"] for plan in found["plans"]] == [0, 63]
    assert {"step", "stage", "op", "axes", "num_calls", "num_bytes"} == set(found["plans"][0]["traffic"][0])


def test_ranks_that_do_not_fit_are_one_line(file: str) -> None:
    """The error is one line; the exit code is 2."""
    result = CliRunner().invoke(main, ["dry-run", file, "--ranks", "7"])
    assert result.exit_code == 2
    assert result.output.startswith("error: ranks 7 is not valid: ")
    assert result.output.count("\n") == 1
