#!/usr/bin/env python3
"""forebay-gpt beside the same GPT in PyTorch on the CPU: processor time of a training step, in fp32.

    python tests/bench/gpt_vs_torch.py build/release/bin/forebay-gpt --threads 1

Both train 2048 tokens a step with AdamW and a clipped norm, in turn; the medians of the rounds are printed. Processor
time is less disturbed by other programs than wall time, which is printed too (of an idle machine only).
"""

import argparse
import os
import statistics
import subprocess
import sys
import time

LAYERS, HIDDEN, HEADS, VOCABULARY, TOKENS = 4, 384, 6, 256, 2048


def torch_steps(sequence, threads, steps):
    import torch
    from torch import nn
    from torch.nn import functional
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    batch = TOKENS // sequence

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.before_attention, self.before_mlp = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
            self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
            self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

        def forward(self, x):
            parts = self.qkv(self.before_attention(x)).split(HIDDEN, 2)
            heads = [part.view(batch, sequence, HEADS, -1).transpose(1, 2) for part in parts]
            attention = functional.scaled_dot_product_attention(*heads, is_causal=True)
            x = x + self.out(attention.transpose(1, 2).reshape(batch, sequence, HIDDEN))
            return x + self.down(functional.gelu(self.up(self.before_mlp(x)), approximate="tanh"))

    class Gpt(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.positions = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(sequence, HIDDEN)
            self.blocks, self.norm = nn.ModuleList(Block() for _ in range(LAYERS)), nn.LayerNorm(HIDDEN)

        def forward(self, tokens):
            x = self.tokens(tokens) + self.positions.weight
            for block in self.blocks:
                x = block(x)
            return self.norm(x) @ self.tokens.weight.T

    model = Gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for _ in range(steps):
        tokens = torch.randint(0, VOCABULARY, (batch, sequence))
        functional.cross_entropy(model(tokens).view(-1, VOCABULARY), tokens.view(-1)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def seconds(command):
    """The processor time and the wall time of a command."""
    began, before = time.monotonic(), os.times()
    done = subprocess.run(command, capture_output=True, text=True)
    after = os.times()
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    return (after.children_user + after.children_system - before.children_user - before.children_system,
            time.monotonic() - began)


def step_seconds(make_command, steps):
    """A step's share: a long run less one of a single step."""
    first, last = seconds(make_command(1)), seconds(make_command(1 + steps))
    return [(b - a) / steps for a, b in zip(first, last)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", help="forebay-gpt")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=5, help="steps of a run [default: 5]")
    parser.add_argument("--rounds", type=int, default=3, help="rounds in turn [default: 3]")
    parser.add_argument("--sequences", default="128,512,1024,2048", help="tokens of a sample [default: 128,512,1024,2048]")
    arguments = parser.parse_args()

    print("sequence  forebay-gpt s   PyTorch s   PyTorch / forebay-gpt: processor time, wall time")
    for sequence in map(int, arguments.sequences.split(",")):
        def forebay_command(steps):
            return [arguments.program, *f"--layers {LAYERS} --hidden {HIDDEN} --heads {HEADS} --sequence {sequence} --batch "
                    f"{TOKENS // sequence} --steps {steps} --threads {arguments.threads}".split()]

        def torch_command(steps):
            return [sys.executable, __file__, "--torch", str(sequence), str(arguments.threads), str(steps)]

        rounds = [(step_seconds(forebay_command, arguments.steps), step_seconds(torch_command, arguments.steps))
                  for _ in range(arguments.rounds)]
        ours, theirs = (statistics.median(r[i][0] for r in rounds) for i in (0, 1))
        cpu, wall = (statistics.median(r[1][k] / r[0][k] for r in rounds) for k in (0, 1))
        print(f"{sequence:8}  {ours:13.3f}  {theirs:10.3f}   {cpu:.2f}  {wall:.2f}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--torch"]:
        torch_steps(*map(int, sys.argv[2:]))
    else:
        main()
