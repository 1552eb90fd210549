#!/usr/bin/env python3
"""Holds forebay-gpt to the results it had when they were recorded: small trainings, and the demo of ./dev.

  golden.py check --program build/release/bin/forebay-gpt    runs them and compares them with digests.json
  golden.py record --program build/release/bin/forebay-gpt   runs them and writes digests.json
  golden.py list                                             prints them with their options
With --demo, check and record run the trainings of ./dev demo, with both --matmul, instead: about 5 minutes.

For each training it compares the digest of the fp32 weights, all losses and gradient norms to the last bit, the planned
bytes of every pool, the planned and the counted bytes on every wire, and the contents of the files it leaves. A change
that is meant to change none of these must pass; a change that is meant to must record them again, and say so.

Exit codes: 0 all is as recorded, 1 something differs or a program failed, 2 a mistake on the command line, 77 skipped:
results differ a little and this machine's arithmetic is not the recorder's, so nothing is known.

Differences between machines: the small ones use --matmul plain, whose products have the same bits everywhere. log, cos
and pow are the C library's (initial weights, loss, AdamW's bias correction), and its variants for other processors
round the last bit of a double otherwise. Weights are fp32 and hardly ever show it; a loss is a double and may. So a
table of these functions is recorded, too. The demo's products are oneDNN's, whose bits depend on its version and on the
instruction set that it finds; both are recorded, too. Bytes depend on none of this.
"""

import argparse
import hashlib
import json
import math
import os
import pathlib
import random
import shlex
import struct
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
TEXT = ROOT / "LICENSE"  # The text that they train on.
RECORDED = HERE / "digests.json"
# Limit for one training: far above its time, even on a busy machine.
DEADLINE_SECONDS = 300
DEMO_DEADLINE_SECONDS = 1800
SKIPPED = 77

# Options of all; an option of a setting replaces the one here.
BASE = (
    "--layers 2 --hidden 48 --heads 4 --sequence 24 --batch 2 --steps 4 --lr 0.01 --clip 0.5 --seed 7"
    " --ranks 1 --communicator local --threads 1 --matmul plain"
)

