"""forebay.lightning.Strategy: the losses of Lightning's own strategies, on one rank and on two under torchrun."""

import json
import logging
import os
import subprocess
import sys
import tempfile
import unittest
import warnings
from unittest import mock

import support

support.need("torch", "pytorch_lightning")
support.need_library()

import pytorch_lightning as pl
import torch

import forebay
import forebay.lightning
import models

torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)
warnings.simplefilter("ignore")
logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)


class Batches(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, i):
        return tuple(one[0] for one in models.batch(i, 0, size=1))


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net, self.scale = models.make(), torch.nn.Parameter(torch.ones(()))  # One parameter is the root's own.
        self.seen = []

    def forward(self, x, y):
        return self.net(x, y) * self.scale

    def training_step(self, batch, _):
        loss = self(*batch)
        self.seen.append(loss.item())
        return loss

    def validation_step(self, batch, _):
        self.seen.append(self(*batch).item())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)]


def fit(directory, options=None, epochs=2, path=None, devices=1, precision="32-true", make=Module):
    """Options: of shard(); None: Lightning's DDP."""
    pl.seed_everything(0)
    module = make()
    trainer = pl.Trainer(
        precision=precision,
        strategy="ddp" if options is None else forebay.lightning.Strategy(**options), devices=devices,
        accelerator="cpu", max_epochs=epochs, limit_train_batches=3, limit_val_batches=1, num_sanity_val_steps=1,
        accumulate_grad_batches=2, gradient_clip_val=0.5, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, default_root_dir=directory)
    data = torch.utils.data.DataLoader(Batches(), batch_size=2)
    trainer.fit(module, data, data, ckpt_path=path)
    if options is not None:
        trainer.validate(module, data, verbose=False)
    return module, trainer


