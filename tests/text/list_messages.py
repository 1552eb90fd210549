#!/usr/bin/env python3
"""Lists the error messages that the tests provoke, so that a person can judge each: request, finding, remedy.

    list_messages.py [--build DIR] [-j N] [REGEX]

It runs the tests of a finished build (all but those labelled slow or gpu and those that change files at random, or those
with a name that REGEX matches) with tests/text/message_log.cc preloaded, which records every error Status and what the C
interface throws. It relinks libforebay-core.so and libforebay-c.so into a temporary directory first, without
-Bsymbolic-functions, so that the preloaded constructor replaces the libraries'. The build stays as it is. Tests that look
at LD_PRELOAD may fail; the number of failed tests is printed, and their messages count.

Each message is printed once, with numbers, sizes, quoted words and temporary paths folded, after its code, the program or
library that made it and a test that provokes it. Parts of longer messages of the same test are left out. Marks in front of a message:

    remedy   it has neither a ';' nor a verb of advice
    flag     it comes from a library and contains a command-line option: libraries name members of options
    long     its first line has more than 400 characters
"""
import argparse
import collections
import concurrent.futures
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RELINKED = ("libforebay-core.so", "libforebay-c.so")
LONG_CHARACTERS = 400
ADVICE = re.compile(r";|\b(use|give|set|try|name|check|free|install|call|raise|lower|leave|make|add|remove|pass|see|run|write|"
                    r"record|wait|choose|start|build|is the file cut off)\b|"
                    r"needs .* first$|belongs before ")


def link_without_binding(build, directory, name):
    commands = subprocess.run(["ninja", "-C", build, "-t", "commands", f"lib/{name}"], capture_output=True, text=True)
    links = [line for line in commands.stdout.split("\n") if "-shared" in line and f"-soname,{name}" in line]
    if len(links) != 1:
        sys.exit(f"list_messages: {build} has no link command for lib/{name}; give the directory of a finished build with "
                 f"--build\n{commands.stderr}")
    # A version script would hide the constructor.
    words = [word for word in shlex.split(links[0].strip(": &"))
             if not word.endswith("-Bsymbolic-functions") and "--version-script" not in word]
    soname = next(word.split("-soname,")[1] for word in words if "-soname," in word)
    words[words.index("-o") + 1] = str(directory / soname)
    subprocess.run(words, cwd=build, check=True)
    if soname != name:
        (directory / name).symlink_to(soname)


def link_others(build, directory):
    """The libraries find each other in one directory."""
    for library in (build / "lib").resolve().glob("*.so*"):
        if not library.name.startswith(RELINKED):
            (directory / library.name).symlink_to(library)


def compile_log(compiler, directory):
    library = directory / "message_log.so"
    subprocess.run([compiler, "-std=c++20", "-O1", "-shared", "-fPIC", f"-I{ROOT}/runtime/base/include",
                    ROOT / "tests/text/message_log.cc", "-o", library], check=True)
    return library


def list_tests(build, regex):
    chosen = ["-R", regex] if regex else ["-E", "^FuzzCorpus"]
    shown = subprocess.run(["ctest", "--test-dir", build, "--show-only=json-v1", "-LE", "^(slow|gpu)$", *chosen],
                           capture_output=True, text=True, check=True)
    tests = [test for test in json.loads(shown.stdout)["tests"] if "command" in test]
    if not tests:
        sys.exit("list_messages: no test has such a name; build the tests first, and see ctest -N for their names")
    return tests


