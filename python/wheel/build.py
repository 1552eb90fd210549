#!/usr/bin/env python3
"""`./dev wheel`: one wheel of forebay for every Python 3 on Linux with glibc 2.28 or newer.

The compiler is zig's clang from PyPI, which links against any version of glibc. The libraries below are compiled from
the sources of Debian's or Ubuntu's packages, by `apt-get source`, and linked statically. All work is done under
build/wheel; a source that lies in build/wheel/sources already is not fetched again.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import os
import pathlib
import re
import shlex
import shutil
import stat
import subprocess
import sys
import zipfile
from typing import Dict, List, Optional

ROOT = pathlib.Path(__file__).resolve().parents[2]
WORK = ROOT / "build" / "wheel"
TOOLS = WORK / "tools"
SOURCES = WORK / "sources"
GLIBC = "2.28"
TAG = "manylinux_" + GLIBC.replace(".", "_")
BYTES_MAX = 8_000_000

# The compiler is pinned: another one may support another set of flags.
PIP_TOOLS = ["ziglang==0.17.1", "auditwheel==6.8.2", "zopfli==0.4.3"]

# Debian's source packages, with the licences of each one.
LIBRARIES = {
    "cli11": ["LICENSE"],
    "gloo": ["LICENSE"],
    "highway": ["LICENSE*"],
    "liburing": ["LICENSE"],
    "nlohmann-json3": ["LICENSE.MIT"],
    "onetbb": ["LICENSE.txt", "third-party-programs.txt"],
    "xxhash": ["LICENSE"],
}
# Parts of the compiler that are linked into every library and program.
RUNTIME = ["LICENSE", "lib/libcxx/LICENSE.TXT", "lib/libcxxabi/LICENSE.TXT", "lib/libunwind/LICENSE.TXT",
           "lib/libc/glibc/LICENSES"]
# The build's file, and its name in the package's folder `lib`.
BINARIES = {
    "lib/libforebay-c.so.1": "libforebay-c.so.1",
    "lib/libforebay-core.so.0": "libforebay-core.so.0",
    "lib/libforebay-preload.so": "libforebay-preload.so",
    "bin/forebay": "forebay",
}
# Releases of the same archive in which a source is searched if the machine's own release does not give it.
OTHER_RELEASES = ["bookworm", "trixie", "sid"]


def say(text: str) -> None:
    print(f"==> {text}", flush=True)


def fail(text: str) -> None:
    sys.exit(f"dev: {text}")


def run(*command: object, log: Optional[pathlib.Path] = None, **options: object) -> str:
    """Runs a command and returns its output, which goes to `log` too."""
    words = [str(word) for word in command]
    done = subprocess.run(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          errors="replace", check=False, **options)  # type: ignore[call-overload]
    if log:
        with open(log, "a", encoding="utf-8") as file:
            file.write(f"$ {shlex.join(words)}\n{done.stdout}")
    if done.returncode:
        print("\n".join(done.stdout.splitlines()[-40:]), file=sys.stderr)
        fail(f"failed with {done.returncode}: {shlex.join(words)}" + (f"; the whole output is in {log}" if log else ""))
    return done.stdout


def jobs() -> str:
    return os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL") or str(os.cpu_count())


def version() -> str:
    found = re.search(r"project\(forebay VERSION ([0-9.]+)", (ROOT / "CMakeLists.txt").read_text())
    assert found
    return found.group(1)


# ---- tools and sources ----


def pip_install(packages: List[str]) -> None:
    if not (TOOLS / "bin/python").exists():
        run(sys.executable, "-m", "venv", TOOLS)
    words = shlex.split(os.environ.get("FOREBAY_PIP_ARGUMENTS", ""))
    run(TOOLS / "bin/pip", "install", "--quiet", "--disable-pip-version-check", *words, *packages)


def site_packages() -> pathlib.Path:
    return next((TOOLS / "lib").glob("python3*/site-packages"))


def zig() -> pathlib.Path:
    program = site_packages() / "ziglang" / "zig" if TOOLS.exists() else None
    found = {file.name.split("-")[0] for file in site_packages().glob("*.dist-info")} if program else set()
    if not {tool.split("==")[0] for tool in PIP_TOOLS} <= found:
        say(f"Installing {' and '.join(PIP_TOOLS)} in {TOOLS.relative_to(ROOT)}")
        pip_install(PIP_TOOLS)
        program = site_packages() / "ziglang" / "zig"
    return program


def fetch_sources() -> None:
    missing = [name for name in LIBRARIES if not (SOURCES / name).exists()]
    if not missing:
        return
    for program in ("apt-get", "dpkg-source"):
        if not shutil.which(program):
            fail(f"the wheel needs the sources of {', '.join(missing)}, which `apt-get source` fetches, and {program} is "
                 f"not here. Install dpkg-dev, or put their unpacked sources into {SOURCES}")
    say(f"Fetching the sources of {', '.join(missing)}")
    # Settings of our own, so that neither root nor a changed /etc/apt is needed.
    apt = WORK / "apt"
    for folder in ("lists/partial", "cache/archives/partial"):
        (apt / folder).mkdir(parents=True, exist_ok=True)
    rows = run("apt-get", "indextargets", "--format", "$(REPO_URI) $(RELEASE) $(COMPONENT)", "Created-By: Packages")
    ours = [row.split() for row in dict.fromkeys(rows.splitlines())
            if re.search(r"/(debian|ubuntu|ubuntu-ports)/? [a-z]+ (main|universe)$", row)]
    if not ours:
        fail("apt knows no archive of Debian or Ubuntu (apt-get update)")
    releases = list(dict.fromkeys(row[1] for row in ours))
    lines = [f"deb-src {uri} {release} {component}" for uri, release, component in ours]
    if "/debian" in ours[0][0]:
        others = [release for release in OTHER_RELEASES if release not in releases]
        lines += [f"deb-src {ours[0][0]} {release} main" for release in others]
        releases += others
    (apt / "sources.list").write_text("\n".join(lines) + "\n")
    options = ["-o", f"Dir::Etc::sourcelist={apt}/sources.list", "-o", "Dir::Etc::sourceparts=/dev/null",
               "-o", f"Dir::State::lists={apt}/lists", "-o", f"Dir::Cache={apt}/cache", "-qq"]
    if os.geteuid() == 0:
        options += ["-o", "APT::Sandbox::User=root"]
    # A release whose key is not known here is left out by apt, with a warning.
    run("apt-get", *options, "update", log=WORK / "sources.log")
    SOURCES.mkdir(exist_ok=True)
    for name in missing:
        for release in releases:
            done = subprocess.run(["apt-get", *options, "source", "--download-only", f"{name}/{release}"], cwd=apt,
                                  stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
            with open(WORK / "sources.log", "a", encoding="utf-8") as log:
                log.write(done.stdout + done.stderr)
            described = sorted(apt.glob(f"{name}_*.dsc"), key=os.path.getmtime)
            if done.returncode == 0 and described:
                run("dpkg-source", "--no-check", "-x", described[-1], SOURCES / name, log=WORK / "sources.log")
                break
        else:
            fail(f"no release of {', '.join(releases)} gave the source of {name}; see {WORK}/sources.log, or put it "
                 f"unpacked into {SOURCES / name}")


# ---- building ----


class Build:
    """A compiler for one processor, and the prefix with the libraries compiled by it."""

    def __init__(self, processor: str) -> None:
        self.processor = processor
        self.directory = WORK / processor
        self.prefix = self.directory / "prefix"
        self.log = self.directory / "build.log"
        self.environment: Dict[str, str] = {
            **os.environ, "ZIG_GLOBAL_CACHE_DIR": str(WORK / "zig-cache"), "ZIG_LOCAL_CACHE_DIR": str(WORK / "zig-cache"),
            "PKG_CONFIG_LIBDIR": f"{self.prefix}/lib/pkgconfig", "PKG_CONFIG_PATH": ""}
        self.directory.mkdir(parents=True, exist_ok=True)
        self.log.write_text("")
        self.write_tools()

    def run(self, *command: object, **options: object) -> str:
        return run(*command, log=self.log, env=self.environment, **options)

    def write_tools(self) -> None:
        """Programs by the names that build systems expect, and a toolchain file of CMake."""
        tools = self.directory / "bin"
        tools.mkdir(exist_ok=True)
        target = f"-target {self.processor}-linux-gnu.{GLIBC}"
        commands = {"cc": f"cc {target}", "c++": f"c++ {target}", "ar": "ar", "ranlib": "ranlib"}
        for name, arguments in commands.items():
            file = tools / name
            text = f'#!/bin/sh\nexec {shlex.quote(str(zig()))} {arguments} "$@"\n'
            if not file.exists() or file.read_text() != text:
                file.write_text(text)
                file.chmod(0o755)
        (self.directory / "toolchain.cmake").write_text(f"""\
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR {self.processor})
set(CMAKE_C_COMPILER "{tools}/cc")
set(CMAKE_ASM_COMPILER "{tools}/cc")
set(CMAKE_CXX_COMPILER "{tools}/c++")
set(CMAKE_AR "{tools}/ar" CACHE FILEPATH "")
set(CMAKE_RANLIB "{tools}/ranlib" CACHE FILEPATH "")
# The headers and libraries of this machine belong to another C library.
set(CMAKE_FIND_ROOT_PATH "{self.prefix}")
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE ONLY)
""")

    def cmake(self, name: str, source: pathlib.Path, *options: str, targets: str = "install") -> pathlib.Path:
        """Configures and builds a source with CMake; returns its build directory."""
        directory = self.directory / name
        generator = ["-G", "Ninja"] if shutil.which("ninja") else []
        self.run("cmake", "-S", source, "-B", directory, *generator,
                 f"-DCMAKE_TOOLCHAIN_FILE={self.directory}/toolchain.cmake", f"-DCMAKE_INSTALL_PREFIX={self.prefix}",
                 "-DCMAKE_INSTALL_LIBDIR=lib", "-DCMAKE_POSITION_INDEPENDENT_CODE=ON", "-DBUILD_SHARED_LIBS=OFF",
                 "-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_POLICY_VERSION_MINIMUM=3.5", *options)
        self.run("cmake", "--build", directory, "--parallel", jobs(), "--target", *targets.split())
        return directory

    def libraries(self) -> None:
        """Compiles the static libraries, each once."""
        done = self.directory / "done"
        done.mkdir(exist_ok=True)
        # Hidden, and without multiply-adds of the compiler's choice, as forebay itself.
        flags = "-O2 -DNDEBUG -g0 -fvisibility=hidden -ffp-contract=off -w"
        both = [f"-DCMAKE_C_FLAGS_RELEASE={flags}", f"-DCMAKE_CXX_FLAGS_RELEASE={flags}"]
        steps = {
            "xxhash": self.xxhash,
            "liburing": lambda: self.liburing(flags),
            "nlohmann-json3": lambda: self.cmake("nlohmann-json3", SOURCES / "nlohmann-json3", "-DJSON_BuildTests=OFF"),
            "cli11": lambda: self.cmake("cli11", SOURCES / "cli11", "-DCLI11_BUILD_TESTS=OFF", "-DCLI11_BUILD_EXAMPLES=OFF",
                                        "-DCLI11_BUILD_DOCS=OFF", "-DCLI11_PRECOMPILED=OFF"),
            "highway": lambda: self.cmake("highway", SOURCES / "highway", "-DHWY_ENABLE_TESTS=OFF", "-DBUILD_TESTING=OFF",
                                          "-DHWY_ENABLE_EXAMPLES=OFF", "-DHWY_ENABLE_CONTRIB=OFF", *both),
            "onetbb": lambda: self.cmake("onetbb", SOURCES / "onetbb", "-DTBB_TEST=OFF", "-DTBB_STRICT=OFF",
                                         "-DTBBMALLOC_BUILD=OFF", "-DTBBMALLOC_PROXY_BUILD=OFF",
                                         "-DTBB_DISABLE_HWLOC_AUTOMATIC_SEARCH=ON", *both),
            "gloo": lambda: self.cmake("gloo", SOURCES / "gloo", *both),
        }
        for name, step in steps.items():
            if not (done / name).exists():
                say(f"{self.processor}: compiling {name}")
                step()
                (done / name).touch()

    def xxhash(self) -> None:
        (self.prefix / "include").mkdir(parents=True, exist_ok=True)
        shutil.copy(SOURCES / "xxhash/xxhash.h", self.prefix / "include")

    def liburing(self, flags: str) -> None:
        copy = self.directory / "liburing"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(SOURCES / "liburing", copy)
        tools = self.directory / "bin"
        self.run("./configure", f"--prefix={self.prefix}", f"--cc={tools}/cc", f"--cxx={tools}/c++", cwd=copy)
        variables = [f"CFLAGS={flags} -fPIC", f"AR={tools}/ar", f"RANLIB={tools}/ranlib", "ENABLE_SHARED=0"]
        self.run("make", "-C", copy / "src", "install", *variables)
        # The makefile of the whole writes it; the one of src does not.
        (self.prefix / "lib/pkgconfig").mkdir(exist_ok=True)
        found = re.search(r"^Version: (\S+)", (SOURCES / "liburing/liburing.spec").read_text(), re.M)
        assert found
        (self.prefix / "lib/pkgconfig/liburing.pc").write_text(
            f"prefix={self.prefix}\nName: liburing\nVersion: {found.group(1)}\nDescription: io_uring\n"
            "Libs: -L${prefix}/lib -luring\nCflags: -I${prefix}/include\n")


    def forebay(self) -> pathlib.Path:
        """Compiles forebay; returns the build directory."""
        flags = "-O2 -g0 -DNDEBUG -ffunction-sections -fdata-sections"
        link = "-s -Wl,--gc-sections"
        nvcc = subprocess.run([ROOT / "cmake/fetch-nvcc"], stdout=subprocess.PIPE, text=True, check=False).stdout.strip()
        if not nvcc:
            fail("the wheel has CUDA kernels inside, and there is no nvcc: neither installed nor from PyPI")
        say(f"{self.processor}: compiling forebay")
        return self.cmake(
            "forebay", ROOT, "--fresh", "-DFOREBAY_STANDALONE=ON", "-DFOREBAY_TESTS=OFF", "-DFOREBAY_SAMPLES=OFF",
            "-DFOREBAY_BENCHMARKS=OFF", "-DFOREBAY_HWLOC=OFF", "-DFOREBAY_ONEDNN=OFF",
            "-DCMAKE_DISABLE_PRECOMPILE_HEADERS=ON", "-DCMAKE_VISIBILITY_INLINES_HIDDEN=ON",
            f"-DCMAKE_C_FLAGS_RELEASE={flags}", f"-DCMAKE_CXX_FLAGS_RELEASE={flags}",
            # -z defs: a function that this version of glibc lacks is an error here, and not when the library is loaded.
            f"-DCMAKE_EXE_LINKER_FLAGS={link}", f"-DCMAKE_SHARED_LINKER_FLAGS={link} -Wl,-z,defs",
            # The kernels' image is the same for every processor.
            f"-DFOREBAY_NVCC={nvcc}", f"-DFOREBAY_NVCC_HOST_COMPILER={shutil.which('c++')}",
            targets="forebay-c forebay-core forebay-preload forebay-command")


# ---- the wheel ----


def licences() -> Dict[str, bytes]:
    """The licences of everything inside, by path."""
    found = {"LICENSE": (ROOT / "LICENSE").read_bytes()}
    for name, patterns in LIBRARIES.items():
        for file in [file for pattern in patterns for file in sorted((SOURCES / name).glob(pattern))]:
            found[f"{name}/{file.name}"] = file.read_bytes()
    for part in RUNTIME:
        file = site_packages() / "ziglang" / part
        found[f"zig/{part.replace('lib/', '')}"] = file.read_bytes()
    return found


def source_versions() -> List[str]:
    """Names and versions of the libraries inside, one line each."""
    lines = []
    for name in LIBRARIES:
        head = (SOURCES / name / "debian/changelog").read_text().split("\n", 1)[0]
        lines.append(head.split(";")[0].rsplit(" ", 1)[0])
    return lines


def metadata() -> str:
    described = (ROOT / "README.md").read_text()
    return f"""\
