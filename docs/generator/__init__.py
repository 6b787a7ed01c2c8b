"""Generates pages from the code when the documentation is built."""
