"""Process state, such as torch's global settings, with functions to restore it after a program changed it."""
