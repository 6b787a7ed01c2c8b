"""Scripts to reproduce a scenario with torch only."""
