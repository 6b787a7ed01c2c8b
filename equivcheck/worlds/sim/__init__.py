"""N ranks as threads of this process, exactly one running at a time."""
