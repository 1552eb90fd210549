"""Models and training loops of the PyTorch tests. Nothing here knows forebay."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

VOCABULARY, LENGTH = 64, 16


class Block(nn.Module):
    def __init__(self, width, heads, dropout):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + F.dropout(self.out(a), self.dropout, self.training)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, layers=3, width=32, tied=True, recompute=None, segment=1, shared_block=False, dropout=0.0):
        super().__init__()
        self.recompute, self.segment = recompute, segment
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        made = [Block(width, 4, dropout) for _ in range(1 if shared_block else layers)]
        self.blocks = nn.ModuleList(made)
        self.uses = [0] * layers if shared_block else list(range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, x, y=None):
        h = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        for at in range(0, len(self.uses), self.segment):
            blocks = [self.blocks[i] for i in self.uses[at:at + self.segment]]
            if self.recompute and self.training and torch.is_grad_enabled():
                h = checkpoint(nn.Sequential(*blocks).forward, h, use_reentrant=self.recompute == "reentrant")
            else:
                for block in blocks:
                    h = block(h)
        logits = self.head(self.norm(h))
        return logits if y is None else F.cross_entropy(logits.flatten(0, 1), y.flatten())


def make(seed=0, frozen=(), **options):
    torch.manual_seed(seed)
    model = GPT(**options)
    for name, p in model.named_parameters():
        p.requires_grad_(not any(name.startswith(part) or part in name.split(".") for part in frozen))
    return model


def batch(step, micro_step, rank=0, size=2):
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro_step + rank)
    tokens = torch.randint(0, VOCABULARY, (size, LENGTH + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def train(model, optimizer, steps=4, micro_steps=2, clip=None, rank=0, backward=None):
    """Losses, norms and evaluations of a plain loop."""
    seen = []
    for step in range(steps):
        for micro_step in range(micro_steps):
            torch.manual_seed(100 * step + micro_step)
            loss = model(*batch(step, micro_step, rank)) / micro_steps
            (loss * getattr(optimizer, "loss_scale", 1)).backward()
            seen.append(loss.item())
        if clip is not None:
            seen.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            seen.append(model(*batch(99, 0)).item())
        model.train()
    return seen
