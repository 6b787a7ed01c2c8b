"""The end of a script: compares both runs and prints the differences."""

from __future__ import annotations

from equivcheck.layouts.base.script.draft import Draft
from equivcheck.layouts.base.script.loop import may_lack_gradients
from equivcheck.layouts.base.script.text import indent_lines

HANG_SECONDS = 20
"""Process group timeout in a script, in seconds."""

_FULL = (
    "def full(tensor: torch.Tensor) -> torch.Tensor:",
    '    """A copy of the full tensor."""',
    "    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()",
)
_FULL_OR_NONE = (
    "def full(tensor: torch.Tensor | None) -> torch.Tensor | None:",
    '    """A copy of the full tensor, or None."""',
    "    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor",
    "    return None if tensor is None else tensor.detach().clone()",
)
_COPY = (
    "def full(tensor: torch.Tensor | None) -> torch.Tensor | None:",
    '    """A copy of the tensor, or None."""',
    "    return None if tensor is None else tensor.detach().clone()",
)
_DISTANCE = (
    "def distance(actual: torch.Tensor | None, expected: torch.Tensor | None) -> torch.Tensor:",
    '    """Largest difference of two tensors; infinite if only one of them is None."""',
    "    if actual is None or expected is None:",
    "        return torch.tensor(0.0 if actual is expected else torch.inf)",
    "    return (actual - expected).abs().max()",
)


def comparison_functions(draft: Draft) -> list[list[str]]:
    """Return definitions for the script's helpers ``full`` (copies a full tensor) and ``distance`` (compares two tensors).

    Helpers that the script does not need are left out.
    """
    found = []
    none = may_lack_gradients(draft.scenario.training)
    if draft.has_dtensors:
        draft.need("torch.distributed.tensor", "DTensor")
        found.append(list(_FULL_OR_NONE if none else _FULL))
    elif none and not draft.reading:
        found.append(list(_COPY))
    return found + ([list(_DISTANCE)] if none else [])


def main_lines(draft: Draft) -> list[str]:
    """Return lines to define the script's function ``main``, and to call it."""
    draft.need("sys")
    draft.need("datetime", "timedelta")
    return [
        "def main() -> int:",
        *indent_lines(
            [
                '"""Train on one device and in parallel, and compare everything."""',
                f'dist.init_process_group("gloo", timeout=timedelta(seconds={HANG_SECONDS}))',
                "expected, actual = train(parallel=False), train(parallel=True)",
                "code = 0",
                "for name, values in expected.items():",
                *indent_lines(_difference(draft)),
                "    dist.all_reduce(difference, op=dist.ReduceOp.MAX)",
                "    if dist.get_rank() == 0:",
                '        print(f"{name}: max difference {float(difference)}")',
                "    code |= not float(difference) <= TOLERANCE",
                "dist.destroy_process_group()",
                "return code",
            ]
        ),
        "",
        "",
        'if __name__ == "__main__":',
        "    sys.exit(main())",
    ]


def _difference(draft: Draft) -> list[str]:
    found = (
        "distance(actual[name], values)" if may_lack_gradients(draft.scenario.training) else "(actual[name] - values).abs().max()"
    )
    if not draft.may_lack:
        return [f"difference = {found}"]
    return ["difference = torch.zeros(())", "if name in actual:", f"    difference = {found}"]
