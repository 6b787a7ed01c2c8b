"""Findings: failing cases on disk, one folder per fingerprint."""
