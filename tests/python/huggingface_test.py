"""Models and the Trainer of transformers, accelerate and PEFT, unmodified: the same losses with and without shard().

Small models with random weights; nothing is fetched.
"""

import json
import os
import shutil
import sys
import tempfile
import unittest
import warnings
from unittest import mock

import support

support.need("torch", "transformers", "accelerate")
support.need_library()

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import safetensors.torch
import torch
import transformers

import forebay

torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)
transformers.logging.set_verbosity_error()
warnings.simplefilter("ignore")
# torch 2.4 cannot load a file to the device "cpu:0", which the Trainer of transformers 4.46 asks for, with forebay or without.
torch.serialization.register_package(9, lambda storage: None,
                                     lambda storage, place: storage if place == "cpu:0" else None)

VOCABULARY = 96


def gpt2(dropout=0.0):
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=32, n_embd=32, n_layer=3, n_head=4, resid_pdrop=dropout,
        embd_pdrop=dropout, attn_pdrop=dropout, bos_token_id=0, eos_token_id=0))


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, bos_token_id=0, eos_token_id=0))


def t5():
    return transformers.T5ForConditionalGeneration(transformers.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0))


def bert():
    return transformers.BertForMaskedLM(transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))


def vit():
    return transformers.ViTForImageClassification(transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=64, image_size=16, patch_size=4,
        num_labels=5, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))


def inputs(model, step):
    generator = torch.Generator().manual_seed(step)
    if isinstance(model, transformers.ViTForImageClassification):
        return {"pixel_values": torch.randn(4, 3, 16, 16, generator=generator),
                "labels": torch.randint(0, 5, (4,), generator=generator)}
    tokens = torch.randint(1, VOCABULARY, (2, 16), generator=generator)
    return {"input_ids": tokens, "labels": tokens.clone()}


