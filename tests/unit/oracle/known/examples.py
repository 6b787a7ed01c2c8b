"""Smallest scenarios that show known issues, and similar healthy scenarios."""

from unit.oracle.known import data_parallel, dtensors, pipelines, tensor_parallel, traced

SHOWN = data_parallel.SHOWN | dtensors.SHOWN | pipelines.SHOWN | tensor_parallel.SHOWN | traced.SHOWN
"""Smallest scenario by issue, and healthy scenarios with one difference."""
