"""forebay.shard() on the real engine: one digest over stages, offload and checkpointing, and the losses of plain torch.

One rank in this process; two and three as processes under torchrun.
"""

import collections
import contextlib
import copy
import datetime
import gc
import itertools
import json
import os
import pickle
import re
import resource
import subprocess
import sys
import tempfile
import unittest
import warnings
import weakref
from unittest import mock

import support

support.need("torch")
support.need_library()

import torch

import contract
import forebay
import models
import passes
import ranks
from forebay.torch import memory, sharded, state

torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)


def plain(world=1, micro_steps=2, clip=None, steps=3, **model_options):
    """The same training in plain torch: the gradients of all ranks' batches, averaged."""
    model = models.make(**model_options)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    seen = [[] for _ in range(world)]
    for step in range(steps):
        for micro_step in range(micro_steps):
            for rank in range(world):
                torch.manual_seed(100 * step + micro_step)
                loss = model(*models.batch(step, micro_step, rank)) / micro_steps
                (loss / world).backward()
                seen[rank].append(loss.item())
        if clip is not None:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip).item()
            for one in seen:
                one.append(norm)
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            value = model(*models.batch(99, 0)).item()
        model.train()
        for one in seen:
            one.append(value)
    return model, seen


def torchrun(world, **case):
    results = support.torchrun(os.path.join(os.path.dirname(__file__), "ranks.py"), world, case)
    return sorted(results, key=lambda one: one["rank"])


class Transposed(torch.nn.Linear):
    """Keeps its weight the other way round in a state_dict()."""

    def _save_to_state_dict(self, made, prefix, keep_vars):
        super()._save_to_state_dict(made, prefix, keep_vars)
        made[prefix + "weight"] = made[prefix + "weight"].t().contiguous()

    def _load_from_state_dict(self, values, prefix, *more):
        values[prefix + "weight"] = values[prefix + "weight"].t()
        super()._load_from_state_dict(values, prefix, *more)


