"""The matrix of versions fails if a row does not end as expected."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from torch import nn

from equivcheck import Outcome, UsageError, check_training
from equivcheck.user.verdict import UserVerdict
from tools.trainers import __main__ as command
from tools.trainers import written
from tools.trainers.rows import Framework, Row, run_rows
from tools.trainers.summary import summary
from unit.user.trainers.flat_engine import FlatEngine


def check(**mistakes: object) -> UserVerdict:
    """One update with our own engine."""
    return check_training(
        model=lambda: nn.Linear(3, 2),
        trainer=FlatEngine(**mistakes),
        mesh={"dp": 2},
        batches=[[(torch.ones(2, 3), torch.tensor([[1.0, 2.0], [3.0, 5.0]])) for _ in range(3)]],
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.1),
    )


def refuse() -> UserVerdict:
    """A configuration that an adapter refuses."""
    raise UsageError("it needs a GPU")


def framework(*rows: Row) -> Framework:
    """A framework with a version that needs no folder."""
    return Framework(name="Flat", versions={"1.0": ()}, rows=rows)


def row(check: Callable[[], UserVerdict], **expected: object) -> Row:
    """A row of the only version."""
    return Row(version="1.0", configuration="flat", check=check, **expected)


SUMMED = partial(check, averages=False)
CAUSE = "all gradients are the sum over the 2 dp ranks, not the mean"


@pytest.mark.parametrize(
    ("given", "is_expected"),
    [
        (row(check), True),
        (row(refuse, expected="refused", cause="a GPU"), True),
        (row(SUMMED, expected=Outcome.DIVERGED, cause=CAUSE), True),
        (row(SUMMED, expected=Outcome.DIVERGED, cause="another cause"), False),
        (row(SUMMED), False),
        (row(check, expected=Outcome.DIVERGED), False),
        (row(UserVerdict, expected="refused"), False),
    ],
)
def test_a_row_is_expected_if_outcome_and_cause_are(given: Row, is_expected: bool) -> None:
    """A right outcome with another cause is not, and neither is an exception."""
    (result,) = run_rows(framework(given), "1.0")
    assert result.is_expected is is_expected, result


def run(monkeypatch: pytest.MonkeyPatch, path: Path, *rows: Row) -> Result:
    """Run the command on rows, in this process."""
    found = framework(*rows)
    monkeypatch.setattr(command, "FRAMEWORKS", {"flat": found})
    monkeypatch.setattr(command, "run_version", lambda _name, version, _folder, only: tuple(run_rows(found, version, only)))
    monkeypatch.setattr(command, "write_table", partial(written.write_table, path=path))
    return CliRunner().invoke(command.main, ["flat", "--write"])


def test_the_command_fails_if_one_row_is_not_expected(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It names the row. The table has all rows."""
    found = run(monkeypatch, tmp_path / "table.toml", row(check), row(check, expected=Outcome.DIVERGED))
    assert found.exit_code == 1
    assert "NOT EXPECTED: Flat 1.0, flat: EQUIVALENT" in found.output
    table = tomllib.loads((tmp_path / "table.toml").read_text())
    assert [each[:4] for each in table["rows"]] == [["Flat", "1.0", "flat", "EQUIVALENT"]] * 2
    assert run(monkeypatch, tmp_path / "table.toml", row(check)).exit_code == 0


def test_the_table_keeps_rows_of_other_frameworks(tmp_path: Path) -> None:
    """Each framework may be checked at another time."""
    others = [replace(result, framework=name) for name in ("A", "B") for result in run_rows(framework(row(check)), "1.0")]
    written.write_table(others, tmp_path / "table.toml")
    written.write_table([replace(others[0], outcome="diverged")], tmp_path / "table.toml")
    table = tomllib.loads((tmp_path / "table.toml").read_text())
    assert [(each[0], each[3]) for each in table["rows"]] == [("B", "EQUIVALENT"), ("A", "DIVERGED")]


def test_the_summary_counts_false_alarms_and_mistakes_by_framework() -> None:
    """A mistake with another cause does not count as found."""
    rows = (row(check), row(SUMMED), row(SUMMED, expected=Outcome.DIVERGED), row(SUMMED, expected=Outcome.DIVERGED, cause="x"))
    refused = row(refuse, expected="refused")
    lines = [*summary([*run_rows(framework(*rows, refused), "1.0")])]
    assert [line.split()[:6] for line in lines[1:]] == [["Flat", "2", "1", "2", "1", "1"], ["all", "2", "1", "2", "1", "1"]]


def test_a_command_without_rows_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Otherwise a misspelled text for ``--only`` would pass."""
    assert run(monkeypatch, tmp_path / "table.toml").exit_code == 1


def test_rows_that_a_process_does_not_reach_are_not_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each has the reason, and none is expected."""
    monkeypatch.setattr(command, "FRAMEWORKS", {"flat": framework(row(check), row(refuse, expected="refused"))})
    monkeypatch.setattr(command.sys, "executable", "false")
    found = command.run_version("flat", "1.0", tmp_path)
    assert [(each.outcome, each.is_expected) for each in found] == [("not run", False)] * 2
    assert "its process ended with 1" in found[0].cause
