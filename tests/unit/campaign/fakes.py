"""Checks and scenarios for campaigns, importable by workers."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from hypothesis import strategies as st

from equivcheck.campaign.plan import Plan
from equivcheck.campaign.tally import Tally
from equivcheck.campaign.workers.messages import MayShrink, Progress
from equivcheck.checking.kinds import verdict_on
from equivcheck.mutants.mutant import Family, Minimum, Mutant
from equivcheck.oracle.known_issues.known import could_show
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.oracle.verdict.verdict import CaseVerdict, Outcome, Verdict
from equivcheck.programs.nouns import Leaf, Operation, TensorProgram
from equivcheck.scenario import (
    DDP,
    Axis,
    Compile,
    Data,
    Execution,
    Layer,
    LayerPlan,
    Layout,
    Mesh,
    Model,
    Scenario,
    TensorParallel,
    Training,
)
from equivcheck.scenario.case import Checkable
from equivcheck.system.temporary_folder import NoSpace, temporary_folder
from equivcheck.worlds.failure import RanksDidNotStart
from equivcheck.worlds.sim.interruption import abandon
from equivcheck.worlds.trace.differences import Difference, Divergence, Phase


def scenario(*, width: int = 1, steps: int = 1, ranks: int = 2, layers: int = 1) -> Scenario:
    """A small scenario of DDP."""
    model = Model(features=1, layers=(Layer(width=width),) * layers)
    training = Training(model=model, data=Data(microbatches=(ranks,)), steps=steps)
    return Scenario(training=training, layout=Layout(mesh=Mesh(axes=(Axis(name="dp", size=ranks),)), parallelisms=(DDP(),)))


def some_scenarios(_: Plan) -> st.SearchStrategy[Scenario]:
    """Few enough to be quick, many enough to shrink."""
    return st.builds(
        scenario, width=st.integers(1, 32), steps=st.integers(1, 5), ranks=st.integers(1, 8), layers=st.integers(1, 5)
    )


STATIC_GRAPH = "ddp_static_graph_no_sync"
"""The known issue that `static_graph` could show."""


def static_graph(*, width: int = 1, tensor_parallel: bool = False) -> Scenario:
    """A scenario that could show a known issue, of DDP alone or over tensor parallelism."""
    plain = scenario(width=width)
    training = replace(plain.training, data=Data(microbatches=(2, 2)))
    axes, ddp = plain.layout.mesh.axes, DDP(static_graph=True, no_sync=True)
    if not tensor_parallel:
        return replace(plain, training=training, layout=Layout(mesh=Mesh(axes=axes), parallelisms=(ddp,)))
    mesh = Mesh(axes=(*axes, Axis(name="tp", size=2)))
    parallelisms = (TensorParallel(plan=(LayerPlan(),)), ddp)
    return replace(plain, training=training, layout=Layout(mesh=mesh, parallelisms=parallelisms))


def static_graphs(_: Plan) -> st.SearchStrategy[Scenario]:
    """All of them could show a known issue."""
    return st.builds(static_graph, width=st.integers(1, 32))


def known_if_it_could_show(scenario: Scenario, *, world: str, deadline: float, **_options: object) -> Verdict:
    """Finds the first known issue that could show, and else nothing."""
    for issue in could_show(scenario):
        return Verdict(outcome=Outcome.KNOWN, scenario=scenario, world=world, known=issue.id)
    return Verdict(outcome=Outcome.EQUIVALENT, scenario=scenario, world=world)


def wide_diverges_behind_a_known_issue(scenario: Scenario, *, world: str, deadline: float, **options: object) -> Verdict:
    """Finds a fault wherever the first layer has at least 3 outputs, but where a known issue shows instead."""
    verdict = known_if_it_could_show(scenario, world=world, deadline=deadline)
    is_hidden = verdict.outcome is Outcome.KNOWN
    return verdict if is_hidden else wide_diverges(scenario, world=world, deadline=deadline, **options)


def program(size: int = 1, *names: str) -> TensorProgram:
    """Some operations on a vector."""
    leaf = Leaf(shape=(size,), placements=("S(0)",))
    return TensorProgram(mesh=(2,), statements=(leaf, *(Operation(name=name) for name in names)))


def some_programs(_: Plan) -> st.SearchStrategy[TensorProgram]:
    """Few enough to be quick, many enough to shrink."""
    names = st.lists(st.sampled_from(("exp", "neg", "abs", "softmax")), max_size=5)
    return st.builds(lambda size, chosen: program(size, *chosen), st.integers(1, 8), names)


def softmax_diverges(case: Checkable, /, *, world: str, deadline: float, **options: object) -> CaseVerdict:
    """Finds the same fault in every program that has a softmax, or a fault planted, and in nothing else."""
    if not isinstance(case, TensorProgram):
        assert isinstance(case, Scenario)
        return fine(case, world=world, deadline=deadline, **options)
    if options.get("alter") is None and "softmax" not in case.operations:
        return verdict_on(case, outcome=Outcome.EQUIVALENT, world=world)
    first = Divergence(step=0, phase=Phase.VALUE, tensor="v1 softmax", difference=Difference.VALUE, rank=0)
    return verdict_on(case, outcome=Outcome.DIVERGED, world=world, reason="wrong", divergence=first)


def two_scenarios(_: Plan) -> st.SearchStrategy[Scenario]:
    """Soon exhausted."""
    return st.builds(scenario, width=st.integers(1, 2))


def fine(scenario: Scenario, *, world: str, deadline: float, alter: object = None, **_options: object) -> Verdict:
    """Finds nothing but what is wrong on purpose."""
    if alter is not None:
        return diverged(scenario, world=world)
    return blind(scenario, world=world, deadline=deadline)


def compiled() -> Scenario:
    """One that a compiler is run for."""
    eager = scenario(steps=5)
    return replace(eager, layout=replace(eager.layout, execution=Execution(compile=Compile.AOT_EAGER)))


def blind(scenario: Scenario, *, world: str, deadline: float, **_options: object) -> Verdict:
    """Finds nothing."""
    time.sleep(0.001)
    return Verdict(outcome=Outcome.EQUIVALENT, scenario=scenario, world=world)


def wide_diverges(scenario: Scenario, *, world: str, deadline: float, **options: object) -> Verdict:
    """Finds the same fault wherever the first layer has at least 3 outputs."""
    if scenario.training.model.widths[1] < 3:
        return fine(scenario, world=world, deadline=deadline, **options)
    return diverged(scenario, world=world)


def wide_diverges_but_blind(scenario: Scenario, *, world: str, deadline: float, alter: object = None, **_: object) -> Verdict:
    """Finds a fault of its own, and nothing that is wrong on purpose."""
    found = wide_diverges if alter is None else blind
    return found(scenario, world=world, deadline=deadline)


def mutant(name: str, applies: Callable[[Scenario], bool] = lambda _scenario: True) -> Mutant:
    """A mutant for checks that look at nothing but whether there is one."""
    return Mutant(
        name=name,
        wrong="Nothing.",
        family=Family.DATA_PARALLEL,
        layouts=("ddp",),
        applies=applies,
        plant=leave,
        causes=(Cause.SUMMED,),
        minimum=Minimum(because="it shows anywhere"),
    )


def leave(_: object) -> None:
    """Change nothing."""


def some_mutants(_: Plan) -> tuple[Mutant, ...]:
    """Two to draw from."""
    return mutant("doubled"), mutant("doubled_too")


def unreachable_mutants(_: Plan) -> tuple[Mutant, ...]:
    """One that applies nowhere."""
    return (mutant("nowhere", nowhere),)


def nowhere(_: Scenario) -> bool:
    """Never."""
    return False


def wide_diverges_in_sim(scenario: Scenario, *, world: str, deadline: float, **options: object) -> Verdict:
    """Finds a fault in one world that another does not show."""
    found = wide_diverges if world == "sim" else fine
    return found(scenario, world=world, deadline=deadline, **options)


def diverged(scenario: Scenario, *, world: str = "sim", tensor: str = "layers.0.linear.weight", step: int = 0) -> Verdict:
    """A verdict of a wrong gradient."""
    divergence = Divergence(step=step, phase=Phase.GRADIENT, tensor=tensor, difference=Difference.VALUE, rank=0, error=9.0)
    return Verdict(outcome=Outcome.DIVERGED, scenario=scenario, world=world, reason=f"{tensor} differs", divergence=divergence)


def long_exits(scenario: Scenario, *, world: str, deadline: float, **_options: object) -> Verdict:
    """Takes its process down with scenarios of five steps."""
    if scenario.training.steps == 5:
        os._exit(7)
    return fine(scenario, world=world, deadline=deadline)


def wide_dies(scenario: Scenario, *, world: str, deadline: float, **_options: object) -> Verdict:
    """Takes its process down where the first layer has at least 3 outputs."""
    if scenario.training.model.widths[1] >= 3:
        os._exit(7)
    return fine(scenario, world=world, deadline=deadline)


def long_is_killed(scenario: Scenario, *, world: str, deadline: float, **_options: object) -> Verdict:
    """Is killed, as by a segmentation fault, with scenarios of five steps."""
    if scenario.training.steps == 5:
        os.kill(os.getpid(), signal.SIGSEGV)
    return fine(scenario, world=world, deadline=deadline)


ONCE = "EQUIVCHECK_TEST_ONCE"
"""Names a file that does not exist until something has happened."""


def _first_time() -> bool:
    """Whether this is the first call, of all processes."""
    try:
        os.close(os.open(os.environ[ONCE], os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def long_is_killed_once(scenario: Scenario, *, world: str, deadline: float, **_options: object) -> Verdict:
    """Is killed, as for want of memory, at the first scenario of five steps."""
    if scenario.training.steps == 5 and _first_time():
        os.kill(os.getpid(), signal.SIGKILL)
    return fine(scenario, world=world, deadline=deadline)


def long_crashes_once(scenario: Scenario, *, world: str, deadline: float, **_options: object) -> Verdict:
    """Has ranks that fail at the first scenario of five steps."""
    verdict = fine(scenario, world=world, deadline=deadline)
    if scenario.training.steps == 5 and _first_time():
        return replace(verdict, outcome=Outcome.CRASHED, reason="rank 0 raised MemoryError")
    return verdict


def long_hangs(scenario: Scenario, *, world: str, deadline: float, **_options: object) -> Verdict:
    """Never comes back from scenarios of five steps."""
    while scenario.training.steps == 5:
        time.sleep(1)
    return fine(scenario, world=world, deadline=deadline)


def found_then_hangs(scenario: Scenario, *, world: str, deadline: float, **_options: object) -> Verdict:
    """Finds a fault in the first scenario of all, and never comes back from any other."""
    if _first_time():
        return diverged(scenario, world=world)
    return hangs(scenario)


def crashes_then_hangs(scenario: Scenario, *, world: str, deadline: float, **_options: object) -> Verdict:
    """Has ranks that fail in the first scenario of all, and never comes back from any other."""
    if _first_time():
        return Verdict(outcome=Outcome.CRASHED, scenario=scenario, world=world, reason="rank 0 raised MemoryError")
    return hangs(scenario)


def hangs(_: Scenario, **_options: object) -> Verdict:
    """Never comes back."""
    while True:
        time.sleep(1)


def hangs_with_a_folder(_: Scenario, **_options: object) -> Verdict:
    """Never comes back, and has a temporary folder meanwhile."""
    with temporary_folder():
        while True:
            time.sleep(1)


def has_no_space(scenario: Scenario, *, world: str, deadline: float, **_options: object) -> Verdict:
    """Has nowhere to write to."""
    raise NoSpace("temporary files cannot be written in /nowhere")


def raises(scenario: Scenario, *, world: str, deadline: float, **_options: object) -> Verdict:
    """Is broken itself."""
    raise RuntimeError("no such thing")


def does_not_start(scenario: Scenario, *, world: str, deadline: float, **_options: object) -> Verdict:
    """Has a world whose ranks cannot make it."""
    raise RanksDidNotStart(f"the ranks of {world} could not join:\nno backend")


def dies_at_import(_: Plan) -> st.SearchStrategy[Scenario]:
    """Takes its process down before any check."""
    print("the disk is on fire", flush=True)
    os._exit(9)


def dies_at_import_once(plan: Plan) -> st.SearchStrategy[Scenario]:
    """Takes the first process that asks down before any check."""
    return dies_at_import(plan) if _first_time() else some_scenarios(plan)


def says_whether_beyond(scenario: Scenario, *, world: str, deadline: float, beyond: bool = False, **_options: object) -> Verdict:
    """Finds nothing, and says whether it was asked to go beyond limits."""
    return replace(blind(scenario, world=world, deadline=deadline), beyond="a limit" if beyond else "")


PIDS = "EQUIVCHECK_TEST_PIDS"
"""Names the file to which `leaves_a_thread` appends its process id."""


def leaves_a_thread(scenario: Scenario, *, world: str, deadline: float, **_options: object) -> Verdict:
    """Finds nothing, but a rank of it cannot be stopped."""
    with open(os.environ[PIDS], "a") as pids:
        pids.write(f"{os.getpid()}\n")
    thread = threading.Thread(target=threading.Event().wait, daemon=True)
    thread.start()
    abandon([thread])
    return blind(scenario, world=world, deadline=deadline)


class RecordingLink:
    """Keeps what a worker says, and tells it when to stop."""

    def __init__(self) -> None:
        self.stopped = threading.Event()
        self.sent: list[object] = []

    def next(self) -> MayShrink:
        """Whatever is asked, it may shrink."""
        return MayShrink(yes=True)

    def pending(self) -> list[object]:
        """It asks for nothing."""
        return []

    def send(self, message: object) -> None:
        """Keep a message."""
        self.sent.append(message)

    @property
    def tally(self) -> Tally:
        """All counts together."""
        whole = Tally()
        for message in self.sent:
            if isinstance(message, Progress):
                whole.merge(message.tally)
        return whole
