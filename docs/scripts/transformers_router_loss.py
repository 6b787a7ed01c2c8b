"""transformers' Trainer multiplies the router loss of a mixture of experts by the number of accumulated microbatches.

Each optimizer step sees the same batch one, two or three times. All losses are means, so the gradients should be equal. The
language loss is divided by the number of labels in all microbatches, but the router loss is added for each microbatch.
Tried with transformers 5.24.0 and torch 2.13.0, on the CPU.
"""

import tempfile

import torch
from transformers import MixtralConfig, MixtralForCausalLM, Trainer, TrainingArguments

torch.manual_seed(0)
tokens = torch.randint(3, 23, (4, 10))
batch = {"input_ids": tokens, "labels": tokens.clone(), "attention_mask": torch.ones_like(tokens)}
config = MixtralConfig(
    vocab_size=23,
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    num_local_experts=4,
    num_experts_per_tok=2,
    output_router_logits=True,
    router_aux_loss_coef=0.1,
    experts_implementation="eager",
)
model = MixtralForCausalLM(config).double()


def router_gradient(steps: int) -> torch.Tensor:
    """Gradient of the router over `steps` microbatches, each with the same batch."""
    model.zero_grad()
    arguments = TrainingArguments(output_dir=tempfile.gettempdir(), use_cpu=True, report_to=[], gradient_accumulation_steps=steps)
    trainer = Trainer(model=model, args=arguments)
    trainer.current_gradient_accumulation_steps = steps
    number = trainer._get_num_items_in_batch([batch] * steps, torch.device("cpu"))
    for _ in range(steps):
        trainer.training_step(model, dict(batch), number)
    (gradient,) = [parameter.grad for name, parameter in model.named_parameters() if "gate.weight" in name]
    return gradient.clone()


once = router_gradient(1)
for steps in (2, 3):
    difference = (router_gradient(steps) - once).norm() / once.norm()
    print(f"{steps} microbatches: the router's gradient differs by {difference:.3g} of its norm; it should be equal")
