"""Training: builds model, optimizer and batches from the nouns; one loop for the reference and for every rank."""
