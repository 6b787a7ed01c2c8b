"""Reports on a matrix (one training under many layouts) as a page, JUnit XML and JSON values."""
