"""Installs PyTorch and the libraries of the tests into the virtual environment that runs this program.

    VENV/bin/python tests/python/environment.py

PyPI's torch for Linux is built for CUDA and requires 3 GB of NVIDIA's libraries. No test calls them, so without a GPU
empty libraries with their names and symbols take their place. FOREBAY_PIP_ARGUMENTS is passed to pip.
Exit code 75: pip could not install something required. DeepSpeed is compiled from source, so it may fail.
"""

import glob
import importlib.metadata
import os
import pathlib
import re
import shlex
import subprocess
import sys
import sysconfig
import tempfile

from pip._vendor.packaging.requirements import Requirement

REQUIRED = ["torch", "accelerate", "peft"]  # Without the requirements of these; those follow.
WISHED = ["trl", "pytorch-lightning", "torchmetrics", "deepspeed"]
OTHERS = ["numpy", "transformers", "datasets"]
NOT_INSTALLED = 75
FOR_GPUS = re.compile("nvidia-|cuda-|triton$")


def pip(*packages):
    # Conflicts: the requirements that are left out on purpose.
    words = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-warn-conflicts",
             *shlex.split(os.environ.get("FOREBAY_PIP_ARGUMENTS", ""))]
    return subprocess.run([*words, *packages], check=False).returncode == 0


def requirements(name):
    found = [Requirement(text) for text in importlib.metadata.requires(name) or []]
    return [one for one in found if one.marker is None or one.marker.evaluate({"extra": ""})]


def rest(names):
    """Other packages that these require. The CUDA runtime stays: torch asks it whether there is a GPU."""
    wanted = list(OTHERS)
    for one in (one for name in names for one in requirements(name)):
        if one.name == "cuda-toolkit":
            wanted.append(f"cuda-toolkit[cudart]{one.specifier}")
        elif one.name.startswith("nvidia-cuda-runtime") or not FOR_GPUS.match(one.name) and one.name not in names:
            wanted.append(f"{one.name}{one.specifier}")
    return wanted


def output_of(*command):
    return subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, text=True, check=True).stdout


def stand_in(packages):
    """Makes the libraries that torch is linked to and that are not here, with every symbol that torch names."""
    folder = packages / "torch/lib"
    # This one is loaded when the driver is needed.
    files = [file for file in folder.glob("lib*.so*") if file.name != "libcaffe2_nvrtc.so"]
    needed = {name for file in files for name in re.findall(r"NEEDED.*\[(.*)\]", output_of("readelf", "-dW", file))}
    present = [file for file in packages.glob("nvidia/*/lib/*.so*") if file.name in needed]
    defined = {name for file in present for name in re.findall(r" [TWDBR] (\w+)", output_of("nm", "-D", file))}
    symbols = sorted({found for file in files
                      for found in re.findall(r" U ((?:cu|nccl|nv)\w+)(?:@(\S+))?", output_of("nm", "-D", file))
                      if found[0] not in defined})
    missing = sorted({name for name in needed if re.match("lib(cu|nccl|nv)", name)} - {file.name for file in present})
    with tempfile.TemporaryDirectory() as place:
        source, versions = pathlib.Path(place, "stand_in.c"), pathlib.Path(place, "versions")
        source.write_text("".join(f"void {name}(void) {{ __builtin_trap(); }}\n" for name, _ in symbols))
        versions.write_text("".join(
            f"{version} {{ {' '.join(name + ';' for name, of in symbols if of == version)} }};\n"
            for version in sorted({version for _, version in symbols if version})))
        for name in missing:
            subprocess.run(["c++", "-w", "-shared", "-nostdlib", "-fPIC", f"-Wl,--version-script={versions}",
                            f"-Wl,-soname,{name}", "-o", folder / name, "-x", "c", source], check=True)


def main():
    if glob.glob("/dev/nvidia*"):
        if not pip(*REQUIRED, *OTHERS):
            return NOT_INSTALLED
        for name in WISHED:
            pip(name)
        return 0
    if not pip("--no-deps", *REQUIRED):
        return NOT_INSTALLED
    names = [*REQUIRED, *(name for name in WISHED if pip("--no-deps", name))]
    if not pip(*rest(names)):
        return NOT_INSTALLED
    stand_in(pathlib.Path(sysconfig.get_path("purelib")))
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", "import torch, transformers, accelerate, peft"],
                          check=False)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
