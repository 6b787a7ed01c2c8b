"""A matrix of layouts as a page, JUnit and JSON values."""
