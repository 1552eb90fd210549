#!/usr/bin/env python3
"""Counts how plain the text of the tree is: comments of sources, documents, and messages in string literals.

    plain_english.py [--root DIR] [--list] [PATH ...]

It prints, for each part of the tree, the words, the rate of the pronoun "what" per 1000 words, the median length of a
sentence, and the sentences that begin with a word that STYLE.md forbids. The exit status is 1 when a limit is passed:

    "what"                   at most 1 per 1000 words of comments and documents
    sentences beginning with "Of", "What", "Who", "Whoever", "Those", "Whatever": none
    median sentence          at most 16 words

--list prints each offending line as file:line. PATHs (files or folders) restrict the count.
"""
import argparse
import re
import statistics
import shutil
import subprocess
import sys
from pathlib import Path

WHAT_PER_1000_MAX = 1.0
MEDIAN_WORDS_MAX = 16
BAD_START = re.compile(r"^(Of|What|Whatever|Who|Whoever|Whom|Whose|Those)\b(?!.*\?$)")
WHAT = re.compile(r"\bwhat(ever)?\b", re.I)
WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")
SOURCES = {".cc", ".h", ".c", ".cu", ".S"}
HASHED = {".py", ".sh", ".cmake"}
SKIP = ("tests/fuzz/corpus/", "tests/command/data/", "tests/gpu-results/", "LICENSE", "tests/text/plain_english.py")


