"""Shared by the Python tests: the package on the path, and skips that say their reason and exit with 77."""

import importlib.util
import pathlib
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "python"))


def need(*modules):
    """Ends the program as skipped if a module cannot be imported."""
    for name in modules:
        if importlib.util.find_spec(name) is None:
            skip(f"{sys.executable} has no module {name}; ./dev test-pytorch makes an environment with it")


def need_library():
    """Ends the program as skipped without libforebay-c.so.1."""
    import forebay
    try:
        forebay.version()
    except forebay.Unavailable as error:
        skip(str(error))


def skip(reason):
    print(f"skipped: {reason}", flush=True)
    sys.exit(77)


def main():
    unittest.main(verbosity=1)
