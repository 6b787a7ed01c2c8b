"""Worker processes: started, told what to check, and read by the supervisor."""
