"""JSON format for scenarios: encoding, decoding, and reading older formats."""
