"""The registry of kinds, and third parties' entry points."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint
from typing import ClassVar

import pytest

from equivcheck.errors import UsageError
from equivcheck.layouts.base.kind import LayoutKind
from equivcheck.layouts.base.limits.limit import Limit
from equivcheck.layouts.composition import registry
from equivcheck.layouts.composition.limits import limit_reason, repair_training
from equivcheck.layouts.composition.registry import BrokenLayout, kind_of, layout_kinds
from equivcheck.scenario import DDP, Axis, Data, Layer, Layout, Mesh, Model, Parallelism, Training
from equivcheck.scenario.parallelisms import PARALLELISMS


@dataclass(frozen=True, slots=True, kw_only=True)
class Gossip(Parallelism):
    """A third party's parallelism."""

    tag: ClassVar[str] = "gossip"
    axes: ClassVar[tuple[tuple[str, ...], ...]] = (("ring",),)


def _next_seed(training: Training, _layout: Layout) -> Training:
    return replace(training, seed=training.seed + 1)


class GossipKind(LayoutKind[Gossip]):
    """Kind with one limit that no repair removes."""

    parallelism = Gossip
    limits = (Limit(reason="never", applies=lambda training, layout: True, repair=_next_seed),)

    def apply(self, setup: object, parallelism: Gossip, mesh: object) -> None:
        """Do nothing."""


class TakenKind(GossipKind):
    """Kind for a tag that is taken."""

    parallelism = DDP


def _raises() -> None:
    raise RuntimeError


TRAINING = Training(model=Model(features=1, layers=(Layer(width=1),)), data=Data(microbatches=(1,)))
GOSSIP = Layout(mesh=Mesh(axes=(Axis(name="ring", size=2),)), parallelisms=(Gossip(),))


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    layout_kinds.cache_clear()
    yield
    layout_kinds.cache_clear()


def _install(monkeypatch: pytest.MonkeyPatch, loaded: object) -> None:
    point = EntryPoint(name="gossip", value="third_party:Kind", group=registry.ENTRY_POINTS)
    monkeypatch.setattr(registry, "entry_points", lambda group: (point,))
    monkeypatch.setattr(EntryPoint, "load", lambda point: loaded)


def test_every_built_in_parallelism_has_a_kind_of_its_own() -> None:
    """Each parallelism that ships has one kind under its tag."""
    assert {tag: kind.parallelism for tag, kind in layout_kinds().items()} == {kind.tag: kind for kind in PARALLELISMS}


def test_a_parallelism_that_nobody_registered_lists_those_that_are() -> None:
    """An unknown tag is a usage error that names it and every registered one."""
    registered = ", ".join(kind.tag for kind in PARALLELISMS)
    with pytest.raises(UsageError, match=f"'gossip' is not valid: it is not registered\\. Expected one of {registered}$"):
        kind_of(Gossip())


def test_an_entry_point_adds_a_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A third party's kind is found by its parallelism and asked for its limits."""
    _install(monkeypatch, GossipKind)
    assert isinstance(kind_of(Gossip()), GossipKind)
    assert limit_reason(TRAINING, GOSSIP) == "never"


@pytest.mark.parametrize(
    ("loaded", "says"),
    [
        (_raises, "is not valid. Expected a subclass"),
        (TakenKind, "tag 'ddp' is not valid: it is taken"),
        (LayoutKind, "is not valid. Expected a subclass"),
    ],
)
def test_an_entry_point_that_gives_no_kind_is_one_clear_line(monkeypatch: pytest.MonkeyPatch, loaded: object, says: str) -> None:
    """The error names the entry point and the object that it loaded."""
    _install(monkeypatch, loaded)
    with pytest.raises(BrokenLayout, match=rf"^entry point 'gossip' of equivcheck\.layouts .*{says}"):
        layout_kinds()


def test_an_entry_point_that_cannot_be_imported_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error for a failed import names the entry point and the cause in one line."""
    point = EntryPoint(name="gossip", value="no_such_module:Kind", group=registry.ENTRY_POINTS)
    monkeypatch.setattr(registry, "entry_points", lambda group: (point,))
    with pytest.raises(BrokenLayout, match=r"^entry point 'gossip' .*ModuleNotFoundError: No module named 'no_such_module'$"):
        layout_kinds()


def test_repairs_that_never_end_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit that its own repair does not satisfy is reported rather than repaired for ever."""
    monkeypatch.setattr(registry, "layout_kinds", lambda: {"gossip": GossipKind()})
    with pytest.raises(BrokenLayout, match=r"gossip: a limit still applies after 64 repairs: never"):
        repair_training(TRAINING, GOSSIP)


def test_asking_for_limits_imports_no_torch() -> None:
    """Limits can be read without torch."""
    program = (
        "import sys; from equivcheck.layouts.composition.registry import layout_kinds; "
        "import equivcheck.layouts.base.plan.rules; "
        "[kind.limits for kind in layout_kinds().values()]; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
