#!/usr/bin/env python3
"""Starts forebay-gpt under the launchers that people have, and compares its digest with that of its own launcher.

  launchers.py --program build/release/bin/forebay-gpt             all launchers that are installed here
  launchers.py --program ... --only slurm-pmix --only mpich        some of them
  launchers.py --program ... --torchrun VENV/bin/torchrun          torchrun of a virtual environment

Each run has its hosts in network namespaces of its own (two hosts with two ranks each, except where the table says one
host), which end with it. It needs root, or the right to make namespaces. Prints a table: launcher, version, ranks, hosts,
line, result. Exit codes: 0 all trained to the same digest, 1 one did not, 77 a launcher is not installed and the others
passed.
"""

import argparse
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time

TRAINING = ("--layers 2 --hidden 48 --heads 3 --sequence 24 --batch 2 --threads 1 --matmul plain --stage 3 "
            "--dtype bf16").split()
STEPS = ["--steps", "30"]
# For runs that lose a rank.
LONG = ["--steps", "300"]
SAVE_EVERY = 20
RANKS = 4
HOSTS = 2
SECRET = "s" * 64
SKIPPED = 77


def command_text(words):
    return " ".join(shlex.quote(str(word)) for word in words)


def address(host):
    return f"10.77.0.{host + 1}"


class Hosts:
    """Hosts host0, host1 with addresses of their own on one bridge. They end with this process."""

    def __init__(self, directory, count=HOSTS):
        names = directory / "hosts"
        names.write_text("127.0.0.1 localhost\n" + "".join(f"{address(i)} host{i}\n" for i in range(count)))
        subprocess.run(["mount", "--bind", names, "/etc/hosts"], check=True)
        self.run(["ip", "link", "set", "lo", "up"])
        self.run(["ip", "link", "add", "bridge0", "type", "bridge"])
        self.run(["ip", "link", "set", "bridge0", "up"])
        self.holders = []
        for host in range(count):
            holder = subprocess.Popen(["unshare", "--net", "--uts", "sh", "-c",
                                       f"hostname host{host}; echo ready; exec sleep infinity"],
                                      stdout=subprocess.PIPE, text=True)
            holder.stdout.readline()
            self.holders.append(holder)
            self.run(["ip", "link", "add", f"cable{host}", "type", "veth", "peer", "name", "eth0", "netns", holder.pid])
            self.run(["ip", "link", "set", f"cable{host}", "master", "bridge0", "up"])
            for words in (["link", "set", "lo", "up"], ["addr", "add", f"{address(host)}/24", "dev", "eth0"],
                          ["link", "set", "eth0", "up"], ["route", "add", "default", "dev", "eth0"]):
                self.run(self.on(host, ["ip", *words]))

    @staticmethod
    def run(words):
        subprocess.run([str(word) for word in words], check=True)

    def on(self, host, words):
        return ["nsenter", "--target", str(self.holders[host].pid), "--net", "--uts", *map(str, words)]

    def remote_shell(self, directory):
        """A program that is called as ssh is: HOST COMMAND."""
        script = directory / "remote-shell"
        pids = " ".join(str(holder.pid) for holder in self.holders)
        script.write_text(f"""#!/bin/bash
pids=({pids})
while [ "${{1#-}}" != "$1" ]; do shift; done
host=${{1#host}}; shift
exec nsenter --target "${{pids[$host]}}" --net --uts /bin/sh -c "$*"
""")
        script.chmod(0o755)
        return script


