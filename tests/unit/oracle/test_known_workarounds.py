"""What an issue on file cannot show in."""

from dataclasses import replace

from equivcheck import Scenario
from equivcheck.known_issues.workarounds import nothing_kept_on_disk, plain_implementation, summed_outputs
from equivcheck.layouts.limits.repairs import with_execution
from equivcheck.scenario import Adam, Compile, Implementation, Loss, Resume
from unit.campaign import fakes

EAGER = fakes.scenario(steps=2)


def both(*, whole_step: bool = False, compiler: Compile = Compile.NONE) -> Scenario:
    """A scenario with the same execution before and after a checkpoint."""
    layout = with_execution(EAGER.layout, whole_step=whole_step, compile=compiler)
    return replace(EAGER, layout=layout, resume=Resume(layout=layout))


def test_inductor_is_left_out_of_every_layout() -> None:
    """Before a checkpoint as well; other compilers stay."""
    eager = both(compiler=Compile.AOT_EAGER)

    assert nothing_kept_on_disk(both(compiler=Compile.INDUCTOR)) == eager
    assert nothing_kept_on_disk(eager) == eager
    assert nothing_kept_on_disk(EAGER) == EAGER


def test_outputs_are_summed_and_all_else_stays() -> None:
    """Whatever the loss was, so that its mean is not taken."""
    mean = replace(EAGER, training=replace(EAGER.training, loss=Loss.LINEAR_MEAN))

    assert summed_outputs(mean) == replace(EAGER, training=replace(EAGER.training, loss=Loss.LINEAR_SUM))


def test_a_plain_implementation_is_in_no_graph() -> None:
    """A traced step may hold no loop over parameters, before a checkpoint either."""
    training = replace(EAGER.training, optimizer=Adam(implementation=Implementation.FUSED))

    found = plain_implementation(replace(both(whole_step=True), training=training))

    assert found == replace(both(), training=replace(training, optimizer=Adam()))
