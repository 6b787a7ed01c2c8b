"""Upstream issues on file: failures of torch that a check meets again and again, each with how it is recognised."""
