"""`python -m memlab`: the command line."""

from memlab.cli import main

if __name__ == "__main__":
    main()
