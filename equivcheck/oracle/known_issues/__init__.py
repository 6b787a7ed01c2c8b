"""Known issues of torch. If a check fails, evidence decides whether a known issue explains the failure."""
