"""Linear with a LoRA adapter."""
