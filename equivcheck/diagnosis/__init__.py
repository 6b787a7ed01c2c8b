"""Why a scenario diverged: trainings that are wrong in a known way, tried one after the other."""
