"""A training loop in plain PyTorch. The three lines that are marked make it forebay's.

    torchrun --nproc-per-node 2 samples/pytorch/minimal.py
"""

import os

import forebay  # 1
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, width=256, layers=4):
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
                                    for _ in range(layers))
        self.head = nn.Linear(width, 256)

    def forward(self, tokens):
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


rank = int(os.environ.get("RANK", "0"))
torch.manual_seed(0)  # Every rank starts from the same values.
model = Model()
model = forebay.shard(model, stage=3, offload="optimizer")  # 2
optimizer = forebay.AdamW(model, lr=1e-3)  # 3: it was torch.optim.AdamW(model.parameters(), lr=1e-3)

for step in range(10):
    generator = torch.Generator().manual_seed(100 * step + rank)
    tokens = torch.randint(0, 256, (4, 64), generator=generator)
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print(f"step {step}  loss {loss.item():.4f}  gradient norm {norm:.3f}")
