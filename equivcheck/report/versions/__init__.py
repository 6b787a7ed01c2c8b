"""A page for each command that measures something: a module that says what is on it, and a template."""