def comments_of_source(text):
    """Yields (first line, text) of each run of // comments and each /* */ comment."""
    run, start, last = [], 0, -1
    pattern = re.compile(r'//(?P<line>[^\n]*)|/\*(?P<block>.*?)\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.S)
    for match in pattern.finditer(text):
        number = text.count("\n", 0, match.start()) + 1
        if match.group("line") is not None:
            column = match.start() - (text.rfind("\n", 0, match.start()) + 1)
            alone = not text[match.start() - column : match.start()].strip()
            if run and number == last + 1 and alone == run_alone:
                run.append(match.group("line").strip())
            else:
                if run:
                    yield start, "\n".join(run)
                run, start, run_alone = [match.group("line").strip()], number, alone
            last = number
        elif match.group("block") is not None:
            yield number, "\n".join(line.strip(" *") for line in match.group("block").split("\n"))
    if run:
        yield start, "\n".join(run)


def comments_of_script(text):
    run, start = [], 0
    for number, line in enumerate(text.split("\n"), 1):
        match = re.match(r"\s*#(?!!) ?(.*)", line)
        if match:
            if not run:
                start = number
            run.append(match.group(1))
        elif run:
            yield start, "\n".join(run)
            run = []
    if run:
        yield start, "\n".join(run)
    for match in re.finditer(r'"""(.*?)"""', text, re.S):
        yield text.count("\n", 0, match.start()) + 1, match.group(1)


def prose_of_markdown(text):
    block, start, fenced = [], 0, False
    for number, line in enumerate(text.split("\n") + [""], 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
            line = ""
        if fenced:
            continue
        if line.startswith("|"):
            for cell in line.strip("| ").split("|"):
                if not re.fullmatch(r"[\s:-]*", cell):
                    yield number, cell.strip()
            line = ""
        text_line = re.sub(r"^\s*([-*]|\d+\.|#+|>)\s+", "", line).strip()
        begins = bool(re.match(r"^\s*([-*]|\d+\.|#+|>)\s+", line))
        if (not text_line or begins) and block:
            yield start, "\n".join(block)
            block = []
        if text_line:
            if not block:
                start = number
            block.append(text_line)


def messages_of_source(text):
    """Yields (line, text) of string literals with four words or more: adjacent ones are one."""
    for match in re.finditer(r'"(?:\\.|[^"\\\n])*"(?:\s*"(?:\\.|[^"\\\n])*")*', text):
        if text[max(0, text.rfind("\n", 0, match.start()) + 1) : match.start()].lstrip().startswith(("#include", "//")):
            continue
        literal = "".join(re.findall(r'"((?:\\.|[^"\\\n])*)"', match.group(0)))
        if len(WORD.findall(literal)) >= 4 and " " in literal:
            yield text.count("\n", 0, match.start()) + 1, literal


def sentences(text):
    text = re.sub(r"`[^`]*`", "X", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"\*\*?([^*]+)\*\*?", r"\1", text)
    text = re.sub(r"\s+", " ", text)
    for sentence in re.split(r"(?<=[.!?])\s+(?=[\"(A-Z])", text):
        yield sentence.strip(" -#")


def part_of(path):
    name = str(path)
    if name.startswith("tests/"):
        return "tests"
    if path.suffix == ".md":
        return "documents"
    if "/include/" in name:
        return "public headers"
    return path.parts[0] if len(path.parts) > 1 else "build"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default=Path(__file__).resolve().parents[2], type=Path, help="the source root")
    parser.add_argument("--list", action="store_true", help="print each offending line")
    parser.add_argument("paths", nargs="*", help="files or folders below the root; default: the whole tree")
    arguments = parser.parse_args()
    names = []
    if shutil.which("git"):
        names = subprocess.run(["git", "-C", arguments.root, "ls-files", *arguments.paths], capture_output=True,
                               text=True).stdout.splitlines()
    if not names:
        names = [str(p.relative_to(arguments.root)) for top in arguments.paths or ["."]
                 for p in (arguments.root / top).rglob("*") if "build" not in p.parts and ".git" not in p.parts]
    parts = {}
    for name in sorted(filter(None, names)):
        path = Path(name)
        if name.startswith(SKIP) or not (arguments.root / path).is_file():
            continue
        try:
            text = (arguments.root / path).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found = []
        if path.suffix in SOURCES:
            found = [("comment", *item) for item in comments_of_source(text)]
            found += [("message", *item) for item in messages_of_source(text)] if not name.startswith("tests/") else []
        elif path.suffix == ".md":
            found = [("comment", *item) for item in prose_of_markdown(text)]
        elif path.suffix in HASHED or path.name in ("CMakeLists.txt", "dev", "run-gpu-checks"):
            found = [("comment", *item) for item in comments_of_script(text)]
        part = parts.setdefault(part_of(path), {"words": 0, "what": [], "starts": [], "lengths": []})
        for kind, line, block in found:
            part["words"] += len(WORD.findall(block))
            for offset, row in enumerate(block.split("\n")):
                plain = re.sub(r"`[^`]*`|\"[Ww]hat(ever)?\"", "", row)
                part["what"] += [(name, line + offset, row)] * len(WHAT.findall(plain))
            for sentence in sentences(block):
                if BAD_START.match(sentence) and len(WORD.findall(sentence)) > 1:
                    part["starts"].append((name, line, sentence))
                if kind == "comment" and len(WORD.findall(sentence)) > 2:
                    part["lengths"].append(len(WORD.findall(sentence)))
    total = {"words": 0, "what": [], "starts": [], "lengths": []}
    print(f"{'part':16} {'words':>8} {'what/1000':>10} {'forbidden starts':>17} {'median sentence':>16}")
    for name, part in list(sorted(parts.items())) + [("all", total)]:
        if not part["words"]:
            continue
        rate = 1000 * len(part["what"]) / part["words"]
        median = statistics.median(part["lengths"] or [0])
        print(f"{name:16} {part['words']:8} {rate:10.2f} {len(part['starts']):17} {median:16.0f}")
        if part is not total:
            for key in total:
                total[key] += part[key]
    if arguments.list:
        for name, line, row in sorted(total["what"] + total["starts"]):
            print(f"{name}:{line}: {row[:140]}")
    failed = []
    if 1000 * len(total["what"]) > WHAT_PER_1000_MAX * total["words"]:
        failed.append(f'"what" stands {len(total["what"])} times in {total["words"]} words; at most 1 in 1000')
    if total["starts"]:
        failed.append(f"{len(total['starts'])} sentences begin with a forbidden word; --list shows them")
    if statistics.median(total["lengths"] or [0]) > MEDIAN_WORDS_MAX:
        failed.append(f"the median sentence has more than {MEDIAN_WORDS_MAX} words")
    for line in failed:
        print("not plain: " + line)
    return 1 if failed else 0


sys.exit(main())
