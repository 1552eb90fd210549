#!/usr/bin/env python3
"""Packs a wheel of the libraries and the command of a build directory, installs it by pip in an environment of its own and
tries it there, without the network. wheel.py makes the real one, by another compiler, and tries that.

    wheel_of_this_build.py BUILD_DIRECTORY
"""

import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import zipfile

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# The command of this build is linked to these; that of the real wheel has them inside.
SHARED = ("libforebay.so.0", "libforebay-host.so.0")


def build_module():
    described = importlib.util.spec_from_file_location("build", ROOT / "python/wheel/build.py")
    module = importlib.util.module_from_spec(described)
    described.loader.exec_module(module)
    return module


def stripped(directory, names, place):
    """Copies without the debug information, which is most of their bytes and takes a minute to compress twice."""
    for name in names:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(directory / name, place / name)
        subprocess.run(["strip", "--strip-debug", place / name], check=True)
    return place


def packed(directory, place):
    """The wheel. The licences and versions of its libraries are with their sources, which are not here."""
    build = build_module()
    build.WORK = place
    build.licences = lambda: {"LICENSE": (ROOT / "LICENSE").read_bytes()}
    build.source_versions = lambda: []
    build.BINARIES.update({f"lib/{name}": name for name in SHARED if (directory / "lib" / name).exists()})
    if shutil.which("strip"):
        directory = stripped(directory, build.BINARIES, place / "stripped")
    wheel = build.assemble(os.uname().machine, directory)
    first = wheel.read_bytes()
    assert build.assemble(os.uname().machine, directory).read_bytes() == first, "equal files gave another wheel"
    return wheel


def main():
    directory = pathlib.Path(sys.argv[1]).resolve()
    if importlib.util.find_spec("ensurepip") is None:
        print(f"skipped: {sys.executable} has no module ensurepip (Debian: python3-venv)")
        sys.exit(77)
    with tempfile.TemporaryDirectory() as place:
        place = pathlib.Path(place)
        wheel = packed(directory, place)
        with zipfile.ZipFile(wheel) as archive:
            assert archive.testzip() is None
            names = set(archive.namelist())
        sources = {f"forebay/{file.relative_to(ROOT / 'python/forebay')}"
                   for file in (ROOT / "python/forebay").rglob("*.py")} | {"forebay/py.typed"}
        assert sources <= names, sources - names
        subprocess.run([sys.executable, "-m", "venv", place / "venv"], check=True)
        subprocess.run([place / "venv/bin/pip", "install", "--quiet", "--disable-pip-version-check", "--no-index", wheel],
                       check=True)
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("FOREBAY_", "PYTHON"))}
        subprocess.run([sys.executable, HERE / "wheel_trial.py", "--installed", place / "venv"], check=True,
                       stdin=subprocess.DEVNULL, env={**environment, "HOME": str(place)})


if __name__ == "__main__":
    main()
