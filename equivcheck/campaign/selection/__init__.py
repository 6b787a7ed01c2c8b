"""Select which drawn cases are checked: cases with much new coverage for their cost, and few with known issues."""
