"""Ranks as real processes that communicate over gloo and are kept alive between runs."""
