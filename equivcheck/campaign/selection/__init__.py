"""Which of the scenarios that are drawn are checked: what is new for its cost, with known issues avoided."""
