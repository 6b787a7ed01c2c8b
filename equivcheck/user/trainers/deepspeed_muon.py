"""DeepSpeed's Muon on one device, and in DeepSpeed's engines. Tried with DeepSpeed 0.18.2 to 0.19.8.

ZeRO writes Muon's updates in place of gradients, so gradients are read before it does.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any

import torch

from equivcheck.user.usage import invalid

MUON = "muon"
"""DeepSpeed's name for the optimizer, in lower case."""
ADAM_ONLY = ("embed", "lm_head")
"""Parameters whose names contain such a word use Adam."""
MATRIX_DIMS = 2
NUM_ITERATIONS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of Newton-Schulz's polynomial."""
SETTINGS = {
    *("lr", "muon_lr", "adam_lr", "momentum", "weight_decay", "betas", "eps"),
    *("ns_method", "torch_adam", "adam_w_mode"),  # for DeepSpeed's kernels only
}
"""Arguments that `DeepSpeedMuon` takes."""


class DeepSpeedMuon(torch.optim.Optimizer):
    """DeepSpeed's Muon on one device: Muon for matrices, and Adam for other parameters, embeddings and the head.

    Takes DeepSpeed's arguments, as in ``DeepSpeedMuon(named_parameters, **config["optimizer"]["params"])``. Parameters may have
    names; without names, all matrices use Muon.
    """

    def __init__(self, parameters: Iterable[Any], **given: Any) -> None:
        """Takes parameters, or pairs of name and parameter."""
        pairs = [each if isinstance(each, tuple) else ("", each) for each in parameters]
        _require_known(given)
        uses_muon = {id(each): each.dim() > 1 and not any(word in name.lower() for word in ADAM_ONLY) for name, each in pairs}
        if any(uses_muon[id(each)] and each.dim() > MATRIX_DIMS for _, each in pairs):
            raise invalid("DeepSpeedMuon", "a parameter for Muon has more than two dims", "matrices")
        groups = [
            {"params": [each for _, each in pairs if uses_muon[id(each)]], **_muon_settings(given)},
            {"params": [each for _, each in pairs if not uses_muon[id(each)]], **_adam_settings(given)},
        ]
        super().__init__([group for group in groups if group["params"]], {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002 - no loss is computed again
        """Update all parameters."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    update = self._muon(parameter, group) if group["use_muon"] else self._adam(parameter, group)
                    parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])

    def _muon(self, parameter: torch.Tensor, group: Mapping[str, Any]) -> torch.Tensor:
        gradient, beta = _gradient(parameter), group["momentum"]
        momentum: torch.Tensor = self.state[parameter].setdefault("momentum_buffer", torch.zeros_like(gradient))
        momentum.lerp_(gradient, 1 - beta)
        rows, columns = gradient.shape
        scale = math.sqrt(max(1.0, rows / columns))
        return scale * newton_schulz(gradient.lerp(momentum, beta))

    def _adam(self, parameter: torch.Tensor, group: Mapping[str, Any]) -> torch.Tensor:
        gradient, state, (first, second) = _gradient(parameter), self.state[parameter], group["betas"]
        mean: torch.Tensor = state.setdefault("exp_avg", torch.zeros_like(gradient))
        square: torch.Tensor = state.setdefault("exp_avg_sq", torch.zeros_like(gradient))
        mean.lerp_(gradient, 1 - first)
        square.lerp_(gradient.square(), 1 - second)
        number = int(state.get("step", 0)) + 1
        state["step"] = torch.tensor(float(number))  # as torch's Adam, so that states compare
        update: torch.Tensor = (mean / (1 - first**number)) / ((square / (1 - second**number)).sqrt() + group["eps"])
        return update


def _require_known(given: Mapping[str, Any]) -> None:
    for name in given:
        if name not in SETTINGS:
            raise invalid("DeepSpeedMuon", f"it got {name}, which it does not know", ", ".join(sorted(SETTINGS)))
    if given.get("adam_w_mode", True) is False:
        raise invalid("DeepSpeedMuon", "its adam_w_mode is False, but it only decays weights as AdamW does", "adam_w_mode=True")


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None, "asked for only with a gradient"
    return parameter.grad


def _muon_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    own = {key: given[key] for key in ("lr", "momentum", "weight_decay") if key in given}
    own["lr"] = given.get("muon_lr", own.get("lr", 0.02))
    return {"momentum": 0.95, "weight_decay": 0, **own, "use_muon": True}


def _adam_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    own = {key: given[key] for key in ("lr", "betas", "eps", "weight_decay") if key in given}
    own["lr"] = given.get("adam_lr", own.get("lr", 3e-4))
    return {"betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0, **own, "use_muon": False}


def newton_schulz(matrix: torch.Tensor, steps: int = NUM_ITERATIONS) -> torch.Tensor:
    """Return Newton-Schulz's approximation of the nearest orthogonal matrix, in the matrix's own element type."""
    a, b, c = COEFFICIENTS
    is_tall = matrix.size(-2) > matrix.size(-1)
    found: torch.Tensor = matrix.transpose(-2, -1) if is_tall else matrix
    found = found / (found.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = found @ found.mT
        found = a * found + (b * gram + c * gram @ gram) @ found
    return found.transpose(-2, -1) if is_tall else found


def run_muon_eagerly_in_float32() -> None:
    """Replace DeepSpeed's Newton-Schulz iterations, which round to 16 bits, by one in the gradient's element type.

    Otherwise rounding to 16 bits hides mistakes. DeepSpeed also compiles Muon, which takes minutes on a CPU. So `torch.compile`
    has no effect on this rank from now on, not even for the user's own functions.
    """
    muon: Any = import_module("deepspeed.runtime.zero.muon.original_muon")
    muon.zeropower_via_newtonschulz5 = newton_schulz
    muon.zeropower_via_gram_newtonschulz = newton_schulz  # from 0.19; before, one iteration
    torch.compiler.set_stance("force_eager")


def with_torch_adam(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration of Muon that uses torch's Adam. DeepSpeed 0.19.8 would compile its own Adam for minutes."""
    return {**optimizer, "params": {"torch_adam": True, **optimizer.get("params", {})}}


class MuonGradients:
    """Copies full gradients before ZeRO overwrites them with Muon's updates. Keys are `id(parameter)`."""

    def __init__(self, zero: Any) -> None:
        """Wrap the method of a ZeRO optimizer that calls Muon."""
        self.full: dict[int, torch.Tensor] = {}
        self._zero = zero
        if hasattr(zero, "all_grad_tensors"):  # ZeRO-1 and ZeRO-2
            self._wrap("get_flat_partition", self._keep_flat)
        elif hasattr(zero, "_apply_distributed_muon_update"):  # ZeRO-3 before 0.19.8, in each microbatch
            self._wrap("_apply_distributed_muon_update", self._add_buckets)
        # ZeRO-3 from 0.19.8 updates in its step, after the gradients are read.

    def take(self) -> dict[int, torch.Tensor]:
        """Return the full gradients since the last call."""
        found, self.full = self.full, {}
        return found

    def _wrap(self, name: str, keep: Any) -> None:
        method = getattr(self._zero, name)
        signature = inspect.signature(method)

        def keep_and_call(*given: Any, **keywords: Any) -> Any:
            keep(**signature.bind(*given, **keywords).arguments)
            return method(*given, **keywords)

        setattr(self._zero, name, keep_and_call)

    def _keep_flat(self, tensor_list: Sequence[torch.Tensor], param_group_idx: int, **_other: Any) -> None:
        gradients = self._zero.all_grad_tensors.get(param_group_idx)
        if gradients is None:
            return
        for parameter, gradient in zip(tensor_list, gradients, strict=True):
            if getattr(parameter, "use_muon", False):
                self.full[id(parameter)] = gradient.detach().clone()

    def _add_buckets(self, communication_data_type: torch.dtype, buffer_to_reduce: torch.Tensor) -> None:
        start = 0
        for parameter in self._zero.ipg_buckets[communication_data_type].params:
            length = parameter.grad.numel()
            if getattr(parameter, "use_muon", False):
                part = buffer_to_reduce[start : start + length].reshape(parameter.grad.shape)
                self.full[id(parameter)] = self.full.get(id(parameter), 0) + part
            start += length


def full_momentum(zero: Any, parameter: torch.Tensor, group: int, flat: torch.Tensor) -> torch.Tensor:
    """Return a parameter's momentum under ZeRO-1 and ZeRO-2, which keep full matrices for a rank's partition."""
    before = 0
    for each in zero.params_in_partition[group]:
        if each is parameter:
            break
        before += each.numel()
    else:
        raise AssertionError("the parameter is not in this rank's partition")
    return flat[before : before + parameter.numel()].view(parameter.shape)
