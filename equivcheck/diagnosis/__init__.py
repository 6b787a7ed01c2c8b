"""Find why a scenario diverged, hung or crashed: replay known faults on one device until one reproduces the ranks' values."""
