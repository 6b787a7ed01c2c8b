"""Why a scenario diverged, hung or crashed: trainings that are wrong in a known way, tried one after the other."""
