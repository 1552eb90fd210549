#!/usr/bin/env python3
"""Compares the step time of forebay-gpt with that of `forebay simulate`, on this machine.

  simulated_speed.py --program build/release/bin/forebay-gpt --command build/release/bin/forebay

2 and 4 processes; stages 0 to 3; no offload, offload to the host and to files; models of two sizes; ranks over shared memory, and over
TCP between network namespaces of which each has a token bucket of 100 Mbit/s, 1 Gbit/s or 10 Gbit/s. A round has each combination of
processes, link and stage once; offload and size change from round to round, so that six rounds have all 192 combinations.

Each round first trains one rank alone, as many copies at the same time as there will be ranks, and gives the reports to `forebay bench-tiers
--save`, which the ranks run over the link to measure the rest. Nothing else is told to the simulation. A measured step is the median of several
runs of its case, between which the other stages run. The figures mean something on an idle machine only.

It needs root for the namespaces. Prints a table. Exit codes: 0; 1 if the median of the cases is off by more than 10 % or the worst by more
than 20 %; 77 if namespaces cannot be made, after the cases over shared memory.
"""

import argparse
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

SKIPPED = 77
LIMIT = 300
MEDIAN, WORST = 0.10, 0.20
SHAPES = {"small": ["--layers", "4", "--hidden", "192"], "large": ["--layers", "4", "--hidden", "320"]}
COMMON = ["--heads", "4", "--sequence", "128", "--batch", "4", "--dtype", "fp32"]
RATES = {"100mbit": 100e6, "1gbit": 1e9, "10gbit": 10e9}
STEPS = 5


def call(words, **options):
    return subprocess.run(words, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False, timeout=LIMIT, **options)


def must(words):
    finished = call(words)
    if finished.returncode != 0:
        raise RuntimeError(f"{' '.join(words)}: {finished.stdout.strip()}")
    return finished.stdout


