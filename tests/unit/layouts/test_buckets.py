"""Properties of predicted DDP buckets."""

from __future__ import annotations

import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from equivcheck.layouts.parallelisms.ddp.buckets import (
    Bucketing,
    fill_buckets,
    initial_buckets,
    ready_parameters,
    rebuilt_buckets,
    trained_parameters,
)
from equivcheck.scenario import Model
from equivcheck.strategies import models
from equivcheck.training.model import MLP

NUM_ELEMENTS = st.lists(st.integers(1, 300), min_size=1, max_size=12)
LIMITS = st.lists(st.integers(1, 4000), min_size=1, max_size=3)


@given(NUM_ELEMENTS, LIMITS)
def test_tensors_are_put_into_buckets_as_torch_does(num_elements: list[int], limits: list[int]) -> None:
    """Sizes fill buckets as `torch.distributed` fills them."""
    tensors = [torch.empty(count, dtype=torch.float64) for count in num_elements]
    expected, _ = dist._compute_bucket_assignment_by_size(tensors, limits, [False] * len(tensors))
    assert fill_buckets([8 * count for count in num_elements], limits) == tuple(map(tuple, expected))


@given(NUM_ELEMENTS, st.randoms(use_true_random=False), st.sampled_from((None, 0.0001, 0.001, 25.0)), st.booleans())
def test_every_gradient_is_in_exactly_one_bucket(
    num_elements: list[int], random: object, cap_mb: float | None, find: bool
) -> None:
    """Buckets before and after they are rebuilt hold each gradient once."""
    ready = list(range(len(num_elements)))
    random.shuffle(ready)  # type: ignore[attr-defined]
    bucketing = Bucketing(num_bytes=tuple(num_elements), ready=tuple(ready), cap_mb=cap_mb, find_unused_parameters=find)
    for buckets in (initial_buckets(bucketing), rebuilt_buckets(bucketing)):
        assert sorted(index for bucket in buckets for index in bucket) == list(range(len(num_elements)))


@given(models())
def test_parameters_are_listed_as_the_model_has_them(model: Model) -> None:
    """Buckets use the names of the model's trained parameters, and the ready order is a permutation of them."""
    module = MLP(model)
    for index, layer in enumerate(model.layers):
        if layer.shares is not None:
            module.get_submodule(f"layers.{index}.linear").weight = module.get_submodule(f"layers.{layer.shares}.linear").weight
        frozen = layer.frozen
        for name, parameter in module.get_submodule(f"layers.{index}").named_parameters():
            if layer.shares is None or name != "linear.weight":
                parameter.requires_grad_(not frozen)
    expected = tuple(name for name, parameter in module.named_parameters() if parameter.requires_grad)
    assert trained_parameters(model) == expected
    assert sorted(ready_parameters(model)) == sorted(expected)
