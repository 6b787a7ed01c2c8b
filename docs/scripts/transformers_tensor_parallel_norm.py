"""transformers' Trainer clips tensor-parallel gradients by the norm of each rank's own elements.

Two ranks train one step with the same rows and the model's own tensor-parallel plan. The norm that the trainer logs should be the
norm on one device. Each rank holds its part of a split weight as a plain tensor, and `clip_grad_norm_` sees only this part. Ranks
therefore scale gradients of weights that both hold, such as RMSNorm's, by different factors. Exit code 1 if wrong.
Wrong with transformers 5.10.1, right with 5.17.0 and 5.24.0. Tried with accelerate 1.15.0 and torch 2.13.0, on the CPU.
"""

import os

os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29512"}

import sys
import tempfile
from importlib import import_module
from typing import Any

import torch
import torch.multiprocessing as mp
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
LIMIT = 0.1


def batch() -> dict[str, torch.Tensor]:
    """Four rows of tokens, which are their own labels."""
    tokens = torch.randint(0, 32, (4, 8), generator=torch.Generator().manual_seed(0))
    return {"input_ids": tokens, "labels": tokens.clone()}


def load_part(folder: str) -> Any:
    """Load this rank's part of the model."""
    # accelerate refuses tensor parallelism on CPUs. No other line of it depends on the device.
    import_module("accelerate.parallelism_config").ParallelismConfig._validate_accelerator = lambda *_: None
    given: dict[str, Any] = {"tp_size": 2, "tp_plan": "auto"}
    if hasattr(import_module("transformers.distributed").DistributedConfig, "tp_plan"):  # newer versions
        given = {"distributed_config": import_module("transformers.distributed").DistributedConfig(**given)}
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, **given)


def train(rank: int, folder: str, norms: torch.Tensor, weights: torch.Tensor) -> None:
    """Train one step on a rank. Writes the norm that the trainer logs, and a weight that both ranks hold."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    model = load_part(folder)
    given: dict[str, Any] = {"use_cpu": True, "ddp_backend": "gloo", "report_to": [], "save_strategy": "no", "disable_tqdm": True}
    arguments = TrainingArguments(output_dir=folder, max_steps=1, max_grad_norm=LIMIT, logging_steps=1, **given)
    trainer = Trainer(model=model, args=arguments, optimizers=(torch.optim.SGD(model.parameters(), lr=1.0, foreach=False), None))
    trainer.get_train_dataloader = lambda: [batch()]
    trainer.train()
    norms[rank] = trainer.state.log_history[0]["grad_norm"]
    weights[rank] = model.model.norm.weight.detach()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2, use_cache=False, initializer_range=0.2))
    model(**batch()).loss.backward()
    expected = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
    norms, weights = torch.zeros(2).share_memory_(), torch.zeros(2, 16).share_memory_()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        mp.spawn(train, (folder, norms, weights), nprocs=2)
    ranks = " and ".join(f"{norm:.4f}" for norm in norms)
    print(f"transformers {transformers.__version__}: the gradient norm is {ranks} on ranks 0 and 1; it should be {expected:.4f}")
    print(f"norm.weight, which both ranks hold, differs by {(weights[0] - weights[1]).abs().max():.3g}; it should be equal")
    sys.exit(0 if torch.allclose(norms, expected, rtol=1e-3) else 1)