class Lightning(unittest.TestCase):
    def close(self, seen, expected):
        self.assertGreaterEqual(len(seen), len(expected))
        for a, b in zip(seen, expected):
            self.assertLessEqual(abs(a - b), 2e-6 * abs(b), (seen, expected))

    def test_one_rank(self):
        with tempfile.TemporaryDirectory() as directory:
            expected = fit(directory)[0].seen
            for options in ({"stage": 0}, {"stage": 3, "offload": "optimizer"}):
                self.close(fit(directory, options)[0].seen, expected)

    def test_a_run_goes_on_where_it_was_saved(self):
        with tempfile.TemporaryDirectory() as directory:
            whole = fit(directory, {"stage": 3})[0]
            first, trainer = fit(directory, {"stage": 1}, epochs=1)
            path = os.path.join(directory, "last.ckpt")
            trainer.save_checkpoint(path, weights_only=True)
            self.assertEqual(os.listdir(directory), ["last.ckpt"])  # Without moments.
            trainer.save_checkpoint(path)
            rest, trainer = fit(directory, {"stage": 3}, path=path)
            self.assertEqual(forebay.digest(rest), forebay.digest(whole))
            trainer.strategy.remove_checkpoint(path)
            self.assertEqual(os.listdir(directory), [])

    def test_the_learning_rate_goes_on(self):
        with tempfile.TemporaryDirectory() as directory:
            whole, trainer = fit(directory, {"stage": 1}, epochs=6)
            expected = trainer.optimizers[0].param_groups[0]["lr"]
            _, trainer = fit(directory, {"stage": 1}, epochs=3)
            trainer.save_checkpoint(os.path.join(directory, "last.ckpt"))
            os.mkdir(os.path.join(directory, "links"))
            link = os.path.join(directory, "links", "link.ckpt")  # As ModelCheckpoint(save_last="link") makes.
            os.symlink("../last.ckpt", link)
            rest, trainer = fit(directory, {"stage": 1}, epochs=6, path=link)
            self.assertEqual(trainer.optimizers[0].param_groups[0]["lr"], expected)
            self.assertEqual(forebay.digest(rest), forebay.digest(whole))

    def test_a_kill_in_a_save_leaves_the_checkpoint_before_it(self):
        with tempfile.TemporaryDirectory() as directory:
            path = os.path.join(directory, "last.ckpt")
            first, trainer = fit(directory, {"stage": 1}, epochs=1)
            digest = forebay.digest(first)
            trainer.save_checkpoint(path)
            second, trainer = fit(directory, {"stage": 1}, epochs=2, path=path)
            for killed in ("torch.save", "forebay.save"):
                with mock.patch(killed, side_effect=KeyboardInterrupt), self.assertRaises(KeyboardInterrupt):
                    trainer.save_checkpoint(path)
                again, _ = fit(directory, {"stage": 1}, epochs=1, path=path)
                self.assertEqual(forebay.digest(again), digest, killed)
            with open(os.path.join(path + ".forebay", "a file"), "w", encoding="ascii"):
                pass
            trainer.save_checkpoint(path)
            self.assertEqual(len(os.listdir(path + ".forebay")), 1)
            again, _ = fit(directory, {"stage": 1}, epochs=2, path=path)
            self.assertEqual(forebay.digest(again), forebay.digest(second))

    def test_a_checkpoint_within_an_accumulation_changes_nothing(self):
        with tempfile.TemporaryDirectory() as directory:
            def path(steps, batch):
                return os.path.join(directory, f"{steps}-{batch}.ckpt")

            class Saves(Module):
                def on_train_batch_end(self, outputs, batch, index):
                    self.trainer.save_checkpoint(path(self.trainer.global_step, index))

            expected = fit(directory)[0].seen
            whole, _ = fit(directory, {"stage": 2}, make=Saves)
            self.close(whole.seen, expected)
            self.assertEqual(sorted(name for name in os.listdir(directory) if name.endswith(".ckpt")),
                             ["0-0.ckpt", "1-1.ckpt", "2-0.ckpt", "2-2.ckpt", "3-1.ckpt", "4-2.ckpt"])
            second = fit(directory, {"stage": 3}, path=path(2, 0))[0]  # In the second epoch.
            model = forebay.shard(Module(), stage=1)
            forebay.AdamW(model, lr=1e-2)
            forebay.restore(model, path(2, 0) + ".forebay/" + os.listdir(path(2, 0) + ".forebay")[0])
            digest = forebay.digest(model)
            forebay.restore(model, path(2, 2) + ".forebay/" + os.listdir(path(2, 2) + ".forebay")[0])
            self.assertEqual(forebay.digest(model), digest)
            self.assertNotEqual(forebay.digest(second), digest)

    def test_it_validates_tests_and_predicts(self):
        class Steps(Module):
            def test_step(self, batch, _):
                self.seen.append(-self(*batch).item())

            def predict_step(self, batch, _):
                return 2 * self(*batch).item()

        seen, data = [], torch.utils.data.DataLoader(Batches(), batch_size=2)
        for options in (None, {"stage": 3}):
            with tempfile.TemporaryDirectory() as directory:
                module, trainer = fit(directory, options, epochs=1, make=Steps)
                module.seen.clear()
                trainer.test(module, data, verbose=False)
                seen.append(module.seen + trainer.predict(module, data))
        self.assertEqual(len(seen[0]), 24)
        self.close(seen[1], seen[0])
        module = Steps()  # No shard() is needed without fit().
        trainer = pl.Trainer(strategy=forebay.lightning.Strategy(stage=3), devices=1, accelerator="cpu", logger=False,
                             enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False)
        trainer.test(module, data, verbose=False)
        self.assertFalse(hasattr(module, "_forebay"))

    def test_manual_optimization(self):
        class Manual(Module):
            def __init__(self):
                super().__init__()
                self.automatic_optimization = False

            def configure_optimizers(self):
                return torch.optim.AdamW(self.parameters(), lr=1e-2)

            def training_step(self, batch, _):
                optimizer = self.optimizers()
                for _ in range(2):  # Steps of two passes; the root's own parameter is read in each.
                    optimizer.zero_grad()
                    for _ in range(2):
                        loss = (self.net(*batch) * self.scale) / 2
                        self.manual_backward(loss)
                        self.seen.append(loss.item())
                    self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
                    optimizer.step()

        def seen(options=None):
            pl.seed_everything(0)
            module = Manual()
            trainer = pl.Trainer(
                strategy="ddp" if options is None else forebay.lightning.Strategy(**options), devices=1, accelerator="cpu",
                max_epochs=1, limit_train_batches=3, logger=False, enable_progress_bar=False, enable_model_summary=False,
                enable_checkpointing=False)
            trainer.fit(module, torch.utils.data.DataLoader(Batches(), batch_size=2))
            return module.seen

        plain = seen()
        for options in ({"stage": 0}, {"stage": 2, "offload": "optimizer"}, {"stage": 3}):
            with self.subTest(options=options):
                sharded = seen(options)
                self.assertEqual(len(sharded), len(plain))
                for mine, theirs in zip(sharded, plain):
                    self.assertAlmostEqual(mine, theirs, delta=1e-5)

    def test_the_package_that_the_program_imported(self):
        with tempfile.TemporaryDirectory() as directory:
            other = os.path.join(directory, "lightning", "pytorch")
            os.makedirs(other)
            for path, text in ((os.path.dirname(other) + "/__init__.py", ""), (other + "/__init__.py", ""),
                               (other + "/strategies.py", "class DDPStrategy: pass\n")):
                with open(path, "w", encoding="utf-8") as file:
                    file.write(text)
            for first, expected in (("pytorch_lightning", "True"), ("lightning.pytorch", "False")):
                done = subprocess.run(
                    [sys.executable, "-W", "ignore", "-c",
                     f"import sys; sys.path.insert(0, {directory!r}); import {first}; import forebay.lightning as ours\n"
                     "from pytorch_lightning.strategies import DDPStrategy\n"
                     "print(issubclass(ours.Strategy, DDPStrategy))"], capture_output=True, text=True, check=False,
                    env={**os.environ, "PYTHONPATH": str(support.ROOT / "python")}, timeout=300)
                self.assertEqual(done.stdout.splitlines()[-1:], [expected], done.stderr)

    def test_two_optimizers_are_refused(self):
        class Two(Module):
            def __init__(self):
                super().__init__()
                self.automatic_optimization = False

            def configure_optimizers(self):
                return [torch.optim.AdamW(part.parameters()) for part in (self.net.tokens, self.net.blocks)]

        trainer = pl.Trainer(strategy=forebay.lightning.Strategy(stage=1), devices=1, accelerator="cpu", max_epochs=1,
                             logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False)
        with self.assertRaisesRegex(forebay.Unsupported, r"configure_optimizers\(\) gave 2 optimizers; forebay updates by one"):
            trainer.fit(Two(), torch.utils.data.DataLoader(Batches(), batch_size=2))

    def test_a_second_fit_has_a_new_optimizer(self):
        seen = []
        for options in (None, {"stage": 1}):
            with tempfile.TemporaryDirectory() as directory:
                module, trainer = fit(directory, options, epochs=1)
                trainer.fit_loop.max_epochs = 2
                trainer.fit(module, torch.utils.data.DataLoader(Batches(), batch_size=2))
                seen.append(module.seen[-3:])
        self.close(seen[1], seen[0])

    def test_mixed_precision_is_that_of_lightning(self):
        for options in (None, {"stage": 0}):
            with tempfile.TemporaryDirectory() as directory:
                dtypes = set()

                class Watched(Module):
                    def __init__(self):
                        super().__init__()
                        self.net.blocks[0].up.register_forward_hook(lambda module, given, output: dtypes.add(output.dtype))
                fit(directory, options, epochs=1, precision="bf16-mixed", make=Watched)
                self.assertEqual(dtypes, {torch.bfloat16}, options)

    def test_the_loss_of_fp16_parameters_is_scaled(self):
        with tempfile.TemporaryDirectory() as directory:
            expected, _ = fit(directory, {"stage": 0}, epochs=1)
            seen, trainer = fit(directory, {"stage": 0, "dtype": "fp16", "loss_scale": 512}, epochs=1)
        self.assertGreater(trainer.strategy.optimizers[0].grad_norm, 0.1)
        for a, b in zip(seen.seen, expected.seen):
            self.assertAlmostEqual(a, b, delta=0.02 * abs(b))

    def test_two_ranks_under_torchrun(self):
        expected = support.torchrun(__file__, 2, {"options": None})
        digests = set()
        for options in ({"stage": 0}, {"stage": 3}):
            for one in support.torchrun(__file__, 2, {"options": options}):
                self.close(one["seen"], next(plain["seen"] for plain in expected if plain["rank"] == one["rank"]))
                digests.add(one["digest"])
        with tempfile.TemporaryDirectory() as directory:
            for one in support.torchrun(__file__, 2, {"options": {"stage": 3}, "path": os.path.join(directory, "last.ckpt")}):
                digests.add(one["digest"])
            self.assertEqual(os.listdir(directory), [])
        self.assertEqual(len(digests), 1)


def rank(options, path=None):
    """`path`: the run is saved there after its first epoch, and goes on from it."""
    with tempfile.TemporaryDirectory() as directory:
        if path is not None:
            _, trainer = fit(directory, options, epochs=1, devices=2)
            for _ in range(2):
                trainer.save_checkpoint(path)
            trainer.strategy.barrier()
            assert len(os.listdir(path + ".forebay")) == 1
        module, trainer = fit(directory, options, devices=2, path=path)
        if path is not None:
            trainer.strategy.barrier()
            trainer.strategy.remove_checkpoint(path)
    digest = forebay.digest(module) if options is not None else ""
    return {"rank": int(os.environ["RANK"]), "seen": module.seen, "digest": digest}


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1].startswith("{"):
        support.show(rank(**json.loads(sys.argv[1])))
    else:
        support.main()
