"""Scripts in `examples/` run and print the documented verdicts."""

from __future__ import annotations

import runpy

import pytest

from examples.recipes import EXAMPLES, RECIPES

SAYS = {
    "batching": ["DIVERGED: your step", "why:   mean over the counted tokens of each microbatch"],
    "transformer_block": ["EQUIVALENT: your training on dp 2 x tp 2"],
    "own_data_parallel": [
        "DIVERGED: your training on dp 2",
        "first: step 0, gradient, 2.weight",
        "EQUIVALENT: your training",
    ],
    "pipeline": ["EQUIVALENT: your training on dp 2 x pp 2"],
}


def test_every_example_is_run() -> None:
    """A new script needs a row here. Recipes have their own tests."""
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*SAYS, *RECIPES}


STAGES = pytest.mark.torch(">=2.10", "stages greet each other in another element type than they expect")


@pytest.mark.parametrize("name", [pytest.param(name, marks=STAGES if name == "pipeline" else ()) for name in SAYS])
def test_an_example_says_what_it_finds(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each script's `main` prints its verdicts in this order."""
    runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]()
    printed, position = capsys.readouterr().out, 0
    for words in SAYS[name]:
        found = printed.find(words, position)
        assert found >= 0, f"{words!r} is not, or not there, in\n{printed}"
        position = found + 1