# Name, options. Where there are two lines of options, one training follows on the other; {dir} is an empty directory.
SETTINGS = [
    # Stages.
    ("stage-0-fp32", "--ranks 2 --stage 0"),
    ("stage-1-fp32", "--ranks 3 --stage 1"),
    ("stage-2-fp32", "--ranks 4 --stage 2"),
    ("stage-3-fp32", "--ranks 3 --stage 3"),
    ("stage-0-bf16", "--ranks 3 --stage 0 --dtype bf16"),
    ("stage-1-bf16", "--ranks 2 --stage 1 --dtype bf16"),
    ("stage-2-bf16", "--ranks 3 --stage 2 --dtype bf16"),
    ("stage-3-bf16", "--ranks 4 --stage 3 --dtype bf16"),
    ("stage-0-fp16", "--ranks 3 --stage 0 --dtype fp16"),
    ("stage-3-fp16-steps-skipped", "--ranks 3 --stage 3 --dtype fp16 --loss-scale 262144"),  # Overflows twice.
    # One rank.
    ("one-rank-bf16-stage-3", "--stage 3 --dtype bf16"),
    ("one-rank-no-clipping", "--clip 0 --lr 0.003 --weight-decay 1 --beta1 0.8 --beta2 0.97 --epsilon 1e-4 --seed 3"),
    # Buckets and overlap. The smallest bucket there is, less than a unit; one that divides nothing.
    ("bucket-1-byte", "--ranks 3 --stage 2 --bucket 1 --steps 2"),
    ("bucket-odd", "--ranks 4 --stage 3 --dtype fp16 --bucket 70001"),
    ("no-overlap", "--ranks 4 --stage 3 --dtype bf16 --bucket 70001 --no-overlap"),
    # Accumulation.
    ("micro-steps-local", "--ranks 4 --stage 1 --dtype bf16 --micro-steps 3 --accumulate local"),
    ("micro-steps-local-fp16", "--ranks 3 --stage 0 --dtype fp16 --micro-steps 2 --accumulate local"),
    ("micro-steps-shard", "--ranks 3 --stage 2 --dtype fp16 --micro-steps 3 --accumulate shard"),
    # Order of sums, and sharding within groups. In fp32: fp32 sums of few 2-byte values are exact in any order.
    ("order-groups", "--ranks 4 --stage 2 --order group:2"),
    ("shard-within-groups", "--ranks 4 --stage 3 --order group:2 --shard-within group"),
    (
        "shard-within-groups-local",
        "--ranks 4 --stage 1 --order group:2 --shard-within group --micro-steps 2 --accumulate local",
    ),
    # Ranks as processes.
    ("processes-shm", "--ranks 4 --stage 3 --communicator shm"),
    ("processes-shm-groups", "--ranks 4 --stage 2 --dtype bf16 --order group:2 --micro-steps 2 --communicator shm"),
    ("processes-gloo", "--ranks 3 --stage 2 --micro-steps 2 --communicator gloo"),
    # Offload.
    ("offload-optimizer", "--ranks 2 --stage 2 --dtype bf16 --offload optimizer"),
    ("offload-a-part", "--ranks 3 --stage 1 --layers 4 --offload optimizer --offload-fraction 0.5"),
    ("offload-optimizer-files", "--ranks 2 --stage 1 --dtype fp16 --offload optimizer --offload-tier nvme:{dir}"),
    ("offload-all", "--ranks 4 --stage 3 --dtype bf16 --offload optimizer+parameters"),
    (
        "offload-all-files",
        "--ranks 3 --stage 3 --offload optimizer+parameters --offload-tier nvme:{dir}"
        " --offload-staging 8MiB",
    ),
    ("chosen-by-measurement", "--ranks 2 --stage 2 --bucket auto --offload optimizer --offload-fraction auto"),
    # Optimizers, and states in fewer bytes.
    ("moments-bf16", "--ranks 3 --stage 2 --dtype bf16 --moments bf16"),
    (
        "moments-block8-files",
        "--ranks 4 --stage 3 --moments block8 --offload optimizer --offload-tier nvme:{dir}",
    ),
    ("no-master-weights", "--ranks 3 --stage 1 --dtype bf16 --no-master-weights --moments block8 --ema 0.9"),
    ("adam", "--ranks 3 --stage 2 --optimizer adam --weight-decay 0.1"),
    ("sgd", "--ranks 3 --stage 3 --optimizer sgd --lr 0.1"),
    ("lion", "--ranks 4 --stage 1 --dtype bf16 --optimizer lion --lr 0.0003 --moments bf16"),
    ("adafactor", "--ranks 3 --stage 3 --dtype bf16 --optimizer adafactor"),
    ("muon", "--ranks 3 --stage 2 --optimizer muon"),
    # Recomputation and dropout.
    ("recompute-block", "--ranks 2 --stage 2 --dtype bf16 --recompute block --dropout 0.1"),
    ("recompute-some", "--ranks 3 --stage 3 --layers 4 --recompute every:2 --dropout 0.1"),
    # Ranks that share layers, stages of a pipeline (of which two have the tied embedding), and what is kept for the
    # backward pass.
    ("tensor-parallel", "--ranks 2 --stage 0 --tensor-parallel 2"),
    (
        "tensor-parallel-activations-host",
        "--ranks 4 --stage 3 --dtype bf16 --tensor-parallel 2 --recompute block --activations partition+cpu",
    ),
    (
        "tensor-parallel-activations-files",
        "--ranks 4 --stage 1 --tensor-parallel 4 --layers 3 --recompute block --activations partition+nvme:{dir}",
    ),
    (
        "pipeline",
        "--ranks 4 --stage 2 --dtype bf16 --pipeline-parallel 2 --micro-steps 4 --recompute block"
        " --activations auto --memory 16MiB",
    ),
    (
        "tensor-and-pipeline",
        "--ranks 8 --stage 3 --tensor-parallel 2 --pipeline-parallel 2 --micro-steps 3 --dropout 0.1 --recompute block"
        " --activations partition",
    ),
    # Files: saved and resumed at another stage with other ranks, in a grid, and weights exported and taken from there.
    (
        "saved-and-resumed",
        "--ranks 4 --stage 3 --dtype bf16 --steps 2 --save-every 1 --save-state {dir}/state",
        "--ranks 3 --stage 1 --dtype bf16 --steps 4 --load-state {dir}/state --save-state {dir}/state",
    ),
    (
        "saved-and-resumed-in-a-grid",
        "--ranks 4 --stage 2 --tensor-parallel 2 --pipeline-parallel 2 --micro-steps 2 --steps 2"
        " --save-state {dir}/state",
        "--ranks 8 --stage 3 --tensor-parallel 2 --pipeline-parallel 2 --micro-steps 2 --steps 3"
        " --load-state {dir}/state",
    ),
    (
        "exported-and-initial",
        "--ranks 3 --stage 3 --steps 0 --export {dir}/initial.safetensors",
        "--ranks 2 --stage 1 --steps 3 --seed 5 --initial {dir}/initial.safetensors --export {dir}/trained.safetensors",
    ),
]
CHOSEN_BY_MEASUREMENT = {"chosen-by-measurement"}  # Their bytes are this machine's; their results are not.

