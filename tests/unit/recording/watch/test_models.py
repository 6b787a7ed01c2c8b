"""Models are found as a script calls them."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from equivcheck.recording.trace import Moment
from equivcheck.recording.trace_file import read_trace
from equivcheck.recording.watch.record import record


def test_a_model_in_the_memory_of_an_earlier_module_is_moved(tmp_path: Path) -> None:
    """As after a loss that is made anew for each call: ids of modules that are gone come again."""
    values = torch.arange(6.0).reshape(2, 3) + 1
    with record(tmp_path, moved=1):
        ids = set()
        for _ in range(3):
            loss = nn.MSELoss()
            loss(torch.ones(2), torch.ones(2))
            ids.add(id(loss))
            del loss
        models = [nn.Linear(3, 2) for _ in range(20)]
        model = next(each for each in models if id(each) in ids)
        model.weight.data = values.clone()
        model(torch.ones(4, 3)).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    (trace,) = read_trace(tmp_path)
    start = next(each for each in trace.steps[0].entries if each.moment is Moment.START and each.piece.name == "weight")
    assert 0 < abs(start.sketch.squares - float((values**2).sum())) < 1e-3
