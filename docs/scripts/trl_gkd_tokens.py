"""TRL's GKDTrainer divides the loss of generated answers by the number of tokens in the dataset's answers.

With lmbda=1 every step trains on an answer that the student generates, and the dataset's answer is discarded. So two batches
with the same prompt and the same generated answer must have the same gradient. But the Trainer counts labels before the answer
is replaced. The gradient of a batch whose answer has 2 tokens is therefore four times that of a batch whose answer has 8.
Tried with TRL 1.16.0, transformers 5.24.0 and torch 2.13.0, on the CPU.
"""

import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl.experimental.gkd import GKDConfig, GKDTrainer

VOCABULARY, PROMPT = 23, [3, 4, 5]
words = {f"w{number}": number for number in range(VOCABULARY)}
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0")), pad_token="w0", eos_token="w1", unk_token="w0"
)


def build(seed: int) -> LlamaForCausalLM:
    """A tiny Llama."""
    torch.manual_seed(seed)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, pad_token_id=0, bos_token_id=2, eos_token_id=1))


def batch_with(num_tokens: int) -> dict[str, torch.Tensor]:
    """The prompt with an answer of `num_tokens` tokens, as TRL's collator returns it."""
    tokens = torch.tensor([PROMPT + [7] * num_tokens])
    labels = tokens.clone()
    labels[:, : len(PROMPT)] = -100
    prompt = torch.tensor([PROMPT])
    return {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "labels": labels,
        "prompts": prompt,
        "prompt_attention_mask": torch.ones_like(prompt),
    }


def gradient(num_tokens: int) -> torch.Tensor:
    """Gradient of the output weights after one step."""
    arguments = GKDConfig(
        output_dir=tempfile.gettempdir(), use_cpu=True, report_to=[], lmbda=1.0, max_new_tokens=4, gradient_checkpointing=False
    )
    student = build(0)
    data = Dataset.from_dict({"messages": [[{"role": "user", "content": "w3"}]]})
    trainer = GKDTrainer(student, build(1), arguments, train_dataset=data, processing_class=tokenizer)
    trainer.generation_config.do_sample = False
    batch = batch_with(num_tokens)
    number = trainer._get_num_items_in_batch([batch], torch.device("cpu"))
    trainer.training_step(student, batch, number)
    return student.lm_head.weight.grad.clone()


short, long = gradient(2), gradient(8)
print(f"gradient norms: {short.norm():.4g} with 2 tokens in the dataset, {long.norm():.4g} with 8; they should be equal")
print(f"largest difference from a factor of 4: {(short - 4 * long).abs().max():.2g}")
