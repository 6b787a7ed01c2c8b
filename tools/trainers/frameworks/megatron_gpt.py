"""A small GPT in plain PyTorch, with megatron-core's names of parameters, and the same model built by megatron-core."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.nn import functional

WIDTH, HEADS, GROUPS, LENGTH, VOCABULARY, LAYERS, EXPERTS = 16, 4, 2, 6, 24, 2, 4
SIZES = {
    "num_layers": LAYERS,
    "hidden_size": WIDTH,
    "num_attention_heads": HEADS,
    "num_query_groups": GROUPS,
    "ffn_hidden_size": 24,
}
GATED = {"gated_linear_unit": True, "activation_func": functional.silu, "add_bias_linear": False}
MIXTURE = GATED | {
    "num_moe_experts": EXPERTS,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 24,
    "moe_router_load_balancing_type": "none",
    "moe_token_dispatcher_type": "alltoall",
}


class Attention(nn.Module):
    """Queries, keys and values lie in groups: the queries of a group, then its key and its value."""

    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        head = WIDTH // HEADS
        self.linear_proj = nn.Linear(WIDTH, WIDTH, bias=bias)
        self.linear_qkv = nn.Linear(WIDTH, (HEADS + 2 * GROUPS) * head, bias=bias)

    def forward(self, hidden: torch.Tensor, is_hidden: torch.Tensor) -> Any:
        """Attend to positions that are not hidden."""
        rows, length, _ = hidden.shape
        in_group, head = HEADS // GROUPS, WIDTH // HEADS
        grouped = self.linear_qkv(hidden).view(rows, length, GROUPS, in_group + 2, head)
        query = grouped[..., :in_group, :].reshape(rows, length, HEADS, head)
        key, value = (grouped[..., in_group + which, :].repeat_interleave(in_group, 2) for which in (0, 1))
        scores = torch.einsum("bqhd,bkhd->bhqk", query, key) / head**0.5
        weights = scores.masked_fill(is_hidden, float("-inf")).softmax(-1)
        return self.linear_proj(torch.einsum("bhqk,bkhd->bqhd", weights, value).reshape(rows, length, WIDTH))


class Mlp(nn.Module):
    """With GELU, or gated."""

    def __init__(self, *, gated: bool) -> None:
        super().__init__()
        self.gated = gated
        self.linear_fc1 = nn.Linear(WIDTH, 48 if gated else 24, bias=not gated)
        self.linear_fc2 = nn.Linear(24, WIDTH, bias=not gated)

    def forward(self, hidden: torch.Tensor) -> Any:
        """Rows of the gate come before rows of the value."""
        hidden = self.linear_fc1(hidden)
        if not self.gated:
            return self.linear_fc2(functional.gelu(hidden))
        gate, value = hidden.chunk(2, -1)
        return self.linear_fc2(functional.silu(gate) * value)


class Mixture(nn.Module):
    """Two of four experts for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts: Any = nn.Module()
        self.experts.local_experts = nn.ModuleList(Mlp(gated=True) for _ in range(EXPERTS))

    def forward(self, hidden: torch.Tensor) -> Any:
        """Weighted by a softmax over the chosen experts."""
        best, chosen = self.router(hidden).topk(2, -1)
        weights = torch.zeros(*hidden.shape[:-1], EXPERTS).scatter(-1, chosen, best.softmax(-1))
        outputs = [weights[..., number, None] * expert(hidden) for number, expert in enumerate(self.experts.local_experts)]
        return torch.stack(outputs).sum(0)


class Layer(nn.Module):
    """Attention and MLP."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.input_layernorm, self.pre_mlp_layernorm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.self_attention = Attention(bias=kind == "gelu")
        self.mlp = Mixture() if kind == "mixture" else Mlp(gated=kind == "gated")

    def forward(self, hidden: torch.Tensor, is_hidden: torch.Tensor) -> Any:
        """With residual connections."""
        hidden = hidden + self.self_attention(self.input_layernorm(hidden), is_hidden)
        return hidden + self.mlp(self.pre_mlp_layernorm(hidden))


class Gpt(nn.Module):
    """Megatron's GPT with learned positions."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embedding: Any = nn.Module()
        self.decoder: Any = nn.Module()
        self.embedding.word_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.embedding.position_embeddings = nn.Embedding(LENGTH, WIDTH)
        self.decoder.layers = nn.ModuleList(Layer(kind) for _ in range(LAYERS))
        self.decoder.final_layernorm = nn.LayerNorm(WIDTH)
        self.output_layer = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        """Return logits."""
        hidden = self.embedding.word_embeddings(input_ids) + self.embedding.position_embeddings(position_ids)
        for layer in self.decoder.layers:
            hidden = layer(hidden, attention_mask)
        return self.output_layer(self.decoder.final_layernorm(hidden))


def megatron_gpt(config: Any, **stage: bool) -> nn.Module:
    """The same model by megatron-core, with logits on all tensor-parallel ranks."""
    gpt = import_module("megatron.core.models.gpt")
    specs = import_module("megatron.core.models.gpt.gpt_layer_specs")
    layer = specs.get_gpt_layer_local_spec(num_experts=config.num_moe_experts)
    built: nn.Module = gpt.GPTModel(config, layer, VOCABULARY, LENGTH, parallel_output=False, **stage)
    return built


def batches(num_microbatches: int) -> list[Any]:
    """Two updates, with rows for two data-parallel ranks."""
    generator = torch.Generator().manual_seed(0)
    is_hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1).expand(4, 1, LENGTH, LENGTH)
    position = torch.arange(LENGTH).expand(4, LENGTH)

    def draw() -> Any:
        tokens = torch.randint(0, VOCABULARY, (4, LENGTH + 1), generator=generator)
        return {"input_ids": tokens[:, :-1], "position_ids": position, "attention_mask": is_hidden}, tokens[:, 1:]

    return [[draw() for _ in range(num_microbatches)] for _ in range(2)]


def next_token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean over tokens."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
