#!/usr/bin/env python3
"""With FOREBAY_UNITY several sources are compiled as one, and their anonymous namespaces are the same one. Then a call can
silently mean another source's function of that name. So sources that are compiled as one share no such name.

    unity_names.py BUILD_DIRECTORY
"""

import itertools
import json
import pathlib
import re
import sys

# Other names of two meanings do not compile; functions overload.
FUNCTION = r"[\w:<>,&*\[\]\s]+?[\s&*](\w+)\("
# Functions whose first parameter is of a type of their source.
OWN_PARAMETER = {"run", "committed", "report_of", "PrintTo"}


def names_of(text):
    """The functions that are defined at column 0: in anonymous namespaces, and elsewhere."""
    text = re.sub(r'R"(\w*)\((.*?)\)\1"', '""', text, flags=re.S)
    hidden, others, anonymous = set(), set(), False
    for line in text.splitlines():
        if line.startswith("namespace {"):
            anonymous = True
        elif line.startswith("}  // namespace"):
            anonymous = False
        elif not re.match(r"[A-Za-z_]", line) or line.startswith(("TEST", "INSTANTIATE", "GTEST", 'extern "C"', "return")):
            continue
        elif found := re.match(FUNCTION, line):
            (hidden if anonymous or line.startswith("static ") else others).add(found[1])
    return hidden - OWN_PARAMETER, others


def shared_names(texts):
    """By pair of sources: the names of an anonymous namespace that the other one has too."""
    names = {source: names_of(text) for source, text in texts.items()}
    for a, b in itertools.combinations(names, 2):
        (hidden_a, others_a), (hidden_b, others_b) = names[a], names[b]
        found = hidden_a & (hidden_b | others_b) | hidden_b & others_a
        if found:
            yield a, b, sorted(found)


def check_itself():
    one = "namespace {\nOptions options_for(int ranks) {\n  return {};\n}\n}  // namespace\n"
    other = "namespace {\nOptions options_for(const Case& c) {\n  return {};\n}\nint size_of(int a) {\n}\n}  // namespace\n"
    assert [names for _, _, names in shared_names({"a": one, "b": other})] == [["options_for"]]
    assert not list(shared_names({"a": one, "b": other.replace("options_for", "options_of")}))


def main():
    check_itself()
    commands = json.loads((pathlib.Path(sys.argv[1]) / "compile_commands.json").read_text())
    groups, bad = 0, 0
    for place in sorted({command["file"] for command in commands if "/Unity/" in command["file"]}):
        sources = [source for source in re.findall(r'#include "([^"]+)"', pathlib.Path(place).read_text())
                   if source.endswith(".cc")]
        groups += 1
        for a, b, names in shared_names({source: pathlib.Path(source).read_text() for source in sources}):
            print(f"{a} and {b} are compiled as one, and both define {', '.join(names)}; rename one")
            bad += 1
    print(f"{groups} groups of sources, {bad} pairs with shared names")
    if not groups:
        print("skipped: this build compiles no sources as one (FOREBAY_UNITY)")
        sys.exit(77)
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
