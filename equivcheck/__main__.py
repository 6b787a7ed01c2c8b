"""Run the command line by `python -m equivcheck`."""

from equivcheck.cli import main

if __name__ == "__main__":
    main(prog_name="equivcheck")