# Keys of each entry of `ranks` in the report.
POOLS = ("parameters", "gradients", "optimizer", "gathered", "buckets", "activations")
BYTES = [f"planned_bytes.{pool}" for pool in POOLS] + [
    "planned_reserved_bytes",
    "planned_host_bytes",
    "planned_file_bytes",
    "planned_file_read_bytes_per_step",
    "planned_file_written_bytes_per_step",
    "planned_sent_bytes_per_step",
    "planned_received_bytes_per_step",
    "sent_bytes_per_step",
    "received_bytes_per_step",
    "tensor_sent_bytes_per_step",
    "tensor_received_bytes_per_step",
    "pipeline_sent_bytes_per_step",
    "pipeline_received_bytes_per_step",
    "planned_saved_device_bytes",
    "planned_saved_host_bytes",
    "planned_saved_file_bytes",
    "planned_saved_sent_bytes_per_step",
    "saved_sent_bytes_per_step",
]

# Relative, of losses and norms. Lower: another library's last bits, grown over the demo's 30 steps, are taken for a
# defect. Higher: on a machine with another library a defect is taken for rounding.
ROUNDING_MAX = 0.05

# As run_demo of ./dev has it. How much oneDNN's products need depends on the machine, so two pools are left out.
DEMO = "--layers 8 --hidden 256 --heads 8 --sequence 128 --batch 1 --steps 30 --lr 0.0005 --bucket 1MiB --seed 1"
DEMO_COMMAND = "--ranks 4 --stage {stage} --dtype bf16 " + DEMO
DEMO_BYTES = [field for field in BYTES if field not in ("planned_bytes.activations", "planned_reserved_bytes")]


def say(text=""):
    print(text, flush=True)


class Failed(Exception):
    """A training that ended in another way than it should."""


class Impossible(Exception):
    """A training that this build or machine cannot do, and why."""


def options_of(words):
    """The words of a setting, over those of BASE, in one order."""
    options = {}
    for part in f" {BASE} {words}".split(" --")[1:]:
        name, _, value = part.strip().partition(" ")
        options["--" + name] = value
    return [word for name, value in options.items() for word in ([name, value] if value else [name])]


# ---- running ----


def train(program, words, report, deadline_seconds=DEADLINE_SECONDS, variables=None):
    """One training, by its words. Returns its report, and what it printed."""
    command = [program, *words, "--report", str(report), "--quiet"]
    environment = dict(os.environ, **(variables or {}))
    try:
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            timeout=deadline_seconds, errors="replace", check=False)
    except subprocess.TimeoutExpired as error:
        raise Failed(f"it did not end within {deadline_seconds} seconds") from error
    if "this build has no Gloo" in done.stdout:
        raise Impossible("this build has no Gloo (Debian: apt-get install libgloo-dev)")
    if "this build has no oneDNN" in done.stdout:
        raise Impossible("this build has no oneDNN (Debian: apt-get install libdnnl-dev)")
    if done.returncode != 0:
        raise Failed(f"it ended with exit code {done.returncode} and said:\n{done.stdout.strip()}")
    return json.loads(report.read_text()), done.stdout


def bytes_of(report, fields):
    """Each field's value on every rank: one number where all have the same, else a list. Zeros are left out."""
    found = {}

    def put(name, values):
        if any(values):
            found[name] = values[0] if all(value == values[0] for value in values) else values

    ranks = report["ranks"]
    for field in fields:
        first, _, second = field.partition(".")
        put(field, [rank[first][second] if second else rank[first] for rank in ranks])
    # The payload of the whole run, to and from all other ranks.
    for direction in ("count", "sent_bytes", "received_bytes"):
        rows = [{row["operation"]: row[direction] for row in rank["traffic"]} for rank in ranks]
        for operation in sorted(set().union(*rows)):
            values = [row.get(operation, 0) for row in rows]
            put(f"{operation}.{direction}", [sum(value) if isinstance(value, list) else value for value in values])
    return found


