#!/usr/bin/env python3
"""Trains and saves under conditions that hosts have now and then, and compares digests with those of an undisturbed run.

  conditions.py --program build/release/bin/forebay-gpt --command build/release/bin/forebay    all that can be made here
  conditions.py ... --only clock --only network                                                some of them

  clock         the wall clock jumps by ten days, forwards and backwards (libfaketime)
  fsync         each fsync of a saving run fails once with ENOSPC: the run says so, and a run that resumes ends with the same weights
  full          a disk too small for the second state, and a quota (ext4 in a file)
  slow          a FUSE file system that takes 5 ms a call; exFAT (exfat-fuse): saved states and offloaded states
  vfat          a vfat disk, under a kernel that has vfat (user-mode-linux, from its Debian package): saved states, and 1,000 kills while
                a process saves, if --state-test names engine_state_test
  network       a cable that flips bits in every hundredth packet
  connections   100,000 connections to the rendezvous store in turn, a few with garbage or with bytes of an earlier run
  setuid        `forebay run` with a set-user-ID program
  libraries     the places where the loader looks for libraries: never the working directory

It needs root, and runs in a mount and a network namespace of its own. Prints a table. Exit codes: 0 all passed, 1 one failed, 77 one
could not be made here and the others passed.
"""

import argparse
import fcntl
import os
import pathlib
import random
import re
import select
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time

HERE = pathlib.Path(__file__).resolve().parent
MODEL = "--layers 2 --hidden 48 --heads 3 --sequence 24 --batch 2 --threads 1 --matmul plain --stage 3 --dtype bf16".split()
SECRET = "s" * 64
SKIPPED = 77
LIMIT = 600


class Skip(Exception):
    """The condition cannot be made on this machine."""


