"""What runs of users leave: tensors by canonical names, settings of optimizers, and numbers of the whole."""
