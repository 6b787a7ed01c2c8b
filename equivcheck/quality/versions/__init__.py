"""Other versions of torch beside this equivcheck: environments that have them, and in which of them a finding shows."""
