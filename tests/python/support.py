"""Shared by the Python tests: the package on the path, and skips that say their reason and exit with 77."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "python"))


def need(*modules):
    """Ends the program as skipped if a module cannot be imported."""
    for name in modules:
        if importlib.util.find_spec(name) is None:
            skip(f"{sys.executable} has no module {name}; ./dev test-pytorch makes an environment with it")


def need_library():
    """Ends the program as skipped without libforebay-c.so.1."""
    import forebay
    try:
        forebay.version()
    except forebay.Unavailable as error:
        skip(str(error))


def skip(reason):
    print(f"skipped: {reason}", flush=True)
    sys.exit(77)


def torchrun(program, ranks, case, timeout=900):
    """Runs a program with `case` as JSON on ranks of this host. The results that its ranks gave to show()."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nproc-per-node", str(ranks),
         "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", os.path.abspath(program), json.dumps(case)],
        capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=timeout, check=False)
    if done.returncode:
        raise AssertionError(done.stdout + done.stderr)
    return [json.loads(line[len(MARK):]) for line in done.stdout.splitlines() if line.startswith(MARK)]


MARK = "result: "


def show(result):
    """Gives a result of a rank to torchrun()."""
    # All ranks share one pipe: one write each.
    os.write(1, f"\n{MARK}{json.dumps(result)}\n".encode())


def leave():
    """Ends a rank of torch.distributed whose work is done.

    At the end of a rank that still has Gloo's threads, PyTorch may abort when another rank has ended before.
    """
    import torch
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def main():
    unittest.main(verbosity=1)
