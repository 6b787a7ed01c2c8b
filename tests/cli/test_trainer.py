"""`equivcheck trainer` varies accumulation and clipping, and keeps the rest of the configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from equivcheck.cli import main
from equivcheck.user.trainers import table
from unit.user.trainers.flat_engine import FlatEngine


def flat(config: Mapping[str, Any], limit: float) -> FlatEngine:
    """Our own engine, whose configuration plants mistakes."""
    return FlatEngine(limit=limit or None, **config)


@pytest.fixture(autouse=True)
def _has_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(table.KINDS, "flat", table.TrainerKind(make=flat, **table.LAYERS))


def run(*arguments: object) -> Result:
    """Run a command line on simulated ranks."""
    return CliRunner().invoke(main, ["trainer", *map(str, arguments), "--world", "sim"])


def written(folder: Path, text: str) -> Path:
    """A configuration file."""
    path = folder / "config.json"
    path.write_text(text)
    return path


def test_all_pairs_of_a_right_trainer_agree(tmp_path: Path) -> None:
    """There is a line for each."""
    found = run("flat", "--config", written(tmp_path, '{"loss_scale": 64.0}'), "--ranks", 3)
    assert found.exit_code == 0, found.output
    for pair in ("accumulate 1, clip 0 ", "accumulate 1, clip 0.1 ", "accumulate 3, clip 0 ", "accumulate 3, clip 0.1 "):
        assert pair in found.stdout
    assert "4 layouts: 4 equivalent" in found.stdout


def test_a_mistake_of_the_configuration_is_found_where_it_shows(tmp_path: Path) -> None:
    """The last microbatch only: with one microbatch, that is right."""
    found = run("flat", "--config", written(tmp_path, '{"keeps_first": false}'), "--clip", "0", "--json")
    assert found.exit_code == 1, found.output
    outcomes = {row["name"]: row["outcome"] for row in json.loads(found.stdout)["layouts"]}
    assert outcomes == {"accumulate 1, clip 0": "equivalent", "accumulate 3, clip 0": "diverged"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("deepspede",), "trainer 'deepspede' is not valid: it does not exist"),
        (("flat", "--accumulate", "0"), "'0': expected numbers separated by commas, for example 1,3"),
        (("flat", "--clip", "x"), "'x': expected numbers separated by commas, for example 0,0.1"),
        (("flat", "--config", "none.json"), "--config 'none.json' is not valid"),
        (("deepspeed", "--accumulate", "1", "--clip", "0"), "trainer DeepSpeed is not valid: it needs processes"),
    ],
)
def test_bad_input_ends_with_2(arguments: tuple[object, ...], words: str) -> None:
    """It names the argument."""
    found = run(*arguments)
    assert found.exit_code == 2, found.output
    assert words in found.stderr


def test_a_configuration_that_is_no_object(tmp_path: Path) -> None:
    """It names the file."""
    found = run("flat", "--config", written(tmp_path, "[]"))
    assert found.exit_code == 2
    assert "it is a list. Expected a JSON object." in found.stderr
