"""How much CPU time campaigns take to catch each mutant."""
