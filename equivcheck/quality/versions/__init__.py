"""Other torch versions: their environments, and the search for versions with a finding."""
