#!/usr/bin/env python3
"""Makes a wheel and checks it: tag, symbols, libraries, size, licences, the digests of trainings beside those of this
build; then installs it in a bare Debian without a compiler and tries it there.

    wheel.py [--target aarch64] [--wheel FILE] [--library libforebay-c.so.1] [--no-trial]

    --wheel     check this one; else ./dev wheel makes it
    --library   the library of this build, for the digests
    --no-trial  only look at it

A wheel for aarch64 is tried by an emulator, qemu-aarch64, with Debian's Python for that processor.

Exit code 77: this machine cannot make the wheel.
"""

import argparse
import base64
import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
BYTES_MAX = 8_000_000
GLIBC_MAX = (2, 28)
MAY_NEED = {"libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1", "ld-linux-x86-64.so.2",
            "ld-linux-aarch64.so.1"}
# The command's main function, which its program calls.
NOT_IN_THE_HEADER = {"forebay_command_main"}
# Debian's packages with which Python runs under the emulator.
EMULATED = ["python3.11-minimal", "libpython3.11-minimal", "libpython3.11-stdlib", "libc6", "zlib1g", "libexpat1",
            "libffi8", "libgcc-s1", "libssl3", "libbz2-1.0", "liblzma5", "libcrypt1", "libuuid1"]
LICENCES = ("LICENSE", "cli11", "gloo", "highway", "liburing", "nlohmann-json3", "onetbb", "xxhash", "zig")