def result_of(report, fields):
    try:
        result = {name: report[name] for name in ("digest", "loss", "grad_norm")}
        if fields:
            result["bytes"] = bytes_of(report, fields)
        return result
    except KeyError as error:
        raise Failed(f"its report has no {error}") from error


def files_digest(directory):
    """One digest over the names and contents of all files in a directory, but for locks, which name their process.
    None: there are none."""
    files = sorted(path for path in directory.rglob("*") if path.is_file() and path.name != ".lock")
    digest = hashlib.sha256()
    for path in files:
        content = path.read_bytes()
        digest.update(f"{path.relative_to(directory)} {len(content)}\n".encode() + content)
    return digest.hexdigest() if files else None


def run_setting(program, setting):
    """Runs the trainings of a setting one after the other. Returns what to record of it."""
    name, *lines = setting
    runs = []
    with tempfile.TemporaryDirectory(prefix="forebay-golden-") as temporary:
        directory = pathlib.Path(temporary, "files")
        directory.mkdir()
        for line in lines:
            words = [word.format(dir=directory) for word in options_of(line)] + ["--text", str(TEXT)]
            report, _ = train(program, words, pathlib.Path(temporary, "report.json"))
            runs.append(result_of(report, [] if name in CHOSEN_BY_MEASUREMENT else BYTES))
        result = {"options": [" ".join(options_of(line)) for line in lines], "runs": runs}
        digest = files_digest(directory)
    return dict(result, files=digest) if digest else result


def by_hand(program, setting):
    """The commands of a setting, for a shell."""
    _, *lines = setting
    needs_directory = any("{dir}" in line for line in lines)
    commands = ["dir=$(mktemp -d)"] if needs_directory else []
    for line in lines:
        words = " ".join(options_of(line)).replace("{dir}", "$dir")
        commands.append(f"{shlex.quote(program)} {words} --text {shlex.quote(str(TEXT))} --report report.json")
    return commands


# ---- dependencies of the results ----


def libm_table():
    """A digest of the C library's log, cos and pow in double, by way of Python, as forebay-gpt calls them."""
    numbers = random.Random(1)
    digest = hashlib.sha256()
    for i in range(1, 40001):
        u = numbers.random()
        beta = (0.9, 0.95, 0.999)[i % 3]
        values = (math.log(u), math.cos(2 * math.pi * u), math.pow(beta, i % 20000), math.log(1 + 255 * u))
        digest.update(struct.pack("<4d", *values))
    return digest.hexdigest()


def text_digest():
    return hashlib.sha256(TEXT.read_bytes()).hexdigest()


def onednn_facts(program, directory):
    """oneDNN's own words on its version and the instruction set that it found."""
    words = "--layers 1 --hidden 16 --heads 1 --sequence 8 --batch 1 --steps 1 --matmul library".split()
    words += ["--text", str(TEXT)]
    _, output = train(program, words, pathlib.Path(directory, "report.json"), variables={"ONEDNN_VERBOSE": "1"})
    infos = [line.split("_verbose,info,", 1)[1] for line in output.splitlines() if "_verbose,info," in line]
    return "; ".join(info for info in infos if info.startswith(("oneDNN", "cpu,isa")))


# ---- comparing ----


def differences(recorded, found, name=""):
    """A name, what was recorded and what was found, for everything in which two results differ."""
    if isinstance(recorded, dict) and isinstance(found, dict):
        for key in dict.fromkeys([*recorded, *found]):
            yield from differences(recorded.get(key), found.get(key), f"{name}.{key}" if name else key)
    elif name == "runs" and len(recorded) == len(found):
        for i, (one, other) in enumerate(zip(recorded, found)):
            yield from differences(one, other, "" if len(found) == 1 else f"run {i + 1}")
    elif recorded != found:
        yield name, recorded, found


def is_rounding(name, recorded, found):
    """Whether other rounding could be the cause. It is not of other bytes, nor of losses and norms far away."""
    field = name.split(".")[-1]
    if field in ("loss", "grad_norm") and len(recorded) == len(found):
        return all(
            one == other or (one is not None and other is not None and math.isclose(one, other, rel_tol=ROUNDING_MAX))
            for one, other in zip(recorded, found))
    return field in ("digest", "files")


