#!/usr/bin/env python3
"""Reruns the experiments of the ZeRO paper by `forebay plan --largest` and `forebay simulate`.

A row has the paper's value, ours, and our value divided by the paper's. Nothing is fitted.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys


def answer(words):
    finished = subprocess.run(words, capture_output=True, text=True, check=False)
    if finished.returncode not in (0, 1) or not finished.stdout:
        sys.exit(f"{' '.join(words)}: {finished.stderr.strip()}")
    return json.loads(finished.stdout)


def scaling(program, common, experiment):
    """Devices' throughput in all at the last number of GPUs over that at the first. Each takes the largest batch that fits."""
    throughputs = []
    for ranks in experiment["ranks"]:
        words = common + experiment["arguments"] + ["--ranks", str(ranks)]
        batch = answer([program, "plan", "--largest", "--json", "--memory", "32GB", "--attention", "plain"] + words)["stages"][0]["batch"]
        words += ["--cluster", "dgx-2", "--attention", "plain", "--batch", str(batch)]
        speed = answer([program, "simulate", "--json", "--no-changes"] + words)["tflops_per_device"]
        print(f"    {ranks} GPUs: batch {batch} of a rank, {speed:.1f} TFLOP/s of a GPU")
        throughputs.append(speed * ranks)
    return throughputs[-1] / throughputs[0]


def measure(program, common, experiment):
    if experiment["kind"] == "scaling":
        return experiment["ranks"][-1] / experiment["ranks"][0], scaling(program, common, experiment), "times as fast (paper: more)"
    if experiment["kind"] == "largest":
        found = answer([program, "plan", "--largest", "--json", "--attention", "plain", "--layers", "1"] + common +
                       experiment["arguments"])
        return experiment["paper_billion"], found["stages"][0]["parameters"] / 1e9, "billion parameters"
    found = answer([program, "simulate", "--json", "--no-changes"] + common + experiment["arguments"])
    return experiment["paper_tflops"], found["tflops_per_device"], "TFLOP/s of a GPU"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("forebay", help="the program, such as build/release/bin/forebay")
    parser.add_argument("--json", help="write the rows to this file")
    options = parser.parse_args()
    here = os.path.dirname(os.path.abspath(__file__))
    with open(os.path.join(here, "experiments.json"), encoding="utf-8") as stream:
        plan = json.load(stream)
    rows = []
    for experiment in plan["experiments"]:
        paper, ours, unit = measure(options.forebay, plan["common"], experiment)
        rows.append({"name": experiment["name"], "paper": paper, "ours": round(ours, 2),
                     "ratio": round(ours / paper, 3), "unit": unit})
        print(f"{experiment['name']:55} paper {paper:8.1f}   ours {ours:8.1f}   ratio {ours / paper:5.2f}   {unit}")
    ratios = sorted(row["ratio"] for row in rows)
    off = statistics.median(abs(ratio - 1) for ratio in ratios)
    print(f"median ratio {statistics.median(ratios):.2f}; off by {off * 100:.0f} % in the median")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as stream:
            json.dump(rows, stream, indent=2)


if __name__ == "__main__":
    main()
