"""Records a training process. Hooks and replaced functions read values and do not change them."""
