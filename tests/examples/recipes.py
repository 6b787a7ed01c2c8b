"""Recipes in `examples/` and their planted bugs."""

from __future__ import annotations

from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
RECIPES = sorted(path.stem for path in EXAMPLES.glob("*.py") if "equivcheck.Matrix(" in path.read_text("utf-8"))
"""File names without suffix."""
PLANTED = {
    "distributed_muon": {"each shard by itself (DeepSpeed #8437)": "step 0 update 0.weight"},
    "edges": {
        "to_local says nothing (torchtitan #2532)": "step 0 gradient 1.weight",
        "local_map says nothing (autoparallel #515)": "step 0 gradient 1.weight",
    },
    "plain_tensor_parallel": {
        "norms of own positions (Megatron-LM #1446)": "step 0 gradient norm.weight",
        "bias on every rank (TGI #1036)": "step 0 loss loss",
        "bias in shares (torchtitan #4332)": "step 0 gradient down.bias",
    },
    "context_parallel": {
        "gradients summed (DeepSpeed #5248)": "step 0 gradient embedding.weight",
        "positions counted anew (verl #6267)": "step 0 loss loss",
    },
    "llama": {"loss written out (pytorch #190746)": "step 0 gradient embedding.weight"},
    "mixture_of_experts": {
        "empty expert skipped (Automodel #2995)": "step 0 gradient experts.3.0.weight",
        "expert gradients summed (pytorch #160285)": "step 0 gradient experts.0.0.weight",
        "router gradient in parts (transformers #48205)": "step 0 gradient router.weight",
    },
    "tied_embeddings": {"untied (verl #7834)": "step 0 gradient embedding.weight"},
    "token_weighted": {"DDP, counts of own rows (torchtitan #1842)": "step 0 loss loss"},
    "weight_averaging": {"updated with each microbatch (F5-TTS #631)": "step 0 update average.0.weight"},
}
"""Layouts with planted bugs, and their first difference."""
