"""The smallest scenarios that show the upstream issues on file, and some near them that show nothing."""

from unit.oracle.known import data_parallel, dtensors, pipelines, tensor_parallel, traced

SHOWN = data_parallel.SHOWN | dtensors.SHOWN | pipelines.SHOWN | tensor_parallel.SHOWN | traced.SHOWN
"""By issue: the smallest scenario that shows it, and some that are healthy but for one thing the same."""
