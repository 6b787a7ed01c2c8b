"""Finds the optimizers of a user's training, and reads the gradients with which they step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from equivcheck.user.traces.reader import Reader, join_snapshots
from equivcheck.worlds.marks import mark
from equivcheck.worlds.trace.stage import Stage
from equivcheck.worlds.trace.trace import Snapshot


def optimizers_in(value: Any) -> list[Optimizer]:
    """Return all optimizers in a list, tuple, dict or object. A wrapping optimizer comes before the optimizers inside it."""
    found: dict[int, Optimizer] = {}

    def collect(value: Any, *, is_attribute: bool) -> None:
        if id(value) in found:
            return
        if isinstance(value, Optimizer):
            found[id(value)] = value
        if isinstance(value, (list, tuple)):
            parts: Sequence[Any] = value
        elif isinstance(value, Mapping):
            parts = list(value.values())
        elif isinstance(value, Optimizer) or not is_attribute:
            parts = [part for name, part in getattr(value, "__dict__", {}).items() if name not in ("state", "param_groups")]
        else:
            return
        for part in parts:
            if isinstance(part, (Optimizer, list, tuple, Mapping)):
                collect(part, is_attribute=True)

    collect(value, is_attribute=False)
    return list(found.values())


def has_hooks(optimizer: Optimizer) -> bool:
    """Whether hooks can be registered on an optimizer.

    They cannot be registered on `PostLocalSGDOptimizer`, because it never calls `Optimizer.__init__`.
    """
    return hasattr(optimizer, "_optimizer_step_pre_hooks")


def hook_steps(optimizer: Any, hook: Callable[..., None]) -> None:
    """Register `hook` on each optimizer in `optimizer`, as a step pre-hook of torch."""
    for each in filter(has_hooks, optimizers_in(optimizer)):
        each.register_step_pre_hook(hook)


class GradientReader:
    """Reads the gradients of each optimizer's parameters when the optimizer steps.

    If an optimizer steps several times in a batch, the last step is used. If an optimizer gets a closure (LBFGS), the gradients
    do not exist yet, so they are read at the end of the batch.
    """

    def __init__(self, reader: Reader, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers = list(optimizers)
        """The user's optimizers, and others that have stepped on the same parameters, for example in a backward hook."""
        self._reader, self._step = reader, 0
        self._owned = [_parameters_of(each) for each in optimizers]
        self._found: dict[int, Snapshot] = {}
        self._unclipped: Snapshot | None = None
        self._stepped: set[int] = set()
        self._by_closure: set[int] = set()

    def begin(self, step: int) -> None:
        """Begin step number `step`, and discard earlier gradients."""
        self._step, self._found, self._by_closure, self._unclipped = step, {}, set(), None

    def gradients(self) -> Snapshot:
        """Return the gradients with which the optimizers stepped, or those before clipping if they were kept.

        If no optimizer stepped, return the current gradients.
        """
        if self._unclipped is not None:
            return self._unclipped
        if not self._found:
            return self._reader.gradients()
        self._found |= {number: self._reader.gradients(self._owned[number]) for number in self._by_closure}
        return join_snapshots([self._found[number] for number in sorted(self._found)])

    def keep_unclipped(self) -> None:
        """Keep a copy of the current gradients, because they are about to be clipped."""
        self._unclipped = self._reader.gradients()

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Inside the context, read gradients whenever an optimizer steps.

        This may be the user's optimizer, or another optimizer that a hook calls on the same parameters.
        """
        with ExitStack() as handles:
            for number, each in enumerate(self.optimizers):
                if has_hooks(each):
                    handles.callback(each.register_step_pre_hook(partial(self._read, number)).remove)
            handles.callback(register_optimizer_step_pre_hook(lambda optimizer, *_: self._hear(optimizer)).remove)
            yield

    def _hear(self, optimizer: Optimizer) -> None:
        count = len(self.optimizers)
        number = next((number for number, each in enumerate(self.optimizers) if each is optimizer), count)
        if number < len(self._owned):  # has its own hook
            return
        own = _parameters_of(optimizer)
        if own & self._reader.known_parameters():
            if number == count:
                self.optimizers.append(optimizer)
            mark(Stage.READING, self._step)
            self._found[number] = self._reader.gradients(own)
            mark(Stage.COMPUTE, self._step)

    def _read(self, number: int, _optimizer: Optimizer, arguments: Any, keywords: Any) -> None:
        if any(map(callable, (*arguments[1:], *keywords.values()))):
            self._found.pop(number, None)
            self._by_closure.add(number)
            return
        self._by_closure.discard(number)
        self._stepped.add(number)
        mark(Stage.READING, self._step)
        self._found[number] = self._reader.gradients(self._read_at(number))
        mark(Stage.UPDATE, self._step)

    def _read_at(self, number: int) -> set[int] | None:
        """Return the ids of the parameters to read when an optimizer steps; None for all.

        Parameters of inner optimizers that have stepped are left out, because they were read then.
        """
        if len(self._owned) == 1:
            return None
        inner = [self._owned[other] for other in self._stepped if other > number]
        unowned = self._reader.known_parameters().difference(*self._owned)
        return (self._owned[number] - set().union(*inner)) | unowned


def _parameters_of(optimizer: Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
