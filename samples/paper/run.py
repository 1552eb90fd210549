#!/usr/bin/env python3
"""Reruns the experiments of the ZeRO paper by `forebay plan` and `forebay simulate`.

A row has the paper's value, ours, and our value divided by the paper's. Then come the shapes of the figures: who
is ahead, and by how many times at least. Nothing is fitted.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys


class Program:
    def __init__(self, path, plan):
        self.path = path
        self.common = plan["common"]
        self.models = plan["models"]

    def answer(self, command, words, model=None):
        shape = [word for name, value in self.models.get(model, {}).items() for word in (f"--{name}", str(value))]
        words = [self.path, command, "--json"] + self.common + words + shape
        finished = subprocess.run(words, capture_output=True, text=True, check=False)
        if finished.returncode not in (0, 1) or not finished.stdout:
            sys.exit(f"{' '.join(words)}: {finished.stderr.strip()}")
        return json.loads(finished.stdout)

    def plan(self, model, arguments):
        return self.answer("plan", ["--memory", "32GB"] + arguments.split(), model)

    def speed(self, model, arguments):
        return self.answer("simulate", ["--no-changes", "--cluster", "dgx-2"] + arguments.split(),
                           model)["tflops_per_device"]


def measure(program, experiment):
    """Our value, its unit, and a remark."""
    if experiment["kind"] == "largest":
        words = ["--largest", "--memory", "32GB", "--layers", "1"] + experiment["arguments"].split()
        return program.answer("plan", words)["stages"][0]["parameters"] / 1e9, "billion parameters", ""
    if experiment["kind"] == "size":
        fitting = [name for name in experiment["models"] if program.plan(name, experiment["arguments"])["fits"]]
        sizes = [float(name.split("B")[0]) for name in fitting]
        return max(sizes, default=0), "billion parameters, the largest of the paper's models that fits", ""
    speeds = [program.speed(run["model"], run["arguments"]) for run in experiment["runs"]]
    remark = "" if len(speeds) == 1 else ": " + ", ".join(f"{speed:.0f}" for speed in speeds)
    return statistics.mean(speeds), "TFLOP/s of a GPU", remark


def quantity(program, name, run):
    if name == "speed":
        return program.speed(run["model"], run["arguments"])
    found = program.plan(run["model"], run["arguments"])
    return found["bytes_per_rank"]["total"] / 1e9 if name == "memory" else 2.0 * found["fits"] + 1


def check(program, shape):
    """Prints the figures of a shape. True if all of its expectations hold."""
    values = {run["label"]: quantity(program, shape["quantity"], run) for run in shape["runs"]}
    holds = all(values[more] > times * values[less] for more, _, times, less in shape["expect"])
    unit = {"speed": "TFLOP/s of a GPU", "memory": "GB", "fits": ""}[shape["quantity"]]
    words = {label: ("fits" if value > 1 else "does not fit") if unit == "" else f"{value:.1f}"
             for label, value in values.items()}
    print(f"{'as in the paper' if holds else 'NOT AS IN THE PAPER'}: {shape['name']}")
    print("    " + ", ".join(f"{label} {word}" for label, word in words.items()) + " " + unit)
    return holds


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("forebay", help="the program, such as build/release/bin/forebay")
    parser.add_argument("--json", help="write the rows to this file")
    options = parser.parse_args()
    here = os.path.dirname(os.path.abspath(__file__))
    with open(os.path.join(here, "experiments.json"), encoding="utf-8") as stream:
        plan = json.load(stream)
    program = Program(options.forebay, plan)
    rows = []
    for experiment in plan["experiments"]:
        paper = experiment["paper"]
        ours, unit, remark = measure(program, experiment)
        rows.append({"name": experiment["name"], "paper": paper, "ours": round(ours, 2),
                     "ratio": round(ours / paper, 3), "unit": unit})
        print(f"{experiment['name']:48} paper {paper:6.1f}   ours {ours:6.1f}   ratio {ours / paper:5.2f}   {unit}{remark}")
    ratios = sorted(row["ratio"] for row in rows)
    off = statistics.median(abs(ratio - 1) for ratio in ratios)
    print(f"median ratio {statistics.median(ratios):.2f}; off by {off * 100:.0f} % in the median\n")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as stream:
            json.dump(rows, stream, indent=2)
    return 0 if all([check(program, shape) for shape in plan["shapes"]]) else 1


if __name__ == "__main__":
    sys.exit(main())
