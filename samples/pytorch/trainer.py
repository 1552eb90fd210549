"""Hugging Face's Trainer over a sharded model. The two lines that are marked are forebay's.

    torchrun --nproc-per-node 2 samples/pytorch/trainer.py
"""

import argparse
import tempfile

import forebay
import torch
import transformers

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--stage", type=int, default=3)
parser.add_argument("--config", help="a DeepSpeed configuration, ds_config.json, in place of --stage")
arguments = parser.parse_args()


class Data(torch.utils.data.Dataset):
    """Sequences that count up."""

    def __len__(self):
        return 256

    def __getitem__(self, i):
        tokens = (torch.arange(32) + i) % 120 + 1
        return {"input_ids": tokens, "labels": tokens.clone()}


transformers.set_seed(0)  # Every rank starts from the same values.
model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
    vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=32, bos_token_id=0, eos_token_id=0))

options = {"config": arguments.config} if arguments.config else {"stage": arguments.stage, "offload": "optimizer"}
forebay.shard(model, **options)  # 1
optimizer = forebay.AdamW(model, lr=1e-3)  # 2

with tempfile.TemporaryDirectory() as directory:
    trainer = transformers.Trainer(
        model=model, train_dataset=Data(), optimizers=(optimizer, None),
        args=transformers.TrainingArguments(
            output_dir=directory, max_steps=arguments.steps, per_device_train_batch_size=4,
            gradient_accumulation_steps=2, max_grad_norm=1.0, gradient_checkpointing=True, logging_steps=1,
            save_strategy="no", report_to=[],
            use_cpu=not torch.cuda.is_available()))
    trainer.train()
if trainer.is_world_process_zero():
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    print(f"loss {float(losses[0]):.4f} -> {float(losses[-1]):.4f}")