Metadata-Version: 2.4
Name: forebay
Version: {version()}
Summary: Train models that do not fit into the memory of one device
License-Expression: Apache-2.0
{"".join(f"License-File: {name}" + chr(10) for name in licences())}\
Requires-Python: >=3.9
Provides-Extra: torch
Requires-Dist: torch>=2.4; extra == "torch"
Provides-Extra: hf
Requires-Dist: torch>=2.4; extra == "hf"
Requires-Dist: transformers; extra == "hf"
Requires-Dist: accelerate; extra == "hf"
Description-Content-Type: text/markdown

{described}"""


class Zopfli:
    """Deflate in 4 % fewer bytes than zlib's. It takes a minute."""

    def __init__(self) -> None:
        self.parts: List[bytes] = []

    def compress(self, data: bytes) -> bytes:
        self.parts.append(bytes(data))
        return b""

    def flush(self) -> bytes:
        import zopfli.zlib
        return zopfli.zlib.compress(b"".join(self.parts), numiterations=3)[2:-4]  # Without zlib's frame.


def use_zopfli() -> None:
    """From now on, zipfile compresses with Zopfli."""
    sys.path.append(str(site_packages()))
    zipfile._get_compressor = lambda *_: Zopfli()  # type: ignore[attr-defined]


def assemble(processor: str, build: pathlib.Path) -> pathlib.Path:
    """Writes the wheel. Equal files give an equal wheel."""
    tag = f"py3-none-{TAG}_{processor}"
    info = f"forebay-{version()}.dist-info"
    files: Dict[str, bytes] = {}
    package = ROOT / "python/forebay"
    for file in sorted(package.rglob("*")):
        if file.suffix in (".py", ".pyi", ".typed", ".json"):
            files[f"forebay/{file.relative_to(package)}"] = file.read_bytes()
    for source, name in BINARIES.items():
        files[f"forebay/lib/{name}"] = (build / source).read_bytes()
    files[f"{info}/METADATA"] = metadata().encode()
    files[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\nGenerator: forebay\nRoot-Is-Purelib: false\nTag: {tag}\n".encode()
    files[f"{info}/entry_points.txt"] = b"[console_scripts]\nforebay = forebay.__main__:main\n"
    files[f"{info}/libraries.txt"] = "".join(line + "\n" for line in source_versions()).encode()
    for name, text in licences().items():
        files[f"{info}/licenses/{name}"] = text
    record = "".join(f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},"
                     f"{len(data)}\n" for name, data in files.items())
    files[f"{info}/RECORD"] = (record + f"{info}/RECORD,,\n").encode()
    wheel = WORK / f"forebay-{version()}-{tag}.whl"
    unfinished = wheel.with_suffix(".unfinished")
    with zipfile.ZipFile(unfinished, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, data in files.items():
            entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            mode = 0o755 if name.startswith("forebay/lib/") else 0o644
            entry.external_attr = (stat.S_IFREG | mode) << 16
            archive.writestr(entry, data, zipfile.ZIP_DEFLATED, 9)
    unfinished.replace(wheel)
    return wheel


def show(wheel: pathlib.Path, build: pathlib.Path) -> None:
    """Prints the figures of a wheel and auditwheel's verdict; fails if they are not as promised."""
    for source, name in BINARIES.items():
        text = run("readelf", "-dVW", build / source)
        needed = re.findall(r"\(NEEDED\).*\[(.*)\]", text)
        versions = {tuple(map(int, found.split("."))) for found in re.findall(r"GLIBC_([0-9.]+)", text)}
        newest = ".".join(map(str, max(versions)))
        print(f"{name:<24} {(build / source).stat().st_size / 1e6:5.2f} MB  GLIBC_{newest:<5} {' '.join(needed)}")
    verdict = " ".join(run(TOOLS / "bin/auditwheel", "show", wheel).split())
    print(f"auditwheel: {verdict}")
    size = wheel.stat().st_size
    print(f"{wheel.relative_to(ROOT)}  {size / 1e6:.2f} MB")
    if f"{TAG}_" not in verdict:
        fail(f"auditwheel does not call it {TAG}")
    if size > BYTES_MAX:
        fail(f"the wheel has {size} bytes, more than {BYTES_MAX}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="./dev wheel", description="Makes a wheel of forebay in build/wheel.")
    parser.add_argument("--target", choices=("x86_64", "aarch64"), default="x86_64", help="the processor [%(default)s]")
    processor = parser.parse_args().target
    WORK.mkdir(parents=True, exist_ok=True)
    zig()
    fetch_sources()
    build = Build(processor)
    build.libraries()
    made = build.forebay()
    use_zopfli()
    show(assemble(processor, made), made)


if __name__ == "__main__":
    main()