class OneRank(unittest.TestCase):
    def close(self, seen, expected):
        self.assertEqual(len(seen), len(expected))
        for a, b in zip(seen, expected):
            self.assertLessEqual(abs(a - b), 1e-6 * abs(b))

    def test_one_digest_for_all_placements(self):
        _, (expected,) = plain()
        digests = {}
        with tempfile.TemporaryDirectory() as files:
            for stage in range(4):
                for offload in ({}, {"offload": "optimizer"},
                                {"offload": "optimizer", "offload_tier": f"nvme:{files}"}):
                    result = ranks.run({"stage": stage, **offload})
                    self.close(result["seen"], expected)
                    digests[stage, str(offload)] = result["digest"]
            digests["parameters"] = ranks.run({"stage": 3, "offload": "optimizer+parameters"})["digest"]
        for kind in ("nonreentrant", "reentrant"):
            for stage in (0, 3):
                digests[kind, stage] = ranks.run({"stage": stage}, {"recompute": kind})["digest"]
        self.assertEqual(len(set(digests.values())), 1, digests)

    def test_one_digest_in_bf16(self):
        digests = {ranks.run({"stage": stage, "dtype": "bf16", "offload": offload})["digest"]
                   for stage in (0, 1, 2, 3) for offload in ("none", "optimizer")}
        self.assertEqual(len(digests), 1)

    def test_one_digest_in_fp16_with_a_loss_scale(self):
        digests, scales = set(), []
        for stage in (0, 3):
            model = forebay.shard(models.make(), stage=stage, dtype="fp16", loss_scale=65536)
            optimizer = forebay.AdamW(model, lr=1e-2)
            for step in range(4):
                (model(*models.batch(step, 0)).float() * optimizer.loss_scale).backward()
                optimizer.step()
                scales.append((optimizer.loss_scale, optimizer.grad_norm is None))
            digests.add(forebay.digest(model))
        self.assertEqual(len(digests), 1)
        self.assertIn((32768.0, True), scales)  # A step was skipped, and the scale was halved.

    def test_a_loss_that_was_not_scaled_is_refused(self):
        model = forebay.shard(models.make(), stage=2, dtype="fp16")
        optimizer = forebay.AdamW(model)
        model(*models.batch(0, 0)).float().backward()
        with self.assertRaisesRegex(forebay.InvalidArgument, r"call \(loss \* optimizer\.loss_scale\)\.backward"):
            optimizer.step()
        optimizer.zero_grad()
        (model(*models.batch(0, 0)).float() * optimizer.loss_scale).backward()
        optimizer.step()

    @unittest.skipUnless(hasattr(torch.optim, "Muon"), "this PyTorch has no Muon")
    def test_muon_beside_adamw(self):
        """Two optimizers of torch and a scheduler, wrapped as one."""
        def made(model, wrap=None):
            tables = {id(p) for part in (model.tokens, model.positions) for p in part.parameters()}
            hidden = [p for p in model.parameters() if p.dim() == 2 and id(p) not in tables]
            muon = torch.optim.Muon(hidden, lr=1e-2, adjust_lr_fn="match_rms_adamw")
            names = {id(p) for p in hidden}
            others = torch.optim.AdamW([p for p in model.parameters() if id(p) not in names], lr=1e-2)
            return muon, others

        digests, losses = set(), []
        with tempfile.TemporaryDirectory() as files:
            for options in ({"stage": 0}, {"stage": 3}, {"stage": 1, "offload": "optimizer"},
                            {"stage": 2, "offload": "optimizer", "offload_tier": f"nvme:{files}"}):
                model = forebay.shard(models.make(), **options)
                muon, others = made(model)
                optimizer = forebay.wrap(muon, others)
                schedule = torch.optim.lr_scheduler.LinearLR(muon, 0.5, 1.0, 4)
                losses.append(models.train(model, optimizer))
                schedule.step()
                self.assertGreater(optimizer.param_groups[0]["lr"], 5e-3)
                self.assertEqual(optimizer.param_groups[1]["lr"], 1e-2)
                digests.add(forebay.digest(model))
        self.assertEqual(len(digests), 1)
        plain = models.make()
        muon, others = made(plain)
        torch.optim.lr_scheduler.LinearLR(muon, 0.5, 1.0, 4)

        class Both:
            def step(self):
                muon.step()
                others.step()

            def zero_grad(self):
                muon.zero_grad()
                others.zero_grad()

        for a, b in zip(losses[0], models.train(plain, Both())):
            self.assertLessEqual(abs(a - b), 1e-2 * abs(b))  # torch's products are bf16.

    def test_muon_by_parameter_groups(self):
        digests = set()
        for grouped in (False, True):
            model = forebay.shard(models.make(tied=False), stage=3)
            tables = {id(p) for part in (model.tokens, model.positions) for p in part.parameters()}
            hidden = [p for p in model.parameters() if p.dim() == 2 and id(p) not in tables]
            others = [p for p in model.parameters() if p.dim() != 2 or id(p) in tables]
            groups = [{"params": others, "use_muon": False}, {"params": hidden}] if grouped else None
            models.train(model, forebay.Muon(model, groups, lr=1e-2))
            digests.add(forebay.digest(model))
        self.assertEqual(len(digests), 1)

    def test_other_optimizers(self):
        class Lion(torch.optim.Optimizer):
            def __init__(self, params, lr):
                super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": 0.1})

        makers = [lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1),
                  lambda params: torch.optim.Adam(params, lr=1e-2, weight_decay=0.1), lambda params: Lion(params, 1e-3)]
        if hasattr(torch.optim, "Adafactor"):  # Since PyTorch 2.5.
            makers.append(lambda params: torch.optim.Adafactor(params, lr=1e-2, weight_decay=0.1))
        for make in makers:
            digests = set()
            with tempfile.TemporaryDirectory() as files:
                for options in ({"stage": 0}, {"stage": 3}, {"stage": 1, "offload": "optimizer"},
                                {"stage": 2, "offload": "optimizer", "offload_tier": f"nvme:{files}"}):
                    model = forebay.shard(models.make(), **options)
                    seen = models.train(model, forebay.wrap(make(model.parameters())))
                    digests.add(forebay.digest(model))
            self.assertEqual(len(digests), 1)
            plain = models.make()
            optimizer = make(plain.parameters())
            if not isinstance(optimizer, Lion):  # torch has none.
                self.close(seen, models.train(plain, optimizer))

    def test_a_parameter_group_without_parameters(self):
        digests = []
        for at in (None, 0, 1):
            model = forebay.shard(models.make(), stage=3)
            groups = [{"params": list(model.parameters())}]
            if at is not None:
                groups.insert(at, {"params": [], "lr": 3.0})
            models.train(model, forebay.AdamW(model, groups, lr=1e-2), steps=2)
            digests.append(forebay.digest(model))
        self.assertEqual(len(set(digests)), 1)

    def test_parameters_are_frozen_and_unfrozen(self):
        results = []
        for stage in (None, 0, 3):
            model = models.make(frozen=["positions"])
            if stage is not None:
                forebay.shard(model, stage=stage, guard=True)
            trainable = [p for p in model.parameters() if p.requires_grad]
            make = torch.optim.SGD if stage is None else forebay.SGD
            optimizer = make(trainable, lr=0.1, momentum=0.9)
            seen = []
            for step in range(4):
                model.tokens.requires_grad_(step != 1)
                model.blocks[0].requires_grad_(step not in (1, 2))
                loss = model(*models.batch(step, 0))
                loss.backward()
                seen += [loss.item(), torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()]
                optimizer.step()
                optimizer.zero_grad()
            results.append(seen)
        self.close(results[1], results[0])
        self.assertEqual(results[1], results[2])
        model.positions.requires_grad_(True)
        with self.assertRaisesRegex(forebay.Unsupported, r"positions\.weight was frozen when the optimizer was made"):
            model(*models.batch(0, 0))
        model.positions.requires_grad_(False)

    def test_a_frozen_model_that_gradients_pass_through(self):
        prompt = torch.nn.Parameter(torch.zeros(4, models.LENGTH, 32))
        model = models.make(frozen=[""])
        forebay.shard(model, stage=3, guard=True, micro_steps=4)
        for step in range(6):
            for block in model.blocks[:1]:
                block(prompt).square().sum().backward()
        self.assertIsNotNone(prompt.grad)
        self.assertEqual(model._forebay.micro_step, 0)

    def test_a_state_is_saved_while_training_goes_on(self):
        digests = []
        with tempfile.TemporaryDirectory() as directory:
            for background in (False, True):
                path = os.path.join(directory, str(background))
                model = forebay.shard(models.make(), stage=1, save_async=background)
                optimizer = forebay.AdamW(model, lr=1e-2)
                models.train(model, optimizer, steps=1)
                saving = forebay.save(model, path, {"epoch": 3}, background=background)
                digests.append(forebay.digest(model))
                models.train(model, optimizer, steps=2)
                if saving is not None:
                    saving.result()
                self.assertEqual(forebay.restore(model, path), {"epoch": 3})
                digests.append(forebay.digest(model))
            self.assertEqual(len(set(digests)), 1)
            model = forebay.shard(models.make())
            with self.assertRaisesRegex(forebay.InvalidArgument, r"shard\(save_async=True\)"):
                forebay.save(model, directory, background=True)

    def test_a_save_in_the_background_has_the_weights_of_its_moment(self):
        for stage, dtype in ((0, "fp32"), (1, "fp32"), (2, "fp32"), (2, "bf16")):
            layers = [torch.nn.Linear(1024, 1024) for _ in range(8)]
            layers[3].requires_grad_(False)
            model = forebay.shard(torch.nn.Sequential(*layers), stage=stage, dtype=dtype, save_async=True)
            optimizer = forebay.SGD(model, lr=0.1)
            model(torch.ones(2, 1024, dtype=next(model.parameters()).dtype)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            expected = [p.detach().clone() for p in model.parameters()]
            with tempfile.TemporaryDirectory() as directory:
                saving = forebay.save(model, directory, background=True)
                for p in reversed(list(model.parameters())):
                    p.data.add_(1)  # As a trainer does that perturbs its weights for a pass.
                saving.result()
                forebay.restore(model, directory)
            for p, value in zip(model.parameters(), expected):
                self.assertTrue(torch.equal(p.detach(), value), (stage, dtype))

    def test_a_call_of_another_thread_is_no_error_of_the_save(self):
        model = forebay.shard(models.make(), save_async=True)
        models.train(model, forebay.AdamW(model, lr=1e-2), steps=1)
        engine = model._forebay.engine
        with tempfile.TemporaryDirectory() as directory:
            saving = forebay.save(model, directory, {"n": 0}, background=True)
            error = forebay.InvalidArgument("forebay_save_end: engine is in another call, of another thread or of a function")
            with mock.patch.object(engine, "save_end", side_effect=error), self.assertRaises(forebay.InvalidArgument):
                saving.result()
            saving.result()
            self.assertEqual(forebay.restore(model, directory), {"n": 0})

    def test_a_save_in_the_background_that_fails_is_told_of_that_state_alone(self):
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)  # The interpreter ignores the signal of it.
        small = (4096, limits[1])
        model = forebay.shard(models.make(), save_async=True)
        models.train(model, forebay.AdamW(model, lr=1e-2), steps=1)
        with tempfile.TemporaryDirectory() as directory:
            forebay.save(model, directory, {"n": 0})
            try:
                resource.setrlimit(resource.RLIMIT_FSIZE, small)
                first = forebay.save(model, directory, {"n": 1}, background=True)
                with self.assertRaisesRegex(forebay.InputOutputError, "before is not saved, and this save was not begun.*File too large"):
                    forebay.save(model, directory, {"n": 2}, background=True)
                second = forebay.save(model, directory, {"n": 3}, background=True)
                with self.assertWarnsRegex(UserWarning, "began to save is not saved: .*File too large"):
                    self.assertEqual(forebay.restore(model, directory), {"n": 0})
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            third = forebay.save(model, directory, {"n": 4}, background=True)
            for saving in (first, first, second):
                with self.assertRaisesRegex(forebay.InputOutputError, "File too large"):
                    saving.result()
            third.result()
            self.assertEqual(forebay.restore(model, directory), {"n": 4})
            third.result()

    def test_values_that_load_state_dict_assigns(self):
        for options in ({"stage": 0}, {"stage": 1, "offload": "optimizer"}, {"stage": 2, "dtype": "bf16"}, {"stage": 3}):
            model = forebay.shard(models.make(), **options)
            optimizer = forebay.AdamW(model, lr=1e-2)
            models.train(model, optimizer, steps=1)
            values = {name: value * 0.5 for name, value in model.state_dict().items()}
            model.load_state_dict(values, assign=True)
            for name, value in model.state_dict().items():
                self.assertTrue(torch.equal(value, values[name]), (options, name))
            models.train(model, optimizer, steps=1)
            if "offload" in options or "dtype" in options:
                with torch.no_grad():
                    next(model.parameters()).mul_(2)
                with self.assertRaisesRegex(forebay.InvalidArgument, "was written in place"):
                    models.train(model, optimizer, steps=1)

    def test_what_cannot_be_pickled_says_so(self):
        model = forebay.shard(torch.nn.Linear(2, 2))
        optimizer = forebay.AdamW(model)
        model(torch.ones(1, 2)).sum().backward()
        for what, text in ((optimizer, "an optimizer of forebay.*forebay.save"), (model.weight.grad, "gradient.* of a sharded model")):
            for copied in (pickle.dumps, copy.deepcopy):
                with self.assertRaisesRegex(forebay.Unsupported, text):
                    copied(what)

    def test_a_deadline_in_seconds_is_named(self):
        with self.assertWarnsRegex(UserWarning, "join_deadline is 20 milliseconds, .* for seconds give a thousand times as much"):
            forebay.shard(models.make(), join_deadline=20)

    def test_a_pass_with_gradients_while_values_are_read_is_refused(self):
        for stage in (0, 3):
            model = forebay.shard(models.make(), stage=stage)
            optimizer = forebay.AdamW(model, lr=1e-2)
            models.train(model, optimizer)
            with self.assertRaisesRegex(forebay.InvalidArgument, r"within forebay\.gathered\(model\), which is for reading"):
                with forebay.gathered(model), torch.enable_grad():
                    model(*models.batch(0, 0))
            models.train(model, optimizer, steps=1)

    def test_options_of_a_wrong_type_are_named(self):
        for options, kind, text in (({"units": 5}, forebay.InvalidArgument, "units is 5; give classes"),
                                    ({"resident": True}, forebay.InvalidArgument, "resident is True; give classes"),
                                    ({"dtype": ["bf16"]}, forebay.InvalidArgument, "dtype is .*; use fp32"),
                                    ({"config": 0}, TypeError, "PathLike object, not int"),  # Not what the program reads.
                                    ({"config": "/nowhere"}, forebay.InputOutputError, "cannot read /nowhere")):
            with self.assertRaisesRegex(kind, text):
                forebay.shard(torch.nn.Linear(2, 2), **options)

    def test_a_scripted_module_is_refused_before_anything_changes(self):
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.jit.script(torch.nn.Linear(2, 2)))
        with self.assertRaisesRegex(forebay.InvalidArgument, "1 is a ScriptModule"):
            forebay.shard(model)
        model(torch.ones(1, 2)).sum().backward()

    def test_gradients_are_divided_and_have_one_norm(self):
        def step(model, optimizer, change):
            model(torch.ones(1, 2)).sum().backward()
            change([p.grad for p in model.parameters()])
            optimizer.step()
            return {name: value.tolist() for name, value in model.state_dict().items()}

        def one_by_one(gradients):
            for gradient in gradients:
                gradient /= 4

        for change in (one_by_one, lambda gradients: torch._foreach_div_(gradients, 4.0)):
            made = []
            for sharded in (False, True):
                torch.manual_seed(0)
                model = torch.nn.Linear(2, 2)
                optimizer = forebay.SGD(forebay.shard(model), lr=0.5) if sharded else torch.optim.SGD(model.parameters(), lr=0.5)
                made.append(step(model, optimizer, change))
            self.assertEqual(*made)
        model(torch.ones(1, 2)).sum().backward()
        with self.assertRaisesRegex(forebay.Unsupported, "norm over a dimension"):
            model.weight.grad.norm(2, dim=1)

    def test_clipping_by_torch(self):
        _, (expected,) = plain(clip=0.5)
        self.close(ranks.run({"stage": 3}, clip=0.5)["seen"], expected)

    def test_models(self):
        for options in ({"tied": False}, {"shared_block": True}, {"frozen": ["tokens", "positions"]},
                        {"recompute": "nonreentrant", "segment": 2, "dropout": 0.1},
                        {"frozen": ["tokens", "positions", "qkv", "up", "down", "norm1", "norm2", "norm"],
                         "tied": False}):
            with self.subTest(options):
                _, (expected,) = plain(**options)
                self.close(ranks.run({"stage": 3}, options)["seen"], expected)

    def test_gathered_values_can_be_written(self):
        for stage in (0, 3):
            model = forebay.shard(models.make(), stage=stage, guard=True)
            forebay.AdamW(model)
            with forebay.gathered(model, write=True):
                model.norm.weight.mul_(3)
                self.assertEqual(model.state_dict()["norm.weight"][0], 3)
            self.assertTrue(torch.equal(model.state_dict()["norm.weight"], torch.full((32,), 3.0)))

    def test_elements_that_are_not_changed_within_gathered_keep_their_masters(self):
        """Else a block in each step, as clamp_() of one weight, would undo what 16 bits do not show of the other steps."""
        for options in ({"dtype": "bf16"}, {"dtype": "fp16"}, {"dtype": "bf16", "offload": "optimizer"},
                        {"dtype": "bf16", "master_weights": False}, {}):
            for stage in (0, 1, 3):
                with self.subTest(options, stage=stage):
                    model = forebay.shard(models.make(), stage=stage, **options)
                    optimizer = forebay.AdamW(model, lr=1e-3)
                    models.train(model, optimizer)
                    trained = forebay.digest(model)
                    with forebay.gathered(model, write=True):
                        pass
                    self.assertEqual(forebay.digest(model), trained)
                    with forebay.gathered(model, write=True):
                        model.norm.bias.clamp_(-5, 5)
                        model.norm.weight.data = model.norm.weight.data * 1
                    self.assertEqual(forebay.digest(model), trained)

                    before = self.masters(model)
                    with forebay.gathered(model, write=True):
                        model.norm.weight[3] = 3
                    after = self.masters(model)
                    self.assertEqual(after["norm.weight"][3], 3)
                    after["norm.weight"][3] = before["norm.weight"][3]
                    for name, master in before.items():
                        self.assertTrue(torch.equal(after[name], master), name)
                    models.train(model, optimizer, steps=1)

    @staticmethod
    def masters(model):
        found = {}
        sharded = model._forebay
        for p in sharded.parameters:
            master = torch.empty(p.shape, dtype=torch.float32)
            sharded.engine.get(*sharded.places[p][0], "fp32", master.data_ptr(), master.numel())
            found[sharded.names[p]] = master
        return found

    def test_a_pass_with_gradients_while_values_are_written_is_refused(self):
        for stage in (0, 2, 3):
            model = forebay.shard(models.make(), stage=stage)
            optimizer = forebay.AdamW(model, lr=1e-2)
            models.train(model, optimizer)
            for call in (lambda: model(*models.batch(0, 0)), lambda: model.norm(torch.ones(1, model.norm.weight.numel()))):
                with self.subTest(stage=stage), forebay.gathered(model, write=True), torch.enable_grad():
                    with self.assertRaisesRegex(forebay.InvalidArgument, r"are being written by gathered\(model, write=True\)"):
                        call()
                    with torch.no_grad():
                        model.norm.weight.fill_(3)
                self.assertEqual(model.state_dict()["norm.weight"][0], 3)
            models.train(model, optimizer, steps=1)

    def test_values_that_cannot_be_set_are_dropped(self):
        for stage in (0, 3):
            model = forebay.shard(models.make(), stage=stage)
            optimizer = forebay.AdamW(model, lr=1e-2)
            models.train(model, optimizer)
            trained = forebay.digest(model)
            with mock.patch.object(sharded.Sharded, "set_value", side_effect=KeyError), self.assertRaises(KeyError):
                with forebay.gathered(model, write=True):
                    model.norm.weight.mul_(3)
            self.assertEqual(forebay.digest(model), trained)
            models.train(model, optimizer, steps=1)

    def test_an_exception_within_gathered_drops_the_writes(self):
        for options in ({}, {"dtype": "bf16"}, {"offload": "optimizer"}):
            for stage in (0, 2, 3):
                with self.subTest(options, stage=stage):
                    model = forebay.shard(models.make(), stage=stage, **options)
                    optimizer = forebay.AdamW(model, lr=1e-3)
                    models.train(model, optimizer)
                    trained = forebay.digest(model)
                    with self.assertRaises(KeyError):
                        with forebay.gathered(model, write=True):
                            model.norm.weight.mul_(3)
                            raise KeyError("a mistake")
                    self.assertEqual(forebay.digest(model), trained)
                    models.train(model, optimizer, steps=1)

    def test_a_step_that_fails_leaves_nothing_for_the_next_of_the_scaler(self):
        """GradScaler gives its factor to the optimizer, and takes it back behind a step() that returns."""
        def train(scaled, fails):
            model = forebay.shard(models.make(), stage=1)
            optimizer = forebay.SGD(model, lr=0.1)
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
            for step in range(4):
                optimizer.zero_grad()
                scaler.scale(model(*models.batch(step, 0))).backward()
                if step == 1 and fails == "in":
                    optimizer.param_groups[0]["lr"] = float("nan")
                if step == 1 and fails == "before":
                    hook = optimizer.register_step_pre_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
                try:
                    scaler.step(optimizer)
                    scaler.update()
                except (forebay.Error, KeyboardInterrupt):
                    self.assertEqual(step, 1)
                    optimizer.param_groups[0]["lr"] = 0.1
                    if fails == "before":
                        hook.remove()
                    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
            return model.state_dict()

        for fails in ("in", "before"):
            with self.subTest(fails=fails):
                expected = train(False, fails)
                for name, value in train(True, fails).items():
                    self.assertLess((value - expected[name]).abs().max(), 1e-6, name)

    def test_weights_loaded_within_gathered_are_exact(self):
        """Then an element that has its value in 16 bits already takes the master that the value gives."""
        for stage in (0, 3):
            digests = []
            for steps in (0, 3):
                model = forebay.shard(models.make(), stage=stage, dtype="bf16")
                initial = {name: value.clone() for name, value in model.state_dict().items()}
                optimizer = forebay.AdamW(model, lr=1e-5)
                if steps:
                    models.train(model, optimizer, steps=steps)
                with forebay.gathered(model, write=True):
                    model.load_state_dict(initial)
                digests.append(forebay.digest(model))
            self.assertEqual(*digests)

    def test_tensors_that_are_assigned_while_values_are_written_are_saved(self):
        """load_state_dict(assign=True) would exchange the parameters, and the engine would go on with the old ones."""
        wanted = {name: torch.full_like(value, 7) for name, value in models.make().state_dict().items()}
        for stage, meta in ((0, False), (0, True), (3, False), (3, True)):
            with torch.device("meta" if meta else "cpu"):
                model = models.make()
            forebay.shard(model, stage=stage, **({"device": "cpu"} if meta else {}))
            with forebay.gathered(model, write=True):
                model.load_state_dict(wanted, assign=True)
            loaded = forebay.shard(models.make(), stage=stage)
            with tempfile.TemporaryDirectory() as directory:
                forebay.save(model, directory)
                forebay.restore(loaded, directory)
            for name, value in loaded.state_dict().items():
                self.assertTrue(torch.equal(value, wanted[name]), (stage, meta, name))

    def test_a_model_that_was_compiled_before_has_an_optimizer(self):
        model = forebay.shard(torch.compile(torch.nn.Linear(4, 4), backend="eager"))
        optimizer = forebay.AdamW(model, lr=0.1)
        before = forebay.digest(model)
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        self.assertNotEqual(forebay.digest(model), before)

    def test_a_parameter_that_was_exchanged_is_not_saved_as_it_was(self):
        for stage in (0, 3):
            model = forebay.shard(models.make(), stage=stage)
            forebay.AdamW(model)
            with self.assertRaisesRegex(forebay.InvalidArgument, r"norm\.weight was replaced or removed after shard"):
                with forebay.gathered(model, write=True):
                    model.norm.weight = torch.nn.Parameter(torch.zeros(32))
            for call in (lambda: forebay.save(model, "/nowhere"), lambda: forebay.digest(model)):
                with self.assertRaisesRegex(forebay.InvalidArgument, r"norm\.weight was replaced or removed after shard"):
                    call()

    def test_values_are_loaded_while_they_are_written(self):
        for stage in (0, 3):
            model = forebay.shard(models.make(), stage=stage, guard=True)
            optimizer = forebay.AdamW(model)
            wanted = {name: torch.full_like(value, 7) for name, value in model.state_dict().items()}
            with forebay.gathered(model, write=True):
                model.load_state_dict(wanted)
                with forebay.gathered(model, write=True):
                    model.norm.weight.fill_(9)
                with forebay.gathered(model):
                    self.assertEqual(model.norm.weight[0], 9)
                for call in (optimizer.step, lambda: forebay.digest(model), lambda: forebay.save(model, "/nowhere"),
                             lambda: forebay.restore(model, "/nowhere")):
                    with self.assertRaisesRegex(forebay.InvalidArgument, "are being written by gathered"):
                        call()
            found = model.state_dict()
            self.assertEqual(found["norm.weight"][0], 9)
            self.assertTrue(torch.equal(found["norm.bias"], wanted["norm.bias"]))

    def test_a_pass_while_values_are_written_has_them(self):
        plain = models.make()
        with torch.no_grad():
            plain.norm.weight.mul_(3)
            expected = plain(*models.batch(0, 0)).item()
        for stage in (0, 3):
            model = forebay.shard(models.make(), stage=stage, guard=True)
            optimizer = forebay.AdamW(model)
            with forebay.gathered(model, write=True):
                model.norm.weight.mul_(3)
                self.assertEqual(model(*models.batch(0, 0)).item(), expected)
            with torch.no_grad():
                self.assertEqual(model(*models.batch(0, 0)).item(), expected)
            models.train(model, optimizer, steps=1)

    def test_values_that_a_block_holds_are_not_written_or_saved(self):
        model = forebay.shard(models.make(), stage=3)
        optimizer = forebay.AdamW(model)
        models.train(model, optimizer)
        state, before = model.state_dict(), forebay.digest(model)
        with tempfile.TemporaryDirectory() as directory:
            for call in (lambda: forebay.gathered(model, write=True).__enter__(), lambda: forebay.save(model, directory), optimizer.step,
                         lambda: model.load_state_dict(state), lambda: forebay.digest(model)):
                with self.assertRaisesRegex(forebay.InvalidArgument, r"and forebay\.gathered\(model\) holds them; do this after"):
                    with forebay.gathered(model):
                        call()
        self.assertEqual(forebay.digest(model), before)
        models.train(model, optimizer, steps=1)

    def test_autocast_over_a_model_in_bf16(self):
        model = forebay.shard(models.make(), stage=3, dtype="bf16")
        forebay.AdamW(model)
        with torch.autocast("cpu", torch.bfloat16):
            model(*models.batch(0, 0)).backward()

    def test_a_state_saved_while_gradients_wait_is_that_of_the_step_before(self):
        digests = []
        for saves in (False, True):
            with tempfile.TemporaryDirectory() as directory:
                model = forebay.shard(models.make(), stage=3, save_async=True)
                optimizer = forebay.AdamW(model, lr=1e-2)
                for step in range(3):
                    if step == 2:
                        before = forebay.digest(model)
                    for k in range(3):
                        loss = model(*models.batch(step, k))
                        if saves and k == 1:  # Between a forward and its backward pass.
                            with self.assertRaisesRegex(forebay.InvalidArgument, "waits for its backward pass"):
                                forebay.save(model, directory)
                        loss.backward()
                        if saves and k == 0:
                            forebay.save(model, directory)
                        elif saves and k == 1:
                            forebay.save(model, directory, background=True).result()
                    optimizer.step()
                    optimizer.zero_grad()
                digests.append(forebay.digest(model))
                if saves:
                    forebay.restore(model, directory)
                    self.assertEqual(forebay.digest(model), before)
        self.assertEqual(digests[0], digests[1])

    def test_values_are_not_replaced_while_gradients_wait(self):
        weights = models.make(seed=1)
        with tempfile.TemporaryDirectory() as directory:
            path = os.path.join(directory, "model.safetensors")
            write_safetensors(path, dict(weights.named_parameters()))
            model = forebay.shard(models.make(), stage=1)
            optimizer = forebay.AdamW(model, lr=1e-2)
            forebay.save(model, directory)
            model(*models.batch(0, 0)).backward()
            for call in (lambda: forebay.load(model, path), lambda: model.load_state_dict(weights.state_dict()),
                         lambda: forebay.restore(model, directory),
                         lambda: forebay.gathered(model, write=True).__enter__()):
                with self.assertRaisesRegex(forebay.InvalidArgument, r"gradients wait for optimizer\.step\(\); call it, or opt"):
                    call()
            optimizer.step()

    def test_values_that_an_exception_keeps_from_being_written(self):
        """The model keeps the values of before, and trains on."""
        for stage in (0, 3):
            model, expected = (forebay.shard(models.make(), stage=stage, guard=True) for _ in range(2))
            optimizers = [forebay.AdamW(one, lr=1e-2) for one in (model, expected)]
            with self.assertRaises(KeyError), forebay.gathered(model, write=True):
                model.norm.weight.mul_(3)
                raise KeyError
            self.assertEqual(forebay.digest(model), forebay.digest(expected))
            self.assertEqual(*(models.train(*one) for one in zip((model, expected), optimizers)))

    def test_values_that_were_collected_for_a_file_are_not_kept(self):
        model = forebay.shard(models.make(), stage=3)
        optimizer = forebay.AdamW(model, lr=1e-2)
        with state.collected(model):
            before = model.state_dict()["norm.weight"]
        models.train(model, optimizer, steps=1)
        after = model.state_dict()["norm.weight"]
        self.assertFalse(torch.equal(after, before))
        with forebay.gathered(model):
            self.assertTrue(torch.equal(after, model.norm.weight))

    def test_buffers_are_saved(self):
        def make():
            torch.manual_seed(1)
            module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
            module.register_buffer("scratch", torch.zeros(2), persistent=False)
            module.register_buffer("turned", torch.zeros(2, 3).t())  # Its elements lie in another order.
            model = forebay.shard(module, stage=1)
            return model, forebay.AdamW(model, lr=0.1)

        with tempfile.TemporaryDirectory() as directory:
            model, optimizer = make()
            for _ in range(3):
                model(torch.randn(8, 4)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            model.scratch.fill_(5)
            model.turned.copy_(torch.arange(6.0).view(3, 2))
            forebay.save(model, directory)
            other, _ = make()
            forebay.restore(other, directory)
            for name, value in model.named_buffers():
                expected = torch.zeros(2) if name == "scratch" else value
                self.assertTrue(torch.equal(dict(other.named_buffers())[name], expected), name)
            other, _ = make()
            other.register_buffer("later", torch.full((2,), 7.0))
            forebay.restore(other, directory)
            self.assertEqual(other.later.tolist(), [7.0, 7.0])  # The state has none.
            other[1].num_batches_tracked = torch.zeros(3)
            with self.assertRaisesRegex(forebay.InvalidArgument, r"num_batches_tracked has shape \[\], and \[3\] in the model"):
                forebay.restore(other, directory)
            large, _ = make()
            large.register_buffer("large", torch.zeros(33 << 20))
            with self.assertRaisesRegex(forebay.InvalidArgument, "the buffers of the model have 1384"):
                forebay.save(large, directory)

    def test_what_no_engine_holds_is_saved(self):
        class Extra(torch.nn.Linear):
            def __init__(self, count, kind):
                super().__init__(4, 4)
                self.count, self.kind = count, kind

            def get_extra_state(self):
                return {"tensor": torch.tensor([self.count]), "json": {"count": self.count}, "object": {self.count}}[self.kind]

            def set_extra_state(self, value):
                self.count = int(value[0] if self.kind == "tensor" else value["count"])

        def make(seed, extra=3, kind="tensor", dense=True, size=4):
            torch.manual_seed(seed)
            module = torch.nn.Sequential(Extra(extra, kind), Extra(extra + 1, "json"))
            module.whole = torch.nn.Parameter(torch.randint(100, (size,)), requires_grad=False)
            module.complex = torch.nn.Parameter(torch.randn(4, dtype=torch.complex64), requires_grad=False)
            module.register_buffer("turned", torch.randn(4, dtype=torch.complex64).conj())
            module.register_buffer("negative", torch.randn(4, dtype=torch.complex64).conj().imag)
            module.register_buffer("odd", torch.ones(2, 2) if dense else torch.ones(2, 2).to_sparse())
            model = forebay.shard(module, stage=1)
            forebay.AdamW(model)
            return model

        with tempfile.TemporaryDirectory() as directory:
            saved, other = make(0), make(1, extra=7)
            forebay.save(saved, directory)
            forebay.restore(other, directory)
            self.assertEqual([module.count for module in other], [3, 4])
            for name in ("whole", "complex", "turned", "negative"):
                self.assertTrue(torch.equal(getattr(other, name), getattr(saved, name)), name)
        with tempfile.TemporaryDirectory() as directory:
            with self.assertRaisesRegex(forebay.InvalidArgument, "odd has the layout torch.sparse_coo, and a state holds dense"):
                forebay.save(make(0, dense=False), directory)
            with self.assertWarnsRegex(UserWarning, "the extra state of 0 is a set that JSON cannot hold, and is not saved"):
                forebay.save(make(0, kind="object"), directory)
        with tempfile.TemporaryDirectory() as directory:
            large = make(0, size=17 << 20)
            with self.assertWarnsRegex(UserWarning, "2 parameters that are no floating-point numbers, whole first, are too large"):
                forebay.save(large, directory)

    def test_writes_that_a_step_would_undo_are_refused(self):
        for options in ({}, {"dtype": "bf16"}, {"stage": 2, "offload": "optimizer"}):
            model = forebay.shard(torch.nn.Linear(4, 4), **options)
            optimizer = forebay.SGD(model, lr=0.5)
            x = torch.ones(2, 4, dtype=model.weight.dtype)

            def step():
                optimizer.zero_grad()
                model(x).sum().backward()
                optimizer.step()

            for _ in range(3):
                step()
            with torch.no_grad():
                model.weight.fill_(1.0)
            if options:  # Else the weights are the masters.
                for use in (step, lambda: forebay.save(model, "nowhere"), lambda: forebay.digest(model)):
                    with self.assertRaisesRegex(forebay.InvalidArgument, "weight was written in place, and steps and saved"):
                        use()
                    optimizer.zero_grad()
                self.assertFalse(os.path.exists("nowhere"))
                with forebay.gathered(model, write=True):
                    pass
            for _ in range(2):
                step()
            self.assertTrue(torch.equal(model.state_dict()["weight"], torch.full((4, 4), -1.0).to(x.dtype)), options)
            model.load_state_dict(dict(model.state_dict()))
            step()
            model.load_state_dict(dict(model.named_parameters()))
            step()
            model.load_state_dict(dict(model.state_dict()))
            if options:
                with torch.no_grad():
                    model.weight.zero_()
                with self.assertRaisesRegex(forebay.InvalidArgument, "weight was written in place"):
                    step()
                optimizer.zero_grad()
            with forebay.gathered(model, write=True):
                model.weight.mul_(2)
            step()

    def test_writes_in_place_that_stage_3_or_a_master_loses_are_refused(self):
        """In a pass after the first steps, in a block that only reads, and of a parameter that was frozen after the first step."""
        def write(weight):
            with torch.no_grad():
                weight.fill_(0.25)

        for options, where in itertools.product(({"stage": 3}, {"stage": 3, "offload": "optimizer"}, {"stage": 2, "offload": "optimizer"}),
                                                ("pass", "block", "frozen")):
            with self.subTest(options, where=where):
                model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
                writes = []
                model[0].register_forward_pre_hook(lambda module, _: write(module.weight) if writes else None)
                forebay.shard(model, **options)
                optimizer = forebay.AdamW(model, lr=1e-2)

                def step():
                    optimizer.zero_grad()
                    model(torch.ones(2, 4)).square().sum().backward()
                    optimizer.step()

                for _ in range(3):
                    step()
                if where == "pass":
                    writes.append(True)
                elif where == "block":
                    with forebay.gathered(model):
                        write(model[0].weight)
                else:
                    model[0].requires_grad_(False)
                    step()
                    with contextlib.nullcontext() if options["stage"] == 2 else forebay.gathered(model):
                        write(model[0].weight)
                with self.assertRaisesRegex(forebay.InvalidArgument, "0.weight was written in place"):
                    step()
                writes.clear()
                optimizer.zero_grad()
                with forebay.gathered(model, write=True):
                    pass
                step()

    def test_weights_are_there_when_a_step_has_returned(self):
        """At stages 0 to 2 the program may read and write them then, as SWA does."""
        def trained(stage):
            torch.manual_seed(0)
            model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(6)])
            if stage is not None:
                forebay.shard(model, stage=stage)
            optimizer = passes.plain_adamw(model) if stage is None else forebay.AdamW(model, lr=1e-2)
            seen = []
            for step in range(6):
                model(torch.ones(2, 512)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                if step > 1:
                    seen.append(model[5].weight.detach().clone())
                    with torch.no_grad():
                        model[4].weight.mul_(0.5)
            return seen

        expected = trained(None)
        for stage in (0, 1, 2):
            for a, b in zip(trained(stage), expected):
                torch.testing.assert_close(a, b, rtol=0, atol=1e-4)

    def test_weights_are_loaded_from_parameters_that_are_released(self):
        for options in ({"stage": 3}, {"stage": 2}):
            torch.manual_seed(0)
            source, target = (forebay.shard(models.make(), **options) for _ in range(2))
            for model in (source, target):
                models.train(model, forebay.AdamW(model, lr=1e-2 if model is source else 1e-3), steps=3)
            self.assertNotEqual(forebay.digest(source), forebay.digest(target))
            target.load_state_dict(dict(source.named_parameters(remove_duplicate=False)))
            self.assertEqual(forebay.digest(source), forebay.digest(target))
            before = forebay.digest(source)
            source.load_state_dict({name: p.detach() for name, p in source.named_parameters(remove_duplicate=False)})
            self.assertEqual(forebay.digest(source), before)

    def test_gradients_that_are_scaled_between_backward_passes_are_refused(self):
        model = forebay.shard(models.make(), stage=2)
        optimizer = forebay.AdamW(model)
        for step in range(2):
            model(*models.batch(step, 0)).backward()
            for p in model.parameters():
                p.grad.mul_(0.5)
            with self.assertRaisesRegex(forebay.Unsupported, "between two backward passes of a step"):
                model(*models.batch(step, 1)).backward()
            optimizer.zero_grad()
            model(*models.batch(step, 0)).backward()
            for p in model.parameters():
                p.grad.mul_(0.5)
            optimizer.step()  # Without zero_grad(): the next step begins with gradients of zero.

    def test_a_write_of_weights_in_a_pass_is_refused(self):
        class Clamped(torch.nn.Linear):
            def forward(self, x):
                with torch.no_grad():
                    self.weight.clamp_(-0.1, 0.1)
                return super().forward(x)

        for stage in (0, 3):
            model = forebay.shard(torch.nn.Sequential(Clamped(4, 4), torch.nn.Linear(4, 1)), stage=stage)
            forebay.SGD(model, lr=0.1)
            with self.assertRaisesRegex(forebay.InvalidArgument, "clamp_.* writes 0.weight within a pass"):
                model(torch.ones(2, 4))

    def test_several_backward_passes(self):
        class Block(torch.nn.Module):
            def __init__(self, uses):
                super().__init__()
                torch.manual_seed(0)
                self.a, self.b, self.uses = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), uses

            def forward(self, x):
                with torch.no_grad():  # A read of weights comes first.
                    scale = self.a.weight.norm()
                for _ in range(self.uses):
                    x = torch.tanh(self.a(x))
                return (self.b(x) * scale).square().sum()

        first, second = torch.full((2, 4), 0.3), torch.full((2, 4), 0.7)

        def losses(model):
            a, b = model(first), model(second)
            a.backward()
            b.backward()

        def retained(model):
            a = model(first)
            for retain in (True, True, False):
                a.backward(retain_graph=retain)

        def both(model):
            a, b = model(first), model(second)
            (a + b).backward(retain_graph=True)
            (a * b).backward()

        def across(model):
            a, b = model(first), model(second)
            a.backward()
            (b + model(first)).backward()

        def trained(run, uses, **options):
            model = Block(uses)
            if options:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # The read of weights.
                    model = forebay.shard(model, **options)
                    optimizer = forebay.SGD(model, lr=0.001)
                    for _ in range(3):
                        run(model)
                        optimizer.step()
                        optimizer.zero_grad()
            else:
                optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
                for _ in range(3):
                    run(model)
                    optimizer.step()
                    optimizer.zero_grad()
            return torch.cat([value.flatten() for value in model.state_dict().values()])

        for uses in (1, 2):
            for run in (losses, retained, both):
                expected = trained(run, uses)
                for options in ({"stage": 0}, {"stage": 2}, {"stage": 3, "guard": True}):
                    with self.subTest(uses=uses, run=run.__name__, **options):
                        self.assertLessEqual((trained(run, uses, **options) - expected).abs().max().item(), 1e-6)
            with self.assertRaisesRegex(forebay.InvalidArgument, "once on the sum of these losses"):
                trained(across, uses, stage=3)

    def test_moments_of_another_optimizer_are_refused(self):
        plain = models.make()
        source = torch.optim.AdamW(plain.parameters(), lr=0.1)
        models.train(plain, source)
        model = forebay.shard(models.make())
        given = torch.optim.AdamW(model.parameters(), lr=0.5)
        optimizer = forebay.wrap(given)
        with self.assertRaisesRegex(forebay.InvalidArgument, "moments of zero"):
            optimizer.load_state_dict(source.state_dict())
        optimizer.load_state_dict({**source.state_dict(), "state": {}})
        self.assertEqual(optimizer.param_groups[0]["lr"], 0.1)
        given.load_state_dict(source.state_dict())
        model(*models.batch(0, 0)).backward()
        with self.assertRaisesRegex(forebay.InvalidArgument, "moments of zero"):
            optimizer.step()

    def test_parameters_that_cannot_be_trained_are_refused(self):
        module = torch.nn.Linear(2, 2)
        module.turn = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
        with self.assertRaisesRegex(forebay.InvalidArgument, "turn is torch.complex64"):
            forebay.shard(module)
        module.turn.requires_grad_(False)
        forebay.shard(module)
        with self.assertRaisesRegex(forebay.InvalidArgument, "has max_norm"):
            forebay.shard(torch.nn.Embedding(4, 2, max_norm=1.0))

    def test_parameters_that_share_elements_are_refused(self):
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        model[1].weight = torch.nn.Parameter(model[0].weight[1:3].detach())
        with self.assertRaisesRegex(forebay.Unsupported, r"0\.weight and 1\.weight share elements"):
            forebay.shard(model)
        both = torch.randn(24)  # Elements of one tensor, and none twice.
        model[0].weight, model[1].weight = (torch.nn.Parameter(part.view(-1, 4)) for part in both.split([16, 8]))
        forebay.shard(model)

    def test_parameters_that_share_elements_with_other_strides_are_refused(self):
        whole = torch.randn(8, 8)
        bits = torch.randn(4, 8, dtype=torch.bfloat16)
        shared = {
            "transposed": (whole, whole.t()), "columns and a row": (whole[:, ::2], whole[5]), "columns": (whole[:, 2:5], whole[:, 4:]),
            "expanded": (whole[:1].expand(4, 8), whole[0, 3:]), "permuted": (whole.view(2, 4, 8).permute(2, 0, 1), whole[7]),
            "of two types": (bits[:, ::2], bits.view(torch.float32)[:, 1:])}
        apart = {
            "halves": whole.split(4), "rows": whole, "interleaved columns": (whole[:, ::2], whole[:, 1::2]),
            "columns": whole.split(3, dim=1), "interleaved rows": (whole[::2], whole[1::2].t()), "one between": (whole[::2, ::2], whole[3]),
            "of two types": (bits[:, :4], bits.view(torch.float32)[:, 2:]), "empty": (whole[:, :0], whole.t(), whole[:, 8:])}

        def model(views):
            made = torch.nn.Module()
            made.views = torch.nn.ParameterList(torch.nn.Parameter(view) for view in views)
            return made

        for name, views in shared.items():
            with self.subTest(name), self.assertRaisesRegex(forebay.Unsupported, r"views\.0 and views\.1 share elements"):
                forebay.shard(model(views), dtype="fp32")
        for name, views in apart.items():
            with self.subTest(name):
                forebay.shard(model(views), dtype="fp32")

    def test_parameters_that_no_optimizer_updates_are_left_out(self):
        for extra in (torch.nn.Parameter(torch.empty(0)), torch.nn.Parameter(torch.arange(3), requires_grad=False)):
            for in_group in (False, True):
                module = torch.nn.Linear(4, 4)
                module.extra = extra
                model = forebay.shard(module, stage=2)
                optimizer = forebay.AdamW([{"params": model.parameters()}] if in_group else model.parameters(), lr=0.1)
                before = forebay.digest(model)
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
                self.assertNotEqual(forebay.digest(model), before)

    def test_a_parameter_of_another_shape_is_refused_before_any_is_restored(self):
        def make(*shape):
            torch.manual_seed(len(shape))
            module = torch.nn.Module()
            module.first, module.last = torch.nn.Parameter(torch.randn(8)), torch.nn.Parameter(torch.randn(*shape))
            model = forebay.shard(module, stage=1)
            forebay.AdamW(model)
            return model

        for saved, own in (((2, 6), (6, 2)), ((2, 6), (12,)), ((12,), (3, 4))):
            with tempfile.TemporaryDirectory() as directory, self.subTest((saved, own)):
                forebay.save(make(*saved), directory)
                model = make(*own)
                before = forebay.digest(model)
                with self.assertRaisesRegex(forebay.InvalidArgument, r"last has the shape .* there and .* here"):
                    forebay.restore(model, directory)
                self.assertEqual(forebay.digest(model), before)

    def test_the_transport_changes_no_plan(self):
        plans = [forebay.plan(torch.nn.Linear(2, 2), **options)["plan"] for options in ({}, {"communicator": "gloo"})]
        self.assertEqual(*plans)

    def test_options_that_have_no_effect_on_a_model_are_refused_with_the_place_where_they_have_one(self):
        for options, remedy in (({"beta1": 0.1}, r"forebay\.AdamW\(model, .*betas="), ({"betas": (0.1, 0.2)}, r"forebay\.AdamW"),
                                ({"epsilon": 1.0}, "eps="), ({"lr": 3}, "lr="), ({"weight_decay": 1}, "weight_decay="),
                                ({"size": 4}, "mpirun"), ({"rank": 0}, "torchrun"), ({"arena_limit": "1KiB"}, "`memory`"),
                                ({"pinned_limit": 1}, "offload_staging"), ({"activation_tier": "cpu"}, "offload_activations"),
                                ({"activation-leases": 2}, "offload_activations"), ({"store_checksums": False}, "offload_tier"),
                                ({"order_of_units": "strict"}, "leave the option out"), ({"device": "meta"}, "use cpu, or cuda:0"),
                                ({"device": "nonsense"}, "nonsense; use cpu")):
            with self.subTest(options), self.assertRaisesRegex(forebay.InvalidArgument, f"^{next(iter(options)).replace('-', '_')} is .*{remedy}"):
                forebay.shard(torch.nn.Linear(2, 2), **options)
            if "device" not in options:
                with self.assertRaisesRegex(forebay.InvalidArgument, remedy if "size" not in options else "ranks"):
                    forebay.plan(torch.nn.Linear(2, 2), **options)
        with self.assertRaisesRegex(forebay.Unsupported, "set_detect_anomaly"):
            forebay.shard(torch.nn.Linear(2, 2), find_non_finite=True)
        model = forebay.shard(torch.nn.Linear(2, 2), store_prefix="mine", order_of_units="recorded", beta1=None, device="cpu")
        self.assertEqual(len(forebay.digest(model)), 32)
        with self.assertRaisesRegex(forebay.InvalidArgument, "ranks"):
            forebay.plan({}, size=3)
        with self.assertRaisesRegex(forebay.InvalidArgument, "offload-tier is '1,2'"):
            forebay.shard(torch.nn.Linear(2, 2), offload_tier=(1, 2))

    def test_a_tier_without_offload_is_refused(self):
        with self.assertRaisesRegex(forebay.InvalidArgument, "nothing is offloaded; add offload"):
            forebay.digest(forebay.shard(torch.nn.Linear(2, 2), offload_tier="nvme:/tmp"))

    def test_files_that_are_not_there_are_errors_of_forebay(self):
        model = forebay.shard(torch.nn.Linear(2, 2))
        with tempfile.TemporaryDirectory() as directory:
            missing = os.path.join(directory, "missing")
            for call in (lambda: forebay.load(model, missing), lambda: forebay.plan(missing)):
                for kind in (forebay.InputOutputError, FileNotFoundError):
                    with self.assertRaisesRegex(kind, f"cannot read {missing}: No such file"):
                        call()
            os.symlink("loop", os.path.join(directory, "loop"))
            with self.assertRaisesRegex(forebay.InputOutputError, "cannot read .*loop: Too many levels"):
                forebay.load(model, os.path.join(directory, "loop"))

    def test_another_models_state_stays(self):
        def make(width):
            model = forebay.shard(torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Linear(width, 4)), save_async=True)
            forebay.AdamW(model)
            return model

        def save_in_background(model, directory):
            forebay.save(model, directory, background=True).result()

        for save in (forebay.save, save_in_background):
            with tempfile.TemporaryDirectory() as directory, self.subTest(save):
                generator, twin, discriminator = make(8), make(8), make(16)
                save(generator, directory)
                with self.assertRaisesRegex(forebay.InvalidArgument, "state of another model of this program.*each model a directory.*drop the other"):
                    save(twin, directory)
                del generator
                with self.assertRaisesRegex(forebay.InvalidArgument, "of another model.*each model a directory"):
                    save(discriminator, directory)
                save(twin, directory)  # It is the only one of its shape now.
                forebay.restore(twin, directory)

    def test_another_tools_directory_stays(self):
        model = forebay.shard(torch.nn.Linear(4, 4))
        with tempfile.TemporaryDirectory() as directory:
            os.makedirs(os.path.join(directory, "global_step10"))
            with open(os.path.join(directory, "latest"), "w", encoding="utf-8") as file:
                file.write("global_step10")
            with self.assertRaisesRegex(forebay.InvalidArgument, "another tool wrote it.*another directory"):
                forebay.save(model, directory)
            self.assertEqual(sorted(os.listdir(directory)), ["global_step10", "latest"])

    def test_a_model_that_waits_for_the_garbage_collector_does_not_keep_its_directory(self):
        gc.disable()
        try:
            with tempfile.TemporaryDirectory() as directory:
                for step in range(3):
                    model = forebay.shard(models.make())
                    optimizer = forebay.AdamW(model)
                    models.train(model, optimizer, steps=1)
                    model.itself = [model]
                    forebay.save(model, directory, step)
                self.assertEqual(forebay.restore(model, directory), 2)
        finally:
            gc.enable()

    def test_more_backward_passes_than_a_step_has(self):
        model = forebay.shard(torch.nn.Linear(2, 2), stage=1, micro_steps=2)
        optimizer = forebay.AdamW(model)
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
        with self.assertRaisesRegex(forebay.InvalidArgument, r"backward pass 3 since .* at most 2; call optimizer.step"):
            model(torch.ones(1, 2))
        optimizer.step()

    def test_save_and_restore_with_the_state_of_the_trainer(self):
        with tempfile.TemporaryDirectory() as directory:
            results = []
            for resumed in (False, True):
                model = forebay.shard(models.make(seed=int(resumed)), stage=3 if resumed else 1)
                optimizer = forebay.AdamW(model, lr=1e-2)
                if resumed:
                    self.assertEqual(forebay.restore(model, directory), {"step": 2})
                else:
                    models.train(model, optimizer, steps=2)
                    for part, named in (({"best": [torch.ones(1)]}, r"state\['best'\]\[0\] is of type Tensor"),
                                        ({(0, 1): 2}, "a key of state is of type tuple")):
                        with self.assertRaisesRegex(forebay.InvalidArgument, named):
                            forebay.save(model, directory, part)
                    forebay.save(model, directory, {"step": 2})
                models.train(model, optimizer, steps=2)
                results.append(forebay.digest(model))
            self.assertEqual(results[0], results[1])

    def test_a_model_on_the_meta_device_takes_values_from_safetensors(self):
        original = models.make()
        with tempfile.TemporaryDirectory() as directory:
            write_safetensors(os.path.join(directory, "model.safetensors"), dict(original.named_parameters()))
            with torch.device("meta"):
                model = models.GPT()
            forebay.shard(model, stage=3)
            optimizer = forebay.AdamW(model, lr=1e-2)
            self.assertEqual(forebay.load(model, directory), [])
            values = model.state_dict()
            for name, value in original.state_dict().items():
                self.assertTrue(torch.equal(values[name], value), name)
            _, (expected,) = plain()
            self.close(models.train(model, optimizer, steps=3), expected)

    def test_a_model_on_the_meta_device_takes_values_from_a_state(self):
        with tempfile.TemporaryDirectory() as directory:
            saved = forebay.shard(models.make(), stage=1)
            forebay.AdamW(saved)
            forebay.save(saved, directory)
            with torch.device("meta"):
                model = models.GPT()
            forebay.AdamW(forebay.shard(model, stage=1))
            forebay.restore(model, directory)
            self.assertEqual(model(*models.batch(0, 0)).item(), saved(*models.batch(0, 0)).item())

    def test_a_directory_with_two_models_is_refused(self):
        with tempfile.TemporaryDirectory() as directory:
            for name in ("model.safetensors", "model_before.safetensors"):
                write_safetensors(os.path.join(directory, name), dict(models.make().named_parameters()))
            model = forebay.shard(models.make(), stage=2)
            with self.assertRaisesRegex(forebay.InvalidArgument, "is in .*model.safetensors and in .*model_before"):
                forebay.load(model, directory)

    def test_files_of_another_kind_are_named(self):
        model = forebay.shard(torch.nn.Linear(2, 2))
        with tempfile.TemporaryDirectory() as directory:
            torch.save(model.state_dict(), os.path.join(directory, "model.pt"))
            with self.assertRaisesRegex(forebay.InvalidArgument, r"torch.load\(\)"):
                forebay.load(model, os.path.join(directory, "model.pt"))
            forebay.save(model, os.path.join(directory, "state"))
            with self.assertRaisesRegex(forebay.InvalidArgument, r"give it to forebay.restore\(\)"):
                forebay.load(model, os.path.join(directory, "state"))

    def test_what_a_file_has_beside_the_model_or_lacks(self):
        whole = dict(models.make(seed=3).named_parameters())
        for has_engine in (False, True):
            model = forebay.shard(models.make(), stage=2)
            if has_engine:
                forebay.AdamW(model)
            with tempfile.TemporaryDirectory() as directory:
                with self.assertRaisesRegex(forebay.InvalidArgument, r"has no \*\.safetensors"):
                    forebay.load(model, directory)
                path = os.path.join(directory, "model.safetensors")
                for change, message in (({"norm.bias": None}, "lacks 1 parameters, norm.bias first"),
                                        ({"norm.bias": torch.ones(31)}, r"norm\.bias has shape \[31\] in .* and \[32\] in the"),
                                        ({"more.bias": torch.ones(3), "norm.other": torch.ones(2)}, "")):
                    tensors = {name: value for name, value in {**whole, **change}.items() if value is not None}
                    write_safetensors(path, tensors)
                    if message:
                        with self.assertRaisesRegex(forebay.InvalidArgument, message):
                            forebay.load(model, path)
                    else:
                        self.assertEqual(forebay.load(model, path), ["more.bias", "norm.other"])
            forebay.AdamW(model)
            for name, value in model.state_dict().items():
                self.assertTrue(torch.equal(value, whole["tokens.weight" if name == "head.weight" else name]), name)

    def test_weights_of_every_type_are_loaded(self):
        torch.use_deterministic_algorithms(False)  # PyTorch 2.4 cannot fill F8.
        try:
            values = {name: torch.tensor([0, 1, 0.5, 3] if dtype.is_floating_point else [0, 1, 1, 0]).to(dtype)
                      for dtype, name in TYPES.items()}
        finally:
            torch.use_deterministic_algorithms(True)
        module = torch.nn.Module()
        for name, value in values.items():
            if value.is_floating_point():
                module.register_parameter(name, torch.nn.Parameter(torch.full((4,), 9.0)))
            else:
                module.register_buffer(name, torch.full((4,), 7).to(value.dtype))
        model = forebay.shard(module, stage=1)
        forebay.AdamW(model)
        with tempfile.NamedTemporaryFile(suffix=".safetensors") as file:
            write_safetensors(file.name, values)
            self.assertEqual(forebay.load(model, file.name), [])
        for name, value in model.state_dict().items():
            self.assertEqual(value.dtype, torch.float32 if values[name].is_floating_point() else values[name].dtype)
            self.assertEqual(value.tolist(), values[name].tolist(), name)

    def test_a_file_that_is_shortened_while_it_is_read(self):
        with tempfile.NamedTemporaryFile(suffix=".safetensors") as file:
            write_safetensors(file.name, {"weight": torch.ones(2, 2), "bias": torch.ones(1 << 20)})
            tensors = state.read_safetensors(file.name)
            self.assertEqual(next(tensors)[1].tolist(), [[1, 1], [1, 1]])
            os.truncate(file.name, 1000)
            with self.assertRaisesRegex(forebay.InvalidArgument, "it was shortened while it was read"):
                next(tensors)

    def test_a_type_that_is_not_read_is_named(self):
        model = forebay.shard(torch.nn.Linear(2, 2), stage=1)
        with tempfile.NamedTemporaryFile(suffix=".safetensors") as file:
            header = {name: {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]} for name in ("bias", "other")}
            text = json.dumps({**header, "bias": {**header["bias"], "shape": [2]}}).encode()
            file.write(len(text).to_bytes(8, "little") + text + b"ab")
            file.flush()
            with self.assertRaisesRegex(forebay.InvalidArgument, "'bias' has type 'F4' in .*, which is not read"):
                forebay.load(model, file.name)

    def test_buffers_come_from_safetensors_and_state_dicts(self):
        class Buffered(models.GPT):
            def __init__(self):
                super().__init__()
                self.register_buffer("scale", torch.full((1,), 2.0))
                self.middle = torch.nn.BatchNorm1d(models.LENGTH)

            def forward(self, x, y):
                return super().forward(x, y) * self.scale

        torch.manual_seed(0)
        original = Buffered()
        original.middle.running_mean.fill_(3.0)
        expected = original(*models.batch(0, 0)).item()
        with tempfile.TemporaryDirectory() as directory:
            values = {name: value for name, value in original.state_dict().items() if value.dtype == torch.float32}
            values["scale"] = values["scale"].half()
            write_safetensors(os.path.join(directory, "model.safetensors"), values)
            for how in ("file", "state", "nothing"):
                with torch.device("meta"):
                    model = Buffered()
                model.middle.num_batches_tracked = torch.tensor(0)
                forebay.shard(model, stage=3)
                forebay.AdamW(model)
                if how == "file":
                    self.assertEqual(forebay.load(model, directory), [])
                elif how == "state":
                    model.load_state_dict(original.state_dict())
                else:
                    with forebay.gathered(model, write=True):
                        for p in model.parameters():
                            p.zero_()
                    with self.assertRaisesRegex(forebay.InvalidArgument, "3 buffers are on the meta device.*middle.run"):
                        model(*models.batch(0, 0))
                    continue
                self.assertLessEqual(abs(model(*models.batch(0, 0)).item() - expected), 1e-6)
                self.assertEqual(model.middle.running_mean[0], 3.0)
                self.assertEqual(model.scale.dtype, torch.float32)

    def test_values_may_be_loaded_before_the_optimizer_is_made(self):
        expected = models.make(seed=1).state_dict()
        model = forebay.shard(models.make(), stage=3)
        model.load_state_dict(expected)
        self.assertTrue(torch.equal(model.state_dict()["norm.weight"], expected["norm.weight"]))
        forebay.AdamW(model, [{"params": [p for p in model.parameters() if p.dim() > 1]},
                              {"params": [p for p in model.parameters() if p.dim() < 2]}])
        for name, value in model.state_dict().items():
            self.assertTrue(torch.equal(value, expected[name]), name)

    def test_one_element_is_loaded_for_a_scalar(self):
        class Scaled(torch.nn.Linear):
            def __init__(self):
                super().__init__(4, 4)
                self.scale = torch.nn.Parameter(torch.tensor(1.0))

        for stage in (0, 3):
            model = forebay.shard(Scaled(), stage=stage)
            forebay.AdamW(model)
            model.load_state_dict({**model.state_dict(), "scale": torch.tensor([3.0])})
            self.assertEqual(model.state_dict()["scale"].item(), 3)

    def test_a_write_in_a_state_dict(self):
        for stage in (0, 3):
            model = models.make()
            forebay.shard(model, stage=stage)
            forebay.AdamW(model)
            given = model.state_dict()
            with torch.no_grad():
                given["norm.weight"].fill_(0.5)
            with self.assertWarnsRegex(UserWarning, "norm.weight was written in what state_dict"):
                model(*models.batch(0, 0))
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                kept = model.state_dict()
                model(*models.batch(0, 0))
                with torch.no_grad():
                    kept["norm.weight"].fill_(0.5)  # An average that the program keeps.
                model(*models.batch(0, 0))
                with forebay.gathered(model, write=True):
                    model.state_dict()["norm.weight"].fill_(0.25)
                    self.assertIs(model.state_dict(keep_vars=True)["norm.weight"], model.norm.weight)
                self.assertEqual(float(model.state_dict()["norm.weight"].mean()), 0.25)
                model.load_state_dict({**kept, "norm.weight": kept["norm.weight"].mul_(2)})
                model(*models.batch(0, 0))
            self.assertEqual(float(model.state_dict()["norm.weight"].mean()), 1)

    def test_a_module_that_makes_its_own_entries_of_a_state_dict(self):
        for stage in range(4):
            torch.manual_seed(1)
            plain = torch.nn.Sequential(Transposed(4, 4), torch.nn.Linear(4, 2))
            plain[1]._register_state_dict_hook(lambda _, made, prefix, __: made.update({prefix + "bias": made[prefix + "bias"].half()}))
            expected = {name: value.clone() for name, value in plain.state_dict().items()}
            model = forebay.shard(plain, stage=stage)
            forebay.AdamW(model)
            given = model.state_dict()
            for name, value in expected.items():
                self.assertTrue(torch.equal(given[name], value) and given[name].dtype == value.dtype, (stage, name))
            model.load_state_dict(given)
            self.assertTrue(torch.equal(model.state_dict()["0.weight"], expected["0.weight"]))
            with state.collected(model):
                self.assertTrue(torch.equal(model.state_dict()["0.weight"], expected["0.weight"]))

    def test_views_of_weights_in_a_state_dict(self):
        Pair = collections.namedtuple("Pair", "first second")

        class Split(torch.nn.Linear):
            def get_extra_state(self):
                return {"first": [self.weight.detach()[0]], "norm": float(self.weight.norm())}

            def set_extra_state(self, value):
                pass

        def split(module, made, prefix, _):
            weight = made.pop(prefix + "weight")
            made.update({prefix + str(i): part for i, part in enumerate(weight.chunk(2))},
                        **{prefix + "t": Pair(weight.t(), 1), "all_" + prefix: weight.detach().numpy()})

        def make():
            torch.manual_seed(1)
            layers = torch.nn.ModuleList(Split(4, 4) for _ in range(6))
            for layer in layers:
                layer._register_state_dict_hook(split)
            return torch.nn.Sequential(*layers)

        def flat(made):
            return [(name, *([value["first"][0], value["norm"]] if isinstance(value, dict) else value if isinstance(value, Pair) else [value]))
                    for name, value in made.items()]

        expected = make().state_dict()
        for stage in (2, 3):
            model = forebay.shard(make(), stage=stage)
            forebay.AdamW(model)
            for within in (contextlib.nullcontext(), state.collected(model)):
                with within:
                    given = model.state_dict()
                self.assertEqual(list(given), list(expected))
                for one, other in zip(flat(given), flat(expected)):
                    self.assertTrue(all(torch.equal(*map(torch.as_tensor, pair)) for pair in zip(one[1:], other[1:])), (stage, one[0]))

    def test_extra_states_of_weights_are_saved(self):
        class Marked(torch.nn.Linear):
            def get_extra_state(self):
                return self.weight.detach()[0]

            def set_extra_state(self, value):
                self.loaded = value

        for stage in (2, 3):
            model = forebay.shard(torch.nn.Sequential(*(Marked(4, 4) for _ in range(6))), stage=stage)
            optimizer = forebay.AdamW(model)
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            with tempfile.TemporaryDirectory() as directory:
                forebay.save(model, directory)
                forebay.restore(model, directory)
            for i, layer in enumerate(model):
                self.assertTrue(torch.equal(layer.loaded, model.state_dict()[f"{i}.weight"][0]), (stage, i))

    def test_an_extra_state_of_another_modules_weights_is_refused(self):
        class Outer(torch.nn.Sequential):
            def get_extra_state(self):
                return self[0].weight.detach()[0]

            def set_extra_state(self, value):
                pass

        model = forebay.shard(Outer(*(torch.nn.Linear(4, 4) for _ in range(4))), stage=3)
        forebay.AdamW(model)
        model(torch.ones(1, 4)).sum().backward()
        with tempfile.TemporaryDirectory() as directory:
            with self.assertRaisesRegex(forebay.Unsupported, "extra state of the model is a view of weights of another module"):
                forebay.save(model, directory)

    def test_a_hook_before_a_load_that_was_registered_late(self):
        for options in ({"stage": 1, "offload": "optimizer"}, {"stage": 2, "dtype": "bf16"}, {"stage": 3}):
            model = forebay.shard(models.make(), **options)
            optimizer = forebay.SGD(model, lr=0.0)
            model.norm.register_load_state_dict_pre_hook(
                lambda _, values, prefix, *__: values.update({prefix + "bias": values[prefix + "bias"] * 0 + 3}))
            model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
            models.train(model, optimizer, steps=1)
            self.assertEqual(model.state_dict()["norm.bias"].unique().tolist(), [3], options)

    def test_state_that_json_would_change_is_refused(self):
        model = forebay.shard(torch.nn.Linear(2, 2))
        forebay.AdamW(model)
        with tempfile.TemporaryDirectory() as directory:
            for given, finding in (({"best": {1: 0.5}}, r"a key of state\['best'\] is of type int"),
                                   ({"seen": {1}}, r"state\['seen'\] is of type set")):
                with self.assertRaisesRegex(forebay.InvalidArgument, finding):
                    forebay.save(model, directory, given)
            forebay.save(model, directory, {"best": {"1": 0.5}})
            self.assertEqual(forebay.restore(model, directory), {"best": {"1": 0.5}})

    def test_what_a_gradient_cannot_take(self):
        model = forebay.shard(models.make(), stage=1)
        optimizer = forebay.SGD(model, lr=0.1)
        model(*models.batch(0, 0)).backward()
        gradient = next(model.parameters()).grad
        for refused in (lambda: setattr(gradient, "data", torch.zeros_like(gradient, device="meta")),
                        lambda: gradient.div_(2, rounding_mode="floor")):
            with self.assertRaises(forebay.Unsupported):
                refused()
        for p in model.parameters():
            p.grad.data *= -0.5
        with self.assertRaisesRegex(forebay.Unsupported, "multiplied by -0.5; .* negate the loss"):
            optimizer.step()

    def test_tied_parameters_stay_tied_in_a_state_dict(self):
        model = forebay.shard(models.make(), stage=3)
        forebay.AdamW(model)
        first, second = model.state_dict(), model.state_dict()
        self.assertIs(first["tokens.weight"], first["head.weight"])
        self.assertIsNot(first["tokens.weight"], second["tokens.weight"])

    def test_evaluation_first_in_inference_mode(self):
        plain, model = models.make(), forebay.shard(models.make(), stage=3)
        with torch.inference_mode():
            self.assertEqual(model(*models.batch(0, 0)).item(), plain(*models.batch(0, 0)).item())
        models.train(model, forebay.AdamW(model), steps=1)

    def test_evaluation_in_inference_mode_after_each_step(self):
        results = []
        for is_sharded in (False, True):
            model, seen = models.make(), []
            if is_sharded:
                model = forebay.shard(model, stage=3)
            optimizer = forebay.AdamW(model) if is_sharded else contract.AdamW(model.parameters(), lr=1e-3)
            for step in range(4):
                model(*models.batch(step, 0)).backward()
                optimizer.step()
                optimizer.zero_grad()
                with torch.inference_mode():
                    seen.append(model(*models.batch(99, 0)).item())
                seen.append(torch.zeros(1).item())  # torch works on.
            results.append(seen)
        self.close(*results)

    def test_penalties_on_gradients(self):
        """Below stage 3 weights stay, so a backward pass over a backward pass finds them."""
        def trained(**options):
            torch.manual_seed(0)
            model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
            optimizer = forebay.AdamW(forebay.shard(model, **options)) if options else contract.AdamW(model.parameters(), lr=1e-3)
            seen = []
            for step in range(6):
                x = torch.full((2, 4), 0.1 * step + 0.1, requires_grad=True)
                y = model(x)
                loss = (y - 1).square().mean()
                if step % 2 == 0:
                    gradient, = torch.autograd.grad(y.sum(), x, create_graph=True)
                    loss = loss + gradient.square().sum()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                seen.append(loss.item())
            return seen

        expected = trained()
        for stage in (0, 1, 2):
            self.close(trained(stage=stage), expected)
        with self.assertRaisesRegex(forebay.Unsupported, r"create_graph=True.*use shard\(stage=2\)"):
            trained(stage=3)

    def test_weights_with_fewer_bytes_than_their_shape_are_refused(self):
        original = models.make()
        with tempfile.TemporaryDirectory() as directory:
            path = os.path.join(directory, "model.safetensors")
            write_safetensors(path, dict(original.named_parameters()))
            model = forebay.shard(models.make(), stage=2)
            forebay.AdamW(model)
            with open(path, "rb") as file:
                whole = file.read()
            length = int.from_bytes(whole[:8], "little")
            header = json.loads(whole[8:8 + length])
            for begin, end in [(0, 0), (0, 4), (-8, 0), (1 << 40, 1 << 41)]:
                changed = dict(header)
                name = next(iter(changed))
                changed[name] = {**changed[name], "data_offsets": [begin, end]}
                text = json.dumps(changed).encode()
                with open(path, "wb") as file:
                    file.write(len(text).to_bytes(8, "little") + text + whole[8 + length:])
                with self.assertRaisesRegex(forebay.InvalidArgument, "has not the bytes of its shape"):
                    forebay.load(model, path)

    def test_weights_whose_file_was_cut_off_are_refused(self):
        values = dict(models.make().named_parameters())
        model = forebay.shard(models.make(), stage=2)
        forebay.AdamW(model)
        with tempfile.TemporaryDirectory() as directory:
            path = os.path.join(directory, "model.safetensors")
            write_safetensors(path, values)
            whole = os.path.getsize(path)
            for size in (whole - 1, whole - 4):
                os.truncate(path, size)
                with self.assertRaisesRegex(forebay.InvalidArgument, "has not the bytes of its shape"):
                    forebay.load(model, path)

    def test_a_state_of_another_interface_is_refused_in_a_sentence(self):
        for text in (b"step 7", b"[]", b"{\"parameters\": 1}", b"{\"parameters\": {\"a\": 1}}", b"[" * 100_000):
            model = forebay.shard(models.make(), stage=2)
            forebay.AdamW(model)
            forebay.digest(model)
            with tempfile.TemporaryDirectory() as directory, self.subTest(text[:20]):
                model._forebay.engine.save(directory, text)
                with self.assertRaisesRegex(forebay.InvalidArgument, "not saved by forebay.save"):
                    forebay.restore(model, directory)

    def test_hostile_safetensors_are_refused_in_a_sentence(self):
        one = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
        headers = [b"[" * 100_000, b"{", b"\xff" * 8, b"[]", b"null", json.dumps({"a": 1}).encode(), b" " * (17 << 20)]
        headers += [json.dumps({"\x1b[2J" + "x" * 100_000: {**one, **change}}).encode() for change in (
            {"shape": None}, {"shape": "1"}, {"shape": [-1]}, {"shape": [1.0]}, {"shape": [True]}, {"shape": [2**70]},
            {"shape": [2**62, 2**62]}, {"shape": [0, -5], "data_offsets": [0, 0]}, {"data_offsets": None},
            {"data_offsets": [0]}, {"data_offsets": [0, "4"]}, {"data_offsets": [4, 0]}, {"data_offsets": [0, 2**70]},
            {"shape": [0] + [2**40] * 3, "data_offsets": [0, 0]})]
        twice = json.dumps(one).encode()
        headers.append(b'{"norm.weight": %s, "norm.weight": %s}' % (twice, twice))
        model = forebay.shard(models.make(), stage=2)
        forebay.AdamW(model)
        with tempfile.TemporaryDirectory() as directory:
            path = os.path.join(directory, "model.safetensors")
            for header in headers:
                with open(path, "wb") as file:
                    file.write(len(header).to_bytes(8, "little") + header + bytes(4))
                with self.subTest(header[:60]), self.assertRaisesRegex(forebay.InvalidArgument, "no whole") as caught:
                    forebay.load(model, path)
                self.assertLess(len(str(caught.exception)), 500)
                self.assertNotIn("\x1b", str(caught.exception))
            for other in (b"", b"\x01" * 7, (2**63).to_bytes(8, "little")):
                with open(path, "wb") as file:
                    file.write(other)
                with self.assertRaisesRegex(forebay.InvalidArgument, "longer than the file"):
                    forebay.load(model, path)
            os.remove(path)
            os.mkfifo(path)
            for special in (path, directory, "/dev/zero"):
                with self.assertRaisesRegex(forebay.InvalidArgument, "no regular file"):
                    forebay.load(model, special)

    def test_reports_and_plans_agree(self):
        model = forebay.shard(models.make(), stage=2)
        forebay.AdamW(model)
        found = forebay.report(model)
        planned = forebay.plan(models.make(), ranks=1, stage=2)
        self.assertEqual(planned["plan"]["bytes"], found["plan"]["bytes"])
        self.assertEqual({unit["name"] for unit in found["model"]["units"] if not unit["backward_reads_parameters"]},
                         {"tokens", "positions"})
        planned = forebay.plan(models.make(), stage=3, resident=["blocks.0"], units="Linear")
        self.assertEqual([unit["name"] for unit in planned["model"]["units"]][:3], ["model", "tokens", "positions"])
        self.assertNotIn("blocks.0.up", {unit["name"] for unit in planned["model"]["units"]})
        with torch.device("meta"):
            large = models.GPT(layers=24, width=1024)
        planned = forebay.plan(large, ranks=64, stage=3, dtype="bf16", units=["Block"])
        self.assertEqual(sum(len(unit["parameters"]) for unit in planned["model"]["units"]),
                         len(list(large.parameters())))

    def test_a_model_that_is_dropped_gives_its_memory_back(self):
        """As a cell of a notebook that runs again. A gradient is there, and the guard is on."""
        for steps in (0, 1):
            model = forebay.shard(models.make(), stage=3)
            optimizer = forebay.AdamW(model, lr=1e-2)
            models.train(model, optimizer, steps=steps)
            model(*models.batch(0, 0)).backward()
            dropped = weakref.ref(model), weakref.ref(model._forebay.engine)
            del model, optimizer
            gc.collect()
            self.assertEqual([one() for one in dropped], [None, None])

    def test_a_view_outlives_its_model(self):
        program = ("import gc, models, forebay\n"
                   "model = forebay.shard(models.make(), stage=0)\n"
                   "optimizer = forebay.AdamW(model)\n"
                   "with forebay.gathered(model):\n"
                   "    view, values = model.tokens.weight.detach(), model.tokens.weight.detach().clone()\n"
                   "del model, optimizer\n"
                   "gc.collect()\n"
                   "assert view.equal(values)")
        path = [support.ROOT / "python", support.ROOT / "tests/python"]
        done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=False,
                              env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))})
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_nothing_grows(self):
        model = forebay.shard(models.make(layers=1, width=16), stage=3)
        optimizer = forebay.AdamW(model)
        models.train(model, optimizer, steps=20, micro_steps=1)
        gc.collect()  # Models of other tests have descriptors.
        views, files, size = len(model._forebay.views), len(os.listdir("/proc/self/fd")), resident_bytes()
        models.train(model, optimizer, steps=500, micro_steps=1)
        self.assertEqual((len(model._forebay.views), len(os.listdir("/proc/self/fd"))), (views, files))
        self.assertLess(resident_bytes() - size, 8 << 20)


