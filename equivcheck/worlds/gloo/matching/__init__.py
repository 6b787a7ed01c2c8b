"""Compares the collectives of gloo ranks before gloo runs them. gloo does not notice different dtypes, and adds up any bytes."""
