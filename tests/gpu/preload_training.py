#!/usr/bin/env python3
"""Trains a small transformer in PyTorch for 50 steps, the same way each time, and writes its figures.

    preload_training.py --json FILE

It runs natively and under `forebay run`. The digest is that of the weights; both runs must have the same. It needs a
CUDA device and CUBLAS_WORKSPACE_CONFIG=:4096:8.
"""
import argparse
import hashlib
import json
import time

import torch
from torch import nn

STEPS, WARM_STEPS = 50, 5


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", required=True, metavar="FILE")
    path = parser.parse_args().json
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(1)
    device = torch.device("cuda")
    width, vocabulary = 512, 1024
    layers = [nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True) for _ in range(6)]
    model = nn.Sequential(nn.Embedding(vocabulary, width), *layers, nn.Linear(width, vocabulary)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    generator = torch.Generator().manual_seed(2)
    for step in range(STEPS):
        if step == WARM_STEPS:
            torch.cuda.synchronize()
            start = time.perf_counter()
        # Lengths vary, so that an allocator has work.
        tokens = torch.randint(0, vocabulary, (8, 64 + 16 * (step % 5)), generator=generator).to(device)
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    step_ms = (time.perf_counter() - start) / (STEPS - WARM_STEPS) * 1e3
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().numpy().tobytes())
    free, total = torch.cuda.mem_get_info()
    count = 2000
    start = time.perf_counter()
    for i in range(count):
        torch.empty((1 + i % 7) << 20, dtype=torch.uint8, device=device)
    allocation_us = (time.perf_counter() - start) / count * 1e6
    figures = {"digest": digest.hexdigest(), "loss": loss.item(), "peak_mib": (total - free) >> 20,
               "step_ms": round(step_ms, 3), "allocation_us": round(allocation_us, 2), "torch": torch.__version__}
    with open(path, "w", encoding="utf-8") as file:
        json.dump(figures, file)
    print(json.dumps(figures, indent=1))


main()
