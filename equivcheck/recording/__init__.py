"""Records two runs of any script, and compares them without gathering a tensor."""