def losses(make, is_sharded, steps=3, **options):
    torch.manual_seed(0)
    model = make()
    if is_sharded:
        forebay.shard(model, stage=3, **options)
        optimizer = forebay.AdamW(model, lr=1e-3)
    else:
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    seen = []
    for step in range(steps):
        loss = model(**inputs(model, step)).loss
        loss.backward()
        seen.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    return seen, model


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, i):
        tokens = torch.randint(1, VOCABULARY, (16,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": tokens, "labels": tokens.clone()}


def trainer_log(is_sharded, stage=3, again=False, options=None, dropout=0.1, **arguments):
    transformers.set_seed(0)
    model = gpt2(dropout)
    optimizers = (None, None)
    if is_sharded:
        forebay.shard(model, stage=stage, **(options or {}))
        optimizers = (forebay.AdamW(model, lr=1e-3, weight_decay=0.0), None)
    with tempfile.TemporaryDirectory() as directory:
        trainer = transformers.Trainer(
            model=model, train_dataset=Data(), eval_dataset=Data(), optimizers=optimizers,
            args=transformers.TrainingArguments(
                output_dir=directory, max_steps=4, logging_steps=1, learning_rate=1e-3, use_cpu=True, seed=0,
                per_device_train_batch_size=2, report_to=[], save_strategy="no", eval_strategy="steps", eval_steps=2,
                disable_tqdm=True, **arguments))
        trainer.train()
        if again:
            trainer.train()
    log = [{key: row[key] for key in ("loss", "grad_norm", "eval_loss") if key in row}
           for row in trainer.state.log_history]
    return log, forebay.digest(model) if is_sharded else None


def saved_and_resumed(is_sharded, directory):
    """A run of the Trainer's own making, and the rest of it from its first checkpoint."""
    def run(resume):
        transformers.set_seed(0)
        model = gpt2()
        if is_sharded:
            forebay.shard(model, stage=3)
        trainer = transformers.Trainer(
            model=model, train_dataset=Data(), eval_dataset=Data(), args=transformers.TrainingArguments(
                output_dir=directory, max_steps=4, logging_steps=1, learning_rate=1e-3, weight_decay=0.1, use_cpu=True,
                seed=0, per_device_train_batch_size=2, report_to=[], save_strategy="steps", save_steps=2,
                eval_strategy="steps", eval_steps=2, load_best_model_at_end=not resume, disable_tqdm=True))
        trainer.train(resume_from_checkpoint=os.path.join(directory, "checkpoint-2") if resume else None)
        log = [{key: row[key] for key in ("loss", "grad_norm", "eval_loss") if key in row}
               for row in trainer.state.log_history]
        return trainer, model, log

    trainer, model, whole = run(False)
    digests = [forebay.digest(model) if is_sharded else ""]
    trainer, model, resumed = run(True)
    digests.append(forebay.digest(model) if is_sharded else "")
    trainer.save_model(os.path.join(directory, "last"))
    if os.environ.get("RANK", "0") != "0":
        return None
    found = transformers.AutoModelForCausalLM.from_pretrained(os.path.join(directory, "last"))
    return {"whole": whole, "resumed": resumed, "digests": digests,
            "tied": os.path.getsize(os.path.join(directory, "last", "model.safetensors")),
            "sum": sum(p.double().sum().item() for p in found.parameters())}


class Close(unittest.TestCase):
    def close(self, seen, expected):
        self.assertEqual(len(seen), len(expected))
        for a, b in zip(seen, expected):
            self.assertLessEqual(abs(a - b), 2e-6 * max(abs(b), 1e-3), (seen, expected))


class Models(Close):
    def compare(self, make):
        expected, _ = losses(make, False)
        seen, model = losses(make, True)
        self.close(seen, expected)
        return model

    def test_gpt2(self):
        self.compare(gpt2)

    def test_llama(self):
        self.compare(llama)

    def test_t5(self):
        self.compare(t5)

    def test_bert(self):
        self.compare(bert)

    def test_vit(self):
        self.compare(vit)

    def test_gradient_checkpointing_of_both_kinds(self):
        def make(reentrant):
            model = llama()
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
            return model
        for reentrant in (False, True):
            with self.subTest(reentrant):
                self.compare(lambda: make(reentrant))

    def test_generate(self):
        torch.manual_seed(0)
        plain = llama().eval()
        torch.manual_seed(0)
        model = forebay.shard(llama().eval(), stage=3)
        prompt = torch.tensor([[5, 6, 7]])
        expected = plain.generate(prompt, max_new_tokens=8, do_sample=False)
        self.assertTrue(torch.equal(model.generate(prompt, max_new_tokens=8, do_sample=False), expected))


class Adapters(Close):
    def test_lora(self):
        support.importlib.util.find_spec("peft") or self.skipTest("no module peft")
        import peft

        def make():
            return peft.get_peft_model(llama(), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
        expected, plain = losses(make, False)
        seen, model = losses(make, True)
        self.close(seen, expected)
        self.assertEqual(set(peft.get_peft_model_state_dict(model)), set(peft.get_peft_model_state_dict(plain)))


class Accelerate(Close):
    def losses(self, is_sharded, wraps=False):
        import accelerate
        transformers.set_seed(0)
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = llama()
        if is_sharded:
            forebay.shard(model, stage=3)
        if is_sharded and wraps:
            optimizer = forebay.AdamW(model, lr=1e-3)
        else:  # accelerator.prepare() wraps it.
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=4)
        model, optimizer, data, scheduler = accelerator.prepare(
            model, optimizer, torch.utils.data.DataLoader(Data(), batch_size=4), scheduler)
        seen = []
        for batch in data:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    seen.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                seen.append(loss.item())
        return seen

    def test_a_loop_with_accumulation(self):
        expected = self.losses(False)
        self.close(self.losses(True), expected)
        self.close(self.losses(True, wraps=True), expected)

    def test_mixed_precision_is_that_of_accelerate(self):
        import accelerate
        accelerate.state.AcceleratorState._reset_state(True)
        try:
            accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
            for stage in (None, 0, 3):
                model, seen = llama(), set()
                if stage is not None:
                    forebay.shard(model, stage=stage)
                model.lm_head.register_forward_hook(lambda module, given, output: seen.add(output.dtype))
                model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
                if stage == 3:
                    with self.assertRaisesRegex(forebay.Unsupported, "autocast over fp32 parameters"):
                        model(**inputs(model, 0))
                    continue
                loss = model(**inputs(model, 0)).loss
                self.assertEqual((seen, loss.dtype), ({torch.bfloat16}, torch.float32))
                accelerator.backward(loss)
                optimizer.step()
        finally:
            accelerate.state.AcceleratorState._reset_state(True)

    def test_trl_moves_a_reference_model(self):
        support.importlib.util.find_spec("trl") or self.skipTest("no module trl")
        from trl.trainer.callbacks import SyncRefModelCallback
        model, reference = forebay.shard(llama(), stage=3), llama()
        optimizer = forebay.AdamW(model, lr=1e-2)
        for step in range(4):
            model(**inputs(model, step)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        before = {name: value.clone() for name, value in reference.state_dict().items()}
        values = model.state_dict()
        for is_sharded in (False, True):
            if is_sharded:
                reference.load_state_dict(before)
                forebay.shard(reference, stage=3)
                forebay.AdamW(reference)
            SyncRefModelCallback._sync_target_model(model, reference, 0.25)
            for name, value in reference.state_dict().items():
                self.assertTrue(torch.allclose(value, 0.75 * before[name] + 0.25 * values[name]), name)

    def test_a_state_that_accelerate_saved(self):
        import accelerate
        with tempfile.TemporaryDirectory() as directory, warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)  # The moments are saved.
            digests = []
            for is_resumed in (False, True):
                transformers.set_seed(0)
                accelerator = accelerate.Accelerator(cpu=True)
                model = forebay.shard(llama(), stage=3)
                model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
                if is_resumed:
                    accelerator.load_state(directory)
                for step in range(2 if is_resumed else 0, 4):
                    if step == 2 and not is_resumed:
                        for _ in range(2):
                            with mock.patch.object(forebay.torch.state, "save", wraps=forebay.torch.state.save) as save:
                                accelerator.save_state(directory)
                            self.assertEqual(save.call_count, 1)
                    accelerator.backward(model(**inputs(model, step)).loss)
                    optimizer.step()
                    optimizer.zero_grad()
                digests.append(forebay.digest(model))
        self.assertEqual(digests[0], digests[1])

    def test_several_optimizers_of_which_one_scales_its_loss_are_refused(self):
        import accelerate
        accelerator = accelerate.Accelerator(cpu=True)
        model = forebay.shard(llama(), stage=2, dtype="fp16")
        critic = torch.nn.Linear(4, 1)
        model, optimizer, critic, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), critic,
                                                          torch.optim.SGD(critic.parameters(), lr=1.0))
        with self.assertRaisesRegex(forebay.Unsupported, "cannot tell which losses to scale"):
            accelerator.backward(critic(torch.ones(4)).sum())

    def test_other_weights_than_the_moments_have_and_no_moments_are_named(self):
        import accelerate
        for dtype in (torch.float32, torch.bfloat16):
            with self.subTest(dtype), tempfile.TemporaryDirectory() as directory:
                accelerator = accelerate.Accelerator(cpu=True)
                model = forebay.shard(llama().to(dtype), stage=2)
                model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
                for step in range(2):
                    accelerator.backward(model(**inputs(model, step)).loss)
                    optimizer.step()
                    optimizer.zero_grad()
                accelerator.save_state(directory)
                with warnings.catch_warnings():
                    warnings.filterwarnings("error", message="the weights in|there is no")
                    accelerator.load_state(directory)
                path = os.path.join(directory, "model.safetensors")
                weights = safetensors.torch.load_file(path)
                weights["lm_head.weight"] = weights["lm_head.weight"].flip(0).contiguous()  # As of another tokenizer.
                safetensors.torch.save_file(weights, path, metadata={"format": "pt"})
                with self.assertWarnsRegex(UserWarning, "differ from those in the other files of the checkpoint"):
                    accelerator.load_state(directory)
                shutil.rmtree(os.path.join(directory, "forebay_0"))
                with self.assertWarnsRegex(UserWarning, "which has the moments, so they begin at zero"):
                    accelerator.load_state(directory)
                self.assertTrue(torch.equal(model.state_dict()["lm_head.weight"], weights["lm_head.weight"]))


