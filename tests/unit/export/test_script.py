"""Contents of exported scripts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from equivcheck import Outcome, check
from equivcheck.export.script import can_export, script_of
from equivcheck.layouts.base.script.draft import CannotExport
from equivcheck.layouts.base.script.form import form_of
from equivcheck.layouts.base.script.numbers import MOST_LITERALS, Numbers, count_numbers
from equivcheck.layouts.base.script.text import WIDTH
from equivcheck.mutants.registry import mutants
from equivcheck.scenario import (
    DDP,
    FSDP2,
    Axis,
    ClipNorm,
    Compression,
    Data,
    Execution,
    Layer,
    Layout,
    Mesh,
    Model,
    Norm,
    Precision,
    Scenario,
    Training,
)
from equivcheck.training.material import material

PLAIN = Training(model=Model(features=1, layers=(Layer(width=1),)), data=Data(microbatches=(2,)))
TWO = Mesh(axes=(Axis(name="dp", size=2),))


def scenario(training: Training = PLAIN, parallelism: DDP | FSDP2 | None = None, **execution: bool) -> Scenario:
    """A training on two data-parallel ranks."""
    layout = Layout(mesh=TWO, parallelisms=(parallelism or DDP(),), execution=Execution(**execution))  # type: ignore[arg-type]
    return Scenario(training=training, layout=layout)


@pytest.mark.parametrize("parallelism", [DDP(), FSDP2()], ids=["ddp", "fsdp2"])
def test_a_small_script_fits_on_a_page(parallelism: DDP | FSDP2) -> None:
    """A shrunk case takes fewer than 80 lines, all of legal width, and imports only torch and the standard library."""
    text = script_of(scenario(parallelism=parallelism))

    assert text.count("\n") < 80
    assert max(map(len, text.splitlines())) <= WIDTH
    imported = {line.split()[1].partition(".")[0] for line in text.splitlines() if line.startswith(("import ", "from "))}
    assert imported <= {"torch", "sys", "datetime"}


def test_what_is_not_used_is_not_written() -> None:
    """No microbatches, clipping, schedules, masks or missing gradients if the scenario has none."""
    text = script_of(scenario())

    for word in ("microbatch", "clip", "schedule", "mask", "None:", "no_sync", "class ", "DTensor"):
        assert word not in text, word


@pytest.mark.parametrize("precision", list(Precision))
def test_literals_read_back_exactly(precision: Precision) -> None:
    """Parameters equal the scenario's bit by bit, in either precision."""
    training = replace(PLAIN, precision=precision, model=Model(features=3, layers=(Layer(width=4, norm=Norm.LAYER),)))
    text = script_of(scenario(training), numbers=Numbers.EXACT)

    start = text.index("PARAMETERS = ")
    found = eval(text[start + len("PARAMETERS = ") : text.index("# Per step", start)])
    names = form_of(scenario(training)).name_of
    expected = material(training).parameters
    assert {names(name) for name in expected} == set(found)
    for name, values in expected.items():
        assert values.new_tensor(found[names(name)]).equal(values)


def test_many_numbers_are_drawn_and_it_is_said() -> None:
    """Torch draws them if there are too many literals, and the docstring says so."""
    large = replace(PLAIN, model=Model(features=16, layers=(Layer(width=16),)))
    assert count_numbers(large) > MOST_LITERALS

    text = script_of(scenario(large))

    assert "torch.manual_seed(0)" in text
    assert "random numbers of torch" in " ".join(text.split())
    assert "PARAMETERS" not in text
    assert "PARAMETERS" in script_of(scenario(large), numbers=Numbers.EXACT)


@pytest.mark.parametrize(
    ("refused", "words"),
    [
        (scenario(parallelism=DDP(compression=Compression.FP16)), "DDP.compression"),
        (scenario(compiled_autograd=True), "Execution.compiled_autograd"),
    ],
    ids=["compression", "compiled autograd"],
)
def test_what_cannot_be_exported_is_named(refused: Scenario, words: str) -> None:
    """The error names the option in one line."""
    with pytest.raises(CannotExport, match=words) as caught:
        script_of(refused)
    assert "\n" not in str(caught.value)
    assert not can_export(refused)


def test_the_docstring_of_a_failing_script_says_which_rank_raised() -> None:
    """The verdict of a crash becomes the title and the evidence; the exit code covers failing ranks."""
    verdict = check(scenario(), alter=mutants()["rank_raises"].plant)

    text = script_of(scenario(), verdict=verdict)

    assert verdict.outcome is Outcome.CRASHED
    assert "Training fails with DistributedDataParallel on 2 ranks, but not on one device." in text
    assert "rank 1 raised RuntimeError" in " ".join(text.split())
    assert "Exit code 1 if a rank fails or the runs differ" in text


def test_clipping_is_compared_before_and_after() -> None:
    """The norm is kept, and gradients twice."""
    text = script_of(scenario(replace(PLAIN, clipping=ClipNorm())))

    assert 'left[f"step {step} norm"]' in text
    assert 'left[f"step {step} clipped gradient {name}"]' in text
