"""Failing scenarios, kept on disk, one a fingerprint."""