def run_test(test, build, preload, directory, log):
    def relinked(word):
        """Tests name the library of the C interface by its path."""
        return re.sub(rf"{re.escape(str(build))}/lib/libforebay-c\.so[.\d]*", str(directory / "libforebay-c.so"), word)

    properties = {one["name"]: one["value"] for one in test.get("properties", [])}
    environment = dict(os.environ)
    for setting in properties.get("ENVIRONMENT", []):
        name, _, value = setting.partition("=")
        environment[name] = relinked(value)
    environment.update(LD_PRELOAD=str(preload), LD_LIBRARY_PATH=str(directory), FOREBAY_MESSAGE_LOG=str(log),
                       FOREBAY_MESSAGE_TEST=test["name"])
    try:
        ended = subprocess.run([relinked(word) for word in test["command"]], cwd=properties.get("WORKING_DIRECTORY"), env=environment,
                               stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                               timeout=properties.get("TIMEOUT", 600))
        return ended.returncode in (0, properties.get("SKIP_RETURN_CODE"))
    except subprocess.TimeoutExpired:
        return False


def fold(message):
    message = re.sub(r"/(?:tmp|dev/shm)/[\w./+-]+", "/tmp/...", message)
    message = re.sub(r"'[^']*'", "'...'", message)
    message = re.sub(r"\b0x[0-9a-f]+\b|\d+(\.\d+)?", "N", message)
    message = re.sub(r"N (B|[KMGT]iB)\b", "N B", message)
    message = re.sub(r"^(rank N: )+", "", message)
    return re.sub(r"\branks? N((, N)* and N)?\b", "rank N", message.split("\\n")[0])


def read_log(log):
    """The outermost messages, as {(code, origin, folded text): [tests, an example]}."""
    by_test = collections.defaultdict(set)
    for line in log.read_text(errors="replace").splitlines():
        fields = line.split("\t", 3)
        if len(fields) == 4 and fields[3]:
            by_test[fields[2]].add((fields[0], fields[1], fields[3]))
    found = {}
    for test, entries in by_test.items():
        texts = {text for _, _, text in entries}
        for code, origin, text in entries:
            if any(text != other and text in other for other in texts):
                continue
            found.setdefault((code, origin, fold(text)), [set(), text])[0].add(test)
    return found


def marks_of(origin, text):
    marks = []
    if not ADVICE.search(text):
        marks.append("remedy")
    if origin.startswith("libforebay") and re.search(r"(^|[\s'(])--[a-z]", text):
        marks.append("flag")
    if len(text.split("\\n")[0]) > LONG_CHARACTERS:
        marks.append("long")
    return marks


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default=ROOT / "build/release", type=Path, help="the build directory")
    parser.add_argument("-j", dest="jobs", default=os.cpu_count(), type=int, help="tests to run at once")
    parser.add_argument("regex", nargs="?", help="names of tests, as ctest -R takes them")
    arguments = parser.parse_args()
    arguments.build = arguments.build.resolve()
    cache = (arguments.build / "CMakeCache.txt").read_text()
    compiler = re.search(r"^CMAKE_CXX_COMPILER:\w+=(.*)$", cache, re.M).group(1)
    with tempfile.TemporaryDirectory(prefix="forebay-messages-") as scratch:
        directory, log = Path(scratch), Path(scratch) / "log"
        log.touch()
        for name in RELINKED:
            link_without_binding(arguments.build, directory, name)
        link_others(arguments.build, directory)
        preload = compile_log(compiler, directory)
        tests = list_tests(arguments.build, arguments.regex)
        with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
            passed = list(pool.map(lambda test: run_test(test, arguments.build, preload, directory, log), tests))
        found = read_log(log)
    marked = collections.Counter()
    for (code, origin, _), (provokers, text) in sorted(found.items(), key=lambda item: (item[0][1], item[0][2])):
        marks = marks_of(origin, text)
        marked.update(marks)
        first = sorted(provokers)[0]
        others = f" and {len(provokers) - 1} more" if len(provokers) > 1 else ""
        print(f"{code} {origin} ({first}{others})")
        print(f"    {''.join(f'[{mark}] ' for mark in marks)}{text}")
    failed = len(passed) - sum(passed)
    print(f"{len(found)} messages of {len(tests)} tests ({failed} failed); marked: "
          + (", ".join(f"{mark} {count}" for mark, count in sorted(marked.items())) or "none"))
    return 0


sys.exit(main())
