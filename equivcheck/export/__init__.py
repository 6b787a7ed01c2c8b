"""Scripts that reproduce a scenario and import only torch."""
