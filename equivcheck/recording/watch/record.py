"""`record`: write a trace while a training loop runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from equivcheck.errors import UsageError
from equivcheck.recording.adapters.adapter import Adapter
from equivcheck.recording.adapters.cuts import require_declared
from equivcheck.recording.adapters.names import Names, require_names
from equivcheck.recording.signs import NUM_SUMS
from equivcheck.recording.watch.hooks import install_hooks
from equivcheck.recording.watch.recorder import Recorder
from equivcheck.user.traces.cuts import Cuts


@contextlib.contextmanager
def record(  # noqa: PLR0913 - options, all by keyword
    folder: str | Path,
    *,
    steps: int | None = None,
    from_step: int = 0,
    moved: int = 0,
    outputs: bool | str = False,
    mesh: Mapping[str, int] | None = None,
    cuts: Cuts | None = None,
    names: Names | None = None,
) -> Iterator[None]:
    """Record the training inside the context to ``folder/rankN.ecr``, for ``equivcheck.compare``.

    Each step contains the losses, gradients and parameters as sketches, with some hundred bytes for each tensor. The first step
    also has the initial parameters, and the last step also has the optimizer state and buffers. `steps` and `from_step` choose
    the recorded steps. A new step begins when a module is called after an optimizer has stepped. If `from_step` is not 0, the
    parameters before this step are recorded too. Nothing is communicated and no value changes. If recording fails, one line on
    stderr says so, and the training goes on.

    If `moved` is between 1 and 32, each element of the initial parameters is multiplied by 1 + eps or 1 - eps. Each number from 1
    to 32 draws other random signs. Such runs measure how far rounding alone carries the training.

    `outputs=True` records the outputs of all modules too. A string such as ``"layers.*,head"`` selects modules by patterns for
    their names. Modules inside a compiled graph, and outputs without one row per sample, are left out.

    `mesh` and `cuts` describe parameters that are plain shards, as in `check_training`. Shards with Megatron's attributes need no
    `cuts`. If megatron.core is not imported, they need a `mesh` with an axis ``tp``, and experts need an axis ``ep``.

    `names` maps names of another run to names of this one, so that both can be compared: ``{"new.*.weight": "old.*.weight"}``. A
    dict can stand in place of the old name. It says ``transpose=True``, or lists several tensors that the other run has as one:
    ``{"qkv.weight": {"parts": ["q.weight", "k.weight", "v.weight"], "dim": 0, "groups": 1}}``. With `groups`, parts alternate:
    each group contains an equal piece of each part. ``{"tied": ["a.weight", "b.weight"]}`` means one tensor with several names.
    If a rank has several of these tensors, only the first is recorded.

    Raises `UsageError` if an argument is not valid, or if this process already records.
    """
    if not 0 <= moved <= NUM_SUMS:
        raise UsageError(
            f"moved {moved} is not valid: no perturbation has this number. Expected 0 for no perturbation, or 1 to {NUM_SUMS}."
        )
    if steps is not None and steps < 1:
        raise UsageError(f"steps {steps} is not valid: nothing would be recorded. Expected at least 1.")
    if from_step < 0:
        raise UsageError(f"from_step {from_step} is not valid: it is negative. Expected 0 or more.")
    if Recorder.is_active:
        raise UsageError("record is not valid here: this process already records. Expected one `with record(...)` at a time.")
    adapter = Adapter(require_declared(cuts, mesh), require_names(names))
    chosen = outputs if isinstance(outputs, str) else "*" if outputs else ""
    recorder = Recorder(Path(folder), adapter, steps=steps, from_step=from_step, moved=moved, outputs=chosen)
    Recorder.is_active = True
    try:
        with install_hooks(recorder):
            yield
    finally:
        Recorder.is_active = False
        recorder.finish()
