"""`python -m tests.fuzz`, from the root of the repository."""

import sys

from tests.fuzz.runner import main

if __name__ == "__main__":
    sys.exit(main())