class Launchers:
    def __init__(self, options, directory):
        self.program = pathlib.Path(options.program).resolve()
        self.torchrun = options.torchrun or shutil.which("torchrun")
        self.directory = directory
        self.report = directory / "report.json"
        self.hosts = Hosts(directory)
        self.environment = {name: os.environ[name] for name in ("PATH", "HOME", "TERM", "LANG", "TMPDIR")
                            if name in os.environ}
        self.secret_file = directory / "secret"
        self.secret_file.write_text(SECRET + "\n")
        self.secret_file.chmod(0o600)
        self.training = [self.program, *TRAINING, *STEPS, "--report", self.report]
        self.daemons = []

    def finish(self, words, more=None, limit=120, ranks=RANKS):
        """Runs a command to its end and returns the digest of its report."""
        self.report.unlink(missing_ok=True)
        finished = subprocess.run(list(map(str, words)), env={**self.environment, **(more or {})}, text=True,
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=limit)
        return self.digest(finished.returncode, finished.stdout, ranks)

    def digest(self, code, output, ranks=RANKS):
        if code != 0:
            raise RuntimeError(f"exit code {code}: {output.strip()[-2000:]}")
        if not self.report.exists():
            raise RuntimeError(f"no report was written: {output.strip()[-2000:]}")
        report = json.loads(self.report.read_text())
        if report["world_size"] != ranks:
            raise RuntimeError(f"it trained with {report['world_size']} ranks instead of {ranks}")
        return report["digest"]

    def own(self):
        words = [*self.training, "--ranks", RANKS]
        return "forebay-gpt --ranks 4", 1, self.finish(words)

    def store_variables(self, port, **more):
        return {"FOREBAY_STORE_PORT": str(port), "FOREBAY_SECRET_FILE": str(self.secret_file), **more}

    def elastic(self):
        """A rank is killed, and the three that are left go on from the last state, to the same weights as ranks that are
        started so by hand."""
        training, state = self.resumable("elastic-state")
        output = self.directory / "elastic.out"
        self.report.unlink(missing_ok=True)
        started = subprocess.Popen(list(map(str, [*training, "--ranks", RANKS, "--elastic"])), env=self.environment,
                                   stdout=open(output, "w"), stderr=subprocess.STDOUT)
        seconds = self.kill_a_rank(state, output)
        started.wait(120)
        digest = self.digest(started.returncode, output.read_text(), RANKS - 1)
        cost = self.cost(seconds, "a rank", "the other three")
        self.compare_by_hand(digest, RANKS - 1)
        return f"forebay-gpt --ranks 4 --save-state DIR --save-every 20 --resume --elastic; {cost}", 1, digest

    def compare_by_hand(self, digest, left):
        """Trains all ranks to the step of the last run's state, and the ranks that are left from there."""
        first = json.loads(self.report.read_text())["first_step"]
        by_hand = self.directory / f"by-hand-{left}"
        self.finish([self.program, *TRAINING, "--steps", first, "--ranks", RANKS, "--save-state", by_hand, "--report",
                     self.report])
        own = self.finish([self.program, *TRAINING, *LONG, "--ranks", left, "--load-state", by_hand, "--report",
                           self.report], ranks=left)
        if own != digest:
            raise RuntimeError(f"its digest is {digest}, and {own} with ranks that were started by hand")

    # --- by the environment alone, as pods are started ---
    def environment_alone(self):
        self.report.unlink(missing_ok=True)
        ranks = []
        for rank in range(RANKS):
            words = self.hosts.on(rank * HOSTS // RANKS, self.training)
            variables = {**self.environment, "FOREBAY_RANK": str(rank), "FOREBAY_SIZE": str(RANKS),
                         "FOREBAY_LOCAL_SIZE": "1", "FOREBAY_SECRET": SECRET,
                         "FOREBAY_STORE": f"tcp://{address(0)}:29400"}
            ranks.append(subprocess.Popen(list(map(str, words)), env=variables, text=True, stdout=subprocess.PIPE,
                                          stderr=subprocess.STDOUT))
        outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
        line = "FOREBAY_RANK=R FOREBAY_SIZE=4 FOREBAY_LOCAL_SIZE=1 FOREBAY_STORE=tcp://host0:29400 forebay-gpt"
        return line, HOSTS, self.digest(max(abs(rank.returncode) for rank in ranks), "".join(outputs))

    # --- MPI ---
    def openmpi(self):
        words = ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-np", RANKS, "--host", "host0:2,host1:2"]
        quiet = ["--mca", "plm_rsh_agent", self.hosts.remote_shell(self.directory),
                 "--mca", "oob_tcp_if_include", "eth0"]
        line = "mpirun -np 4 --host host0:2,host1:2 forebay-gpt"
        return line, HOSTS, self.finish(self.hosts.on(0, [*words, *quiet, *self.training]))

    def mpich(self):
        words = ["mpirun.mpich", "-launcher", "ssh", "-launcher-exec", self.hosts.remote_shell(self.directory),
                 "-iface", "eth0", "-hosts", "host0,host1", "-ppn", 2, "-n", RANKS]
        variables = {"FOREBAY_STORE": f"tcp://{address(0)}:29401", "FOREBAY_SECRET_FILE": str(self.secret_file)}
        line = "FOREBAY_STORE=tcp://host0:29401 FOREBAY_SECRET_FILE=… mpirun -hosts host0,host1 -ppn 2 -n 4 forebay-gpt"
        return line, HOSTS, self.finish(self.hosts.on(0, [*words, *self.training]), variables)

    # --- torchrun ---
    def torchrun_words(self, host, master_port, more=()):
        return self.hosts.on(host, [self.torchrun, "--nnodes", HOSTS, "--node-rank", host, "--nproc-per-node",
                                    RANKS // HOSTS, "--master-addr", address(0), "--master-port", master_port, *more,
                                    "--no-python"])

    def start_torchrun(self, training, master_port, store_port, more=(), output=None):
        self.report.unlink(missing_ok=True)
        target = open(output, "w") if output else subprocess.PIPE
        variables = {**self.environment, **self.store_variables(store_port), "GLOO_SOCKET_IFNAME": "eth0",
                     "TP_SOCKET_IFNAME": "eth0"}
        return [subprocess.Popen(list(map(str, self.torchrun_words(host, master_port, more) + training)),
                                 env=variables, text=True, stdout=target, stderr=subprocess.STDOUT)
                for host in range(HOSTS)]

    def finish_all(self, started, limit=300):
        outputs = [one.communicate(timeout=limit)[0] for one in started]
        return self.digest(max(abs(one.returncode) for one in started), "".join(filter(None, outputs)))

    def torchrun_alone(self):
        line = "FOREBAY_STORE_PORT=29402 FOREBAY_SECRET_FILE=… torchrun --nnodes 2 --nproc-per-node 2 --no-python forebay-gpt"
        return line, HOSTS, self.finish_all(self.start_torchrun(self.training, 29500, 29402))

    def torchrun_restarted(self):
        """A rank is killed in the middle. torchrun starts all again, and they go on from the last state."""
        training, state = self.resumable("torchrun-state")
        output = self.directory / "torchrun.out"
        started = self.start_torchrun(training, 29501, 29403, ["--max-restarts", "2"], output)
        seconds = self.kill_a_rank(state, output)
        digest = self.finish_all(started)
        line = "torchrun --max-restarts 2 … forebay-gpt --save-state DIR --save-every 20 --resume"
        return f"{line}; {self.cost(seconds)}", HOSTS, digest

    def torchrun_elastic(self):
        """The second host is lost with its agent. torchrun goes on with the first one alone."""
        training, state = self.resumable("torchrun-elastic-state")
        output = self.directory / "torchrun-elastic.out"
        self.report.unlink(missing_ok=True)
        words = [self.torchrun, "--nnodes", f"1:{HOSTS}", "--nproc-per-node", RANKS // HOSTS, "--rdzv-backend", "c10d",
                 "--rdzv-id", "elastic", "--rdzv-endpoint", f"{address(0)}:29502", "--rdzv-conf",
                 "last_call_timeout=3", "--max-restarts", 3, "--no-python", *training]
        variables = {**self.environment, **self.store_variables(29405), "GLOO_SOCKET_IFNAME": "eth0",
                     "TP_SOCKET_IFNAME": "eth0"}
        agents = []
        for host in range(HOSTS):
            agents.append(subprocess.Popen(list(map(str, self.hosts.on(host, words))), env=variables, text=True,
                                           stdout=open(output, "a"), stderr=subprocess.STDOUT))
            time.sleep(3)  # The first agent serves the rendezvous and has the first ranks.
        network = os.readlink(f"/proc/{self.hosts.holders[1].pid}/ns/net")

        def on_second_host(pid):
            return os.readlink(f"/proc/{pid}/ns/net") == network

        def lose_the_host():
            agents[1].kill()
            for pid in list(self.pids_of(self.program)):
                if on_second_host(pid):
                    os.kill(pid, signal.SIGKILL)

        seconds = self.kill_a_rank(state, output, lose_the_host)
        agents[0].wait(240)
        digest = self.digest(agents[0].returncode, output.read_text(), RANKS // HOSTS)
        cost = self.cost(seconds, "a host", "the other's ranks")
        self.compare_by_hand(digest, RANKS // HOSTS)
        line = "torchrun --nnodes 1:2 --rdzv-backend c10d --max-restarts 3 … forebay-gpt --save-state DIR --save-every 20 --resume"
        return f"{line}; {cost}", HOSTS, digest

    def resumable(self, name):
        state = self.directory / name
        return [self.program, *TRAINING, *LONG, "--report", self.report, "--save-state", state, "--save-every",
                SAVE_EVERY, "--resume"], state

    def kill_rank_2(self):
        for pid in list(self.pids_of(self.program)):
            if "2" in (self.variable_of(pid, name) for name in ("RANK", "SLURM_PROCID", "FOREBAY_RANK")):
                os.kill(pid, signal.SIGKILL)

    def kill_a_rank(self, state, output, kill=None):
        """Kills rank 2 (or as told) once two states were saved. Returns the seconds from there to the first step after it."""
        self.await_that(lambda: self.saved_step(state) >= 2 * SAVE_EVERY, "two states are saved", output)
        begin = time.monotonic()
        (kill or self.kill_rank_2)()
        before = len(self.steps_shown(output))
        # A run shows its first step, whichever it is; after that, one in a while.
        self.await_that(lambda: any(step % SAVE_EVERY == 1 for step in self.steps_shown(output)[before:]),
                        "ranks train again", output)
        return time.monotonic() - begin

    def cost(self, seconds, lost="a rank", survivors="all"):
        first = json.loads(self.report.read_text())["first_step"]
        if first == 0 or first % SAVE_EVERY != 0:
            raise RuntimeError(f"the last run began after step {first}, and states are saved every {SAVE_EVERY}")
        return (f"{lost} was killed, and {seconds:.1f} s later {survivors} trained again from the state of step {first}, the last "
                f"of those saved every {SAVE_EVERY} steps")

    @staticmethod
    def saved_step(state):
        try:
            return int((state / "latest").read_text().split("-")[1])
        except (OSError, IndexError, ValueError):
            return 0

    @staticmethod
    def steps_shown(output):
        return [int(step) for step in re.findall(r"\bstep (\d+)/", output.read_text())] if output.exists() else []

    @staticmethod
    def await_that(condition, text, output, limit=240):
        end = time.monotonic() + limit
        while not condition():
            if time.monotonic() > end:
                printed = output.read_text()[-2000:] if output.exists() else "nothing"
                raise RuntimeError(f"waited {limit} s until {text}; it printed {printed}")
            time.sleep(0.005)

    @staticmethod
    def pids_of(program):
        for entry in pathlib.Path("/proc").glob("[0-9]*"):
            try:
                if (entry / "exe").resolve() == program:
                    yield int(entry.name)
            except OSError:
                pass

    @staticmethod
    def variable_of(pid, name):
        for text in pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if text.startswith(name.encode() + b"="):
                return text.decode().split("=", 1)[1]
        return None

    # --- Slurm ---
    def start_slurm(self):
        if self.daemons:
            return
        place = self.directory / "slurm"
        place.mkdir()
        place.chmod(0o755)
        key = place / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        socket = place / "munge.socket"
        nodes = "\n".join(f"NodeName=host{i} NodeAddr={address(i)} CPUs=8 RealMemory=1000 State=UNKNOWN"
                          for i in range(HOSTS))
        (place / "slurm.conf").write_text(f"""ClusterName=forebay
SlurmctldHost=host0({address(0)})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={socket},cred_expire=5
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
SchedulerType=sched/backfill
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
JobRequeue=1
MpiDefault=none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
StateSaveLocation={place}/state
SlurmdSpoolDir={place}/spool-%n
TmpFS={place}/tmp-%n
SlurmctldPidFile={place}/slurmctld.pid
SlurmdPidFile={place}/slurmd-%n.pid
SlurmctldLogFile={place}/slurmctld.log
SlurmdLogFile={place}/slurmd-%n.log
{nodes}
PartitionName=all Nodes=ALL Default=YES State=UP MaxTime=INFINITE
""")
        (place / "state").mkdir()
        self.environment["SLURM_CONF"] = str(place / "slurm.conf")
        self.daemon(["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={socket}",
                     f"--pid-file={place}/munged.pid", f"--log-file={place}/munged.log", f"--seed-file={place}/munge.seed"])
        self.daemon(self.hosts.on(0, ["slurmctld", "-D"]))
        for host in range(HOSTS):
            (place / f"spool-host{host}").mkdir()
            (place / f"tmp-host{host}").mkdir()
            self.daemon(self.hosts.on(host, ["slurmd", "-D", "-N", f"host{host}"]))
        end = time.monotonic() + 60
        while True:
            states = subprocess.run(self.hosts.on(0, ["sinfo", "--noheader", "--format=%T %D"]), env=self.environment,
                                    text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT).stdout.split()
            if states == ["idle", str(HOSTS)]:
                return
            if time.monotonic() > end:
                logs = "".join(log.read_text()[-1500:] for log in sorted(place.glob("*.log")))
                raise RuntimeError(f"the nodes of Slurm are {states}; its logs end with\n{logs}")
            time.sleep(0.2)

    def daemon(self, words):
        log = open(self.directory / "daemons.log", "a")
        self.daemons.append(subprocess.Popen(list(map(str, words)), env=self.environment, stdout=log, stderr=log,
                                             stdin=subprocess.DEVNULL))
        time.sleep(0.5)

    def slurm_pmix(self):
        self.start_slurm()
        words = ["srun", "--mpi=pmix", "-N", HOSTS, "--ntasks-per-node", RANKS // HOSTS, *self.training]
        return "srun --mpi=pmix -N 2 --ntasks-per-node=2 forebay-gpt", HOSTS, self.finish(self.hosts.on(0, words))

    def slurm_plain(self):
        self.start_slurm()
        words = ["srun", "--mpi=none", "-N", HOSTS, "--ntasks-per-node", RANKS // HOSTS, *self.training]
        line = "FOREBAY_STORE_PORT=29404 FOREBAY_SECRET_FILE=… srun -N 2 --ntasks-per-node=2 forebay-gpt"
        return line, HOSTS, self.finish(self.hosts.on(0, words), self.store_variables(29404))

    def slurm_requeued(self):
        """A rank of a batch job is killed. The job's script requeues it, and it goes on from the last state."""
        self.start_slurm()
        self.report.unlink(missing_ok=True)
        training, state = self.resumable("slurm-state")
        script = self.directory / "job.sh"
        script.write_text(f"""#!/bin/bash
#SBATCH --requeue -N {HOSTS} --ntasks-per-node={RANKS // HOSTS}
srun --kill-on-bad-exit=0 --mpi=pmix {command_text(training)}
code=$?
if [ $code -eq 75 ] || [ $code -gt 128 ]; then scontrol requeue $SLURM_JOB_ID; fi
exit $code
""")
        output = self.directory / "job.out"
        submitted = subprocess.run(self.hosts.on(0, ["sbatch", "--parsable", "-N", HOSTS, "--ntasks-per-node",
                                                     RANKS // HOSTS, "--requeue", "--open-mode=append", "-o", output,
                                                     script]),
                                   env=self.environment, check=True, text=True, stdout=subprocess.PIPE)
        job = submitted.stdout.strip()
        seconds = self.kill_a_rank(state, output)
        self.await_that(self.report.exists, f"job {job} ends", output)
        time.sleep(1)
        digest = self.digest(0, output.read_text())
        line = "sbatch --requeue, srun --mpi=pmix forebay-gpt --save-state DIR --save-every 20 --resume"
        return f"{line}; {self.cost(seconds)}", HOSTS, digest


TORCH = ["torch"]  # The version of torchrun's virtual environment.
RESTARTED = {"torchrun-restarted", "slurm-requeued"}
OF_OTHER_RANKS = {"elastic", "torchrun-elastic"}  # It compares its digest itself.
CASES = {
    # name: (function, the programs that it needs, how to ask for the version)
    "elastic": (Launchers.elastic, [], None),
    "environment": (Launchers.environment_alone, [], None),
    "openmpi": (Launchers.openmpi, ["mpirun.openmpi"], ["mpirun.openmpi", "--version"]),
    "mpich": (Launchers.mpich, ["mpirun.mpich"], ["mpichversion"]),
    "torchrun": (Launchers.torchrun_alone, ["torchrun"], TORCH),
    "torchrun-restarted": (Launchers.torchrun_restarted, ["torchrun"], TORCH),
    "torchrun-elastic": (Launchers.torchrun_elastic, ["torchrun"], TORCH),
    "slurm-pmix": (Launchers.slurm_pmix, ["slurmctld", "slurmd", "srun", "munged"], ["srun", "-V"]),
    "slurm": (Launchers.slurm_plain, ["slurmctld", "slurmd", "srun", "munged"], ["srun", "-V"]),
    "slurm-requeued": (Launchers.slurm_requeued, ["slurmctld", "slurmd", "srun", "munged"], ["srun", "-V"]),
}


def version(question, launchers):
    if question is TORCH:
        python = pathlib.Path(launchers.torchrun).parent / "python3"
        question = [python, "-c", "import torch; print('torch', torch.__version__)"]
    if question is None:
        return ""
    answer = subprocess.run(question, env={**os.environ, **launchers.environment}, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT).stdout
    return re.sub(r"\s+", " ", answer.splitlines()[0])


def in_own_namespaces():
    """Runs this script again where its network, mounts and processes are its own and end with it."""
    words = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", sys.executable, __file__,
             "--inside", *sys.argv[1:]]
    return subprocess.run(words).returncode


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", required=True, help="forebay-gpt")
    parser.add_argument("--only", action="append", choices=CASES, help="a launcher; may be repeated [default: all]")
    parser.add_argument("--torchrun", help="torchrun [default: the one on PATH]")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.inside:
        return in_own_namespaces()
    skipped = failed = 0
    with tempfile.TemporaryDirectory() as name:
        launchers = Launchers(options, pathlib.Path(name))
        line, hosts, expected = launchers.own()
        long = launchers.finish([launchers.program, *TRAINING, *LONG, "--ranks", RANKS, "--report", launchers.report])
        print(f"| launcher | version | ranks | hosts | run | result |\n|---|---|---|---|---|---|\n"
              f"| forebay-gpt | | {RANKS} | {hosts} | {line} | digest {expected[:12]} |", flush=True)
        for case in options.only or CASES:
            function, programs, question = CASES[case]
            missing = [one for one in programs if shutil.which(one) is None and not (one == "torchrun" and launchers.torchrun)]
            if missing:
                print(f"| {case} | | | | | skipped: {', '.join(missing)} not installed |", flush=True)
                skipped += 1
                continue
            try:
                line, hosts, digest = function(launchers)
                result = f"digest {digest[:12]}"
                if case not in OF_OTHER_RANKS and digest != (long if case in RESTARTED else expected):
                    result, failed = f"**another digest: {digest[:12]}**", failed + 1
            except (RuntimeError, OSError, subprocess.SubprocessError) as error:
                line, hosts, failed = "", "", failed + 1
                result = f"**failed**: {error}"
            print(f"| {case} | {version(question, launchers)} | {RANKS} | {hosts} | {line} | "
                  f"{result} |", flush=True)
        for daemon in reversed(launchers.daemons):
            daemon.terminate()
            daemon.wait()
    return 1 if failed else SKIPPED if skipped else 0


if __name__ == "__main__":
    sys.exit(main())
