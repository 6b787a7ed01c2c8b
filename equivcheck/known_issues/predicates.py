"""What an entry of known.toml may ask of a scenario (`needs`) and of its first divergence (`shows`), by name.

To put an issue on file that needs a new one, add a function to the module of its topic, and its name to one of the two tables.
"""

from __future__ import annotations

from collections.abc import Callable

from equivcheck.known_issues.compile_predicates import (
    compiled_anew_beside_gradients,
    compiled_by_inductor,
    compiled_like_shards,
    compiled_original_parameters,
    compiled_units_over_tensor_parallel,
)
from equivcheck.known_issues.ddp_predicates import static_graph_without_sync, unused_parameters_not_looked_for
from equivcheck.known_issues.fsdp_predicates import (
    compiled_flat_parameter_of_several,
    flat_parameter_of_one_element,
    gradient_has_an_empty_shard,
    rank_without_gradients,
    reduces_each_microbatch,
    replicas_of_one_shard,
    unit_of_nothing,
)
from equivcheck.known_issues.pipeline_predicates import (
    always_splits_backward,
    in_a_stage_behind_frozen_layers,
    sometimes_splits_backward,
    splits_backward,
    stage_behind_frozen_layers,
    stage_ends_in_view,
    weight_shared_around_others,
)
from equivcheck.known_issues.plan_predicates import (
    activations_cut_unevenly,
    column_of_one_on_one_rank,
    columns_cut_again_unevenly,
    frozen_over_tensor_parallel,
    frozen_sequence_parallel_norm,
    of_a_frozen_layer,
    on_frozen_sequence_parallel_norm,
    tensor_parallel_leaves_nothing,
    weights_split_over_ranks,
)
from equivcheck.known_issues.spmd_predicates import (
    features_viewed_unevenly,
    flattened_between_transpositions,
    mean_of_uneven_means,
    one_row_or_feature_on_one_rank,
    outputs_cut_unevenly,
    sharded_by_rows,
    traced_steps,
)
from equivcheck.known_issues.training_predicates import (
    adafactor,
    clipping_by_norm,
    clipping_by_value,
    double_precision,
    fused_adam,
    inf_norm,
    mean_squared_error,
    norm_of_an_earlier_step,
    of_a_matrix,
    of_a_shared_weight,
    rms_norm_after_a_layer,
    several_data_ranks,
    shared_weights,
    times_data_ranks,
)
from equivcheck.scenario import Scenario
from equivcheck.trace.differences import Divergence


def _by_name(*functions: Callable[..., bool]) -> dict[str, Callable[..., bool]]:
    return {function.__name__: function for function in functions}


NEEDS: dict[str, Callable[[Scenario], bool]] = _by_name(
    activations_cut_unevenly,
    adafactor,
    always_splits_backward,
    clipping_by_norm,
    clipping_by_value,
    column_of_one_on_one_rank,
    columns_cut_again_unevenly,
    compiled_anew_beside_gradients,
    compiled_by_inductor,
    compiled_flat_parameter_of_several,
    compiled_like_shards,
    compiled_original_parameters,
    compiled_units_over_tensor_parallel,
    double_precision,
    features_viewed_unevenly,
    flattened_between_transpositions,
    frozen_over_tensor_parallel,
    flat_parameter_of_one_element,
    frozen_sequence_parallel_norm,
    fused_adam,
    gradient_has_an_empty_shard,
    inf_norm,
    mean_squared_error,
    one_row_or_feature_on_one_rank,
    outputs_cut_unevenly,
    rank_without_gradients,
    reduces_each_microbatch,
    replicas_of_one_shard,
    rms_norm_after_a_layer,
    several_data_ranks,
    sharded_by_rows,
    shared_weights,
    sometimes_splits_backward,
    splits_backward,
    stage_behind_frozen_layers,
    stage_ends_in_view,
    static_graph_without_sync,
    tensor_parallel_leaves_nothing,
    traced_steps,
    unit_of_nothing,
    unused_parameters_not_looked_for,
    weight_shared_around_others,
    weights_split_over_ranks,
)
"""What an issue may ask of a scenario."""

SHOWS: dict[str, Callable[[Scenario, Divergence], bool]] = _by_name(
    in_a_stage_behind_frozen_layers,
    mean_of_uneven_means,
    norm_of_an_earlier_step,
    of_a_frozen_layer,
    of_a_matrix,
    of_a_shared_weight,
    on_frozen_sequence_parallel_norm,
    times_data_ranks,
)
"""What an issue may ask of the first divergence."""
