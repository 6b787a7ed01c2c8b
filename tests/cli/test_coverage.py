"""`equivcheck coverage` reports the features that generated scenarios reach."""

from __future__ import annotations

import json

import pytest

from equivcheck.campaign.coverage.pairs import legal_pairs
from equivcheck.cli import main


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Run the command and return exit code, stdout and stderr."""
    with pytest.raises(SystemExit) as left:
        main(list(arguments))
    captured = capsys.readouterr()
    return int(str(left.value.code)), captured.out, captured.err


def test_json_has_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    """Counts add up, and missing pairs are named."""
    code, out, _ = run(capsys, "coverage", "--seconds", "3", "--seed", "3", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["scenarios"] > 0
    assert found["drawn_pairs"] + len(found["missing"]) == found["legal_pairs"]
    assert found["share"] == pytest.approx(found["drawn_pairs"] / found["legal_pairs"], abs=1e-6)
    assert sum(part["drawn"] for part in found["parts"]) == found["drawn_pairs"]
    assert sum(part["legal"] for part in found["parts"]) == found["legal_pairs"]
    assert found["seed"] == 3
    assert set(found["unknown_features"]).isdisjoint(map(str, legal_pairs().features))


def test_people_get_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    """The table has pairs of parts, then the pairs that are missing most."""
    code, out, _ = run(capsys, "coverage", "--seconds", "0.5", "--layout", "ddp")
    assert code == 0
    assert "layout.parallelisms" in out
    assert "pairs of features covered: " in out
    assert "features with the most pairs not covered:" in out


def test_a_layout_that_does_not_exist_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """The error lists existing layouts; the exit code is 2."""
    code, _, err = run(capsys, "coverage", "--seconds", "1", "--layout", "dpp")
    assert code == 2
    assert "layout 'dpp' is not valid: it does not exist. Did you mean ddp? Expected one of ddp" in err