def show(name, differing, commands):
    """Says how a setting differs, and how to run it. Returns whether other rounding could be the cause."""
    say(f"\n{name} differs:")
    for field, recorded, found in differing:
        say(f"  {field}: recorded {json.dumps(recorded)}, now {json.dumps(found)}")
    show_commands(commands)
    return all(is_rounding(*one) for one in differing)


def show_commands(commands):
    say("  by hand:")
    for command in commands:
        say(f"    {command}")


def skip(reason):
    say(f"golden.py: Skipped\n{reason}")  # The form that `./dev test` looks for.
    return SKIPPED


# ---- the small trainings ----


def run_settings(program, settings, judge):
    """Runs settings; judge(setting, result) returns the word to print after its name. Returns (impossible, failed)."""
    impossible, failed = [], []
    for i, setting in enumerate(settings):
        start = time.monotonic()
        try:
            word = judge(setting, run_setting(program, setting))
        except Impossible as error:
            impossible.append((setting, str(error)))
            word = f"SKIPPED: {error}"
        except Failed as error:
            failed.append((setting, str(error)))
            word = "FAILED"
        say(f"[{i + 1:2}/{len(settings)}] {setting[0]}: {word} ({time.monotonic() - start:.1f} s)")
    for setting, reason in failed:
        say(f"\n{setting[0]} failed: {reason}")
        show_commands(by_hand(program, setting))
    return impossible, failed


def check_settings(program, settings):
    recorded = json.loads(RECORDED.read_text())
    if recorded["text_sha256"] != text_digest():
        say(f"golden.py: {TEXT} is another text than was recorded, so nothing would be as recorded; record again")
        return 1
    start = time.monotonic()
    differing = []

    def judge(setting, result):
        if setting[0] not in recorded["settings"]:
            raise Failed("it is not recorded; golden.py record")
        found = list(differences(recorded["settings"][setting[0]], result))
        if found:
            differing.append((setting, found))
        return "DIFFERS" if found else "as recorded"

    impossible, failed = run_settings(program, settings, judge)
    for setting, reason in impossible:
        skip(f"{setting[0]}: {reason}")
    rounding = all([show(setting[0], found, by_hand(program, setting)) for setting, found in differing])
    counts = f"{len(differing)} differ, {len(failed)} failed, {len(impossible)} skipped"
    say(f"\n{len(settings)} settings in {time.monotonic() - start:.0f} s: {counts}")
    if not differing and not failed:
        return 0
    if not failed and rounding and recorded["libm_table"] != libm_table():
        return skip(
            "results differ a little from the recorded ones, and so do log, cos and pow of this machine's C library, "
            "which rounds differently; so nothing is known of them. Bytes are as recorded")
    say("Where this change is meant: golden.py record")
    return 1


def record_settings(program):
    results = {}

    def judge(setting, result):
        results[setting[0]] = result
        return "done"

    impossible, failed = run_settings(program, SETTINGS, judge)
    if impossible or failed:
        say("Nothing was written, since not all settings ran")
        return 1
    recorded = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    recorded.update(text_sha256=text_digest(), libm_table=libm_table(), settings=results)
    write(recorded)
    return 0


# ---- the demo ----


def run_demo(program, matmul, judge):
    """The four stages; judge(name, result, text) takes each."""
    with tempfile.TemporaryDirectory(prefix="forebay-golden-") as directory:
        for stage in range(4):
            start = time.monotonic()
            name = f"stage-{stage}-{matmul}"
            words = DEMO_COMMAND.format(stage=stage).split() + ["--matmul", matmul]
            report, _ = train(program, words, pathlib.Path(directory, "report.json"), DEMO_DEADLINE_SECONDS)
            word = judge(name, result_of(report, DEMO_BYTES), report["training"]["text"])
            say(f"{name}: {word} ({time.monotonic() - start:.1f} s)")
        return onednn_facts(program, directory) if matmul == "library" else None


def demo_by_hand(program, name):
    _, stage, matmul = name.split("-")
    return [f"{shlex.quote(program)} {DEMO_COMMAND.format(stage=stage)} --matmul {matmul} --report report.json"]


