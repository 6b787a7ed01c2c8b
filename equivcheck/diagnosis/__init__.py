"""Finds why a scenario diverged, hung or crashed: tries known mistakes on one device until one reproduces the ranks' values."""
