"""The bugs of mutants as lines of a script; a module for each part of a training."""
