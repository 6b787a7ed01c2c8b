"""Matrix of versions: trainers of frameworks, in versions with and without known bugs."""
