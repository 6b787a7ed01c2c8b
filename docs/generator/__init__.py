"""Pages of these docs that are written from the code when the docs are built."""