class Conditions:
    def __init__(self, options, directory):
        self.program = pathlib.Path(options.program).resolve()
        self.command = pathlib.Path(options.command).resolve()
        self.directory = directory
        self.environment = {name: os.environ[name] for name in ("PATH", "HOME", "TERM", "LANG", "TMPDIR") if name in os.environ}
        self.seed = options.seed
        self.count = options.connections
        self.state_test = pathlib.Path(options.state_test).resolve() if options.state_test else None
        self.digests = {}
        self.devices = []

    # ---- runs ----

    def start(self, words, more=None, before=(), **options):
        return subprocess.Popen([*map(str, before), str(self.program), *MODEL, *map(str, words)],
                                env={**self.environment, **(more or {})}, text=True, stdout=subprocess.PIPE,
                                stderr=subprocess.STDOUT, **options)

    def run(self, words, more=None, before=(), code=0, **options):
        """The output of a run that ends with this code."""
        process = self.start(words, more, before, **options)
        output = process.communicate(timeout=LIMIT)[0]
        if code is not None and process.returncode != code:
            raise RuntimeError(f"exit code {process.returncode} instead of {code}: {output.strip()[-1500:]}")
        self.code = process.returncode
        return output

    def digest_of(self, output):
        found = re.search(r"digest +([0-9a-f]{16,})", output)
        if not found:
            raise RuntimeError(f"no digest: {output.strip()[-1500:]}")
        return found.group(1)

    def expected(self, steps, ranks=2):
        key = (steps, ranks)
        if key not in self.digests:
            self.digests[key] = self.digest_of(self.run(["--ranks", ranks, "--steps", steps, "--communicator", "local"]))
        return self.digests[key]

    def check(self, output, steps, ranks=2):
        if self.digest_of(output) != self.expected(steps, ranks):
            raise RuntimeError(f"other weights than those of the undisturbed run: {output.strip()[-1500:]}")

    def rank(self, rank, size, store, words, before=(), more=None):
        return self.start(words, {"FOREBAY_RANK": str(rank), "FOREBAY_SIZE": str(size), "FOREBAY_LOCAL_SIZE": "1",
                                  "FOREBAY_STORE": store, "FOREBAY_SECRET": SECRET, **(more or {})}, before)

    def compile(self, source, name, *flags):
        compiler = shutil.which("cc")
        if not compiler:
            raise Skip("no C compiler")
        output = self.directory / name
        subprocess.run([compiler, "-O1", "-o", output, source, *flags], check=True)
        return output

    def mounted(self, words, point):
        """Mounts by a command that stays or ends; the namespace ends with this process."""
        point.mkdir(exist_ok=True)
        before = pathlib.Path("/proc/mounts").read_text()
        process = subprocess.Popen([str(word) for word in words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for _ in range(100):
            if f" {point} " in pathlib.Path("/proc/mounts").read_text() and f" {point} " not in before:
                return process
            if process.poll() not in (None, 0):
                raise Skip(f"{words[0]}: {process.communicate()[0].strip()[-300:]}")
            time.sleep(0.1)
        raise Skip(f"{words[0]} mounted nothing in 10 s")

    # ---- conditions ----

    def clock(self):
        library = next((path for path in pathlib.Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1")), None)
        if not library:
            raise Skip("libfaketime is not installed")
        stamp = self.directory / "clock"
        result = []
        for communicator in ("shm", "gloo"):
            stamp.write_text("+0d\n")
            more = {"LD_PRELOAD": str(library), "FAKETIME_TIMESTAMP_FILE": str(stamp), "FAKETIME_NO_CACHE": "1",
                    "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
            process = self.start(["--ranks", "2", "--steps", "400", "--communicator", communicator, "--deadline", "20",
                                  "--save-state", self.directory / f"clock-{communicator}", "--save-every", "100"], more)
            jumps = 0
            while process.poll() is None:
                time.sleep(0.3)
                jumps += 1
                stamp.write_text(("+10d\n", "-10d\n", "+0d\n")[jumps % 3])
                if jumps > LIMIT * 3:
                    process.kill()
            output = process.communicate()[0]
            if process.returncode != 0:
                raise RuntimeError(f"exit code {process.returncode}: {output.strip()[-1500:]}")
            self.check(output, 400)
            result.append(f"{communicator} {jumps} jumps")
        return ", ".join(result) + ", the same digest"

    def fsync(self):
        return "; ".join(f"{name}: {self.fail_each_fsync(words)}" for name, words in (
            ("ranks wait", []), ("--save-async", ["--save-async"])))

    def fail_each_fsync(self, more):
        shim = self.compile(HERE / "failing_fsync.c", "failing_fsync.so", "-shared", "-fPIC", "-ldl")
        state, count = self.directory / "fsync-state", self.directory / "fsync-count"
        words = ["--ranks", "2", "--communicator", "shm", "--steps", "4", "--save-state", state, "--save-every", "2", *more]
        shutil.rmtree(state, ignore_errors=True)

        def save(which):
            count.write_bytes(b"")
            return self.run(words, {"LD_PRELOAD": str(shim), "FAILING_FSYNC_COUNT": str(count), "FAILING_FSYNC": str(which)}, code=None)

        output = save(0)
        self.check(output, 4)
        total = count.stat().st_size
        if self.code != 0 or total == 0:
            raise RuntimeError(f"an undisturbed run: exit code {self.code}, {total} calls of fsync")
        said = 0
        for which in range(1, total + 1):
            shutil.rmtree(state)
            output = save(which)
            if self.code == 0:
                raise RuntimeError(f"fsync {which} of {total} failed, and the run ended with 0: {output.strip()[-1500:]}")
            said += "No space left on device" in output
            self.check(self.run([*words, "--resume"]), 4)
        if said != total:
            raise RuntimeError(f"{total - said} of {total} runs do not say that no space is left")
        return f"{total} calls; each failed once, was named, and the resumed run has the same digest"

    def full(self):
        image, point = self.directory / "disk", self.directory / "disk-mounted"
        if not shutil.which("mkfs.ext4"):
            raise Skip("no mkfs.ext4")
        kept = "named, the first state loads, the resumed run has the same digest"
        result = []
        for kind in ("disk", "quota"):
            with open(image, "wb") as file:
                file.truncate(64 << 20)
            subprocess.run(["mkfs.ext4", "-q", "-F", *(["-O", "quota"] if kind == "quota" else []), "-m", "0", image], check=True)
            try:
                self.mounted(["mount", "-o", "loop" + (",usrquota" if kind == "quota" else ""), image, point], point).wait()
            except Skip:
                if not result:
                    raise
                return f"disk: {kept}; skipped quota: this kernel has none for ext4"
            os.chown(point, 1000, 1000)
            words = ["--ranks", "2", "--communicator", "shm", "--save-state", point / "state", "--save-every", "2"]
            user = {"user": 1000, "group": 1000, "extra_groups": []}
            self.run([*words, "--steps", "2"], **user)
            state_bytes = sum(file.stat().st_size for file in (point / "state").rglob("*") if file.is_file())
            if kind == "quota":
                if not shutil.which("setquota"):
                    raise Skip("no setquota")
                limit = (state_bytes * 3 // 2) // 1024
                subprocess.run(["setquota", "-u", "1000", str(limit), str(limit), "0", "0", point], check=True)
            else:
                free = os.statvfs(point)
                with open(point / "ballast", "wb") as file:
                    os.posix_fallocate(file.fileno(), 0, free.f_bavail * free.f_frsize - state_bytes // 2)
            output = self.run([*words, "--steps", "4", "--resume"], code=None, **user)
            if self.code == 0:
                raise RuntimeError(f"{kind}: the second state did not fit, and the run ended with 0")
            if not re.search("No space left|quota", output, re.IGNORECASE):
                raise RuntimeError(f"{kind}: it does not say why: {output.strip()[-1500:]}")
            if kind == "quota":
                subprocess.run(["setquota", "-u", "1000", "0", "0", "0", "0", point], check=True)
            else:
                (point / "ballast").unlink()
            after = self.digest_of(self.run([*words, "--steps", "4", "--resume"], **user))
            if after != self.expected(4):
                raise RuntimeError(f"{kind}: the resumed run has other weights")
            subprocess.run(["umount", point], check=True)
            result.append(kind)
        return f"{' and '.join(result)}: {kept}"

    def slow(self):
        result, skipped = [], []
        for kind in ("fuse", "exfat"):
            point = self.directory / f"{kind}-mounted"
            try:
                if kind == "fuse":
                    (self.directory / "below").mkdir()
                    self.mounted(["/usr/bin/python3", HERE / "slow_files.py", self.directory / "below", point, "5"], point)
                else:
                    if not shutil.which("mount.exfat-fuse") or not shutil.which("mkfs.exfat"):
                        raise Skip("no exfat-fuse and mkfs.exfat")
                    image = self.directory / "exfat"
                    with open(image, "wb") as file:
                        file.truncate(64 << 20)
                    subprocess.run(["mkfs.exfat", image], check=True, stdout=subprocess.DEVNULL)
                    device = subprocess.run(["losetup", "--find", "--show", image], check=True, capture_output=True, text=True).stdout.strip()
                    self.devices.append(device)
                    self.mounted(["mount.exfat-fuse", device, point], point)
            except Skip as reason:
                skipped.append(f"{kind}: {reason}")
                continue
            words = ["--ranks", "2", "--communicator", "shm", "--save-state", point / "state", "--save-every", "2"]
            self.run([*words, "--steps", "4"])
            self.check(self.run([*words, "--steps", "6", "--resume"]), 6)
            output = self.run(["--ranks", "2", "--communicator", "shm", "--steps", "4", "--offload", "optimizer+parameters",
                               "--offload-tier", f"nvme:{point}"], code=None)
            if self.code == 0:
                self.check(output, 4)
                result.append(f"{kind}: saved, resumed, offloaded")
            else:
                # A refusal must name the directory and the reason.
                if str(point) not in output:
                    raise RuntimeError(f"{kind}: {output.strip()[-1500:]}")
                result.append(f"{kind}: saved, resumed; offload refused: {output.strip().splitlines()[-1][-160:]}")
            subprocess.run(["umount", "-l", point], check=True)
        if not result:
            raise Skip("; ".join(skipped))
        return "; ".join(result + [f"skipped {text}" for text in skipped])

    def vfat(self):
        for program in ("linux.uml", "mkfs.vfat", "insmod"):
            if not shutil.which(program):
                raise Skip(f"{program} is not installed")
        modules = sorted(path for path in pathlib.Path("/usr/lib/uml/modules").glob("*/kernel/fs/**/*.ko")
                         if path.name in ("fat.ko", "vfat.ko", "nls_cp437.ko", "nls_iso8859-1.ko", "nls_ascii.ko"))
        image, script, log = (self.directory / name for name in ("vfat", "vfat.sh", "vfat.log"))
        with open(image, "wb") as file:
            file.truncate(64 << 20)
        subprocess.run(["mkfs.vfat", image], check=True, stdout=subprocess.DEVNULL)
        program = " ".join([str(self.program), *MODEL, "--ranks 2 --communicator shm --save-state /mnt/vfat/state --save-every 2"])
        lines = ["mount -t proc proc /proc", "mount -t tmpfs tmpfs /dev/shm", *(f"insmod {path}" for path in modules), "ip link set lo up",
                 "mount -t tmpfs tmpfs /mnt && mkdir /mnt/vfat && mount -t vfat /dev/ubda /mnt/vfat || exit", "cd /mnt",
                 f"{program} --steps 4 && {program} --steps 6 --resume", "echo trained $?"]
        if self.state_test:
            lines += [f"TMPDIR=/mnt/vfat {self.state_test} --gtest_filter='*.SurvivesAThousandKills'", "echo killed $?"]
        script.write_text("\n".join(["#!/bin/sh", f"exec >{log} 2>&1", f"export PATH={os.environ['PATH']}:/usr/sbin:/sbin HOME=/root",
                                     "trap 'sync; poweroff -f' EXIT", *lines]) + "\n")
        script.chmod(0o755)
        kernel = subprocess.run(["linux.uml", f"ubd0={image}", "mem=2G", "rootfstype=hostfs", "rootflags=/", "rw", f"init={script}",
                                 "con=null", "con0=null,fd:1"], check=False, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                stderr=subprocess.STDOUT, text=True, timeout=3600)
        output = log.read_text() if log.exists() else kernel.stdout
        if "trained 0" not in output or (self.state_test and "killed 0" not in output):
            raise RuntimeError(output.strip()[-1500:])
        self.check(output[output.rindex("digest"):], 6)
        return "saved, resumed" + ("; 1,000 kills left a whole state" if self.state_test else "")

    def network(self):
        for program in ("ip", "unshare", "nsenter"):
            if not shutil.which(program):
                raise Skip(f"{program} is not installed")
        if not os.path.exists("/dev/net/tun"):
            raise Skip("no /dev/net/tun")
        holders, taps = [], []
        for host in range(2):
            holder = subprocess.Popen(["unshare", "--net", "sh", "-c", "echo ready; exec sleep infinity"], stdout=subprocess.PIPE, text=True)
            holder.stdout.readline()
            holders.append(holder)
            tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            fcntl.ioctl(tap, 0x400454ca, struct.pack("16sH", f"tap{host}".encode(), 0x0002 | 0x1000))  # TUNSETIFF: TAP, no header.
            taps.append(tap)
            subprocess.run(["ip", "link", "set", f"tap{host}", "netns", str(holder.pid)], check=True)
            for words in (["link", "set", "lo", "up"], ["addr", "add", f"10.78.0.{host + 1}/24", "dev", f"tap{host}"],
                          ["link", "set", f"tap{host}", "up"]):
                subprocess.run(["nsenter", "--target", str(holder.pid), "--net", "ip", *words], check=True)
        noise = random.Random(self.seed)
        counts = {"packets": 0, "damaged": 0}
        ends = threading.Event()

        def relay():
            while not ends.is_set():
                for tap in select.select(taps, [], [], 0.2)[0]:
                    try:
                        frame = bytearray(os.read(tap, 65536))
                    except BlockingIOError:
                        continue
                    counts["packets"] += 1
                    # TCP over IPv4 only, behind the Ethernet header.
                    if len(frame) > 34 and frame[12:14] == b"\x08\x00" and frame[23] == 6 and noise.random() < 0.01:
                        bit = noise.randrange(34 * 8, len(frame) * 8)
                        frame[bit // 8] ^= 1 << (bit % 8)
                        counts["damaged"] += 1
                    try:
                        os.write(taps[1 - taps.index(tap)], frame)
                    except (BlockingIOError, OSError):
                        pass

        thread = threading.Thread(target=relay, daemon=True)
        thread.start()
        try:
            ranks = [self.rank(rank, 2, "tcp://10.78.0.1:29400", ["--steps", "30", "--deadline", "120", "--communicator", "gloo"],
                               ["nsenter", "--target", str(holders[rank].pid), "--net"]) for rank in range(2)]
            outputs = [rank.communicate(timeout=LIMIT)[0] for rank in ranks]
            errors = 0
            for holder in holders:
                lines = pathlib.Path(f"/proc/{holder.pid}/net/snmp").read_text().splitlines()
                tcp = [line.split() for line in lines if line.startswith("Tcp:")]
                errors += int(tcp[1][tcp[0].index("InCsumErrors")])
        finally:
            ends.set()
            thread.join()
            for holder in holders:
                holder.kill()
        if any(rank.returncode != 0 for rank in ranks):
            raise RuntimeError(f"seed {self.seed}: exit codes {[rank.returncode for rank in ranks]}: {outputs[0].strip()[-1500:]}")
        self.check(outputs[0], 30)
        if counts["damaged"] < 10 or errors == 0:
            raise RuntimeError(f"too few packets were damaged: {counts}, {errors} found by TCP")
        return (f"seed {self.seed}: {counts['damaged']} of {counts['packets']} packets damaged, {errors} dropped by TCP's checksum, "
                "the same digest")

    def connections(self):
        port = 29500
        store = f"tcp://127.0.0.1:{port}/first"
        words = ["--steps", "4", "--communicator", "gloo", "--deadline", "30", "--join-deadline", "500"]

        # The bytes that a rank sends to the store, kept by a relay.
        kept = bytearray()
        relay = socket.create_server(("127.0.0.1", port + 1))

        def copy():
            client = relay.accept()[0]
            server = None
            while server is None:
                try:
                    server = socket.create_connection(("127.0.0.1", port))
                except ConnectionRefusedError:
                    time.sleep(0.1)
            while True:
                for end in select.select([client, server], [], [])[0]:
                    try:
                        data = end.recv(65536)
                    except OSError:
                        data = b""
                    if not data:
                        client.close(), server.close()
                        return
                    if end is client:
                        kept.extend(data)
                    (server if end is client else client).sendall(data)

        threading.Thread(target=copy, daemon=True).start()
        ranks = [self.rank(0, 2, store, words), self.rank(1, 2, f"tcp://127.0.0.1:{port + 1}/first", words)]
        for rank in ranks:
            output = rank.communicate(timeout=LIMIT)[0]
            if rank.returncode != 0:
                raise RuntimeError(f"through a relay: exit code {rank.returncode}: {output.strip()[-1500:]}")
        if len(kept) < 100:
            raise RuntimeError("the relay saw nothing")

        first = self.rank(0, 2, f"tcp://127.0.0.1:{port}/second", words)
        for _ in range(300):
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except ConnectionRefusedError:
                time.sleep(0.1)

        def resources():
            text = pathlib.Path(f"/proc/{first.pid}/status").read_text()
            return len(os.listdir(f"/proc/{first.pid}/fd")), int(re.search(r"VmRSS:\s+(\d+)", text).group(1))

        noise = random.Random(self.seed)
        oversized = b"fbstore1" + bytes(32) + bytes(32) + b"\xff\xff\xff\x7f" + bytes(1 << 16)
        began, before = time.monotonic(), resources()
        for i in range(self.count):
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                if i % 50 == 0:
                    try:
                        stranger.sendall((bytes(kept), oversized, noise.randbytes(200))[i // 50 % 3])
                    except OSError:
                        pass
        seconds, after = time.monotonic() - began, resources()
        for _ in range(100):
            if resources()[0] <= before[0] + 2:
                break
            time.sleep(0.1)
        last = resources()
        second = self.rank(1, 2, f"tcp://127.0.0.1:{port}/second", words)
        outputs = [rank.communicate(timeout=LIMIT)[0] for rank in (first, second)]
        if first.returncode != 0 or second.returncode != 0:
            raise RuntimeError(f"seed {self.seed}: {outputs[0].strip()[-1500:]}")
        self.check(outputs[0], 4)
        if last[0] > before[0] + 2 or last[1] > before[1] + 16384:
            raise RuntimeError(f"descriptors and KiB of memory: {before} before, {after} after, {last} in the end")
        return (f"{self.count} connections in {seconds:.0f} s, replayed, oversized and random bytes among them; descriptors {before[0]} "
                f"to {last[0]}, {before[1] >> 10} to {last[1] >> 10} MiB; then both ranks trained")

    def setuid(self):
        program = self.directory / "set-user-id"
        shutil.copy("/usr/bin/id", program)
        os.chown(program, 0, 0)
        program.chmod(0o4755)
        finished = subprocess.run([self.command, "run", "--", program, "-u"], user=1000, group=1000, extra_groups=[],
                                  env={**self.environment, "HOME": "/tmp"}, text=True, capture_output=True, timeout=60)
        program.unlink()
        if "set-user-ID" not in finished.stderr and "set-uid" not in finished.stderr and "setuid" not in finished.stderr:
            raise RuntimeError(f"forebay run does not say that the preload has no effect: {finished.stderr.strip()[-800:]}")
        if finished.stdout.strip() not in ("0", ""):
            raise RuntimeError(f"the program printed {finished.stdout!r}")
        line = next(line for line in finished.stderr.splitlines() if re.search("set-?u", line))
        return f"the program ran; forebay run said: {line[-200:]}"

    def libraries(self):
        runs = [[self.program, *MODEL, "--steps", "1", "--ranks", "2"], [self.program, *MODEL, "--device", "cuda", "--steps", "1"],
                [self.program, *MODEL, "--device", "cuda", "--communicator", "nccl", "--ranks", "2", "--steps", "1"],
                [self.command, "devices"], [self.command, "run", "--", "/bin/true"]]
        # As under mpirun: PMIx is loaded.
        launched = {"PMIX_RANK": "0", "PMIX_NAMESPACE": "x", "PMIX_SERVER_URI41": "x", "OMPI_COMM_WORLD_RANK": "0",
                    "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
        tried = []
        for number, (words, more) in enumerate([*((words, {}) for words in runs), (runs[0][:-2], launched)]):
            place = self.directory / f"loader-{number}"
            place.mkdir()
            subprocess.run([str(word) for word in words], cwd=place, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=LIMIT,
                           env={**self.environment, **more, "LD_DEBUG": "libs", "LD_DEBUG_OUTPUT": str(place / "loader")})
            for file in place.glob("loader.*"):
                tried += re.findall(r"trying file=(\S+)", file.read_text(errors="replace"))
        relative = sorted({path for path in tried if not path.startswith("/")})
        if relative:
            raise RuntimeError(f"the loader looked into the working directory: {relative[:5]}")
        if not any(path.endswith("/libcuda.so.1") for path in tried):
            raise RuntimeError("libcuda.so.1 was not looked for")
        return f"{len(runs) + 1} runs, {len(tried)} places tried by the loader, all of them absolute"


NAMES = ["clock", "fsync", "full", "slow", "vfat", "network", "connections", "setuid", "libraries"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", required=True)
    parser.add_argument("--command", required=True)
    parser.add_argument("--state-test", help="tests/engine_state_test of the build tree")
    parser.add_argument("--only", action="append", choices=NAMES)
    parser.add_argument("--connections", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 31))
    options = parser.parse_args()
    if os.geteuid() != 0:
        print("skipped: only root can make these conditions")
        return SKIPPED
    if "FOREBAY_CONDITIONS_INSIDE" not in os.environ:
        os.environ["FOREBAY_CONDITIONS_INSIDE"] = "1"
        words = ["unshare", "--mount", "--net", "--propagation", "private", sys.executable, *sys.argv]
        if subprocess.run([*words[:5], "true"], check=False).returncode != 0:
            print("skipped: no namespaces of its own")
            return SKIPPED
        os.execvp(words[0], words)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    code = 0
    with tempfile.TemporaryDirectory(prefix="forebay-conditions-") as name:
        directory = pathlib.Path(name)
        directory.chmod(0o755)
        conditions = Conditions(options, directory)
        print("| condition | result |\n|---|---|", flush=True)
        for condition in options.only or NAMES:
            try:
                result = getattr(conditions, condition)()
            except Skip as reason:
                result = f"skipped: {reason}"
                code = code or SKIPPED
            except Exception as error:  # pylint: disable=broad-except
                result = f"FAILED: {error}"
                code = 1
            print(f"| {condition} | {result} |", flush=True)
        for line in reversed(pathlib.Path("/proc/mounts").read_text().splitlines()):
            if line.split()[1].startswith(name):
                subprocess.run(["umount", "-l", line.split()[1]], check=False)
        for device in conditions.devices:
            subprocess.run(["losetup", "--detach", device], check=False)
    return code


if __name__ == "__main__":
    sys.exit(main())
