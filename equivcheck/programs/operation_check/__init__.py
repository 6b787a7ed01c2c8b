"""`check_operation`: runs a user's operation under all input placements, and compares with one device."""
