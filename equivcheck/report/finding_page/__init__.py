"""HTML page about a finding, or any verdict, with values from one more run of its ranks."""
