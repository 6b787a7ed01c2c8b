"""Models, parallelisations and data that users bring."""
