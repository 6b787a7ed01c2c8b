"""Whether what ranks received is what the NumPy model says."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from collectives import model
from collectives.cases import COMPLEX, FLOATS, REDUCTIONS, Case, Kind, Values, inputs_of, numpy_dtype
from collectives.model import Array
from collectives.programs import Result

_DIGITS = {"float64": 52, "float32": 23, "float16": 10, "bfloat16": 7, "complex64": 23, "complex128": 52}
EPS = {dtype: 2.0**-digits for dtype, digits in _DIGITS.items()}
"""Distance from 1 to the next number."""


def expected_of(case: Case) -> list[list[Array] | None]:
    """What each member receives; None where nothing is promised."""
    inputs = [inputs_of(case, member) for member in range(len(case.group))]
    found = received(case, [[_wide(array) for array in parts] for parts in inputs] if case.kind in REDUCTIONS else inputs)
    return [None if arrays is None else arrays if isinstance(arrays, list) else [np.asarray(arrays)] for arrays in found]


def received(case: Case, inputs: list[list[Array]]) -> Sequence[Array | list[Array] | None]:
    """The model's results from everybody's inputs."""
    whole = [parts[0] for parts in inputs]
    found: dict[Kind, Callable[[], Sequence[Array | list[Array] | None]]] = {
        Kind.BROADCAST: lambda: model.broadcast(whole, case.root),
        Kind.ALL_REDUCE: lambda: model.all_reduce(whole, case.op),
        Kind.REDUCE: lambda: model.reduce(whole, case.op, case.root),
        Kind.REDUCE_SCATTER: lambda: model.reduce_scatter(inputs, case.op),
        Kind.REDUCE_SCATTER_SINGLE: lambda: model.reduce_scatter(inputs, case.op),
        Kind.ALL_GATHER: lambda: model.all_gather(whole),
        Kind.ALL_GATHER_SINGLE: lambda: model.all_gather(whole),
        Kind.GATHER: lambda: model.gather(whole, case.root),
        Kind.SCATTER: lambda: model.scatter(inputs, case.root),
        Kind.ALL_TO_ALL: lambda: model.all_to_all(inputs),
        Kind.ALL_TO_ALL_SINGLE: lambda: model.all_to_all(inputs),
    }
    return found[case.kind]()


def assert_received(case: Case, results: Sequence[Result | None]) -> None:
    """Every member, and nobody else, received what the model says; `results` are by global rank."""
    expected = expected_of(case)
    if case.kind is Kind.ALL_REDUCE:
        assert len({result.outputs[0].tobytes() for result in results if result and result.outputs}) <= 1, (
            f"ranks differ in {case}"
        )
    for rank, result in enumerate(results):
        assert (result is not None) == (rank in case.group), f"rank {rank} of {case}"
        wanted = expected[case.group.index(rank)] if result is not None else None
        if result is None or wanted is None:
            continue
        assert not result.error, f"rank {rank} raised {result.error} in {case}"
        assert len(result.outputs) == len(wanted), f"rank {rank} of {case}"
        for index, (output, array) in enumerate(zip(result.outputs, wanted, strict=True)):
            assert output.dtype == numpy_dtype(case.dtype), f"rank {rank} of {case}"
            _assert_close(case, output, array, bounds(case, index, rank, array), f"output {index} of rank {rank} of {case}")


def bounds(case: Case, index: int, rank: int, expected: Array) -> Array:
    """How far rounding in any order of reduction may take each element; zero for what is exact."""
    if case.kind not in REDUCTIONS or case.dtype not in FLOATS + COMPLEX or case.op in ("min", "max"):
        return np.zeros(expected.shape)
    if case.values is Values.WHOLE and case.op != "avg":
        return np.zeros(expected.shape)
    size = len(case.group)
    parts = case.group.index(rank) if case.kind in (Kind.REDUCE_SCATTER, Kind.REDUCE_SCATTER_SINGLE) else index
    sizes = [np.abs(_wide(inputs_of(case, member)[parts])) for member in range(size)]
    total = np.prod(sizes, 0) if case.op == "product" else np.sum(sizes, 0)
    smallest = 2.0**-24 if case.dtype == "float16" else 2.0**-126
    return np.asarray((total + smallest) * size * EPS[case.dtype])


def assert_withheld(case: Case, result: Result, member: int) -> None:
    """Nothing that a member is to receive could be seen before the wait."""
    if case.kind is Kind.BROADCAST and member == case.root:
        return
    for array in result.early:
        if case.dtype in FLOATS + COMPLEX:
            assert np.isnan(array).all(), case
        elif case.dtype != "bool":
            assert all(byte == 0x5A for byte in array.tobytes()), case


def _wide(array: Array) -> Array:
    if np.iscomplexobj(array):
        return array.astype(np.complex128)
    return array.astype(np.float64) if array.dtype.kind == "f" else array


def _assert_close(case: Case, found: Array, expected: Array, bound: Array, where: str) -> None:
    assert found.shape == expected.shape, f"{where}: {found.shape} instead of {expected.shape}"
    if case.kind not in REDUCTIONS:
        same = same_bits(found, expected)
    else:
        same = bool((np.abs(found - expected) <= bound).all()) if bound.any() else np.array_equal(found, expected)
    assert same, f"{where}: {found} instead of {expected}"


def same_bits(found: Array, expected: Array) -> bool:
    """Whether shape, type and every bit are the same, but for which of the many NaN."""
    return found.shape == expected.shape and found.dtype == expected.dtype and _bits(found) == _bits(expected)


def _bits(array: Array) -> bytes:
    """What must arrive unchanged: everything, the sign of a zero too, but for which of the many NaN."""
    if array.dtype.kind == "c":
        array = np.ascontiguousarray(array).view(array.real.dtype)
    return (np.where(np.isnan(array), np.nan, array) if array.dtype.kind == "f" else array).tobytes()
