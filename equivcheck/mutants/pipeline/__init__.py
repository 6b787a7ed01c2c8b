"""Pipelines that run stages wrongly."""
