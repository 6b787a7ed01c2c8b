"""Selection of the drawn cases that are checked: new for their cost, and mostly without known issues."""
