"""`equivcheck sweep`."""

from __future__ import annotations

import json

from click.testing import CliRunner

from equivcheck.cli import main


def test_a_sweep_without_differences_is_one_object() -> None:
    """Counts of programs, and exit code 0."""
    result = CliRunner().invoke(main, ["sweep", "--operation", "neg", "--seconds", "60", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["differ"] == []
    assert found["agreed"]["neg"] == found["outcomes"]["equivalent"] > 0


def test_what_is_on_file_is_shown_and_is_no_finding() -> None:
    """With what the programs have in common."""
    result = CliRunner().invoke(main, ["sweep", "--operation", "item", "--seconds", "20"])
    assert result.exit_code == 0, result.output
    assert "item: known, dtensor_item_of_addends" in result.output


def test_what_does_not_exist_is_refused() -> None:
    """In one line that says what does."""
    for arguments in (["--operation", "nope"], ["--mesh", "0"]):
        result = CliRunner().invoke(main, ["sweep", *arguments])
        assert result.exit_code == 2
        assert "allowed" in result.stderr
