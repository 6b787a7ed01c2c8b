"""Random operations with a fixed seed or their own generator, and some whose result is deterministic."""

from __future__ import annotations

from equivcheck.programs.nouns.operations.operation import Shape, operations

SHAPES: tuple[Shape, ...] = ((4, 6), (5, 3))
# Numbers are drawn in memory order, and a redistribution leaves another order than a transpose on one device.
_SEEDED = "a = a.contiguous()\nwith torch.random.fork_rng(devices=()):\n    torch.manual_seed(7)\n    out = {}\nout"
_GENERATOR = "chance = torch.Generator().manual_seed(7)\n{}"
_RANDOM = {
    "rand_like": "torch.rand_like(a)",
    "randn_like": "torch.randn_like(a)",
    "randint_like": "torch.randint_like(a, 9)",
    "bernoulli": "torch.bernoulli(a.detach().abs() / 8)",
    "uniform_": "a.detach().clone().uniform_(-1, 1)",
    "normal_": "a.detach().clone().normal_()",
    "bernoulli_": "a.detach().clone().bernoulli_(0.5)",
    "exponential_": "a.detach().clone().exponential_()",
    "dropout": "F.dropout(a, 0.5)",
    "multinomial": "torch.multinomial(a.detach().abs(), 2)",
    "init_normal": "torch.nn.init.normal_(a.detach().clone(), std=0.5)",
    "init_kaiming": "torch.nn.init.kaiming_uniform_(a.detach().clone())",
}
_FROM_GENERATOR = {
    "uniform_": "a.detach().clone().uniform_(-1, 1, generator=chance)",
    "normal_": "a.detach().clone().normal_(generator=chance)",
    "bernoulli_": "a.detach().clone().bernoulli_(0.5, generator=chance)",
    "bernoulli": "torch.bernoulli(a.detach().abs() / 8, generator=chance)",
    "init_uniform": "torch.nn.init.uniform_(a.detach().clone(), generator=chance)",
}

CHANCE = (
    *operations({f"seeded_{name}": _SEEDED.format(call) for name, call in _RANDOM.items()}, shapes=SHAPES),
    *operations(
        {f"generated_{name}": _GENERATOR.format(call) for name, call in _FROM_GENERATOR.items()},
        shapes=SHAPES,
    ),
    *operations(
        {
            "dropout_none": "F.dropout(a, 0.0)",
            "dropout_all": "F.dropout(a, 1.0)",
            "uniform_of_one_number": "a.detach().clone().uniform_(0.5, 0.5)",
            "normal_of_one_number": "a.detach().clone().normal_(0.5, 0.0)",
            "bernoulli_of_ones": "torch.bernoulli(torch.ones_like(a)) * a",
            "init_constant": "torch.nn.init.constant_(a.detach().clone(), 0.5)",
            "init_zeros": "torch.nn.init.zeros_(a.detach().clone())",
            "init_eye": "torch.nn.init.eye_(a.detach().clone())",
        },
        shapes=SHAPES,
    ),
)
