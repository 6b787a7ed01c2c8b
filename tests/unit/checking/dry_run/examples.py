"""A scenario for dry runs."""

from equivcheck.scenario import (
    FSDP2,
    ActivationSharding,
    AdamW,
    Axis,
    ClipNorm,
    Data,
    Layer,
    LayerPlan,
    Layout,
    Mesh,
    Model,
    Scenario,
    Split,
    TensorParallel,
    Training,
)

PLAN = (LayerPlan(split=Split.COLWISE, output=ActivationSharding.FEATURES), LayerPlan(split=Split.ROWWISE))


def fsdp2_over_tensor_parallel(dp: int = 2, tp: int = 2) -> Scenario:
    """Two linears by columns and rows, sharded over `dp`, with three rows for each data rank."""
    mesh = Mesh(axes=(Axis(name="dp", size=dp), Axis(name="tp", size=tp)))
    return Scenario(
        training=Training(
            model=Model(features=16, layers=(Layer(width=32), Layer(width=16))),
            data=Data(microbatches=(3 * dp,)),
            optimizer=AdamW(),
            clipping=ClipNorm(max_norm=1.0),
            steps=3,
        ),
        layout=Layout(mesh=mesh, parallelisms=(TensorParallel(plan=PLAN), FSDP2())),
    )
