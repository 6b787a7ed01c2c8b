"""Module outputs are recorded under names without wrappers, and their sums do not depend on the order of samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from equivcheck.recording.sketch import EMPTY, Sketch, sketch_parts
from equivcheck.recording.trace import RecordedStep
from equivcheck.recording.trace_file import read_trace
from equivcheck.recording.watch.record import record
from equivcheck.recording.watch.samples import hash_samples
from equivcheck.worlds.trace.trace import Piece

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


class Block(nn.Module):
    """A linear, whose output is changed in place, and a wide one with a row of signs for each feature."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.act, self.wide = nn.Linear(3, 5), nn.ReLU(inplace=True), nn.Linear(5, 90)

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states for each sample and position, and their mean over samples."""
        hidden = self.wide(self.act(self.linear(inputs)))
        return hidden, hidden.mean(0)


class Net(nn.Module):
    """A block that is called twice, a part that flattens samples and positions, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.flat, self.head = Block(), nn.Identity(), nn.Linear(90, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Scores with shape (rows, positions, 2)."""
        hidden = self.block(inputs)[0] + self.block(inputs * 2)[0]
        scores: torch.Tensor = self.head(self.flat(hidden.flatten(0, 1)).view_as(hidden))
        return scores


def batch(rows: int = 6) -> torch.Tensor:
    """Random rows with 4 positions."""
    return torch.randn(rows, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def recorded(
    folder: Path, parts: Sequence[torch.Tensor], wrap: Callable[[nn.Module], Any] = lambda model: model, **options: Any
) -> RecordedStep:
    """One step with these microbatches."""
    torch.manual_seed(0)
    model = wrap(Net().double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with record(folder, **{"outputs": True, **options}):
        for part in parts:
            model(part).square().mean().backward()
        optimizer.step()
    (trace,) = read_trace(folder)
    return trace.steps[0]


def sums(step: RecordedStep) -> dict[tuple[str, int, tuple[int, ...]], Sketch]:
    """Each output, added up over microbatches."""
    found: dict[tuple[str, int, tuple[int, ...]], Sketch] = {}
    for each in step.outputs:
        key = (each.module, each.call, each.shape)
        found[key] = found.get(key, EMPTY) + each.sketch
    return found


SHAPES = {
    **{("block.linear", call): (4, 5) for call in range(2)},
    **{("block.act", call): (4, 5) for call in range(2)},
    **{("block.wide", call): (4, 90) for call in range(2)},
    **{("block[0]", call): (4, 90) for call in range(2)},
    ("head", 0): (4, 2),
    ("", 0): (4, 2),
}


def test_sums_do_not_depend_on_the_order_and_distribution_of_samples(tmp_path: Path) -> None:
    """Outputs without a row for each sample are left out: means over samples, and samples merged with positions."""
    rows = batch()
    one = sums(recorded(tmp_path / "one", [rows]))
    other = sums(recorded(tmp_path / "other", [rows[[4, 0, 5]], rows[[2]], rows[[1, 3]]]))
    assert {(name, call): shape for name, call, shape in one} == SHAPES
    assert set(one) == set(other)
    for key, sketch in one.items():
        np.testing.assert_allclose(other[key].sums, sketch.sums, rtol=0, atol=1e-12 * sketch.norm)
        np.testing.assert_allclose(other[key].squares, sketch.squares, rtol=1e-12)
        assert (other[key].minimum, other[key].maximum) == pytest.approx((sketch.minimum, sketch.maximum), rel=1e-12)


def test_an_output_of_another_sample_is_seen(tmp_path: Path) -> None:
    """Even if the same rows come out in another order."""

    class Reversed(Net):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return super().forward(inputs).flip(0)

    def reverse(model: nn.Module) -> nn.Module:
        found = Reversed().double()
        found.load_state_dict(model.state_dict())
        return found

    one = sums(recorded(tmp_path / "one", [batch()]))["", 0, (4, 2)]
    other = sums(recorded(tmp_path / "other", [batch()], reverse))
    assert one.distance(other["", 0, (4, 2)]) > 0.3 * one.norm


def test_a_sample_has_the_signs_of_a_tensor_times_those_of_its_hash(tmp_path: Path) -> None:
    """They are part of the trace format. Values are those before the next module changes them in place."""
    rows = batch(1)
    found = sums(recorded(tmp_path, [rows]))["block.linear", 0, (4, 5)]
    torch.manual_seed(0)
    output = Net().double().block.linear(rows)[0]
    assert bool((output < 0).any())
    (expected,) = sketch_parts([(Piece(name="", shape=(4, 5)), output)])
    hashes = hash_samples([rows])
    assert hashes is not None
    signs = [1 - 2 * (int(hashes[0]) >> (32 + number) & 1) for number in range(32)]
    np.testing.assert_allclose(found.sums, expected.sums * signs, rtol=1e-12)


def test_chosen_modules_only(tmp_path: Path) -> None:
    """By patterns over names."""
    step = recorded(tmp_path, [batch()], outputs="block.*,head")
    assert {each.module for each in step.outputs} == {"block.linear", "block.act", "block.wide", "head"}
    assert not recorded(tmp_path / "none", [batch()], outputs=False).outputs


@pytest.mark.parametrize(
    ("wrap", "names"),
    [
        (nn.DataParallel, {name for name, _ in SHAPES}),
        (lambda model: torch.compile(model, backend="eager"), {""}),
        (lambda model: nn.DataParallel(torch.compile(model, backend="eager")), {""}),  # type: ignore[arg-type]
    ],
    ids=["wrapped", "compiled", "compiled and wrapped"],
)
def test_wrappers_have_no_outputs_of_their_own(tmp_path: Path, wrap: Callable[[nn.Module], Any], names: set[str]) -> None:
    """The model inside has the name, and modules inside a compiled graph are not seen."""
    plain = sums(recorded(tmp_path / "plain", [batch()]))
    found = sums(recorded(tmp_path / "wrapped", [batch()], wrap))
    assert {name for name, _, _ in found} == names
    for key, sketch in found.items():
        assert plain[key].distance(sketch) <= 1e-12 * sketch.norm


def test_compiled_parts_have_outputs(tmp_path: Path) -> None:
    """If a block is compiled in place, its own output is seen, but nothing inside."""
    torch.manual_seed(0)
    model = Net().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with record(tmp_path, outputs=True):
        model.block.compile(backend="eager")
        model(batch()).square().mean().backward()
        optimizer.step()
    (trace,) = read_trace(tmp_path)
    assert {each.module for each in trace.steps[0].outputs} == {"block[0]", "head", ""}
