#!/usr/bin/env python3
"""Measures the training time that a save in the background costs, as a share of a save that is waited for.

A stack of linear layers trains on one core with AdamW. Each round takes the time of one save that is waited for, and
of two equal runs of steps in random order: one begins with a save in the background, the other has none. The cost is
the trimmed mean of their difference. On a quiet machine with two cores or more; it needs PyTorch.

  PYTHONPATH=python python tests/bench/background_save.py --dtype bf16 --stage 2 --batch 16 --rounds 50
"""
import argparse
import os
import random
import statistics
import tempfile
import time


def trimmed_mean(values):
    values = sorted(values)
    cut = len(values) // 10
    return statistics.mean(values[cut:len(values) - cut])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, choices=range(4), default=2)
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="bf16", help="of the parameters (default: bf16)")
    parser.add_argument("--layers", type=int, default=24, help="of 4 * width^2 bytes in fp32 (default: 24)")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=16, help="samples in a step (default: 16)")
    parser.add_argument("--steps", type=int, default=0, help="in each run (default: twice the time of a save)")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--directory", help="where the states go (default: a temporary directory)")
    options = parser.parse_args()
    if min(options.layers, options.width, options.batch, options.rounds) < 1 or options.steps < 0:
        parser.error("--layers, --width, --batch and --rounds are 1 or more, --steps 0 or more")

    import forebay
    import torch
    torch.set_num_threads(1)
    torch.manual_seed(1)
    layers = [torch.nn.Linear(options.width, options.width) for _ in range(options.layers)]
    dtype = torch.bfloat16 if options.dtype == "bf16" else torch.float32
    model = forebay.shard(torch.nn.Sequential(*layers).to(dtype), stage=options.stage, save_async=True)
    optimizer = forebay.AdamW(model, lr=1e-4)
    batch = torch.randn(options.batch, options.width).to(dtype)

    def train(steps):
        for _ in range(steps):
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    def seconds_of(work):
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin

    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        state = os.path.join(directory, "state")
        waited, calls, costs = [], [], []

        def train_and_save(steps):
            begin = time.perf_counter()
            saving = forebay.save(model, state, background=True)
            calls.append(time.perf_counter() - begin)
            train(steps)
            saving.result()

        train(5)
        forebay.save(model, state)
        save_s = seconds_of(lambda: forebay.save(model, state))
        step_s = seconds_of(lambda: train(1))
        steps = options.steps or int(2 * save_s / step_s) + 1
        for _ in range(options.rounds):
            waited.append(seconds_of(lambda: forebay.save(model, state)))
            train(1)
            runs = {}
            for name, work in random.sample([("save", train_and_save), ("none", train)], 2):
                runs[name] = seconds_of(lambda: work(steps))
            costs.append(runs["save"] - runs["none"])
        size = sum(os.path.getsize(os.path.join(at, file)) for at, _, files in os.walk(state) for file in files)

    save_s = statistics.median(waited)
    means = sorted(trimmed_mean(random.choices(costs, k=len(costs))) for _ in range(1000))
    print(f"stage {options.stage}, {options.dtype}, {size / 1e6:.0f} MB of state, step {step_s:.3f} s, {steps} steps a run, "
          f"{options.rounds} rounds")
    print(f"a save that is waited for {save_s:.3f} s, the call of one in the background {statistics.median(calls) * 1e3:.1f} ms")
    print(f"a save in the background costs {trimmed_mean(costs) * 1e3:.1f} ms, {100 * trimmed_mean(costs) / save_s:.1f} % "
          f"(90 % interval: {100 * means[50] / save_s:.1f} to {100 * means[950] / save_s:.1f})")


if __name__ == "__main__":
    main()
