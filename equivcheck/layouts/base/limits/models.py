"""Which kinds of models a parallelism runs: asked before all other limits, which may take for granted what these say."""

from __future__ import annotations

from equivcheck.layouts.base.limits.limit import Limit
from equivcheck.layouts.base.limits.repairs import of_real_targets, over_features
from equivcheck.scenario import CrossEntropy, Layer, Layout, Training


def _has_others(training: Training, _layout: Layout) -> bool:
    model = training.model
    return model.length is not None or not all(isinstance(layer, Layer) for layer in model.layers)


def linear_layers_alone(where: str, why: str) -> Limit:
    """The limit of a parallelism that runs linear layers over rows of features, and nothing else."""
    return Limit(
        reason=f"{where}: {why}",
        applies=_has_others,
        repair=lambda training, _layout: over_features(training),
    )


def real_targets_alone(where: str, why: str) -> Limit:
    """The limit of a parallelism that runs losses of real targets, and none of labels."""
    return Limit(
        reason=f"{where}: {why}",
        applies=lambda training, _layout: isinstance(training.loss, CrossEntropy),
        repair=lambda training, _layout: of_real_targets(training),
    )
