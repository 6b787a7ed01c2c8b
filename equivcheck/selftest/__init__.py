"""How good the checker is, measured by parallel trainings that are wrong on purpose."""
