"""What DTensor is known to get wrong in tensor programs, told by operation and facts, so that one entry excludes few programs."""

from __future__ import annotations

import re
from dataclasses import dataclass

from equivcheck.program_run.facts import facts_of
from equivcheck.tensor_program.operations.chance import CHANCE
from equivcheck.tensor_program.program import TensorProgram
from equivcheck.torch_version import torch_in
from equivcheck.trace.differences import Phase
from equivcheck.verdict.verdict import Judgement
from equivcheck.worlds.failure import Failure

BACKWARD = "StatementFailed: backward:"
"""What is raised in the backward pass names no operation."""
MISMATCH = "collectives do not match"
"""Nor does what is said of ranks that wait for each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownDifference:
    """One cause of wrong values, or of an error that does not say what is not supported."""

    id: str
    """Short name, unique."""
    link: str
    """Where it is reported, or that no report was found, and the sentence that describes it."""
    torch: str
    """Version range in which it was seen, as a PEP 440 specifier."""
    operations: tuple[str, ...]
    """Operations in which it shows."""
    facts: frozenset[str]
    """What a program must have beside one of them; see `facts_of`."""
    any_of: frozenset[str] = frozenset()
    """Facts of which it must have one; empty where it need not."""
    phases: tuple[Phase, ...] = (Phase.VALUE, Phase.GRADIENT)
    """Where values differ first."""
    raises: str = ""
    """A regular expression found in what a rank raises, or in the stack of one that never ends; empty where values differ."""

    def could_show(self, program: TensorProgram) -> bool:
        """Whether a program has all that it needs, on the installed torch."""
        if {*program.operations}.isdisjoint(self.operations) or not torch_in(self.torch):
            return False
        found = facts_of(program)
        return self.facts <= found and not (self.any_of and self.any_of.isdisjoint(found))

    def explains(self, program: TensorProgram, verdict: Judgement) -> bool:
        """Whether what is wrong first is this: in one of the operations, or where gradients flow into it."""
        if verdict.divergence is None:
            text = _text_of(verdict.failure) if self.raises else ""
            is_raised = bool(self.raises) and re.search(self.raises, text) is not None
            is_named = is_raised and (BACKWARD in text or text.startswith(MISMATCH) or self._named_in(text))
        else:
            phase, tensor = verdict.divergence.phase, verdict.divergence.tensor
            is_named = not self.raises and phase in self.phases and self._named_in(tensor.partition(" ")[2])
        return is_named and self.could_show(program)

    def _named_in(self, text: str) -> bool:
        """Whether one of the operations is a word of a text."""
        return not {*re.findall(r"\w+", text)}.isdisjoint(self.operations)


def _text_of(failure: Failure | None) -> str:
    """What ranks raised, and where those are that run; where all wait, for what."""
    if failure is None:
        return ""
    return "\n".join(each.error or each.stack for each in failure.reports if not each.pending) or failure.summary


CONVOLUTIONS = (
    *("conv1d", "conv1d_padded", "conv1d_stride", "conv1d_channels", "conv_transpose1d"),
    *("conv2d", "conv2d_padded", "conv2d_dilated"),
)
KNOWN = (
    KnownDifference(
        id="dtensor_scan_along_negative_dim",
        link="no report found: cumulative operations take a negative dim for one that is not cut, and scan each shard by itself",
        torch=">=2.9,<2.14",
        operations=("cumsum", "cumprod", "logcumsumexp", "cummax", "cumsum_int"),
        facts=frozenset({"negative dim", "cut"}),
    ),
    KnownDifference(
        id="dtensor_mean_losses",
        link="https://github.com/pytorch/pytorch/issues/162692 (of means): the mean of a loss averages those of uneven shards, "
        "and its gradient is divided by local sizes",
        torch=">=2.11",
        operations=(
            "mse_loss_mean",
            "huber_loss_mean",
            "smooth_l1_loss_mean",
            "bce_mean",
            "bce_with_logits_mean",
            "soft_margin_loss_mean",
        ),
        facts=frozenset({"cut"}),
    ),
    KnownDifference(
        id="dtensor_mean_of_counted_rows",
        link="https://github.com/pytorch/pytorch/issues/185167 (of class weights): the mean of a cross entropy over rows and "
        "places that leaves out some targets weighs the means of shards alike, whatever they left out",
        torch=">=2.9,<2.14",
        operations=("cross_entropy_ignoring_mean",),
        facts=frozenset({"cut"}),
    ),
    KnownDifference(
        id="dtensor_writes_to_slices",
        link="https://github.com/pytorch/pytorch/issues/139735: a slice of a cut dim is a copy: what is written to it is lost",
        torch=">=2.9",
        operations=(
            *("assign_first", "assign_slice", "assign_column", "assign_row", "assign_step", "fill_slice", "mul_slice"),
            *("add_to_slice", "copy_to_view", "zero_last", "fill_transposed"),
        ),
        facts=frozenset({"cut"}),
    ),
    KnownDifference(
        id="dtensor_item_of_addends",
        link="https://github.com/pytorch/pytorch/issues/166638: item() of addends is that of the rank",
        torch=">=2.9",
        operations=("item",),
        facts=frozenset(),
    ),
    KnownDifference(
        id="dtensor_gradient_of_maximum",
        link="no report found: the gradient of amax() and of the infinity norm is NaN unless the first rank has the maximum",
        torch=">=2.9",
        operations=("amax_all", "norm_inf", "norm_minus_inf", "foreach_norm_inf", "total_norm_inf"),
        facts=frozenset({"cut"}),
        phases=(Phase.GRADIENT,),
    ),
    KnownDifference(
        id="dtensor_norm_of_maxima",
        link="no report found (of sums: https://github.com/pytorch/pytorch/pull/159856): the infinity norm of addends of a "
        "maximum is the largest norm of an addend",
        torch=">=2.9,!=2.10.*",
        operations=("norm_inf", "norm_dim_inf"),
        facts=frozenset({"P(max)"}),
    ),
    KnownDifference(
        id="dtensor_threshold_of_maxima",
        link="no report found: threshold counts as monotonic, and is taken of each addend of a maximum",
        torch=">=2.12",
        operations=("threshold",),
        facts=frozenset({"P(max)"}),
    ),
    KnownDifference(
        id="dtensor_lerp_of_pending_weight",
        link="no report found: in the backward of lerp, 1 - weight of addends counts the 1 once for each rank",
        torch=">=2.11",
        operations=("lerp", "foreach_lerp_list", "lerp_tensor_"),
        facts=frozenset({"P(sum)"}),
        phases=(Phase.GRADIENT,),
    ),
    KnownDifference(
        id="dtensor_index_add_to_addends",
        link="no report found: index_add_ to addends does not add what the source is on one device",
        torch=">=2.13,<2.14",
        operations=("index_add_own",),
        facts=frozenset({"P(sum)"}),
    ),
    KnownDifference(
        id="dtensor_fill_addends",
        link="no report found: fill_ of addends fills each, so that their sum is the number times the ranks",
        torch=">=2.9,!=2.12.*,!=2.13.*",
        operations=("fill_",),
        facts=frozenset({"P(sum)"}),
    ),
    KnownDifference(
        id="dtensor_addends_plus_number",
        link="https://github.com/pytorch/pytorch/issues/163193: a number is added to each addend",
        torch="<2.11",
        operations=("add_scalar", "radd_scalar", "add_scalar_"),
        facts=frozenset({"P(sum)"}),
    ),
    KnownDifference(
        id="dtensor_bits_of_addends",
        link="no report found: view(dtype) of addends takes the bits of each, and reduces them as numbers",
        torch=">=2.9",
        operations=("real_view",),
        facts=frozenset(),
    ),
    KnownDifference(
        id="dtensor_promotion_with_pending_scalar",
        link="no report found: integers and addends of a float64 without dims make float32",
        torch=">=2.12",
        operations=("one_hot",),
        facts=frozenset({"cut"}),
    ),
    KnownDifference(
        id="dtensor_convolution_of_cut_weight",
        link="https://github.com/pytorch/pytorch/pull/186129 (depthwise): parts and addends of a weight, addends of an input, "
        "count as whole tensors",
        torch=">=2.12",
        operations=CONVOLUTIONS,
        facts=frozenset({"not replicated"}),
        phases=(Phase.VALUE,),
    ),
    KnownDifference(
        id="dtensor_foreach_of_pending_scalar",
        link="no report found (of numbers: https://github.com/pytorch/pytorch/issues/163193): a foreach operation takes the "
        "addend of a tensor without dims for the whole",
        torch=">=2.9",
        operations=("foreach_add_tensor",),
        facts=frozenset(),
    ),
    KnownDifference(
        id="dtensor_fused_update_of_other_placements",
        link="no report found: what a fused update writes to averages that do not lie as the parameter is lost",
        torch=">=2.9",
        operations=("fused_adam", "fused_adamw", "step_of_adamw_fused"),
        facts=frozenset({"not replicated"}),
        phases=(Phase.VALUE,),
    ),
    KnownDifference(
        id="dtensor_drops_generators",
        link="https://github.com/pytorch/pytorch/issues/138329 (of CPU meshes): the generator of a random operation is "
        "dropped, and each rank draws from its default one",
        torch=">=2.9",
        operations=tuple(f"generated_{name}" for name in ("uniform_", "normal_", "bernoulli_", "bernoulli", "init_uniform")),
        facts=frozenset(),
        phases=(Phase.VALUE,),
    ),
    KnownDifference(
        id="dtensor_random_of_parts",
        link="https://github.com/pytorch/pytorch/issues/138329: on CPU meshes each rank draws for its part as the first does",
        torch=">=2.9",
        operations=tuple(each.name for each in CHANCE if each.family == "seeded"),
        facts=frozenset({"cut"}),
    ),
    KnownDifference(
        id="dtensor_embedding_counts_own_indices",
        link="no report found: the backward of embedding(scale_grad_by_freq=True) divides by counts of the rank's own indices",
        torch=">=2.9",
        operations=("embedding_scaled",),
        facts=frozenset({"cut"}),
        phases=(Phase.GRADIENT,),
    ),
    KnownDifference(
        id="dtensor_fills_empty_addends",
        link="no report found (since https://github.com/pytorch/pytorch/pull/169815): empty_like() of addends is addends, each "
        "of which fill_ fills",
        torch=">=2.10",
        operations=("empty_like_filled", "new_empty_filled"),
        facts=frozenset({"P(sum)"}),
    ),
    KnownDifference(
        id="dtensor_data_of_other_placements",
        link="no report found: assigning to .data a DTensor that lies otherwise changes nothing",
        torch=">=2.9",
        operations=("set_data",),
        facts=frozenset(),
    ),
    KnownDifference(
        id="dtensor_statistics_of_batch_norm",
        link="no report found: running statistics of batch_norm that do not lie as the channels are not updated",
        torch=">=2.12",
        operations=("batch_norm_statistics",),
        facts=frozenset({"cut"}),
    ),
)
"""Met by sweeps and campaigns on torch 2.13; a script of torch alone showed each over two gloo ranks."""
