"""`python -m forebay ...` is the command `forebay ...`. FOREBAY_COMMAND names another program."""

import os
import sys

from forebay._library import command


def main() -> None:
    """Becomes the command, with the arguments of this program."""
    program = command()
    try:
        os.execvp(program, ["forebay", *sys.argv[1:]])
    except OSError as error:
        sys.exit(f"forebay: {program} cannot be started: {error}. Set FOREBAY_COMMAND to its path.")


if __name__ == "__main__":
    main()
