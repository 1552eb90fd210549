"""Fine-tunes GPT-2 of transformers on a text, with optimizer states in host memory.

    torchrun --nproc-per-node 2 samples/pytorch/gpt2_finetune.py --weights /data/gpt2 --text book.txt --save state

Without --weights the model is small and random; without --text it learns this file. --weights is a directory with
config.json and *.safetensors. Started again with the same --save, it goes on from the last saved step.
"""

import argparse
import os
import pathlib

import accelerate
import forebay
import torch
import transformers


def count(text):
    """A type of argparse: a whole number of 1 or more."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} was given; use 1 or more")
    return int(text)


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--weights", help="a directory with config.json and *.safetensors")
parser.add_argument("--text", default=__file__, help="the file to learn (default: this one)")
parser.add_argument("--save", help="the directory of the saved state, written every 10 steps and after the last")
parser.add_argument("--steps", type=count, default=20, help="all steps, those of earlier runs included (default: 20)")
parser.add_argument("--length", type=count, default=64, help="tokens of a sequence (default: 64)")
parser.add_argument("--batch", type=count, default=4, help="sequences of a rank in a step (default: 4)")
parser.add_argument("--stage", type=int, choices=range(4), default=3, help="the ZeRO stage (default: 3)")
arguments = parser.parse_args()
rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))

torch.manual_seed(0)
no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
if arguments.weights:
    config = transformers.GPT2Config.from_pretrained(arguments.weights, **no_dropout)
    with accelerate.init_empty_weights():  # No rank ever holds the whole model. Buffers have their values.
        model = transformers.GPT2LMHeadModel(config)
    model.tie_weights()  # init_empty_weights() parts the head from the embedding.
else:
    config = transformers.GPT2Config(vocab_size=256, n_positions=arguments.length, n_embd=64, n_layer=3, n_head=4,
                                     bos_token_id=0, eos_token_id=0, **no_dropout)
    model = transformers.GPT2LMHeadModel(config)

forebay.shard(model, stage=arguments.stage, offload="optimizer")
optimizer = forebay.AdamW(model, lr=3e-4)
if arguments.weights:
    forebay.load(model, arguments.weights)
first = 0
if arguments.save and os.path.exists(os.path.join(arguments.save, "latest")):
    first = forebay.restore(model, arguments.save)["step"]

text = pathlib.Path(arguments.text).read_bytes()  # Bytes are the tokens; a tokenizer fits here.
data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
if len(data) <= arguments.length:
    raise SystemExit(f"--text {arguments.text} has {len(data)} bytes; give more than --length {arguments.length}")
for step in range(first, arguments.steps):
    generator = torch.Generator().manual_seed(step * ranks + rank)
    starts = torch.randint(0, len(data) - arguments.length, (arguments.batch,), generator=generator)
    tokens = torch.stack([data[at:at + arguments.length] for at in starts])
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print(f"step {step}  loss {loss.item():.4f}  gradient norm {optimizer.grad_norm:.3f}", flush=True)
    if arguments.save and ((step + 1) % 10 == 0 or step + 1 == arguments.steps):
        forebay.save(model, arguments.save, {"step": step + 1})

# One prompt on all ranks, so all run the same number of forward passes. For prompts of their own, call
# torch.distributed.init_process_group() first and give synced_gpus=True.
model.eval()
written = model.generate(data[:8][None], max_new_tokens=16, do_sample=False, pad_token_id=0)
if rank == 0:
    print("generated", bytes(written[0].tolist() if config.vocab_size == 256 else []))
    figures = forebay.report(model)["statistics"]
    print(f"device memory: planned {figures['planned']['total']} bytes, measured {figures['peak']['total']} bytes")
