"""Worker processes: started, spoken to, watched, and ended with all that they started."""