class OverEngines:
    """Results are the same to 1e-6, because the engine's AdamW rounds in another order than torch's."""

    stage = 3

    def shard(self, model):
        return forebay.shard(model, stage=self.stage, guard=True)

    def adamw(self, model):
        return forebay.AdamW(self.shard(model), lr=1e-2)

    def wrap(self, optimizer):
        return forebay.wrap(optimizer)

    def same(self, seen, expected):
        if isinstance(expected, (list, tuple)):
            self.assertEqual(len(seen), len(expected))
            for a, b in zip(seen, expected):
                self.same(a, b)
        elif expected is not None:
            self.assertLessEqual(abs(seen - expected), 1e-6 + 2e-6 * abs(expected))

    def same_weights(self, seen, expected, most=1e-6):
        # The bias of an attention's keys has no gradient but rounding, and AdamW makes whole steps out of it.
        if expected.dim() > 1:
            self.assertLessEqual((seen - expected).abs().mean().item(), most)


class PassesAtStage3(OverEngines, passes.Passes, unittest.TestCase):
    pass


class PassesAtStage1(OverEngines, passes.Passes, unittest.TestCase):
    stage = 1


class Modules(OverEngines, passes.Modules, unittest.TestCase):
    others = (passes.Both,)


class Sample(unittest.TestCase):
    def test_minimal_prints_the_same_without_its_three_lines(self):
        text = (support.ROOT / "samples" / "pytorch" / "minimal.py").read_text(encoding="utf-8")
        plain = "".join(line for line in text.splitlines(keepends=True) if "  # 1" not in line and "  # 2" not in line)
        plain = plain.replace("forebay.AdamW(model, ", "torch.optim.AdamW(model.parameters(), ")
        self.assertNotIn("forebay.", plain.split('"""')[2])
        printed = [subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True,
                                  check=True, env={**os.environ, "PYTHONPATH": str(support.ROOT / "python"),
                                                   "OMP_NUM_THREADS": "1"}).stdout
                   for program in (text, plain)]
        seen, expected = ([float(number) for number in re.findall(r"[\d.]+", one)] for one in printed)
        self.assertEqual(len(expected), 30, printed)
        for a, b in zip(seen, expected):
            self.assertLessEqual(abs(a - b), 1.1e-3, printed)


