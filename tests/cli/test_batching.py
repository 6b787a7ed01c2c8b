"""`equivcheck batching` checks the step in a recipe."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from equivcheck.cli import main

EXAMPLE = Path(__file__).parents[2] / "examples" / "batching.py"


def run(*arguments: object) -> Result:
    """The command's result."""
    return CliRunner().invoke(main, ["batching", *map(str, arguments)])


def with_edit(folder: Path, old: str, new: str) -> Path:
    """The example with one change."""
    text = EXAMPLE.read_text()
    assert old in text
    (folder / "recipe.py").write_text(text.replace(old, new))
    return folder / "recipe.py"


def test_a_wrong_step_exits_with_1_and_names_the_normaliser(tmp_path: Path) -> None:
    """On the screen, in JSON and on a page."""
    page = tmp_path / "page.html"
    result = run(EXAMPLE, "--html", page)
    assert result.exit_code == 1
    words = "mean over the counted tokens of each microbatch, then the mean over microbatches"
    assert words in " ".join(result.output.split())
    assert words in page.read_text()
    assert page.read_text().count('<th scope="row">') == 11
    found = json.loads(run(EXAMPLE, "--json").stdout)
    assert (found["outcome"], found["results"][0]["kind"]) == ("diverged", "split")
    assert found["cause"].startswith(words)


def right(folder: Path) -> Path:
    """The example without its mistake."""
    recipe = with_edit(folder, "len(microbatches)", 'sum((each["labels"][:, 1:] != IGNORED).sum() for each in microbatches)')
    recipe.write_text(recipe.read_text().replace("ignore_index=IGNORED)", 'ignore_index=IGNORED, reduction="sum")'))
    return recipe


def test_a_right_step_exits_with_0(tmp_path: Path) -> None:
    """With the normaliser."""
    result = run(right(tmp_path))
    assert result.exit_code == 0, result.output
    assert "loss:  mean over the counted tokens of all microbatches" in result.output


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("model=build,", "", "argument 'model' is not valid: it is missing"),
        ("model=build,", "modell=build,", "argument 'modell' is not valid: it does not exist. Did you mean model?"),
        ("batching = equivcheck.Batching(", "print(", "raised TypeError"),
        ('normaliser="token"', 'normaliser="words"', "normaliser 'words' is not valid"),
    ],
)
def test_a_recipe_that_is_not_valid_is_one_line(tmp_path: Path, old: str, new: str, words: str) -> None:
    """Exit code 2."""
    result = run(with_edit(tmp_path, old, new))
    assert result.exit_code == 2
    assert words in result.output
    assert result.output.count("\n") == 1


def test_an_undecided_step_exits_with_3(tmp_path: Path) -> None:
    """If all examples have as many counted tokens, another normaliser would give the same."""
    equal = "tokens.where(torch.arange(LENGTH) < 3, torch.tensor(IGNORED))"
    recipe = right(tmp_path)
    recipe.write_text(recipe.read_text().replace("tokens.clone()", equal))
    result = run(recipe)
    assert result.exit_code == 3, result.output
    assert "INCONCLUSIVE" in result.output


def test_a_step_that_fails_has_strict_json(tmp_path: Path) -> None:
    """Its error is not a number."""
    fails = "    if len(microbatches) > 1:\n        raise ValueError\n    optimizer.zero_grad()\n"
    found = run(with_edit(tmp_path, "    optimizer.zero_grad()\n", fails), "--json")
    assert found.exit_code == 1
    assert json.loads(found.stdout)["outcome"] == "crashed"