def check_demo(program):
    demo = json.loads(RECORDED.read_text())["demo"]
    reasons, wrong = [], False
    for matmul in ("library", "plain"):
        differing = []

        def judge(name, result, text):
            if text != demo["text"]:
                raise Impossible("/usr/share/common-licenses, on which it trains, has other texts than were recorded")
            found = list(differences(demo["stages"][name], result))
            if found:
                differing.append((name, found))
            return "DIFFERS" if found else "as recorded"

        try:
            facts = run_demo(program, matmul, judge)
        except Impossible as error:
            reasons.append(f"the demo with --matmul {matmul}: {error}")
            continue
        rounding = all([show(name, found, demo_by_hand(program, name)) for name, found in differing])
        if differing and rounding and demo["libm_table"] != libm_table():
            reasons.append("results differ, and so does the rounding of log, cos and pow of this machine's C library")
        elif differing and rounding and matmul == "library" and facts != demo["onednn"]:
            reasons.append(f"results differ, and so does oneDNN: recorded with '{demo['onednn']}', here '{facts}'")
        elif differing:
            wrong = True
    if wrong:
        say("\nThe demo differs. Where this change is meant: golden.py record --demo")
        return 1
    return skip("; ".join(reasons)) if reasons else 0


def record_demo(program):
    demo = {"options": DEMO_COMMAND, "libm_table": libm_table(), "stages": {}}
    for matmul in ("library", "plain"):

        def judge(name, result, text):
            demo["text"] = text
            demo["stages"][name] = result
            return "done"

        try:
            facts = run_demo(program, matmul, judge)
            demo["onednn"] = facts or demo["onednn"]
        except Impossible as error:
            say(f"Nothing was written: {error}")
            return 1
    recorded = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    write(dict(recorded, demo=demo))
    return 0


# ---- files and the command line ----


def dump(value, depth=0):
    """JSON with a line for each field, in which lists of numbers are not broken."""
    if not isinstance(value, dict) or not value:
        if isinstance(value, list) and value and isinstance(value[0], dict):
            inner = ",\n".join(" " * (depth + 1) + dump(one, depth + 1) for one in value)
            return "[\n" + inner + "\n" + " " * depth + "]"
        return json.dumps(value)
    lines = [f"{' ' * (depth + 1)}{json.dumps(key)}: {dump(one, depth + 1)}" for key, one in value.items()]
    return "{\n" + ",\n".join(lines) + "\n" + " " * depth + "}"


def write(recorded):
    order = ["about", "text_sha256", "libm_table", "settings", "demo"]
    recorded["about"] = "Written by golden.py record. Bytes: one number where all ranks have the same."
    RECORDED.write_text(dump({key: recorded[key] for key in order if key in recorded}) + "\n")
    say(f"Wrote {RECORDED}")


def list_settings():
    for name, *lines in SETTINGS:
        for line in lines:
            say(f"{name}: {line}")
    say(f"\nAll have, where they do not say otherwise: {BASE}")
    return 0


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["check", "record", "list"])
    parser.add_argument("--program", help="forebay-gpt, as built")
    parser.add_argument("--only", metavar="NAME", action="append", help="check: this setting only; may be given again")
    parser.add_argument("--demo", action="store_true", help="the demo instead of the small trainings")
    arguments = parser.parse_args()
    if arguments.command == "list":
        return arguments
    if not arguments.program:
        parser.error(f"{arguments.command} needs --program, the path of forebay-gpt")
    if not os.access(arguments.program, os.X_OK):
        parser.error(f"--program {arguments.program}: no program that can be run is there; ./dev build builds it")
    if arguments.only and (arguments.demo or arguments.command == "record"):
        parser.error("--only is for check without --demo; record takes all settings")
    unknown = set(arguments.only or []) - {name for name, *_ in SETTINGS}
    if unknown:
        parser.error(f"--only {', '.join(sorted(unknown))}: no such setting; golden.py list names them")
    if arguments.command == "check" and not RECORDED.exists():
        parser.error(f"{RECORDED} is not there; golden.py record writes it")
    if arguments.demo and DEMO not in (ROOT / "dev").read_text():
        parser.error("./dev demo has other options than DEMO of this script; make them the same")
    return arguments


def main():
    arguments = parse_arguments()
    if arguments.command == "list":
        return list_settings()
    program = os.path.abspath(arguments.program)
    if arguments.demo:
        return check_demo(program) if arguments.command == "check" else record_demo(program)
    if arguments.command == "record":
        return record_settings(program)
    settings = [setting for setting in SETTINGS if not arguments.only or setting[0] in arguments.only]
    return check_settings(program, settings)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Failed as error:
        sys.exit(f"golden.py: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
