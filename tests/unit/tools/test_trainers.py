"""The matrix of versions fails if a row does not end as expected."""

from __future__ import annotations

import subprocess
import tempfile
import tomllib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from click.testing import CliRunner, Result
from packaging.version import Version
from torch import nn

from equivcheck import Outcome, UsageError, check_training
from equivcheck.user.trainers.deepspeed import DeepSpeed
from equivcheck.user.trainers.lightning import Lightning
from equivcheck.user.trainers.megatron import MegatronCore
from equivcheck.user.trainers.torchtitan import TorchTitan
from equivcheck.user.trainers.transformers import HFTrainer
from equivcheck.user.trainers.trl import TRL
from equivcheck.user.verdict import UserVerdict
from frameworks.pages import shown_output
from tools.trainers import __main__ as command
from tools.trainers import folders, written
from tools.trainers.frameworks import FRAMEWORKS
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


def test_an_expected_first_difference_needs_no_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search for a cause takes longer than the check."""
    monkeypatch.setattr(UserVerdict, "cause", property(lambda _verdict: pytest.fail("searched")))
    (result,) = run_rows(framework(row(SUMMED, expected=Outcome.DIVERGED, cause="gradient weight")), "1.0")
    assert result.is_expected, result
    assert result.cause.startswith("step 0 gradient weight")


def test_a_temporary_folder_has_no_name_in_the_table() -> None:
    """Its name is another one in each run."""

    def fail() -> UserVerdict:
        with pytest.raises(FileNotFoundError) as raised:
            Path(tempfile.mkdtemp(), "saved").read_text("utf-8")
        return UserVerdict(outcome=Outcome.CRASHED, mesh=(), precision="", world="sim", reason=str(raised.value))

    (result,) = run_rows(framework(row(fail, expected=Outcome.CRASHED, cause="No such file or directory: 'FOLDER/saved'")), "1.0")
    assert result.is_expected, result


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


ADAPTERS = {
    "deepspeed": DeepSpeed,
    "lightning": Lightning,
    "megatron": MegatronCore,
    "torchtitan": TorchTitan,
    "transformers": HFTrainer,
    "trl": TRL,
}


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_the_matrix_has_an_adapters_oldest_and_newest_version(name: str) -> None:
    """Other versions are noted as untried, so that a version can not be called tried without rows."""
    tried, *_ = ADAPTERS[name].tried
    versions = sorted(map(Version, FRAMEWORKS[name].versions))
    for limit, version in ((tried.oldest, versions[0]), (tried.newest, versions[-1])):
        assert version.release[: len(Version(limit).release)] == Version(limit).release


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapters_page_shows_one_output(name: str) -> None:
    """The tests in `tests/frameworks` compare a mistake's cause with it, and only the environment `trainers` runs them."""
    assert shown_output(f"trainer_{name}")


def test_a_version_that_pip_cannot_install_is_not_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its rows have pip's last line, and other versions go on."""
    unknown = Framework(name="Flat", versions={"1.0": ("no-such-package==1.0",)}, rows=(row(check), row(check)))
    monkeypatch.setattr(command, "FRAMEWORKS", {"flat": unknown})
    failed = subprocess.CalledProcessError(1, "pip", stderr="ERROR: No matching distribution found for no-such-package==1.0")
    monkeypatch.setattr(folders.subprocess, "run", mock.Mock(side_effect=failed))
    found = command.run_version("flat", "1.0", tmp_path)
    assert [(each.outcome, each.is_expected) for each in found] == [("not run", False)] * 2
    assert "No matching distribution found for no-such-package==1.0" in found[0].cause


def test_a_folder_takes_no_constraint_of_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Constraints name the environment's version, and a folder may have another one. A complete folder stays."""
    given = Framework(name="Flat", versions={"1.0": ("flat==1.0",)}, rows=())
    monkeypatch.setenv("PIP_CONSTRAINT", "constraints.txt")
    run = mock.Mock(side_effect=lambda *_given, **_keywords: (tmp_path / "flat-1.0").mkdir())
    monkeypatch.setattr(folders.subprocess, "run", run)
    assert [folders.version_folder(tmp_path, given, "1.0") for _ in range(2)] == [tmp_path / "flat-1.0"] * 2
    assert run.call_count == 1
    assert not run.call_args.kwargs["env"]["PIP_CONSTRAINT"]
