"""Wrong trainings with their causes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from equivcheck.oracle.verdict.cause import Cause


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A wrong training, and the cause in its verdict."""

    fault: str
    """Name in `wrong_trainings.FAULTS`."""
    cause: Cause | None
    """Expected cause; None if no sketch shows it."""
    words: str = ""
    """Part of the expected sentence."""
    base: str = "sgd"
    """Name in `wrong_trainings.BASES`."""
    layout: str = "one"
    """Name in `wrong_trainings.LAYOUTS`."""
    size: int = 1
    """Number of ranks."""


def on_ranks(fault: str, cause: Cause | None, words: str = "", **options: Any) -> Case:
    """A case on two ranks that average gradients themselves."""
    return Case(fault=fault, cause=cause, words=words, **{"layout": "ranks", "size": 2, **options})


CASES = (
    Case(fault="loss not divided", cause=Cause.MICROBATCHES_SUMMED, words="all gradients are the sum over the 2 microbatches"),
    Case(fault="loss not divided", cause=Cause.MICROBATCHES_SUMMED, words="the 4 microbatches", base="four"),
    Case(fault="loss divided twice", cause=Cause.RESCALED_EACH_MICROBATCH, words="divided by the number of microbatches twice"),
    Case(fault="loss scaled", cause=Cause.NOT_UNSCALED, words="1024 times as large as in A"),
    Case(fault="another factor", cause=Cause.SCALED, words="all gradients are 1.37 times as large as in A"),
    Case(fault="last microbatch", cause=Cause.MICROBATCH_LOST, words="from microbatch 1 (the last) only, weighted by its share"),
    Case(fault="last microbatch", cause=Cause.MICROBATCH_LOST, words="from microbatch 3 (the last) only", base="four"),
    Case(fault="first microbatch", cause=Cause.MICROBATCH_LOST, words="from microbatch 0 (the first) only"),
    Case(fault="first microbatch twice", cause=Cause.MICROBATCH_REPEATED, words="microbatch 0 (the first) added twice"),
    Case(fault="other weights", cause=Cause.SCALED, words="microbatch 0 counts 1.6 times", base="four"),
    Case(fault="never zeroed", cause=Cause.NOT_ZEROED, words="each step adds to those of earlier steps", base="free"),
    Case(fault="never zeroed, clipped", cause=Cause.NOT_ZEROED, words="each step adds to those of earlier steps"),
    Case(fault="not clipped", cause=Cause.NOT_CLIPPED, words="gradients are not clipped"),
    Case(fault="not clipped", cause=Cause.NOT_CLIPPED, words="gradients are not clipped", base="barely clipped"),
    Case(fault="clipped to another limit", cause=Cause.HYPERPARAMETER, words="clipped to a norm of 0.2, not 0.1"),
    Case(fault="each tensor clipped", cause=Cause.PART_OF_NORM, words="each tensor is clipped by its own norm"),
    Case(fault="largest norm", cause=Cause.ANOTHER_NORM, words="inf-norm"),
    Case(fault="root of the norm", cause=Cause.ANOTHER_NORM, words="the root of the norm"),
    Case(fault="norms summed", cause=Cause.ANOTHER_NORM, words="the sum of the tensors' norms"),
    Case(fault="squared norm", cause=Cause.ANOTHER_NORM, words="the square of the norm"),
    Case(fault="norm without a tensor", cause=Cause.PART_OF_NORM, words="leaves out `embedding.weight`"),
    Case(
        fault="gradients a step late", cause=Cause.STALE, words="from the previous step, and zero at the first step", base="free"
    ),
    Case(fault="gradients from the step before", cause=Cause.STALE, words="from the previous step", base="free"),
    Case(fault="gradient zero", cause=Cause.GRADIENT_LOST, words="the gradient of `down.weight` is zero", base="free"),
    Case(fault="learning rate", cause=Cause.HYPERPARAMETER, words="lr is 0.07, not 0.05 (1.4 times)"),
    Case(fault="learning rate", cause=Cause.HYPERPARAMETER, words="lr is 0.07, not 0.01 (7 times)", base="adamw"),
    Case(fault="learning rate, and doubled norms", cause=Cause.HYPERPARAMETER, words="lr is 0.07, not 0.05 (1.4 times)"),
    Case(fault="learning rate in step 1", cause=Cause.SCHEDULE, words="at step 1, lr is 0.025, not 0.05"),
    Case(fault="momentum", cause=Cause.HYPERPARAMETER, words="momentum is 0.8, not 0.9", base="momentum"),
    Case(fault="weight decay", cause=Cause.HYPERPARAMETER, words="weight_decay is 0.1, not 0.5", base="adamw"),
    Case(fault="weight decay", cause=Cause.HYPERPARAMETER, words="weight_decay is 0.1, not 0.5", base="decay"),
    Case(fault="decay twice", cause=Cause.DECAY_TWICE, words="weight decay is applied twice", base="adamw"),
    Case(fault="decay everywhere", cause=Cause.DECAY_EVERYWHERE, words="weight_decay is 0.5, not 0", base="groups"),
    Case(fault="betas", cause=Cause.HYPERPARAMETER, words="betas is (0.8, 0.999), not (0.9, 0.999)", base="adam"),
    Case(fault="state lost", cause=Cause.STATE_LOST, words="the optimizer state is lost before each step", base="momentum"),
    Case(
        fault="state lost once", cause=Cause.STATE_LOST, words="the optimizer state is lost before step 1, once", base="momentum"
    ),
    Case(fault="state lost", cause=Cause.STATE_LOST, words="the optimizer state is lost before each step", base="adamw"),
    Case(fault="state lost once", cause=Cause.STATE_LOST, words="the optimizer state is lost before step 1, once", base="adamw"),
    Case(fault="nothing updated", cause=Cause.NOT_UPDATED, words="does not update any parameter"),
    Case(fault="query not updated", cause=Cause.NOT_UPDATED, words="does not update `query.weight` and `query.bias`"),
    Case(fault="two steps", cause=Cause.STEPPED_EACH_MICROBATCH, words="steps 2 times per step", base="momentum"),
    Case(fault="step count", cause=Cause.STEP_COUNT, words="counts step 2 as step 3", base="adamw"),
    Case(fault="another start", cause=Cause.UNEQUAL_START, words="other values of `query.weight` and `down.weight` than A"),
    Case(fault="query and key swapped", cause=Cause.UNEQUAL_START, words="`query.weight` has the values of `key.weight` in A"),
    Case(fault="rows permuted", cause=Cause.PERMUTED, words="the elements of `query.weight` in wrong places"),
    Case(fault="gradients exchanged", cause=Cause.PERMUTED, words="`query.weight` has that of `key.weight`"),
    Case(fault="gradient permuted", cause=Cause.PERMUTED, words="the gradient of `query.weight` is permuted"),
    Case(fault="parameter permuted", cause=Cause.PERMUTED, words="the value of `query.weight` is permuted"),
    Case(fault="gradients divided again", cause=Cause.RESCALED_EACH_MICROBATCH, words="after each microbatch"),
    Case(fault="frozen", cause=Cause.GRADIENT_LOST, words="`query.weight` and `query.bias` are None"),
    Case(fault="untied", cause=Cause.UNTIED, words="`query.weight` and `key.weight` are no longer one parameter", base="tied"),
    Case(fault="another class", cause=Cause.HYPERPARAMETER, words="the optimizer is NAdam, not AdamW", base="adamw"),
    Case(fault="no learning rate", cause=Cause.HYPERPARAMETER, words="lr is 0, not 0.05"),
    Case(fault="schedule late", cause=Cause.SCHEDULE, words="the schedule is one step behind", base="warmup"),
    Case(fault="clipped while scaled", cause=Cause.NOT_UNSCALED, words="clipped before they are unscaled"),
    Case(fault="elements limited", cause=Cause.ANOTHER_NORM, words="limited to 0.002, as by `clip_grad_value_`"),
    Case(fault="elements limited, and noise", cause=None),
    Case(fault="matrices clipped", cause=Cause.PART_OF_NORM, words="the norm leaves out `query.bias`"),
    Case(fault="shared weight clipped twice", cause=Cause.REPLICAS_IN_NORM, words="counts `query.weight` twice", base="tied"),
    Case(fault="gradients zero in step 1", cause=Cause.GRADIENT_LOST, words="all gradients are zero at step 1"),
    Case(fault="copies updated", cause=Cause.NOT_UPDATED, words="updates copies of the parameters", base="free"),
    on_ranks("kept on rank 1", Cause.NOT_REDUCED, "left unreduced: the rank keeps its own part on rank 1"),
    on_ranks("not reduced", Cause.NOT_REDUCED, "the mean over ranks is right"),
    on_ranks("part of a sum", Cause.NOT_REDUCED, "the sum over ranks is right"),
    on_ranks("each a multiple", Cause.SCALED, "0.5 times as large as in A on rank 0, and all gradients are 1.5 times"),
    on_ranks("each updates some", Cause.NOT_UPDATED, "`key.weight` on rank 0, and the optimizer does not update `query.weight`"),
    Case(fault="one update late", cause=Cause.STALE, words="does not update any parameter at step 0, but one step later"),
    Case(fault="step at each microbatch", cause=Cause.STEPPED_EACH_MICROBATCH, words="B's steps 0 to 1 have the samples"),
    Case(fault="same microbatch", cause=Cause.ROWS_LOST, words="every microbatch has the same samples: 8 of 16"),
    Case(fault="rows lost", cause=Cause.ROWS_LOST, words="4 of 16 samples of A are on no rank"),
    Case(fault="clipped by no limit", cause=Cause.NOT_CLIPPED),
    Case(fault="decay coupled", cause=Cause.DECAY_COUPLED, words="", base="adamw"),
    on_ranks("summed", Cause.SUMMED, "the sum over the 2 ranks"),
    on_ranks("averaged twice", Cause.AVERAGED_TWICE, "averaged twice over the 2 ranks"),
    on_ranks("reduced over pairs", Cause.REDUCED_OVER_PART, "within ranks 0 and 1 and within ranks 2 and 3", size=4),
    on_ranks("norm not reduced", Cause.NOT_REDUCED, "the gradients of `norm.weight` and `norm.bias` are left unreduced"),
    on_ranks("norm not summed", Cause.NOT_REDUCED, "the sum over ranks is right"),
    on_ranks("clipped before", Cause.CLIPPED_BEFORE_REDUCTION, "before they are reduced"),
    on_ranks("same rows", Cause.SAME_ROWS, "every rank computes on the same samples: 8 of 16"),
    on_ranks("learning rate on rank 1", Cause.HYPERPARAMETER, "lr is 0.075, not 0.05 (1.5 times) on rank 1"),
    on_ranks("not updated on rank 1", Cause.NOT_UPDATED, "does not update any parameter on rank 1"),
    on_ranks("start on rank 1", Cause.UNEQUAL_START, "rank 1 starts with other values of `query.weight`"),
    on_ranks("not clipped", Cause.NOT_CLIPPED, layout="fsdp2"),
    on_ranks("local norms summed", Cause.ANOTHER_NORM, "the local norms on the 2 ranks are summed"),
    on_ranks("replicas counted", Cause.REPLICAS_IN_NORM, "replicated over the 2 ranks once per rank"),
    on_ranks("local norm", Cause.LOCAL_NORM, "each rank clips by its local norm", layout="fsdp1"),
    on_ranks("not updated on rank 1", Cause.NOT_UPDATED, "on rank 1", layout="fsdp2"),
    on_ranks("loss not divided", Cause.MICROBATCHES_SUMMED, "the 4 microbatches", layout="fsdp2", base="four"),
    on_ranks("last microbatch", Cause.MICROBATCH_LOST, "(the last) only", layout="ddp"),
    on_ranks("copied from rank 0", Cause.NOT_REDUCED, "copied from rank 0 to every rank, not reduced", layout="ranks"),
    on_ranks("other weights of ranks", Cause.SCALED, "rank 0 counts 0.5 times"),
    Case(fault="one factor", cause=Cause.SCALED, words="the gradient of `down.weight` is 2 times as large as in A"),
    on_ranks("one factor", Cause.SCALED, "the gradient of `down.weight` is 2 times as large as in A"),
    Case(fault="nearly two", cause=Cause.SCALED, words="all gradients are 2.59", base="coarse"),
    Case(fault="three quarters", cause=Cause.SCALED, words="all updates are 0.75", base="slow"),
    on_ranks("loss quadrupled", Cause.SCALED, "4 times as large as in A, and so is the loss", size=4),
    Case(fault="last microbatch", cause=None, base="twins"),
    Case(fault="mean over all microbatches", cause=None, base="one has labels"),
    on_ranks("half a batch", Cause.SAME_ROWS, "every rank computes on the same samples: B's steps 0 to 1", base="in order"),
    on_ranks("half a batch", Cause.SAME_ROWS, "every rank computes on the same samples", base="in order", layout="fsdp2"),
    Case(fault="half a batch", cause=None, base="in order"),
    Case(fault="rows later", cause=None),
    Case(fault="some rows twice", cause=None),
    on_ranks("two causes", None),
    Case(fault="noise", cause=None),
    Case(fault="noise in one tensor", cause=None),
    Case(fault="noise and factor", cause=None),
    Case(fault="noise and loss", cause=None),
    Case(fault="two factors", cause=None),
    Case(fault="other samples", cause=None),
    Case(fault="noise after update", cause=None),
    Case(fault="noise and rate", cause=None),
    Case(fault="microbatch and noise", cause=None),
    on_ranks("reduced in bfloat16", Cause.REDUCED_IN_LOWER_PRECISION, "all gradients are rounded to bfloat16"),
    Case(fault="kept in bfloat16", cause=Cause.MASTERS_IN_LOWER_PRECISION, words="6 more are rounded to bfloat16"),
    Case(fault="never counted", cause=Cause.STEP_COUNT, words="counts step 2 as step 1", base="adam"),
    on_ranks(
        "reduced over other shards",
        Cause.REDUCED_OVER_OTHERS,
        "the gradient of `query.weight` is the same in different shards: reduced over ranks 0 and 1",
        layout="fsdp2",
    ),
    on_ranks("reduced in bfloat16, and noise", None),
    Case(fault="kept in bfloat16, and noise", cause=None),
    on_ranks("other shards, and noise", None, layout="fsdp2"),
    on_ranks("noise on rank 1", None),
    on_ranks("noise between ranks", None),
    on_ranks("not reduced, and noise", None),
    Case(fault="", cause=None, base="momentum"),
    Case(fault="", cause=None, base="groups"),
    on_ranks("", None, size=4),
    on_ranks("", None, layout="ddp"),
    on_ranks("", None, layout="fsdp1"),
    on_ranks("", None, layout="fsdp2", base="adamw"),
)