class Trainer(Close):
    def compare(self, **arguments):
        (expected, _), (seen, _) = trainer_log(False, **arguments), trainer_log(True, **arguments)
        self.same_log(seen, expected)

    def same_log(self, seen, expected):
        self.assertEqual([set(row) for row in seen], [set(row) for row in expected])
        for a, b in zip(seen, expected):
            for key in b:
                # The log is rounded.
                self.assertAlmostEqual(float(a[key]), float(b[key]), delta=2e-4 * abs(float(b[key])), msg=key)

    def test_plain(self):
        self.compare()

    def test_accumulation_clipping_and_checkpointing(self):
        self.compare(gradient_accumulation_steps=2, max_grad_norm=0.5, gradient_checkpointing=True)

    def test_the_loss_of_fp16_parameters_is_scaled(self):
        """By accelerate, which the Trainer and TRL call: a program of theirs has no line for that."""
        expected, _ = trainer_log(False, dropout=0.0, max_grad_norm=1.0)
        seen, _ = trainer_log(True, dropout=0.0, max_grad_norm=1.0, options={"dtype": "fp16", "loss_scale": 512})
        for a, b in zip(seen, expected):
            for key in b:
                self.assertAlmostEqual(float(a[key]), float(b[key]), delta=0.02 * float(b[key]), msg=key)

    def test_it_trains_twice(self):
        self.compare(again=True)

    def test_two_ranks_under_torchrun(self):
        [(expected, _)] = self.torchrun({"is_sharded": False})
        digests = set()
        for stage in (0, 2, 3):
            [(seen, digest)] = self.torchrun({"is_sharded": True, "stage": stage})
            self.same_log(seen, expected)
            digests.add(digest)
        [(_, digest)] = self.torchrun({"is_sharded": True, "stage": 3, "gradient_checkpointing": True})
        self.assertEqual(digests, {digest})

    def test_it_makes_the_optimizer_saves_and_resumes(self):
        """On one rank and on two, by the Trainer's defaults: its AdamW, and checkpoints."""
        with tempfile.TemporaryDirectory() as directory:
            results = [saved_and_resumed(False, os.path.join(directory, "plain"))]
            results.append(saved_and_resumed(True, os.path.join(directory, "sharded")))
            for is_sharded in (False, True):
                results += support.torchrun(__file__, 2, {"kind": "saved_and_resumed", "is_sharded": is_sharded,
                                                          "directory": os.path.join(directory, str(is_sharded))})
        for expected, seen in (results[:2], results[2:]):
            for key in ("whole", "resumed"):
                self.same_log(seen[key], expected[key])
            self.assertEqual(seen["digests"][0], seen["digests"][1])
            self.assertEqual(seen["tied"], expected["tied"])
            self.close([seen["sum"]], [expected["sum"]])

    def torchrun(self, case):
        return support.torchrun(__file__, 2, case)


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1].startswith("{"):  # A rank of a test.
        case = json.loads(sys.argv[1])
        result = globals()[case.pop("kind", "trainer_log")](**case)
        if os.environ["RANK"] == "0":
            support.show(result)
    else:
        support.main()
