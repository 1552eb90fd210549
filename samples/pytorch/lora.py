"""LoRA with PEFT: the frozen model is sharded, and only the adapter has gradients and optimizer states.

    torchrun --nproc-per-node 2 samples/pytorch/lora.py
"""

import argparse
import os

import forebay
import peft
import torch
import transformers

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--weights", help="a directory that transformers loads; default: a small random Llama")
parser.add_argument("--save", help="a directory for the adapter")
parser.add_argument("--steps", type=int, default=10)
arguments = parser.parse_args()
rank = int(os.environ.get("RANK", "0"))

torch.manual_seed(0)
if arguments.weights:
    model = transformers.AutoModelForCausalLM.from_pretrained(arguments.weights)
else:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, bos_token_id=0, eos_token_id=0))
model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))  # It freezes the rest.

forebay.shard(model, stage=3)
optimizer = forebay.AdamW(model, lr=1e-2)

for step in range(arguments.steps):
    generator = torch.Generator().manual_seed(100 * step + rank)
    tokens = (torch.arange(32) + torch.randint(0, 100, (4, 1), generator=generator)) % 100
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print(f"step {step}  loss {loss.item():.4f}")

adapter = peft.get_peft_model_state_dict(model)  # On all ranks: stage 3 gathers.
if rank == 0:
    if arguments.save:
        os.makedirs(arguments.save, exist_ok=True)
        torch.save(adapter, os.path.join(arguments.save, "adapter.pt"))
    total = sum(p.numel() for p in model.parameters())
    print(f"adapter: {sum(value.numel() for value in adapter.values())} of {total} parameters")
    states = forebay.report(model)["plan"]["bytes"]
    print(f"bytes on rank 0: parameters {states['parameters']}, gradients {states['gradients']}, optimizer states "
          f"{states['optimizer']}")