class NothingIsCompiled(unittest.TestCase):
    def test_training_does_not_load_the_compiler(self):
        """torch._dynamo takes 80 MB in each rank."""
        program = ("import support, sys, torch, models, forebay\n"
                   "model = forebay.shard(models.make(), stage=3)\n"
                   "models.train(model, forebay.AdamW(model), steps=2, clip=1.0)\n"
                   "sys.exit('torch._dynamo' in sys.modules)")
        done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], cwd=os.path.dirname(__file__),
                              capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 0, done.stderr)


class Greedy(torch.nn.Module):
    """Takes more memory than there is, in the forward or the backward pass."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, gradient):
            torch.empty(1 << 50)

    def __init__(self, when):
        super().__init__()
        self.when, self.linear = when, torch.nn.Linear(512, 512)

    def forward(self, x):
        if self.when == "forward":
            torch.empty(1 << 50)
        return self.Function.apply(self.linear(x)).sum()


class OutOfMemory(unittest.TestCase):
    SHARE = (r"(?s)allocate.*forebay holds [\d.]+ MiB on cpu for this Greedy.*optimizer states 2\.0 MiB.*"
             r"offload='optimizer' [\d.]+ MiB.*offload_activations")

    def test_in_a_forward_pass(self):
        model = forebay.shard(Greedy("forward"), stage=1)
        forebay.AdamW(model)
        with self.assertRaisesRegex(RuntimeError, self.SHARE) as caught:
            model(torch.ones(1, 512))
        self.assertEqual(str(caught.exception).count("forebay holds"), 1)

    def test_sizes_are_told_in_the_largest_unit_that_fits(self):
        self.assertEqual([memory.size_text(size) for size in (0, 1023, 1 << 10, 1536, (1 << 20) - 1, 1 << 20, 5 << 29)],
                         ["0 bytes", "1023 bytes", "1.0 KiB", "1.5 KiB", "1024.0 KiB", "1.0 MiB", "2.5 GiB"])

    def test_options_that_free_memory_are_told_the_most_first(self):
        model = forebay.shard(models.make(), stage=1)
        forebay.AdamW(model)
        held = forebay.report(model)["plan"]["bytes"]["total"]
        expected = [(text, held - forebay.plan(models.make(), **options)["plan"]["bytes"]["total"]) for text, options in (
            ("stage=3, offload='optimizer+parameters'", {"stage": 3, "offload": "optimizer+parameters"}),
            ("offload='optimizer'", {"stage": 1, "offload": "optimizer"}))]
        self.assertEqual(memory.remedies(model._forebay), expected)  # dtype="bf16" frees nothing.

    def test_in_a_backward_pass_that_ends_the_program(self):
        done = subprocess.run([sys.executable, "-W", "ignore", __file__, "greedy-backward"], capture_output=True,
                              text=True, check=False)
        self.assertNotEqual(done.returncode, 0)
        self.assertRegex(done.stderr, self.SHARE)


def greedy_backward():
    model = forebay.shard(Greedy("backward"), stage=1)
    forebay.AdamW(model)
    model(torch.ones(1, 512)).backward()


class GuardedMemory(unittest.TestCase):
    """The option guard: released memory cannot be read, so the passing tests above show that no hook is late."""

    def test_a_read_of_a_released_parameter_ends_the_process(self):
        done = subprocess.run([sys.executable, __file__, "read-released"], capture_output=True, text=True, check=False)
        self.assertLess(done.returncode, 0, done.stdout + done.stderr)

    def test_one_digest_for_all_stages_with_checkpointing(self):
        digests = {ranks.run({"stage": stage, "guard": True}, {"recompute": kind})["digest"]
                   for stage in range(4) for kind in (None, "nonreentrant", "reentrant")}
        self.assertEqual(len(digests), 1)


def read_released():
    model = forebay.shard(models.make(), stage=3, guard=True, check=False)  # Else the read is an error of Python.
    optimizer = forebay.AdamW(model)
    models.train(model, optimizer, steps=3)  # Operators of the first two are checked.
    print(model.blocks[0].up.weight.sum().item())


class SeveralRanks(unittest.TestCase):
    def test_one_digest_and_the_losses_of_plain_torch(self):
        for world, stages in ((2, (0, 1, 2, 3)), (3, (0, 3))):
            _, expected = plain(world)
            digests = set()
            for stage in stages:
                results = torchrun(world, options={"stage": stage})
                digests.update(one["digest"] for one in results)
                for one, losses in zip(results, expected):
                    for a, b in zip(one["seen"], losses):
                        self.assertLessEqual(abs(a - b), 1e-6 * abs(b), (world, stage))
            self.assertEqual(len(digests), 1, world)

    def test_clipping_and_offload(self):
        _, expected = plain(2, clip=0.5)
        results = torchrun(2, options={"stage": 3, "offload": "optimizer"}, clip=0.5)
        self.assertEqual(results[0]["digest"], results[1]["digest"])
        for one, losses in zip(results, expected):
            for a, b in zip(one["seen"], losses):
                self.assertLessEqual(abs(a - b), 1e-6 * abs(b))


    def test_the_option_communicator_chooses_the_transport(self):
        for name in ("gloo", "shm"):
            for one in torchrun(2, kind="transport", options={"stage": 1, "communicator": name}):
                self.assertEqual(one["transport"], name)

    def test_gradients_that_are_cleared_before_the_step(self):
        digests = [one["digest"] for stage in (0, 3) for one in torchrun(2, kind="clear", options={"stage": stage})]
        self.assertEqual(len(digests), 4)
        self.assertEqual(len(set(digests)), 1)

    def test_one_rank_alone_reads_the_values_below_stage_3(self):
        """Between steps, and training goes on."""
        found = []
        for options in ({"stage": 0}, {"stage": 1, "offload": "optimizer"}, {"stage": 2}):
            results = torchrun(2, kind="alone", options=options)
            self.assertEqual(results[0]["digest"], results[1]["digest"])
            self.assertEqual(results[0]["totals"][0::2], results[0]["totals"][1::2])
            found.append(results[0])
        self.assertEqual(found, found[:1] * 3)

    def test_a_parameter_that_differs_between_ranks_is_named(self):
        first, second = torchrun(2, kind="different", options={"stage": 1})
        self.assertRegex(first["error"], r"norm\.weight has other values on rank 1 than on rank 0")
        self.assertRegex(second["error"], r"norm\.weight has other values on rank 0 than on rank 1")

    def test_requires_grad_that_differs_between_ranks_is_named(self):
        first, second = torchrun(2, kind="switched", options={"stage": 2})
        self.assertRegex(first["error"], "so must requires_grad, which this rank switched for no parameter")
        self.assertRegex(second["error"], r"so must requires_grad, which this rank switched for norm\.weight")

    def test_an_out_of_memory_error_says_what_options_free_on_a_rank(self):
        for one in torchrun(2, kind="remedies", options={"stage": 1}):
            self.assertEqual(one["said"]["offload='optimizer'"], one["freed"])
            self.assertLessEqual({"stage=2", "stage=3"}, set(one["said"]))

    def test_they_meet_under_launchers_that_are_not_of_torch(self):
        program = """if True:
            import sys, torch, forebay
            torch.manual_seed(0)
            model = forebay.shard(torch.nn.Linear(8, 8), stage=3)
            optimizer = forebay.SGD(model, lr=0.1)
            torch.manual_seed(int(sys.argv[1]))
            model(torch.randn(4, 8)).sum().backward()
            optimizer.step()
            print(model._forebay.engine.communicator.size, forebay.digest(model))
            try:
                forebay.SGD(forebay.shard(torch.nn.Linear(8, 8)), lr=0.1)
            except forebay.Unsupported as error:
                print(error)
        """
        variables = {"by hand": ("FOREBAY_RANK", "FOREBAY_SIZE", "FOREBAY_LOCAL_RANK", "FOREBAY_LOCAL_SIZE"),
                     "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
                                "OMPI_COMM_WORLD_LOCAL_SIZE")}
        for launcher, names in variables.items():
            with self.subTest(launcher), tempfile.TemporaryDirectory() as directory:
                ranks = [subprocess.Popen([sys.executable, "-c", program, str(rank)], text=True, stdout=subprocess.PIPE, env={
                    **os.environ, **dict(zip(names, map(str, (rank, 3, rank, 3)))), "FOREBAY_STORE": os.path.join(directory, "store"),
                    "PYTHONPATH": str(support.ROOT / "python")}) for rank in range(3)]
                said = {rank.communicate(timeout=120)[0] for rank in ranks}
                self.assertEqual(len(said), 1, said)
                self.assertRegex(said.pop(), r"\A3 [0-9a-f]{32}\n.*init_process_group")

    def test_they_wait_for_each_other_until_the_deadline(self):
        for options, seconds in (({"join_deadline": 5000, "deadline": 9000}, 5), ({"deadline": 7000}, 7)):
            with mock.patch.dict(os.environ, {"RANK": "1", "WORLD_SIZE": "2"}):
                with mock.patch("torch.distributed.rendezvous", side_effect=KeyError) as meet, self.assertRaises(KeyError):
                    sharded._communicator(None, None, options)
            self.assertEqual(meet.call_args.kwargs["timeout"], datetime.timedelta(seconds=seconds))

    def test_what_one_rank_loads_and_broadcasts_is_exact_on_all(self):
        for stage in (0, 3):
            results = torchrun(3, kind="loaded", options={"stage": stage, "dtype": "bf16"})
            self.assertEqual([one["exact"] for one in results], [True] * 3, stage)
            self.assertEqual(len({one["digest"] for one in results}), 1, stage)

    def test_rank_0_makes_a_state_dict_alone(self):
        for stage in (2, 3):
            for one in torchrun(3, kind="collected", options={"stage": stage}):
                self.assertTrue(one["right"], (stage, one))

    def test_a_parameter_that_joins_later_is_named(self):
        for one in torchrun(2, kind="joined", options={"stage": 1}):
            self.assertRegex(one["error"], r"norm\.adapter\.weight joined the model after shard.*before shard")

    def test_a_step_that_one_rank_gives_up_is_an_error_of_the_others(self):
        for stage in (1, 3):
            for how in ("cleared", "without a backward pass"):
                errors = [one["error"] for one in torchrun(3, kind="given_up", how=how, options={"stage": stage, "deadline": 30000})]
                for rank in (0, 2):
                    self.assertIn("another rank gave this step up", errors[rank], (stage, how))

    def test_a_rank_with_fewer_forward_passes_is_named(self):
        for one in torchrun(2, kind="fewer", options={"stage": 3}):
            self.assertRegex(one["error"], "rank 1")
            self.assertRegex(one["error"], "synced_gpus=True")


def resident_bytes():
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


TYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
         torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL", torch.complex64: "C64",
         torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16"}


def write_safetensors(path, tensors):
    header, data = {}, b""
    for name, tensor in tensors.items():
        one = tensor.detach().flatten().view(torch.uint8).numpy().tobytes()
        header[name] = {"dtype": TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [len(data), len(data) + len(one)]}
        data += one
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text + data)


if __name__ == "__main__":
    if sys.argv[1:] == ["read-released"]:
        read_released()
    elif sys.argv[1:] == ["greedy-backward"]:
        greedy_backward()
    else:
        support.main()
