"""Build model, optimizer and batches from a scenario, and train: one loop for the single-device run and for every rank."""
