"""Tensor-parallel plans: legal plans for a model, computation under a plan, and the calls that a plan causes."""
