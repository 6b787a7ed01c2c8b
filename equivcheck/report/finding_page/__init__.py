"""A finding, or any verdict, as one HTML page with what its ranks leave in one more run."""
