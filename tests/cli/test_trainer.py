"""`equivcheck trainer` varies accumulation and clipping, and keeps the rest of the configuration."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from equivcheck.cli import main
from equivcheck.user.trainers import table
from equivcheck.user.trainers.tried import Tried
from unit.user.trainers.flat_engine import FlatEngine


def flat(config: Mapping[str, Any], limit: float) -> FlatEngine:
    """Our own engine, whose configuration plants mistakes."""
    return FlatEngine(limit=limit or None, **config)


@pytest.fixture(autouse=True)
def _has_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(table.KINDS, "flat", table.TrainerKind(make=flat, model=table.LAYERS))


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


def test_an_untried_version_is_noted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Apart from the output that a program reads."""
    monkeypatch.setattr(FlatEngine, "tried", (Tried("pytest", "999.0", "999.1"),), raising=False)
    found = run("flat", "--config", written(tmp_path, "{}"), "--accumulate", 1, "--json")
    assert found.exit_code == 0
    assert len(json.loads(found.stdout)["layouts"]) == 2
    note = f"note: untried version: pytest {pytest.__version__}; if it fails, try 999.0 to 999.1\n"
    assert found.stderr.endswith(note)
    assert found.stderr.count(note) == 1


def test_a_mistake_of_the_configuration_is_found_where_it_shows(tmp_path: Path) -> None:
    """The last microbatch only: with one microbatch, that is right."""
    found = run("flat", "--config", written(tmp_path, '{"keeps_first": false}'), "--clip", "0", "--json")
    assert found.exit_code == 1, found.output
    outcomes = {row["name"]: row["outcome"] for row in json.loads(found.stdout)["layouts"]}
    assert outcomes == {"accumulate 1, clip 0": "equivalent", "accumulate 3, clip 0": "diverged"}


RECIPE = """
import torch
from torch import nn
from equivcheck import TrainerModel

own = TrainerModel(
    model=lambda: nn.Linear(4, 2),
    draw=lambda rows, generator: (torch.randn(rows, 4, generator=generator), torch.randn(rows, 2, generator=generator)),
    loss=nn.functional.mse_loss,
    optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.1),
)
"""


def test_a_recipe_brings_the_model(tmp_path: Path) -> None:
    """A mistake of the trainer shows with it, too."""
    recipe = tmp_path / "recipe.py"
    recipe.write_text(RECIPE)
    assert run("flat", "--model", recipe).exit_code == 0
    wrong = run("flat", "--model", recipe, "--config", written(tmp_path, '{"averages": false}'))
    assert wrong.exit_code == 1
    assert "all gradients are the sum over the 2 dp ranks, not the mean" in wrong.stdout


def test_an_undecided_check_ends_with_3(tmp_path: Path) -> None:
    """Such as a loss that is not a number on one device."""
    recipe = tmp_path / "recipe.py"
    recipe.write_text(RECIPE.replace("loss=nn.functional.mse_loss", "loss=lambda outputs, targets: outputs.sum() * float('nan')"))
    found = run("flat", "--model", recipe, "--accumulate", 1, "--clip", 0)
    assert found.exit_code == 3, found.output
    assert "the single-device run has values that are not finite" in found.stdout


def with_scale(config: Mapping[str, Any], stage: int) -> Mapping[str, Any]:
    """A stage of our own engine: a loss scale."""
    return {**config, "loss_scale": 2.0**stage}


@pytest.mark.parametrize(
    ("config", "options", "stages"),
    [("{}", (), (0, 1, 2, 3)), ('{"loss_scale": 2.0}', (), (1,)), ('{"loss_scale": 2.0}', ("--stage", "2,3"), (2, 3))],
)
def test_stages_are_varied(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, config: str, options: tuple[str, ...], stages: tuple[int, ...]
) -> None:
    """The command checks the given stages, else the configuration's stage, else all."""
    kind = table.TrainerKind(
        make=flat, model=table.LAYERS, with_stage=with_scale, stage_of=lambda found: 1 if "loss_scale" in found else None
    )
    monkeypatch.setitem(table.KINDS, "flat", kind)
    found = run("flat", "--config", written(tmp_path, config), "--accumulate", 3, "--clip", 0.1, *options, "--json")
    assert found.exit_code == 0, found.output
    names = [row["name"] for row in json.loads(found.stdout)["layouts"]]
    assert names == [f"stage {stage}, accumulate 3, clip 0.1" for stage in stages]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("flat", "--stage", "x"), "'x': expected numbers separated by commas, for example 2,3"),
        (("flat", "--stage", "1"), "--stage 1 is not valid: trainer flat has no stages"),
        (("flat", "--model", "none.py"), "none.py"),
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


def test_a_missing_framework_has_its_packages_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the small model needs it. A module that is None cannot be imported."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    found = run("transformers", "--accumulate", 1, "--clip", 0)
    assert found.exit_code == 2, found.output
    assert found.stderr.endswith("None in sys.modules). Expected pip install transformers accelerate.\n")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ('{"zero_optimization": 1}', "its config has zero_optimization 1. Expected a JSON object"),
        ('{"zero_optimization": {"stage": 7}}', "its ZeRO stage is 7. Expected 0, 1, 2 or 3"),
        ('{"bf16": true}', "its config has bf16 True. Expected a JSON object"),
        ('{"fp16": {"enabled": "auto"}}', 'its config has "auto" in fp16. Expected values in place'),
    ],
)
def test_a_malformed_configuration_of_deepspeed_is_one_line(tmp_path: Path, config: str, words: str) -> None:
    """Before ranks start."""
    found = run("deepspeed", "--config", written(tmp_path, config))
    assert found.exit_code == 2, found.output
    assert found.stderr.startswith(f"error: check_training: trainer DeepSpeed is not valid: {words}")


def test_a_configuration_that_is_no_object(tmp_path: Path) -> None:
    """It names the file."""
    found = run("flat", "--config", written(tmp_path, "[]"))
    assert found.exit_code == 2
    assert "it is a list. Expected a JSON object." in found.stderr
