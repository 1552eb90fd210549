"""`python -m forebay ...` is the command `forebay ...`. FOREBAY_COMMAND names the program if PATH lacks it."""

import os
import sys

if __name__ == "__main__":
    program = os.environ.get("FOREBAY_COMMAND", "forebay")
    try:
        os.execvp(program, [program, *sys.argv[1:]])
    except OSError as error:
        sys.exit(f"forebay: {program} cannot be started: {error}. Set FOREBAY_COMMAND to its path.")
