"""N ranks as processes over gloo, started once and kept."""
