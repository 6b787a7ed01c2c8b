"""How good the checker is: on mutants, on other versions of torch, on this machine."""
