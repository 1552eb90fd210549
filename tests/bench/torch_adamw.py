#!/usr/bin/env python3
"""Measures PyTorch's fused AdamW in the same way as cuda_kernels_bench measures ours, to compare the two.

  torch_adamw.py [--elements N] [--rounds N] [--json FILE]

Rows: fp32 parameters and gradients (28 bytes per parameter, our "adamw fp32"), and the same followed by the cast that
mixed precision needs (6 more; our "adamw fp32 gradient, bf16 parameter" moves 30 in one pass). GB/s counts the
bytes that the formula needs. It needs PyTorch and a CUDA device; without them it says so and exits with 77.
"""
import argparse
import json
import statistics
import sys

CANNOT_RUN = 77


def cannot_run(why):
    print(f"torch_adamw.py: cannot run: {why}")
    sys.exit(CANNOT_RUN)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=1 << 28)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    if options.elements < 1 or options.rounds < 1:
        parser.error("--elements and --rounds are 1 or more")
    try:
        import torch
    except ImportError as error:
        cannot_run(f"PyTorch is not installed ({error})")
    if not torch.cuda.is_available():
        cannot_run("PyTorch sees no CUDA device")

    n = options.elements
    device = torch.device("cuda")
    parameter = torch.nn.Parameter(torch.ones(n, device=device))
    parameter.grad = torch.full((n,), 0.01, device=device)
    narrow = torch.empty(n, dtype=torch.bfloat16, device=device)
    copied = torch.empty(n, device=device)
    optimizer = torch.optim.AdamW([parameter], lr=1e-4, betas=(0.9, 0.999), weight_decay=0.1, fused=True)

    def step_and_cast():
        optimizer.step()
        narrow.copy_(parameter.detach())

    rows = [
        ("copy device to device", 8 * n, lambda: copied.copy_(parameter.grad)),
        ("torch fused AdamW fp32", 28 * n, optimizer.step),
        ("torch fused AdamW fp32, then cast to bf16", 34 * n, step_and_cast),
    ]

    def seconds_of(work, batch):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(batch):
            work()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e-3 / batch

    batches = []
    for _, _, work in rows:
        seconds_of(work, 2)
        batches.append(max(1, min(512, int(0.02 / seconds_of(work, 1)))))
    times = [[] for _ in rows]
    for _ in range(options.rounds):
        for i, (_, _, work) in enumerate(rows):
            times[i].append(seconds_of(work, batches[i]))

    name = torch.cuda.get_device_name(device)
    print(f"PyTorch {torch.__version__} on {name}, {n} elements, {options.rounds} rounds")
    print(f"{'':60} {'ms':>9} {'GB/s':>9} {'of copy':>8}")
    report = []
    for i, (title, size, _) in enumerate(rows):
        seconds = statistics.median(times[i])
        ratios = [size / t / (rows[0][1] / c) for t, c in zip(times[i], times[0])]
        ratio = statistics.median(ratios)
        print(f"{title:60} {seconds * 1e3:9.3f} {size / seconds * 1e-9:9.1f} {ratio:8.3f}")
        report.append({"name": title, "ms": seconds * 1e3, "gb_per_s": size / seconds * 1e-9, "of_copy": ratio})
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"torch": torch.__version__, "device": name, "elements": n, "rows": report}, file, indent=1)


if __name__ == "__main__":
    main()
