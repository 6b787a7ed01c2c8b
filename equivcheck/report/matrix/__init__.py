"""Layout matrix as a page, JUnit and JSON values."""
