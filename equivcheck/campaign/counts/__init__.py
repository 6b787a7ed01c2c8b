"""What came of checks: counted where they are made, added up where they are told."""
