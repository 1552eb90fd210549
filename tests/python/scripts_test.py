"""Training scripts as their libraries document them: transformers' Trainer, TRL, PEFT.

Random small models; nothing is fetched.

Each script runs twice, in plain torch and after forebay.shard(), and logs the same losses.
"""

import os
import sys
import tempfile
import unittest
import warnings

import support

support.need("torch", "transformers", "accelerate")
support.need_library()

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
import transformers

import forebay
import huggingface_test as families

torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)
transformers.logging.set_verbosity_error()
warnings.simplefilter("ignore")

COMMON = dict(max_steps=3, logging_steps=1, learning_rate=1e-3, use_cpu=True, seed=0, per_device_train_batch_size=2,
              report_to=[], save_strategy="no", disable_tqdm=True)


class Examples(torch.utils.data.Dataset):
    """Inputs of one model family."""

    def __init__(self, model, count=16):
        self.rows = []
        for i in range(count):
            row = families.inputs(model, i)
            self.rows.append({name: value[0] for name, value in row.items()})

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def tokenizer():
    """Words of the form "w7", made in memory."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    words = ["<pad>", "<eos>", "<unk>"] + [f"w{i}" for i in range(families.VOCABULARY - 3)]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>",
                                                unk_token="<unk>")


def words(seed, count):
    numbers = torch.randint(0, families.VOCABULARY - 3, (count,), generator=torch.Generator().manual_seed(seed))
    return " ".join(f"w{i}" for i in numbers)


def shard_late(trainer, is_sharded):
    """The lines for a trainer that changes the model when it is made."""
    if is_sharded:
        forebay.shard(trainer.model, stage=3)
        trainer.optimizer = forebay.AdamW(trainer.model, lr=1e-3, weight_decay=0.0)
    return trainer


def optimizers(model, is_sharded, **options):
    """The only lines that differ. Weight decay is off in both: the Trainer leaves it out for some parameters."""
    if not is_sharded:
        return (None, None)
    forebay.shard(model, stage=3, **options)
    return (forebay.AdamW(model, lr=1e-3, weight_decay=0.0), None)


def trained(trainer):
    trainer.train()
    keys = ("loss", "grad_norm", "eval_loss")
    return [{key: float(row[key]) for key in keys if key in row} for row in trainer.state.log_history]


def with_trainer(make):
    def script(is_sharded, directory):
        transformers.set_seed(0)
        model = make()
        data = Examples(model)
        return trained(transformers.Trainer(
            model=model, train_dataset=data, eval_dataset=data, optimizers=optimizers(model, is_sharded),
            args=transformers.TrainingArguments(output_dir=directory, eval_strategy="steps", eval_steps=3, **COMMON)))
    return script


def lora(model):
    import peft
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))


def sft(is_sharded, directory, adapt=None):
    import datasets
    import trl
    transformers.set_seed(0)
    model = families.llama()
    if adapt:
        model = adapt(model)
    rows = datasets.Dataset.from_list([{"text": words(i, 12)} for i in range(16)])
    return trained(trl.SFTTrainer(
        model=model, train_dataset=rows, processing_class=tokenizer(), optimizers=optimizers(model, is_sharded),
        args=trl.SFTConfig(output_dir=directory, max_length=16, bf16=False, **COMMON)))


def dpo(is_sharded, directory, adapt=None):
    import datasets
    import trl
    transformers.set_seed(0)
    model = families.llama()
    reference = None
    if adapt:
        model = adapt(model)
    else:
        torch.manual_seed(1)
        reference = families.llama()
    rows = datasets.Dataset.from_list([{"prompt": words(i, 4), "chosen": " " + words(100 + i, 5),
                                        "rejected": " " + words(200 + i, 6)} for i in range(16)])
    late = adapt is not None  # TRL copies the adapter for the reference.
    trainer = trl.DPOTrainer(
        model=model, ref_model=reference, train_dataset=rows, processing_class=tokenizer(),
        optimizers=(None, None) if late else optimizers(model, is_sharded),
        args=trl.DPOConfig(output_dir=directory, max_length=16, bf16=False, **COMMON))
    return trained(shard_late(trainer, is_sharded) if late else trainer)


SCRIPTS = {
    "gpt2": ((), with_trainer(families.gpt2)),
    "llama": ((), with_trainer(families.llama)),
    "t5": ((), with_trainer(families.t5)),
    "bert": ((), with_trainer(families.bert)),
    "vit": ((), with_trainer(families.vit)),
    "lora": (("peft",), with_trainer(lambda: lora(families.llama()))),
    "sft": (("trl", "datasets"), sft),
    "sft_lora": (("trl", "datasets", "peft"), lambda *of: sft(*of, adapt=lora)),
    "dpo": (("trl", "datasets"), dpo),
    "dpo_lora": (("trl", "datasets", "peft"), lambda *of: dpo(*of, adapt=lora)),
}


class Scripts(unittest.TestCase):
    def compare(self, script):
        logs = []
        for is_sharded in (False, True):
            with tempfile.TemporaryDirectory() as directory:
                logs.append(script(is_sharded, directory))
        plain, seen = logs
        self.assertEqual([set(row) for row in seen], [set(row) for row in plain])
        self.assertGreaterEqual(len([row for row in plain if "loss" in row]), 3)
        for a, b in zip(seen, plain):
            for key, value in b.items():
                self.assertAlmostEqual(a[key], value, delta=2e-6 * abs(value) + 1e-6, msg=key)


def _test(name, needed, script):
    def test(self):
        for module in needed:
            support.importlib.util.find_spec(module) or self.skipTest(f"no module {module}")
        self.compare(script)
    test.__name__ = f"test_{name}"
    return test


for _name, (_needed, _script) in SCRIPTS.items():
    setattr(Scripts, f"test_{_name}", _test(_name, _needed, _script))


if __name__ == "__main__":
    support.main()
