#!/usr/bin/env python3
"""shm's reduce_scatter and all_gather beside those of Open MPI and MPICH, in turns.

  shm_vs_mpi.py [--shm-bench build/release/bin/shm_bench] [--ranks N] [--mib N] [--turns N] [--json FILE]

In each turn every one of them runs by itself, with a few rounds of its own; given are the medians over turns, in
milliseconds of the slowest rank, and the medians of the turns' quotients MPI / shm, the faster of MPI's two reduce_scatters
counting. Above 1: shm is faster. Wants mpicc and mpirun of one of them at least (openmpi-bin and libopenmpi-dev, mpich
and libmpich-dev); without any it says so and exits with 77.
"""
import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile

CANNOT_RUN = 77
HERE = os.path.dirname(os.path.abspath(__file__))


def run(command, **more):
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, **more)
    if done.returncode != 0:
        sys.exit(f"shm_vs_mpi.py: {' '.join(command)} failed: {done.stdout}{done.stderr}")
    return done.stdout


def build_peers(directory):
    peers = {}
    for name in ("openmpi", "mpich"):
        compiler, launcher = (shutil.which(f"{tool}.{name}") for tool in ("mpicc", "mpirun"))
        if not compiler or not launcher:
            print(f"{name}: not installed")
            continue
        program = os.path.join(directory, f"peer-{name}")
        run([compiler, "-O3", "-o", program, os.path.join(HERE, "mpi_peer.c")])
        # Open MPI refuses root, and more ranks than processors, unless told otherwise.
        extra = ["--allow-run-as-root", "--oversubscribe"] if name == "openmpi" else []
        peers[name] = [launcher, *extra, "-np", "{ranks}", program]
    return peers


def shm_times(arguments):
    output = run([arguments.shm_bench, str(arguments.ranks), str(arguments.mib), str(arguments.rounds)])
    return {name: float(ms) for name, ms in re.findall(r"^(\w+)\s.*shm ([\d.]+) ms", output, re.M)}


def mpi_times(command, arguments):
    filled = [word.format(ranks=arguments.ranks) for word in command]
    output = run([*filled, str(arguments.mib), str(arguments.rounds)])
    times = {name: float(ms) for name, ms in re.findall(r"^(\w+) ([\d.]+)$", output, re.M)}
    return {"reduce_scatter": min(times["reduce_scatter"], times["reduce_scatter_block"]),
            "all_gather": times["all_gather"]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shm-bench", default=os.path.join(HERE, "../../build/release/bin/shm_bench"))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mib", type=int, default=64, help="fp32 on each rank, all slices (default: 64)")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=5, help="of each operation in a turn (default: 5)")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        peers = build_peers(directory)
        if not peers:
            print("shm_vs_mpi.py: cannot run: neither Open MPI nor MPICH is installed")
            sys.exit(CANNOT_RUN)
        turns = []
        for _ in range(arguments.turns):
            turn = {"shm": shm_times(arguments)}
            turn.update({name: mpi_times(command, arguments) for name, command in peers.items()})
            turns.append(turn)
    result = {}
    for operation in ("reduce_scatter", "all_gather"):
        row = {name: statistics.median(turn[name][operation] for turn in turns) for name in turns[0]}
        for name in peers:
            row[f"{name}/shm"] = statistics.median(
                turn[name][operation] / turn["shm"][operation] for turn in turns)
        result[operation] = row
        print(f"{operation:15}" + "  ".join(
            f"{name} {value:.2f}{'' if '/' in name else ' ms'}" for name, value in row.items()))
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump({"ranks": arguments.ranks, "mib": arguments.mib, "result": result}, file, indent=2)


if __name__ == "__main__":
    main()
