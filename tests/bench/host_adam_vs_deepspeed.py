#!/usr/bin/env python3
"""The host's AdamW step beside DeepSpeed's, in one process and interleaved.

  host_adam_vs_deepspeed.py [--library build/release/lib/libforebay_host_adam.so] [--elements N] [--rounds N]
                            [--threads N] [--json FILE]

Rows, A B C ... A B C ..., medians of the rounds, ratios of the same round:

  DeepSpeedCPUAdam, fp32                   against ours in fp32                                    bar 1.05
  DeepSpeed's sequence with an offloaded   against our one pass: fp32 gradients                    bar 1.5
  optimizer: multiply the gradient by                            bf16 gradients                    bar 1.7
  1 / scale, step, copy to bf16                                  bf16 gradients, bf16 m and v      bar 2.2

The updates are compared first. Both use the same number of threads; OpenMP's wait passively unless OMP_WAIT_POLICY says
otherwise, since threads that spin after their work would take the processors from ours. Needs PyTorch and DeepSpeed
(PyPI), which compiles its own kernel on first use; without them, or without the library, it says so and exits with 77.
"""
import argparse
import ctypes
import json
import os
import statistics
import sys
import time

CANNOT_RUN = 77
LR, BETA1, BETA2, EPS, DECAY, SCALE = 1e-4, 0.9, 0.999, 1e-8, 0.1, 1024.0


def cannot_run(why):
    print(f"host_adam_vs_deepspeed.py: cannot run: {why}")
    sys.exit(CANNOT_RUN)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = os.path.dirname(os.path.abspath(__file__))
    parser.add_argument("--library", default=os.path.join(here, "../../build/release/lib/libforebay_host_adam.so"))
    parser.add_argument("--elements", type=int, default=1 << 26)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    if options.elements < 1 or options.rounds < 1 or options.threads < 1:
        parser.error("--elements, --rounds and --threads are 1 or more")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        library = ctypes.CDLL(options.library)
    except OSError as error:
        cannot_run(f"{error}; build it with './dev build', or name it with --library")
    try:
        import torch
        import deepspeed
        from deepspeed.ops.adam import DeepSpeedCPUAdam
    except ImportError as error:
        cannot_run(f"PyTorch or DeepSpeed is not installed ({error})")
    torch.set_num_threads(options.threads)

    n = options.elements
    torch.manual_seed(1)
    gradient = torch.randn(n) * SCALE
    parameter = torch.nn.Parameter(torch.randn(n))
    parameter.grad = gradient.clone()
    narrow_gradient = gradient.to(torch.bfloat16)
    narrow = torch.empty(n, dtype=torch.bfloat16)
    narrow_m, narrow_v = torch.zeros(n, dtype=torch.bfloat16), torch.zeros(n, dtype=torch.bfloat16)
    master, m, v = parameter.detach().clone(), torch.zeros(n), torch.zeros(n)
    try:
        peer = DeepSpeedCPUAdam([parameter], lr=LR, betas=(BETA1, BETA2), eps=EPS, weight_decay=DECAY, adamw_mode=True,
                                fp32_optimizer_states=True)
    except Exception as error:  # What compiling an extension may raise is not documented.
        cannot_run(f"DeepSpeed cannot compile its CPU Adam ({error})")

    step = library.forebay_host_adam_step
    pointer, number = ctypes.c_void_p, ctypes.c_double
    step.argtypes = [pointer, ctypes.c_int, pointer, pointer, pointer, ctypes.c_int, pointer, ctypes.c_ulonglong,
                     ctypes.c_ulonglong, ctypes.c_float, number, number, number, number, number, ctypes.c_int]
    steps = 0

    def ours(g, kept_m, kept_v, low, factor):
        nonlocal steps
        steps += 1
        failed = step(g.data_ptr(), g.dtype == torch.bfloat16, master.data_ptr(), kept_m.data_ptr(), kept_v.data_ptr(),
                      kept_m.dtype == torch.bfloat16, low.data_ptr() if low is not None else None, n, steps, factor,
                      LR, DECAY, BETA1, BETA2, EPS, options.threads)
        if failed:
            sys.exit(1)

    # The same update, before anything is timed.
    parameter.grad.mul_(1.0 / SCALE)
    peer.step()
    ours(gradient, m, v, None, 1.0 / SCALE)
    difference = (master - parameter.detach()).abs().max().item()
    print(f"greatest difference after one step of {LR}: {difference:.1e}")
    if difference > 2e-6:
        print("these are not the same updates")
        sys.exit(1)

    unscaled = parameter.grad.clone()

    def sequence():
        parameter.grad.mul_(1.0)  # By a factor that leaves it for the next round: the cost is the same.
        peer.step()
        narrow.copy_(parameter.detach())

    rows = [
        ("DeepSpeedCPUAdam fp32", 28, peer.step),
        ("ours fp32", 28, lambda: ours(unscaled, m, v, None, 1.0)),
        ("DeepSpeed: unscale, step, copy to bf16", 42, sequence),
        ("ours in one pass, fp32 gradients", 30, lambda: ours(gradient, m, v, narrow, 1.0 / SCALE)),
        ("ours in one pass, bf16 gradients", 28, lambda: ours(narrow_gradient, m, v, narrow, 1.0 / SCALE)),
        ("ours in one pass, bf16 gradients, m, v", 20,
         lambda: ours(narrow_gradient, narrow_m, narrow_v, narrow, 1.0 / SCALE)),
    ]
    peers = {1: (0, 1.05), 3: (2, 1.5), 4: (2, 1.7), 5: (2, 2.2)}
    times = [[] for _ in rows]
    for turn in range(options.rounds + 1):
        for i, (_, _, work) in enumerate(rows):
            start = time.perf_counter()
            work()
            if turn > 0:
                times[i].append(time.perf_counter() - start)

    print(f"PyTorch {torch.__version__}, DeepSpeed {deepspeed.__version__}, {n} elements, {options.rounds} rounds, "
          f"{options.threads} threads")
    print(f"{'':42} {'ms':>8} {'Mparam/s':>9} {'GB/s':>7}  times its peer")
    report = []
    for i, (title, size, _) in enumerate(rows):
        seconds = statistics.median(times[i])
        line = f"{title:42} {seconds * 1e3:8.2f} {n / seconds * 1e-6:9.0f} {size * n / seconds * 1e-9:7.1f}"
        entry = {"name": title, "ms": seconds * 1e3, "gb_per_s": size * n / seconds * 1e-9}
        if i in peers:
            other, bar = peers[i]
            ratios = [b / a for a, b in zip(times[i], times[other])]
            ratio = statistics.median(ratios)
            entry.update(ratio=ratio, bar=bar)
            line += (f"  {ratio:.3f} [{min(ratios):.2f}..{max(ratios):.2f}], bar {bar}: "
                     f"{'reached' if ratio >= bar else 'missed'}")
        print(line)
        report.append(entry)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"torch": torch.__version__, "deepspeed": deepspeed.__version__, "elements": n,
                       "threads": options.threads, "rows": report}, file, indent=1)


if __name__ == "__main__":
    main()
