"""`equivcheck sweep` runs operations with all placements."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import pytest
from click.testing import CliRunner

from equivcheck.cli import main
from equivcheck.programs.check import check_program
from equivcheck.programs.sweep import results, sweep
from equivcheck.programs.sweep.programs import Sweep
from equivcheck.programs.sweep.results import first_programs
from equivcheck.programs.verdict import ProgramVerdict


def test_a_sweep_without_differences_is_one_object() -> None:
    """JSON has counts of programs; the exit code is 0."""
    result = CliRunner().invoke(main, ["sweep", "--operation", "neg", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["differ"] == []
    assert found["agreed"]["neg"] == found["outcomes"]["equivalent"] > 0
    assert sum(each["covered"] for each in found["coverage"].values()) == found["agreed"]["neg"]
    assert not any(each["left"] for each in found["coverage"].values())


def test_what_is_on_file_is_shown_and_is_no_finding() -> None:
    """Known errors are printed with the property that their programs share."""
    result = CliRunner().invoke(main, ["sweep", "--operation", "item"])
    assert result.exit_code == 0, result.output
    assert "item: known, dtensor_item_of_addends" in result.output


def test_pairs_say_what_they_have_covered_and_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each shard has its own second operations, and the shards together have all."""
    of_few = Sweep(operations=("to_int", "t"))
    monkeypatch.setattr(results, "first_programs", lambda _, seed: first_programs(of_few, seed))
    totals = {}
    for shard in ("1/1", "1/2", "2/2"):
        arguments = ["--operation", "square", "--operation", "add", "--shard", shard]
        result = CliRunner().invoke(main, ["sweep", "--pairs", *arguments, "--json"])
        assert result.exit_code == 0, result.output
        kinds, *others = json.loads(result.stdout)["coverage"].values()
        assert len(others) == 2
        totals[shard] = kinds["covered"] + kinds["left"]
    assert totals["1/1"] == totals["1/2"] + totals["2/2"] > totals["1/2"] > 0


def test_what_does_not_exist_is_refused() -> None:
    """The error is one line with the valid choices."""
    for arguments in (["--operation", "nope"], ["--mesh", "0"], ["--pairs", "--shard", "3/2"]):
        result = CliRunner().invoke(main, ["sweep", *arguments])
        assert result.exit_code == 2
        assert "allowed" in result.stderr or "Expected" in result.stderr


def test_an_interruption_keeps_what_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """After Ctrl-C, the running program ends, and all results are printed."""

    def interrupted(*arguments: Any, **options: Any) -> ProgramVerdict:
        os.kill(os.getpid(), signal.SIGINT)
        return check_program(*arguments, **options)

    monkeypatch.setattr(sweep, "check_program", interrupted)
    result = CliRunner().invoke(main, ["sweep", "--operation", "neg", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["stopped"]
    assert sum(found["outcomes"].values()) + found["not_applicable"] == 1