def namespaces_missing():
    """The reason why this machine has no network namespaces; empty if it has."""
    for tool in ("ip", "tc", "nsenter", "unshare"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed (iproute2, util-linux)"
    script = ("ip link set lo up && ip link add fbtry type bridge && ip link add fbone type veth peer name fbtwo && "
              "tc qdisc add dev fbone root tbf rate 1gbit burst 200kb latency 400ms")
    finished = call(["unshare", "--net", "sh", "-c", script])
    return "" if finished.returncode == 0 else finished.stdout.strip() or "unshare --net fails"


class Hosts:
    """Network namespaces with a cable to a bridge and a token bucket each way."""

    def __init__(self, count, rate):
        self.holders = []
        must(["ip", "link", "add", "fbbridge", "type", "bridge"])
        must(["ip", "link", "set", "fbbridge", "up"])
        burst = f"{max(64, int(RATES[rate] / 8 / 1000 / 1000))}kb"
        bucket = ["root", "tbf", "rate", rate, "burst", burst, "latency", "400ms"]
        for host in range(count):
            holder = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
            self.holders.append(holder)
            while os.readlink(f"/proc/{holder.pid}/ns/net") == os.readlink("/proc/self/ns/net"):
                time.sleep(0.01)
            cable = f"fbcable{host}"
            must(["ip", "link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", str(holder.pid)])
            must(["ip", "link", "set", cable, "master", "fbbridge", "up"])
            inside = self.on(host)
            must(inside + ["ip", "addr", "add", f"10.78.0.{host + 1}/24", "dev", "eth0"])
            must(inside + ["ip", "link", "set", "eth0", "up"])
            must(inside + ["ip", "link", "set", "lo", "up"])
            must(["tc", "qdisc", "add", "dev", cable] + bucket)
            must(inside + ["tc", "qdisc", "add", "dev", "eth0"] + bucket)

    def on(self, host):
        return ["nsenter", f"--net=/proc/{self.holders[host].pid}/ns/net"]

    def end(self):
        for host, holder in enumerate(self.holders):
            call(["ip", "link", "del", f"fbcable{host}"])
            holder.kill()
            holder.wait()
        must(["ip", "link", "del", "fbbridge"])


class Measurement:
    def __init__(self, options, directory):
        self.program, self.command = str(pathlib.Path(options.program).resolve()), str(pathlib.Path(options.command).resolve())
        self.directory = directory
        self.environment = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "TMPDIR") if name in os.environ}
        self.count = 0

    def place(self, name):
        self.count += 1
        return self.directory / f"{self.count}-{name}"

    def start(self, ranks, words_of, communicator=None, hosts=None):
        """Runs a process for each rank, which meet unless `communicator` is None. Their outputs."""
        store = self.place("store")
        store.mkdir(mode=0o700)
        processes = []
        for rank in range(ranks):
            environment = dict(self.environment)
            if communicator:
                environment.update(FOREBAY_RANK=str(rank), FOREBAY_SIZE=str(ranks), FOREBAY_STORE=str(store))
                if hosts:
                    environment["FOREBAY_INTERFACE"] = "eth0"
            processes.append(subprocess.Popen((hosts.on(rank) if hosts else []) + words_of(rank), env=environment, text=True,
                                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
        outputs = [process.communicate(timeout=LIMIT)[0] for process in processes]
        if any(process.returncode != 0 for process in processes):
            raise RuntimeError(f"{' '.join(words_of(0))}: {' '.join(outputs).strip()[-1500:]}")
        return outputs

    def train(self, ranks, words, communicator=None, hosts=None):
        """Trains; a communicator makes it one run of all ranks, otherwise each rank trains alone. The mean step in seconds, a report."""
        reports = [self.place("report.json") for _ in range(ranks)]
        more = ["--communicator", communicator or "local"] + ([] if communicator else ["--ranks", "1"])
        self.start(ranks, lambda rank: [self.program, *COMMON, *words, "--threads", "1", "--steps", str(STEPS), "--quiet", "--report",
                                        str(reports[rank]), *more], communicator, hosts)
        told = [json.loads(report.read_text()) for report in reports if report.exists()]
        steps = [rank["step_ms"] / 1e3 for report in told for rank in report["ranks"]]
        return statistics.mean(steps), told[0]

    def train_alone(self, ranks):
        """Reports of one rank's trainings, as many at the same time as there will be ranks."""
        runs = []
        for shape in SHAPES.values():
            step, report = self.train(ranks, shape)
            report["ranks"][0]["step_ms"] = step * 1e3
            runs.append(self.place("run.json"))
            runs[-1].write_text(json.dumps(report))
        return runs

    def describe(self, ranks, runs, communicator, hosts):
        """The description of this machine by bench-tiers, which runs on all ranks."""
        saved = self.place("machine.json")
        words = [self.command, "bench-tiers", str(self.directory), "--save", str(saved), "--bytes", "64MiB", "--seconds", "6"]
        if communicator == "gloo":
            words += ["--link", "tcp"]
        for run in runs:
            words += ["--run", str(run)]
        self.start(ranks, lambda rank: words, communicator, hosts)
        return json.loads(saved.read_text())

    def simulate(self, machine, ranks, words):
        file = self.place("cluster.json")
        file.write_text(json.dumps(machine))
        finished = subprocess.run([self.command, "simulate", "--json", "--no-changes", "--cluster", str(file), "--ranks", str(ranks),
                                   "--vocabulary", "256", *COMMON, *words], text=True, capture_output=True, check=False)
        if finished.returncode != 0:
            raise RuntimeError(f"forebay simulate {' '.join(words)}: {finished.stderr.strip()}")
        return json.loads(finished.stdout)["step_seconds"]

    def offload(self, kind):
        if kind == "none":
            return []
        if kind == "host":
            return ["--offload", "optimizer"]
        files = self.place("files")
        files.mkdir()
        return ["--offload", "optimizer", "--offload-tier", f"nvme:{files}"]


def measure_round(measurement, number, ranks_list, links, repetitions, rows):
    for ranks in ranks_list:
        runs = measurement.train_alone(ranks)
        for index, link in enumerate(links):
            communicator = "shm" if link == "shm" else "gloo"
            hosts = Hosts(ranks, link) if communicator == "gloo" else None
            try:
                machine = measurement.describe(ranks, runs, communicator, hosts)
                cases = []
                for stage in range(4):
                    turn = number + index + stage + ranks // 2
                    offload, size = ("none", "host", "files")[turn % 3], list(SHAPES)[(turn // 3 + stage) % 2]
                    words = [*SHAPES[size], "--stage", str(stage), *measurement.offload(offload)]
                    cases.append({"ranks": ranks, "link": link, "stage": stage, "offload": offload, "size": size, "words": words, "runs": []})
                for _ in range(repetitions):
                    for case in cases:
                        case["runs"].append(measurement.train(ranks, case["words"], communicator, hosts)[0])
                for case in cases:
                    measured = statistics.median(case["runs"])
                    simulated = measurement.simulate(machine, ranks, case.pop("words"))
                    rows.append({**case, "measured": measured, "simulated": simulated, "ratio": simulated / measured})
                    print(f"{ranks} ranks {link:8} stage {case['stage']} offload {case['offload']:5} {case['size']:5}   "
                          f"measured {measured * 1e3:8.1f} ms   simulated {simulated * 1e3:8.1f} ms   ratio {simulated / measured:5.2f}",
                          flush=True)
            finally:
                if hosts:
                    hosts.end()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", required=True)
    parser.add_argument("--command", required=True)
    parser.add_argument("--rounds", type=int, default=1, help="1 to 6")
    parser.add_argument("--repetitions", type=int, default=3, help="runs of each case [default: 3]")
    parser.add_argument("--first-round", type=int, default=0)
    parser.add_argument("--ranks", type=int, action="append", choices=(2, 4))
    parser.add_argument("--link", action="append", choices=("shm", *RATES))
    parser.add_argument("--json", help="write the rows and the descriptions' directory")
    parser.add_argument("--keep", help="keep all files in this directory")
    options = parser.parse_args()

    missing = namespaces_missing()
    if not missing and os.environ.get("FOREBAY_IN_NAMESPACE") != "1":
        os.environ["FOREBAY_IN_NAMESPACE"] = "1"
        os.execvp("unshare", ["unshare", "--net", "--", sys.executable, *sys.argv])
    links = options.link or ["shm", *RATES]
    if missing:
        print(f"Skipped: TCP between network namespaces: {missing}")
        links = [link for link in links if link == "shm"]
    else:
        must(["ip", "link", "set", "lo", "up"])
    rows = []
    with tempfile.TemporaryDirectory(prefix="forebay-speed-") as temporary:
        directory = pathlib.Path(options.keep or temporary)
        directory.mkdir(exist_ok=True)
        measurement = Measurement(options, directory)
        for number in range(options.first_round, options.first_round + options.rounds):
            measure_round(measurement, number, options.ranks or [2, 4], links, options.repetitions, rows)
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(rows, indent=1))
    off = [abs(row["ratio"] - 1) for row in rows]
    median, worst = (statistics.median(off), max(off)) if off else (0, 0)
    print(f"{len(rows)} cases: off by {median * 100:.1f} % in the median, {worst * 100:.1f} % at worst")
    if median > MEDIAN or worst > WORST:
        print(f"FAILED: allowed are {MEDIAN:.0%} and {WORST:.0%}")
        sys.exit(1)
    sys.exit(SKIPPED if missing else 0)


if __name__ == "__main__":
    main()