def output_of(*command, cwd=None, **variables):
    done = subprocess.run([str(word) for word in command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, cwd=cwd,
                          stderr=subprocess.STDOUT, text=True, env={**os.environ, **variables}, check=False)
    if done.returncode:
        sys.exit(f"{command}: exit code {done.returncode}\n{done.stdout}")
    return done.stdout


def expect(condition, text):
    if not condition:
        sys.exit(f"FAILED: {text}")


def made_wheel(target):
    missing = [name for name in ("apt-get", "dpkg-source", "cmake", "c++", "readelf") if not shutil.which(name)]
    if missing:
        print(f"skipped: the wheel is made with {', '.join(missing)}, which is not here")
        sys.exit(77)
    subprocess.run([ROOT / "dev", "wheel", "--target", target], stdin=subprocess.DEVNULL, check=True)
    return max((ROOT / "build/wheel").glob(f"*_{target}.whl"), key=os.path.getmtime)


def check_archive(wheel, place, target):
    """The names, the record and the licences."""
    expect(re.fullmatch(rf"forebay-[0-9.]+-py3-none-manylinux_2_28_{target}\.whl", wheel.name), f"the name {wheel.name}")
    expect(wheel.stat().st_size <= BYTES_MAX, f"{wheel.name} has {wheel.stat().st_size} bytes")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        info = next(name.split("/")[0] for name in names if ".dist-info/" in name)
        for row in archive.read(f"{info}/RECORD").decode().splitlines():
            name, digest, size = row.rsplit(",", 2)
            if name != f"{info}/RECORD":
                data = archive.read(name)
                seen = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
                expect((digest, size) == (f"sha256={seen}", str(len(data))), f"RECORD is wrong about {name}")
        expect(archive.read(f"{info}/RECORD").count(b"\n") == len(names), "RECORD does not list all files")
        expect(f"Tag: py3-none-manylinux_2_28_{target}\n".encode() in archive.read(f"{info}/WHEEL"), "the tag in WHEEL")
        listed = re.findall(r"^License-File: (.*)$", archive.read(f"{info}/METADATA").decode(), re.M)
        for licence in LICENCES:
            found = [name for name in listed if name.split("/")[0] == licence]
            expect(found and all(len(archive.read(f"{info}/licenses/{name}")) > 500 for name in found),
                   f"the licence of {licence} is not inside")
        archive.extractall(place)
    # extractall() leaves out modes; pip does not.
    (place / "forebay/lib/forebay").chmod(0o755)


def exported_symbols(library):
    rows = (row.split() for row in output_of("readelf", "--dyn-syms", "-W", library).splitlines())
    return {row[7].split("@")[0] for row in rows
            if len(row) == 8 and row[3] in ("FUNC", "OBJECT") and row[6].isdigit()}


def check_binaries(folder):
    """The symbols that each library exports, the newest version of glibc that it needs, and the libraries it needs."""
    for name in ("libforebay-c.so.1", "libforebay-core.so.0", "libforebay-preload.so", "forebay"):
        text = output_of("readelf", "-dVW", folder / name)
        needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", text))
        needed -= MAY_NEED
        expect(needed == ({"libforebay-c.so.1"} if name == "forebay" else set()), f"{name} needs {needed}")
        paths = re.findall(r"\(R(?:UN)?PATH\).*\[(.*)\]", text)
        expect(set(paths) <= {"$ORIGIN"}, f"{name} searches libraries in {paths}")
        newest = max(tuple(map(int, found.split("."))) for found in re.findall(r"GLIBC_([0-9.]+)", text))
        expect(newest <= GLIBC_MAX, f"{name} needs GLIBC_{newest}")
        expect(".debug_info" not in output_of("readelf", "-SW", folder / name), f"{name} is not stripped")
    exported = exported_symbols(folder / "libforebay-c.so.1")
    header = (ROOT / "runtime/api/include/forebay/forebay.h").read_text()
    declared = set(re.findall(r"^FOREBAY_API [^;(]*?(forebay_\w+)\(", header, re.M))
    expected = declared | NOT_IN_THE_HEADER
    expect(exported == expected, f"exported and not declared, or the reverse: {sorted(exported ^ expected)}")
    exported = exported_symbols(folder / "libforebay-core.so.0")
    expect(all(name.startswith("forebay_") for name in exported), f"libforebay-core.so.0 exports {exported}")
    # The kernels for GPUs.
    expect(b"sm_90" in (folder / "libforebay-c.so.1").read_bytes(), "there are no CUDA kernels inside")


TRIAL = pathlib.Path(__file__).with_name("wheel_trial.py")


def check_digests(place, library):
    """The bits of a training do not depend on the compiler."""
    if not library:
        print("left out: digests beside those of this build (--library)")
        return
    texts = [output_of(sys.executable, TRIAL, "--digests", PYTHONPATH=str(place), FOREBAY_LIBRARY=str(one))
             for one in (library, place / "forebay/lib/libforebay-c.so.1")]
    expect(texts[0] == texts[1], f"digests by {library}:\n{texts[0]}by the wheel:\n{texts[1]}")
    print(texts[0], end="")


def emulate(place, library):
    """Import, command and digests of a wheel for aarch64."""
    emulator = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
    if not emulator:
        print("NOT TRIED: the wheel for aarch64 is compiled, and was never imported, for there is no qemu-aarch64 "
              "(Debian: qemu-user)")
        return
    root = place / "debian"
    for folder in ("lists/partial", "cache/archives/partial"):
        (root / folder).mkdir(parents=True)
    apt = ["apt-get", "-qq", "-o", "APT::Architecture=arm64", "-o", "APT::Architectures=arm64", "-o",
           f"Dir::State::lists={root}/lists", "-o", f"Dir::Cache={root}/cache", "-o", "APT::Sandbox::User=root"]
    output_of(*apt, "update")
    output_of(*apt, "download", *EMULATED, cwd=root)
    for package in root.glob("*.deb"):
        output_of("dpkg", "-x", package, root)
    python = [emulator, "-L", root, root / "usr/bin/python3.11"]
    variables = {"PYTHONHOME": str(root / "usr"), "PYTHONPATH": str(place), "FOREBAY_LIBRARY": ""}
    said = output_of(*python, "-c", "import forebay, platform; print(platform.machine(), forebay.version())", **variables)
    expect(said.startswith("aarch64 "), said)
    expect(output_of(emulator, "-L", root, place / "forebay/lib/forebay", "--version").startswith("forebay "), "the command")
    digests = output_of(*python, TRIAL, "--digests", **variables)
    print(digests, end="")
    if library:
        here = output_of(sys.executable, TRIAL, "--digests", PYTHONPATH=str(place), FOREBAY_LIBRARY=str(library))
        expect(digests == here, f"digests by {library}:\n{here}")
    print("ok  import, command and trainings on an emulated aarch64")


def try_it(wheel):
    """In a bare Debian; where that cannot be made, by this Python as a user who is not root."""
    here = pathlib.Path(__file__).parent
    status = subprocess.run([here / "fresh_root.sh", "--wheel", wheel], stdin=subprocess.DEVNULL, check=False).returncode
    if status != 77:
        expect(status == 0, "the wheel in a bare Debian")
        return
    with tempfile.TemporaryDirectory() as home:
        user = {"user": 65534, "group": 65534} if os.geteuid() == 0 else {}
        for file in (wheel, here / "wheel_trial.py", ROOT / "samples/pytorch/minimal.py"):
            shutil.copy(file, home)
        if user:
            os.chown(home, 65534, 65534)  # A store in a directory that all may write is refused.
        environment = {"HOME": home, "PATH": os.path.join(home, "venv/bin"),
                       **{name: value for name, value in os.environ.items() if re.match("PIP_|FOREBAY_TRIAL|https?_proxy", name)}}
        words = [sys.executable, "wheel_trial.py", wheel.name, "minimal.py"]
        try:
            done = subprocess.run(words, cwd=home, env=environment, stdin=subprocess.DEVNULL, check=False, **user)
        except PermissionError:
            sys.exit(f"FAILED: a user who is not root may not start {sys.executable}. Install debootstrap, or run this with "
                     "/usr/bin/python3")
        expect(done.returncode == 0, "the wheel in an environment of this Python")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=("x86_64", "aarch64"), default="x86_64")
    parser.add_argument("--wheel", type=pathlib.Path)
    parser.add_argument("--library", type=pathlib.Path)
    parser.add_argument("--no-trial", action="store_true")
    arguments = parser.parse_args()
    wheel = (arguments.wheel or made_wheel(arguments.target)).resolve()
    with tempfile.TemporaryDirectory() as place:
        check_archive(wheel, pathlib.Path(place), arguments.target)
        check_binaries(pathlib.Path(place) / "forebay/lib")
        print(f"ok  {wheel.name}: tag, record, licences, symbols, libraries", flush=True)
        if arguments.target == "aarch64":
            if not arguments.no_trial:
                emulate(pathlib.Path(place), arguments.library)
            return
        check_digests(pathlib.Path(place), arguments.library)
    if not arguments.no_trial:
        try_it(wheel)


if __name__ == "__main__":
    main()
