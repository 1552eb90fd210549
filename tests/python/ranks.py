"""One rank of training_test.py, started by torchrun: trains models.GPT and shows the result.

    ranks.py '{"options": {...of shard()}, "model": {...}, "clip": 0.5, "micro_steps": 2}'
"""

import json
import os
import sys

import support

import torch

import forebay
import models

torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)


def run(options, model=None, clip=None, micro_steps=2, steps=3):
    """Trains on this rank's batches; what training_test.py compares."""
    made = models.make(**(model or {}))
    forebay.shard(made, **options)
    optimizer = forebay.AdamW(made, lr=1e-2)
    rank = int(os.environ.get("RANK", "0"))
    seen = models.train(made, optimizer, steps=steps, micro_steps=micro_steps, clip=clip, rank=rank)
    return {"rank": rank, "seen": seen, "digest": forebay.digest(made), "norm": optimizer.grad_norm}


if __name__ == "__main__":
    support.show(run(**json.loads(sys.argv[1])))
