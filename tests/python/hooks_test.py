"""The hooks of forebay.shard() over an engine whose memory cannot be read while a unit is released.

Losses, norms, evaluations and weights equal plain torch bit for bit, because the fake engine updates by torch's AdamW.
"""

import concurrent.futures
import contextlib
import copy
import dataclasses
import faulthandler
import gc
import inspect
import pickle
import sys
import types
import unittest
import warnings
import weakref
from unittest import mock

import support

support.need("torch")
support.need_library()  # It knows the options.

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import forebay
from fake_engine import FakeEngine
from forebay.torch.sharded import Sharded
from forebay.torch.uncompiled import uncompiled
import models
import passes
from passes import plain_adamw

faulthandler.enable()
torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)


def sharded(model, **options):
    with mock.patch.object(Sharded, "make_engine", lambda self: FakeEngine()):
        forebay.shard(model, stage=3, **options)
        return model


def adamw(model, **options):
    with mock.patch.object(Sharded, "make_engine", lambda self: FakeEngine()):
        return forebay.AdamW(model, **{"lr": 1e-2, **options})


def released(model):
    return all(unit.held == 0 and not unit.calls and not unit.in_backward for unit in model._forebay.units)


class Uncompiled(unittest.TestCase):
    def test_works_while_the_compiler_is_imported(self):
        """PyTorch 2.6 and 2.7 run operators in the import of torch._dynamo."""
        with mock.patch.dict(sys.modules, {"torch._dynamo": types.ModuleType("torch._dynamo")}):
            self.assertEqual(uncompiled(lambda value: value + 1)(2), 3)


class EqualsPlainTorch(unittest.TestCase):
    def compare(self, clip=None, units=None, **model_options):
        plain, model = models.make(**model_options), models.make(**model_options)
        before = [(p, p.shape, p.dtype) for p in model.parameters()]
        expected = models.train(plain, plain_adamw(plain), clip=clip)

        optimizer = adamw(sharded(model, units=units))
        addresses = [p.data_ptr() for p in model.parameters()]
        seen = models.train(model, optimizer, clip=clip)

        self.assertEqual(seen, expected)
        self.assertTrue(released(model))
        for (p, shape, dtype), q, address in zip(before, model.parameters(), addresses):
            self.assertIs(p, q)
            self.assertEqual((q.shape, q.dtype, q.data_ptr()), (shape, dtype, address))
        values = model.state_dict()
        for name, value in plain.state_dict().items():
            self.assertTrue(torch.equal(values[name], value), name)
        return model

    def test_plain(self):
        model = self.compare()
        names = ["tokens", "positions", "blocks.0", "blocks.1", "blocks.2", "norm", "head"]
        expected = ["F" + name for name in names] + ["B" + name for name in reversed(names)]
        self.assertEqual(model._forebay.engine.log[:14], expected)

    def test_clipped(self):
        self.compare(clip=0.5)

    def test_untied_head(self):
        self.compare(tied=False)

    def test_checkpointing(self):
        self.compare(recompute="nonreentrant", dropout=0.1)

    def test_checkpointing_of_two_blocks(self):
        self.compare(recompute="nonreentrant", segment=2)

    def test_reentrant_checkpointing(self):
        self.compare(recompute="reentrant", dropout=0.1)

    def test_reentrant_checkpointing_of_two_blocks(self):
        self.compare(recompute="reentrant", segment=2)

    def test_frozen_embeddings(self):
        self.compare(frozen=("tokens", "positions"))

    def test_frozen_first_block(self):
        self.compare(frozen=("tokens", "positions", "blocks.0"), tied=False)

    def test_most_of_each_block_frozen(self):
        self.compare(frozen=("tokens", "positions", "qkv", "up", "down", "norm1", "norm2", "norm"), tied=False)

    def test_one_block_three_times(self):
        self.compare(shared_block=True)

    def test_one_block_three_times_with_checkpointing(self):
        for kind in ("nonreentrant", "reentrant"):
            with self.subTest(kind):
                self.compare(shared_block=True, recompute=kind)

    def test_a_compiled_model(self):
        """The third finds the graphs of the first, which have no hooks."""
        losses = []
        for is_sharded in (False, True, False, True):
            model = models.make()
            optimizer = adamw(sharded(model)) if is_sharded else plain_adamw(model)
            compiled = torch.compile(model, backend="aot_eager")
            seen = []
            for step in range(4):
                loss = compiled(*models.batch(step, 0))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                seen.append(loss.item())
            losses.append(seen)
        self.assertEqual(losses[1:], losses[:1] * 3)

    def test_compiled_blocks(self):
        losses = []
        for is_sharded in (False, True):
            model = models.make()
            for block in model.blocks:
                block.compile(backend="aot_eager")
            optimizer = adamw(sharded(model)) if is_sharded else plain_adamw(model)
            losses.append(models.train(model, optimizer))
        self.assertEqual(losses[0], losses[1])

    def test_the_whole_model_as_one_unit(self):
        self.compare(units=["GPT"])

    def test_every_leaf_a_unit(self):
        self.compare(units=[nn.Linear, nn.LayerNorm, nn.Embedding])

    def test_units_by_one_name_class_or_module(self):
        for units in ("Block", models.Block):
            self.assertEqual(len(self.compare(units=units)._forebay.units), 7)
        model = models.make()
        self.assertEqual([unit.name for unit in sharded(model, units=model.blocks[1].up)._forebay.units if "blocks.1" in unit.name],
                         [f"blocks.1.{name}" for name in ("norm1", "norm2", "qkv", "out", "up", "down")])

    def test_lists_within_lists_make_no_units(self):
        def block():
            made = nn.Module()
            made.line, made.experts = nn.Linear(2, 2), nn.ModuleList(nn.Linear(2, 2) for _ in range(4))
            return made

        model = nn.Module()
        model.blocks = nn.ModuleList(block() for _ in range(3))
        self.assertEqual([unit.name for unit in sharded(model)._forebay.units], ["blocks.0", "blocks.1", "blocks.2"])

    def test_a_module_that_returns_a_dataclass(self):
        @dataclasses.dataclass
        class Output:
            hidden: torch.Tensor
            others: list

        class Part(nn.Module):
            def __init__(self):
                super().__init__()
                self.line = nn.Linear(4, 4)

            def forward(self, x):
                h = torch.tanh(self.line(x))
                return Output(h, [h * 2, None])

        class Whole(nn.Module):
            def __init__(self):
                super().__init__()
                torch.manual_seed(0)
                self.parts = nn.ModuleList(Part() for _ in range(2))

            def forward(self, x):
                first = self.parts[0](x)
                return self.parts[1](first.hidden + first.others[0]).hidden.square().sum()

        results = []
        for is_sharded in (False, True):
            model = Whole()
            optimizer = adamw(sharded(model)) if is_sharded else plain_adamw(model)
            for _ in range(3):
                model(torch.ones(2, 4)).backward()
                optimizer.step()
                optimizer.zero_grad()
            results.append(model.state_dict())
        for name, value in results[0].items():
            self.assertTrue(torch.equal(results[1][name], value), name)

    def test_evaluation_under_autocast(self):
        plain, model = models.make(), models.make()
        adamw(sharded(model))
        losses = []
        for one in (plain, model):
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
                losses.append(one(*models.batch(0, 0)).item())
        self.assertEqual(*losses)


class OverFakes:
    """Results are the same bit for bit."""

    def shard(self, model):
        return sharded(model)

    def adamw(self, model):
        return adamw(sharded(model))

    def wrap(self, optimizer):
        with mock.patch.object(Sharded, "make_engine", lambda self: FakeEngine()):
            return forebay.wrap(optimizer)

    def same(self, seen, expected):
        self.assertEqual(seen, expected)

    def same_weights(self, seen, expected, most=0.0):
        self.assertTrue(torch.equal(seen, expected))


class Passes(OverFakes, passes.Passes, unittest.TestCase):
    pass


class Modules(OverFakes, passes.Modules, unittest.TestCase):
    pass


class ModulesWithoutChecks(Modules):
    def adamw(self, model):
        return adamw(sharded(model, check=False))


class Frozen(unittest.TestCase):
    def test_weights_that_a_reentrant_checkpoint_reads_after_the_last_gradient_of_the_unit(self):
        class Scaled(nn.LayerNorm):
            def __init__(self):
                super().__init__(8)
                self.scale = nn.Parameter(torch.ones(8))
                self.weight.requires_grad_(False)
                self.bias.requires_grad_(False)

            def forward(self, x):
                return super().forward(x) * self.scale

        for check in (None, False):
            model = nn.ModuleList([nn.Linear(8, 8), Scaled(), nn.Linear(8, 8)])
            model.forward = lambda x: model[2](checkpoint(model[1], model[0](x), use_reentrant=True)).square().mean()
            optimizer = adamw(sharded(model, check=check))
            for _ in range(3):
                with mock.patch.object(Sharded, "acquire", autospec=True, side_effect=Sharded.acquire) as acquire:
                    model(torch.ones(2, 8)).backward()
                self.assertEqual(acquire.call_count, 6)  # Each unit for its forward and its backward pass.
                optimizer.step()
                optimizer.zero_grad()


class Values(unittest.TestCase):
    def test_state_dict_of_the_model_and_of_a_module(self):
        plain, model = models.make(), models.make()
        adamw(sharded(model))
        for name, value in plain.state_dict().items():
            self.assertTrue(torch.equal(model.state_dict()[name], value), name)
        part = model.blocks[1].up.state_dict()
        self.assertTrue(torch.equal(part["weight"], plain.blocks[1].up.weight))

    def test_a_state_dict_gathers_each_unit_once(self):
        model = models.make()
        adamw(sharded(model))
        model.state_dict()
        self.assertEqual(sorted(model._forebay.engine.log), sorted("F" + unit.name for unit in model._forebay.units))

    def test_load_state_dict_is_strict(self):
        plain, model = models.make(seed=5), models.make()
        adamw(sharded(model))
        model.load_state_dict(plain.state_dict())
        for name, value in plain.state_dict().items():
            self.assertTrue(torch.equal(model.state_dict()[name], value), name)
        wrong = plain.state_dict()
        del wrong["norm.weight"]
        wrong["extra"] = torch.zeros(1)
        wrong["norm.bias"] = torch.zeros(3)
        with self.assertRaisesRegex(RuntimeError, r'(?s)norm\.weight.*extra.*size mismatch for norm\.bias'):
            model.load_state_dict(wrong)

    def test_values_of_another_type_and_in_another_order_of_elements(self):
        plain, model = models.make(seed=5), models.make()
        adamw(sharded(model))
        model.load_state_dict({name: value.double().t().contiguous().t() if value.dim() == 2 else value.double()
                               for name, value in plain.state_dict().items()})
        for name, value in plain.state_dict().items():
            self.assertTrue(torch.equal(model.state_dict()[name], value), name)

    def test_gathered_gives_all_values(self):
        plain, model = models.make(), models.make()
        adamw(sharded(model))
        with forebay.gathered(model):
            for p, q in zip(model.parameters(), plain.parameters()):
                self.assertTrue(torch.equal(p, q))
        self.assertTrue(released(model))


class Refusals(unittest.TestCase):
    def test_each_names_the_reason(self):
        model = models.make()
        optimizer = adamw(sharded(model))
        with self.assertRaisesRegex(forebay.Unsupported, "deepcopy"):
            copy.deepcopy(model)
        with self.assertRaisesRegex(forebay.Unsupported, "pickling"):
            pickle.dumps(model)
        with self.assertRaisesRegex(forebay.Unsupported, "bfloat16"):
            model.to(torch.bfloat16)
        model.register_buffer("table", torch.ones(2, dtype=torch.float64))
        model.to("cpu").float()  # Only buffers change.
        self.assertEqual(model.table.dtype, torch.float32)
        with self.assertRaisesRegex(forebay.Unsupported, "RMSprop cannot run in shards; use torch.optim.AdamW, Adam"):
            forebay.wrap(torch.optim.RMSprop(model.parameters(), lr=1))
        with self.assertRaisesRegex(forebay.Unsupported, r"moments lie in shards. forebay\.save"):
            optimizer.state[model.norm.weight]
        optimizer.load_state_dict({**optimizer.state_dict(), "state": {}})
        with self.assertRaisesRegex(forebay.Unsupported, r"moments lie in shards. forebay\.save"):
            optimizer.state[model.norm.weight]
        with self.assertRaisesRegex(forebay.InvalidArgument, "already"):
            forebay.shard(model)
        with self.assertRaisesRegex(forebay.Unsupported, "autocast"):
            with torch.autocast("cpu", torch.bfloat16):
                model(*models.batch(0, 0))
        with self.assertRaisesRegex(forebay.Unsupported, "create_graph"):
            model(*models.batch(0, 0)).backward(create_graph=True)
        optimizer.zero_grad()
        with self.assertRaisesRegex(forebay.Unsupported, r"add_param_group\(\) after the optimizer was made"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
        for call in (forebay.digest, forebay.report, lambda model: forebay.save(model, "/nowhere")):
            with self.assertRaisesRegex(forebay.InvalidArgument, "this GPT is not sharded; call forebay.shard"):
                call(models.make())
        model(*models.batch(0, 0)).backward()
        with self.assertRaisesRegex(forebay.Unsupported, "shards"):
            model.norm.weight.grad.add_(1)
        with self.assertRaisesRegex(forebay.InvalidArgument, "optimizer.step"):
            forebay.digest(model)
        optimizer.step()
        self.assertEqual(len(forebay.digest(model)), 64)

    def test_units_that_the_model_does_not_have(self):
        with self.assertRaisesRegex(forebay.InvalidArgument, "did you mean Block"):
            sharded(models.make(), units=["Blok"])

    def test_a_trainable_parameter_without_a_group(self):
        model = sharded(models.make())
        with self.assertRaisesRegex(forebay.InvalidArgument, "blocks.0.norm1.weight"):
            adamw(model, params=[p for n, p in model.named_parameters() if n != "blocks.0.norm1.weight"])

    def test_other_groups_than_those_of_the_first_optimizer(self):
        model = sharded(models.make())
        matrices = [p for p in model.parameters() if p.dim() > 1]
        adamw(model, params=[{"params": matrices}, {"params": [p for p in model.parameters() if p.dim() < 2]}])
        with self.assertRaisesRegex(forebay.InvalidArgument, "other parameter groups"):
            adamw(model)

    def test_another_optimizer(self):
        for before in (False, True):
            model = models.make()
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0) if before else None
            adamw(sharded(model))
            optimizer = optimizer or torch.optim.AdamW(model.parameters())
            model(*models.batch(0, 0)).backward()
            with self.assertRaisesRegex(forebay.InvalidArgument, r"(SGD|AdamW)\.step\(\).*forebay\.wrap"):
                optimizer.step()

    def test_gradients_that_have_no_place(self):
        model = nn.Sequential(nn.Embedding(4, 4, sparse=True), nn.Linear(4, 4))
        optimizer = adamw(sharded(model))
        with self.assertRaisesRegex(forebay.Unsupported, r"gradient of 0\.weight is sparse; make the embedding"):
            model(torch.arange(4)).sum().backward()
        optimizer.zero_grad()
        model = models.make()
        optimizer = adamw(sharded(model))
        model.norm.weight.requires_grad_(False)
        model(*models.batch(0, 0)).backward()
        model.norm.weight.requires_grad_(True)
        with self.assertRaisesRegex(forebay.Unsupported, r"requires_grad of norm\.weight was switched on between the backward"):
            model(*models.batch(0, 0)).backward()

    def test_factors_of_gradients(self):
        model = models.make()
        optimizer = adamw(sharded(model))

        def backward():
            optimizer.zero_grad()
            model(*models.batch(0, 0)).backward()

        backward()
        model.norm.weight.grad.mul_(0.5)
        with self.assertRaisesRegex(forebay.Unsupported, "some gradients were scaled by other factors than the rest"):
            optimizer.step()
        backward()
        for p in model.parameters():
            p.grad.mul_(float("inf"))
        with self.assertRaisesRegex(forebay.InvalidArgument, "scaled by inf, and their norm is finite"):
            optimizer.step()
        for part in (model.blocks[0], model.norm, model.tokens):
            backward()
            with self.assertRaisesRegex(forebay.Unsupported, r"the norm of \d+ of \d+ gradients"):
                torch.nn.utils.clip_grad_norm_(part.parameters(), 1e-3)
        backward()
        for order in (1, float("inf")):
            with self.assertRaisesRegex(forebay.Unsupported, "the norm of order .* of a sharded gradient; only order 2"):
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type=order)
        backward()
        for p in model.parameters():
            p.grad.mul_(0.0)
        optimizer.step()
        self.assertIsNone(optimizer.grad_norm)  # Zero times a norm says nothing of it.

    def test_gradients_that_the_program_changed(self):
        model = models.make()
        optimizer = adamw(sharded(model))
        model(*models.batch(0, 0)).backward()
        model.norm.weight.grad = None
        with self.assertRaisesRegex(forebay.Unsupported, r"gradient of norm\.weight was cleared, and others were not"):
            optimizer.step()
        model.norm.weight.grad = torch.zeros_like(model.norm.weight)
        with self.assertRaisesRegex(forebay.Unsupported, r"gave norm\.weight another gradient"):
            optimizer.step()
        model.zero_grad()
        found = torch.autograd.grad(model(*models.batch(0, 0)), list(model.parameters()))
        for p, gradient in zip(model.parameters(), found):
            p.grad = gradient
        with self.assertRaisesRegex(forebay.Unsupported, "gradients itself.*backward"):
            optimizer.step()

    def test_parameters_that_were_replaced(self):
        for change in (lambda norm: setattr(norm, "weight", nn.Parameter(torch.ones(32))), lambda norm: norm.__delattr__("weight")):
            model = models.make()
            adamw(sharded(model))
            change(model.norm)
            with self.assertRaisesRegex(forebay.InvalidArgument, r"parameter norm\.weight was replaced or removed after shard"):
                model(*models.batch(0, 0))

    def test_models_that_are_divided_already(self):
        with self.assertRaisesRegex(forebay.InvalidArgument, "DataParallel; shard.. takes its place"):
            sharded(nn.DataParallel(models.make()))
        with self.assertRaisesRegex(forebay.InvalidArgument, "blocks.0 is sharded already"):
            model = models.make()
            sharded(model.blocks[0])
            sharded(model)
        with self.assertRaisesRegex(forebay.InvalidArgument, "parameter 0.norm1.weight belongs to another model, which is sharded"):
            model = models.make()
            sharded(model)
            sharded(nn.Sequential(model.blocks[0]))
        with self.assertRaisesRegex(forebay.InvalidArgument, "shard.. of a list"):
            sharded([models.make()])
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            with self.assertRaisesRegex(forebay.Unsupported, "DistributedDataParallel over a sharded model; leave it"):
                nn.parallel.DistributedDataParallel(sharded(models.make()))
        finally:
            torch.distributed.destroy_process_group()

    def test_options_are_judged_by_shard(self):
        with self.assertRaisesRegex(forebay.InvalidArgument, "did you mean offload"):
            forebay.shard(models.make(), ofload="optimizer")
        with self.assertRaisesRegex(forebay.InvalidArgument, "offload is 'cpu'; use none, optimizer or"):
            forebay.shard(models.make(), offload="cpu")

    def test_parameters_from_the_meta_device_without_values(self):
        with torch.device("meta"):
            model = models.GPT()
        adamw(sharded(model))
        with self.assertRaisesRegex(forebay.InvalidArgument, "have no values yet, blocks.0.down.bias first; call forebay"):
            model(*models.batch(0, 0))

    def test_two_types(self):
        model = models.make()
        model.norm.bfloat16()
        with self.assertRaisesRegex(forebay.InvalidArgument, r"norm\.weight is torch\.bfloat16"):
            sharded(model)
        self.assertEqual(sharded(model, dtype=torch.bfloat16)._forebay.options["dtype"], "bf16")
        with self.assertRaisesRegex(forebay.InvalidArgument, "parameter weight is torch.float64; use fp32, bf16 or fp16"):
            sharded(nn.Linear(2, 2).double())
        with self.assertRaisesRegex(forebay.InvalidArgument, "dtype is int8; use fp32, bf16 or fp16"):
            sharded(nn.Linear(2, 2), dtype="int8")
        with self.assertRaisesRegex(forebay.InvalidArgument, "no floating-point parameters; there is nothing to shard"):
            sharded(nn.ReLU())
        model = nn.Linear(2, 2)
        model.empty = nn.Parameter(torch.empty(0, dtype=torch.float64))
        sharded(model)

    def test_models_that_other_libraries_divide(self):
        for name in ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "DeepSpeedEngine"):
            wrapper = type(name, (nn.Sequential,), {})
            with self.assertRaisesRegex(forebay.InvalidArgument, f"0 is a {name}; shard.. takes its place"):
                sharded(nn.Sequential(wrapper(nn.Linear(2, 2))))
        model = nn.Linear(2, 2)
        model.weight.device_mesh = None
        with self.assertRaisesRegex(forebay.InvalidArgument, "parameter weight is a DTensor; shard.. takes the place of fully"):
            sharded(model)

    def test_models_that_the_engine_cannot_hold(self):
        with self.assertRaisesRegex(forebay.InvalidArgument, "the model has max_norm"):
            sharded(nn.EmbeddingBag(4, 2, max_norm=1.0))
        with self.assertRaisesRegex(forebay.Unsupported, "find_non_finite: its finding does not reach Python"):
            sharded(models.make(), find_non_finite=True)


class Warnings(unittest.TestCase):
    def said(self, body):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for _ in range(3):
                body()
        return [str(one.message) for one in said]

    def test_a_step_without_zero_grad(self):
        model = models.make()
        optimizer = adamw(sharded(model))

        def body():
            model(*models.batch(0, 0)).backward()
            optimizer.step()
        [text] = self.said(body)
        self.assertRegex(text, "zero_grad.. was not called")

    def test_a_late_zero_grad_is_a_zero_grad(self):
        model = models.make()
        optimizer = adamw(sharded(model))

        def body():
            model(*models.batch(0, 0)).backward()
            optimizer.step()
            model(*models.batch(0, 1)).backward()
            optimizer.zero_grad()  # Plain torch drops the gradients of both passes here.
            model(*models.batch(0, 2)).backward()
            optimizer.step()
            optimizer.zero_grad()
        self.assertEqual(self.said(body), [])

    def test_the_norm_of_one_gradient(self):
        model = models.make()
        optimizer = adamw(sharded(model))

        def body():
            model(*models.batch(0, 0)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if hasattr(model, "looked"):
                model.norm.weight.grad.norm()
            model.looked = True
            optimizer.step()
            optimizer.zero_grad()
        [text] = self.said(body)
        self.assertRegex(text, "the norm of one gradient.*not known")

    @unittest.skipUnless(hasattr(nn.utils, "get_total_norm"), "this PyTorch has no get_total_norm()")
    def test_the_norm_of_all_gradients(self):
        model = models.make()
        optimizer = adamw(sharded(model))

        def body():
            model(*models.batch(0, 0)).backward()
            norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
            optimizer.step()
            optimizer.zero_grad()
            self.assertAlmostEqual(norm.item(), optimizer.grad_norm, places=5)
        self.assertEqual(self.said(body), [])

    def test_a_state_dict_without_moments(self):
        model = models.make()
        optimizer = adamw(sharded(model))
        self.assertEqual(self.said(optimizer.state_dict), [])
        model(*models.batch(0, 0)).backward()
        optimizer.step()
        for text in self.said(optimizer.state_dict):
            self.assertRegex(text, r"has no moments: they lie in shards\. forebay\.save")
        self.assertEqual(len(self.said(optimizer.state_dict)), 3)


class Optimizers(unittest.TestCase):
    def test_the_arguments_of_torch(self):
        """forebay.AdamW() takes parameters, and a learning rate after them, as torch.optim.AdamW() does."""
        model = sharded(models.make(frozen=["positions"]))
        with mock.patch.object(Sharded, "make_engine", lambda self: FakeEngine()):
            made = forebay.AdamW(model.parameters(), 2e-3, fused=True, foreach=False, capturable=True, amsgrad=False)
        self.assertEqual((made.param_groups[0]["lr"], len(made.param_groups[0]["params"])),
                         (2e-3, sum(p.requires_grad for p in model.parameters())))
        self.assertIs(forebay.wrap(made), made)
        with self.assertRaisesRegex(forebay.Unsupported, "amsgrad"):
            adamw(model, amsgrad=True)
        with self.assertRaisesRegex(TypeError, "momentum"):
            adamw(model, momentum=0.9)
        with self.assertRaisesRegex(forebay.InvalidArgument, r"updates by AdamW, and the optimizer is SGD; give shard\(opt"):
            forebay.SGD(model, lr=1.0)
        with self.assertRaisesRegex(forebay.InvalidArgument, "updates by Lion, and the optimizer is AdamW; give"):
            adamw(sharded(models.make(), optimizer="lion"))

    def test_values_with_which_no_step_is_possible(self):
        model = sharded(models.make())
        for make, values, message in (
                (forebay.AdamW, {"lr": -1}, "lr is -1; use a number of 0 or more"),
                (forebay.AdamW, {"lr": float("nan")}, "lr is nan"),
                (forebay.AdamW, {"lr": float("inf")}, "lr is inf"),
                (forebay.AdamW, {"eps": float("inf")}, "eps is inf"),
                (forebay.AdamW, {"lr": "fast"}, "lr is 'fast'"),
                (forebay.SGD, {"weight_decay": -0.1}, "weight_decay is -0.1; use a number of 0 or more"),
                (forebay.SGD, {"momentum": 1}, "momentum is 1; use a number of 0 or more, below 1"),
                (forebay.Lion, {"betas": (2, 0.9)}, r"betas\[0\] is 2"),
                (forebay.Adam, {"betas": (0.9, 1.0)}, r"betas\[1\] is 1.0"),
                (forebay.Adam, {"betas": (0.9,)}, r"betas is \(0.9,\); use two numbers"),
                (forebay.Muon, {"momentum": -1}, "momentum is -1"),
                (forebay.AdamW, {"eps": 0}, "eps is 0; use a number above 0")):
            with self.subTest(make=make.__name__, **values), self.assertRaisesRegex(forebay.InvalidArgument, message):
                make(model, **values)
        with self.assertRaisesRegex(forebay.InvalidArgument, "lr is -3"):
            forebay.AdamW(model, [{"params": list(model.parameters()), "lr": -3}])
        with mock.patch.object(Sharded, "make_engine", lambda self: FakeEngine()):
            self.assertEqual(adamw(model, lr=torch.tensor(2e-3), weight_decay=0).param_groups[0]["weight_decay"], 0)

    def test_values_that_change_after_the_optimizer_was_made(self):
        model = sharded(models.make())
        optimizer = adamw(model)
        group = optimizer.param_groups[0]

        def step():
            optimizer.zero_grad()
            model(*models.batch(0, 0)).backward()
            optimizer.step()

        for name, value, kind, message in (
                ("amsgrad", True, forebay.Unsupported, "amsgrad=True; forebay updates by plain AdamW, so leave it out"),
                ("maximize", True, forebay.Unsupported, "maximize=True"),
                ("differentiable", True, forebay.Unsupported, "differentiable=True"),
                ("decoupled_weight_decay", False, forebay.Unsupported, "decoupled_weight_decay .* became False after .* made with True"),
                ("lr", None, forebay.InvalidArgument, "lr is None; use a number of 0 or more"),
                ("lr", -1e-3, forebay.InvalidArgument, "lr is -0.001"),
                ("lr", torch.ones(2), forebay.InvalidArgument, r"lr is tensor\(\[1., 1.\]\); use a number"),
                ("betas", (0.9,), forebay.InvalidArgument, r"betas is \(0.9,\); use two numbers"),
                ("betas", None, forebay.InvalidArgument, "betas is None; use two numbers"),
                ("weight_decay", float("nan"), forebay.InvalidArgument, "weight_decay is nan"),
                ("eps", 0, forebay.InvalidArgument, "eps is 0; use a number above 0")):
            before = dict(group)
            with self.subTest(name=name, value=value):
                group[name] = value
                with self.assertRaisesRegex(kind, message):
                    step()
            group.clear()
            group.update(before)
        group.update(lr=torch.tensor(1e-3), foreach=True, fused=True, capturable=True, initial_lr=1.0, decoupled_weight_decay=True)
        step()
        with mock.patch.object(Sharded, "make_engine", lambda self: FakeEngine()):
            optimizer = forebay.Muon(sharded(models.make()))
            for name, value, message in (("use_muon", False, "use_muon of a parameter group became False"),
                                         ("adjust_lr_fn", "match_rms_adamw", "adjust_lr_fn .* became match_rms_adamw after .* original"),
                                         ("ns_steps", 3, "ns_steps=3")):
                before = dict(optimizer.param_groups[1])
                optimizer.param_groups[1][name] = value
                with self.assertRaisesRegex(forebay.Unsupported, message):
                    optimizer.step()
                optimizer.param_groups[1].clear()
                optimizer.param_groups[1].update(before)
            optimizer.param_groups[1].update(adjust_lr_fn="original", ns_coefficients=[3.4445, -4.7750, 2.0315])
            optimizer.step()

    def test_the_rule_of_an_optimizer(self):
        class Lion(torch.optim.Optimizer):
            def __init__(self, params, **values):
                super().__init__(params, {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0, **values})

        def rule_of(kind, **values):
            model = sharded(models.make())
            with mock.patch.object(Sharded, "make_engine", lambda self: FakeEngine()):
                made = forebay.wrap(kind(model.parameters(), **values))
            return made.rule

        if "decoupled_weight_decay" in inspect.signature(torch.optim.Adam).parameters:  # Since PyTorch 2.6.
            self.assertEqual(rule_of(torch.optim.Adam, decoupled_weight_decay=True), "adamw")

        class Named(torch.optim.AdamW):
            pass

        class Own(torch.optim.AdamW):
            def step(self, closure=None):
                pass

        def coupled(params):
            optimizer = torch.optim.AdamW(params)
            optimizer.param_groups[0]["decoupled_weight_decay"] = False
            return optimizer

        self.assertEqual([rule_of(Named), rule_of(coupled)], ["adamw", "adam"])
        with self.assertRaisesRegex(forebay.Unsupported, "Own derives from AdamW and has a step.. of its own"):
            rule_of(Own)
        self.assertEqual([rule_of(torch.optim.AdamW), rule_of(torch.optim.Adam, weight_decay=0.1),
                          rule_of(torch.optim.SGD, lr=1.0, momentum=0.9), rule_of(Lion, cautious_factor=1.0)],
                         ["adamw", "adam", "sgd", "lion"])
        refused = [(torch.optim.SGD, {"lr": 1.0, "momentum": 0.9, "nesterov": True}),
                   (torch.optim.SGD, {"lr": 1.0, "dampening": 0.1}), (torch.optim.AdamW, {"maximize": True}),
                   (torch.optim.Adam, {"amsgrad": True}),
                   (Lion, {"cautious_factor": 0.5})]
        if hasattr(torch.optim, "Adafactor"):  # Since PyTorch 2.5.
            self.assertEqual(rule_of(torch.optim.Adafactor), "adafactor")
            refused.append((torch.optim.Adafactor, {"d": 2.0}))
        for kind, values in refused:
            with self.assertRaisesRegex(forebay.Unsupported, f"{list(values)[-1]}={list(values.values())[-1]}; forebay"):
                rule_of(kind, **values)
        with self.assertRaisesRegex(forebay.Unsupported, "Lion cannot run in shards"):
            rule_of(Lion, eight_bit=True)

    def test_groups_that_a_wrapped_optimizer_has_later(self):
        def wrapped(kind=torch.optim.AdamW):
            model = sharded(models.make())
            given = kind(model.parameters(), lr=1e-2, weight_decay=0.0)
            with mock.patch.object(Sharded, "make_engine", lambda self: FakeEngine()):
                return model, given, forebay.wrap(given)

        def step(model, optimizer):
            optimizer.zero_grad()
            model(*models.batch(0, 0)).backward()
            optimizer.step()

        def load(given):
            given.load_state_dict({**given.state_dict(), "state": {}})

        def assign(given):
            given.param_groups = [{**group} for group in given.param_groups]

        for change in (load, assign):
            model, given, optimizer = wrapped()
            change(given)
            self.assertIs(optimizer.param_groups, given.param_groups)
            given.param_groups[0]["lr"] = 0.0
            before = forebay.digest(model)
            step(model, optimizer)
            self.assertEqual(forebay.digest(model), before)
            optimizer.load_state_dict({**optimizer.state_dict(), "param_groups": [{**given.param_groups[0], "lr": 0.5, "params": list(
                range(len(given.param_groups[0]["params"])))}]})
            self.assertEqual(given.param_groups[0]["lr"], 0.5)

        def add(given):
            given.add_param_group({"params": list(nn.Linear(2, 2).parameters())})

        def exchange(given):
            given.param_groups[0]["params"][-1] = nn.Parameter(torch.ones(2))

        for change in (add, exchange):
            model, given, optimizer = wrapped()
            change(given)
            with self.assertRaisesRegex(forebay.Unsupported, "param_groups, added or moved after .* give all groups at once"):
                step(model, optimizer)

    def test_the_hooks_of_an_optimizer_are_called(self):
        model = sharded(models.make())
        plain = torch.optim.AdamW(model.parameters())
        called = []
        plain.register_step_pre_hook(lambda *_: called.append("before"))
        plain.register_step_post_hook(lambda *_: called.append("after"))
        with mock.patch.object(Sharded, "make_engine", lambda self: FakeEngine()):
            optimizer = forebay.wrap(plain)
            handle = plain.register_step_post_hook(lambda *_: called.append("later"))
            optimizer.step()
            handle.remove()
            optimizer.step()
        self.assertEqual(called, ["before", "after", "later", "before", "after"])
        if hasattr(torch.optim, "Muon"):  # Since PyTorch 2.9.
            model = sharded(models.make())
            matrices = [p for p in model.parameters() if p.dim() == 2]
            first = torch.optim.Muon(matrices)
            second = torch.optim.AdamW([p for p in model.parameters() if p.dim() != 2])
            called.clear()
            removed = second.register_step_pre_hook(lambda *_: called.append("removed"))
            with mock.patch.object(Sharded, "make_engine", lambda self: FakeEngine()):
                optimizer = forebay.wrap(first, second)
                removed.remove()
                for one in (first, second, optimizer):
                    one.register_step_pre_hook(lambda *_: called.append("there"))
                optimizer.step()
            self.assertEqual(called, ["there"] * 3)

    def test_the_defaults_are_those_of_torch(self):
        def made(make, *given):
            model = sharded(models.make(layers=1))
            with mock.patch.object(Sharded, "make_engine", lambda self: FakeEngine()):
                optimizer = make(model, *given)
            return optimizer.defaults

        for name in ("AdamW", "Adam", "SGD", "Adafactor", "Muon"):
            if hasattr(torch.optim, name):
                expected = getattr(torch.optim, name)([nn.Parameter(torch.ones(2, 2))]).defaults
                found = made(getattr(forebay, name))
                shared = found.keys() & expected.keys() - ({"eps"} if name == "Muon" else set())  # That of AdamW here.
                self.assertIn("weight_decay", shared)
                self.assertEqual({key: found[key] for key in shared}, {key: expected[key] for key in shared}, name)
        self.assertEqual(made(forebay.Lion), {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0})

    def test_an_optimizer_that_belongs_elsewhere(self):
        first, second = sharded(models.make()), sharded(models.make())
        for params in ([*first.parameters(), *second.parameters()], nn.Linear(2, 2).parameters()):
            with self.assertRaisesRegex(forebay.InvalidArgument, "parameters are not those of one sharded model; call"):
                adamw(params)
        with self.assertRaisesRegex(forebay.InvalidArgument, r"shape \[3\] in the optimizer does not belong to the sharded"):
            adamw(first, params=[*first.parameters(), nn.Parameter(torch.ones(3))])
        plain = models.make()
        optimizer = torch.optim.AdamW(plain.parameters())
        plain(*models.batch(0, 0)).backward()
        optimizer.step()
        sharded(plain)
        with self.assertRaisesRegex(forebay.InvalidArgument, "has made a step, and its moments cannot move; wrap it before"):
            forebay.wrap(optimizer)

    def test_a_closure_has_gradients(self):
        results = []
        for is_sharded in (False, True):
            model = models.make()
            optimizer = adamw(sharded(model)) if is_sharded else plain_adamw(model)

            def closure():
                optimizer.zero_grad()
                loss = model(*models.batch(0, 0))
                loss.backward()
                return loss
            with torch.no_grad():
                results.append([optimizer.step(closure).item() for _ in range(3)])
        self.assertEqual(*results)

    def test_what_muon_refuses(self):
        def muon(groups, **values):
            model = sharded(models.make())
            with mock.patch.object(Sharded, "make_engine", lambda self: FakeEngine()):
                return forebay.Muon(model, groups(model), **values)

        def apart(model, **values):
            matrices = [p for p in model.parameters() if p.dim() == 2]
            return [{"params": matrices, **values}, {"params": [p for p in model.parameters() if p.dim() != 2],
                                                     "use_muon": False}]

        self.assertEqual(muon(apart).rule, "muon")
        with self.assertRaisesRegex(forebay.InvalidArgument, "has 1 dimensions, and Muon updates matrices.*use_muon=False"):
            muon(lambda model: [{"params": list(model.parameters())}])
        with self.assertRaisesRegex(forebay.Unsupported, "adjust_lr_fn is spectral_unclamped; use original"):
            muon(apart, adjust_lr_fn="spectral_unclamped")
        with self.assertRaisesRegex(forebay.Unsupported, "adjust_lr_fn is None and original; use .* the same for all parameter"):
            muon(lambda model: [{"params": [p], **({"adjust_lr_fn": "original"} if i else {})} if p.dim() == 2 else
                                {"params": [p], "use_muon": False} for i, p in enumerate(model.parameters())])
        with self.assertRaisesRegex(forebay.Unsupported, "nesterov=False; forebay updates by plain Muon"):
            muon(apart, nesterov=False)
        with self.assertRaisesRegex(forebay.Unsupported, "ns_steps=3; forebay"):
            muon(lambda model: apart(model, ns_steps=3))
        with self.assertRaisesRegex(forebay.Unsupported, "AdamW and AdamW over one model"):
            model = sharded(models.make())
            forebay.wrap(torch.optim.AdamW(model.parameters()), torch.optim.AdamW(model.parameters()))
        with mock.patch.object(Sharded, "make_engine", lambda self: FakeEngine()):
            for first, same, other in (("match_rms_adamw", None, "original"), (None, "original", "match_rms_adamw")):
                model = sharded(models.make())
                forebay.Muon(model, adjust_lr_fn=first)
                forebay.Muon(model, adjust_lr_fn=same)
                with self.assertRaisesRegex(forebay.InvalidArgument, f"adjust_lr_fn is {other}, and .* had another optimizer"):
                    forebay.Muon(model, adjust_lr_fn=other)


def train(model, optimizer, steps, *inputs):
    for step in range(steps):
        model(*inputs or models.batch(step, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()


class Reader(nn.Module):
    """Reads a parameter of a module that it does not call."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return nn.functional.linear(self.first(x), self.second.weight).sum()


class Guard(unittest.TestCase):
    def test_a_unit_that_others_read_is_gathered_for_the_whole_pass(self):
        for options in ({}, {"resident": ["second"]}):
            for evaluates_first in (False, True):
                plain, model = Reader(), Reader()
                model.load_state_dict(plain.state_dict())
                optimizer, expected = adamw(sharded(model, **options)), plain_adamw(plain)
                with warnings.catch_warnings(record=True) as said:
                    warnings.simplefilter("always")
                    if evaluates_first:
                        with torch.no_grad():
                            self.assertEqual(model(torch.ones(2, 4)), plain(torch.ones(2, 4)))
                    for _ in range(3):
                        for one, made in ((plain, expected), (model, optimizer)):
                            one(torch.ones(2, 4)).backward()
                            made.step()
                            made.zero_grad()
                with forebay.gathered(model):
                    self.assertTrue(torch.equal(model.second.weight, plain.second.weight))
                self.assertTrue(released(model))
                texts = [str(one.message) for one in said if "resident" in str(one.message)]
                self.assertEqual(len(texts), 0 if options else 1, texts)
                if texts:
                    self.assertRegex(texts[0], r"aten\..*second\.weight.*resident=\[\"second\"\]")

    def test_a_copy_of_a_parameter_before_the_first_step(self):
        model = sharded(models.make())
        adamw(model)
        with self.assertRaisesRegex(forebay.InvalidArgument, r"aten\.clone.*norm\.weight of unit norm.*before shard"):
            model.norm.weight.data.clone()

    def test_it_finds_reads_after_the_first_step(self):
        average = torch.optim.swa_utils.AveragedModel(models.make())
        model = models.make()
        optimizer = adamw(sharded(model))
        model(*models.batch(0, 0)).backward()
        optimizer.step()
        with self.assertRaisesRegex(forebay.InvalidArgument, r"aten\.\w+\.default reads tokens\.weight of unit tokens"):
            average.update_parameters(model)
        self.assertEqual(torch.zeros_like(model.norm.weight).shape, model.norm.weight.shape)  # Reads no values.
        optimizer.zero_grad()
        model(*models.batch(1, 0)).backward()
        optimizer.step()
        with self.assertRaisesRegex(forebay.InvalidArgument, r"aten\.\w+\.default reads tokens\.weight of unit tokens"):
            average.update_parameters(model)
        with forebay.gathered(model):
            average.update_parameters(model)

    def test_reads_of_the_shape_only_are_none(self):
        model = models.make()
        adamw(sharded(model))
        weight = model.norm.weight.detach()
        self.assertEqual([made.shape for made in (weight.new_empty(3), weight.new_zeros(2, 2), torch.ones_like(weight), weight[1:])],
                         [(3,), (2, 2), (32,), (31,)])

    def test_the_first_evaluation_is_checked_after_the_steps(self):
        class Evaluated(Reader):
            def forward(self, x):
                return super().forward(x) if not self.training else self.second(self.first(x)).sum()

        for stage_checks in (None, False):
            plain, model = Evaluated(), Evaluated()
            model.load_state_dict(plain.state_dict())
            optimizer, expected = adamw(sharded(model, check=stage_checks)), plain_adamw(plain)
            for _ in range(3):
                for one, made in ((plain, expected), (model, optimizer)):
                    one(torch.ones(2, 4)).backward()
                    made.step()
                    made.zero_grad()
            with torch.no_grad(), self.assertWarnsRegex(UserWarning, "unit second stays gathered"):
                self.assertEqual(model.eval()(torch.ones(2, 4)), plain.eval()(torch.ones(2, 4)))

    def test_all_passes_are_checked_where_it_is_told_so(self):
        for evaluates in (False, True):
            model = Reader()
            optimizer = adamw(sharded(model, check=True, units=["Linear"]))
            model.forward = lambda x: model.second(model.first(x)).sum()
            for _ in range(3):
                model(torch.ones(2, 4)).backward()
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    model(torch.ones(2, 4))
            del model.forward
            with torch.set_grad_enabled(not evaluates), self.assertWarnsRegex(UserWarning, "unit second stays gathered"):
                model(torch.ones(2, 4))

    def test_a_write_to_an_output_argument_is_refused(self):
        class Writes(nn.Linear):
            def forward(self, x):
                with torch.no_grad():
                    torch.zeros((4, 4), out=self.weight)
                return super().forward(x)

        model = nn.Sequential(Writes(4, 4))
        adamw(sharded(model))
        with self.assertRaisesRegex(forebay.InvalidArgument, r"writes 0\.weight within a pass"):
            model(torch.ones(2, 4))

    def test_it_watches_nothing_after_the_second_step_where_it_is_told_so(self):
        model = models.make()
        optimizer = adamw(sharded(model, check=False))
        train(model, optimizer, 3)
        self.assertEqual({type(p) for p in model.parameters()}, {nn.Parameter})

    def test_it_finds_reads_around_the_passes_of_each_step(self):
        model = models.make()
        optimizer = adamw(sharded(model))
        weight = model.blocks[0].up.weight
        kept = weight.detach()
        reads = {"aten.linalg_vector_norm": lambda: weight.norm(), "aten.pow": lambda: weight.data[1:].pow(2),
                 "aten.mul": lambda: 2 * kept, "aten._foreach_norm": lambda: torch._foreach_norm([weight]),
                 "aten.mm": lambda: nn.functional.linear(torch.ones(1, weight.shape[1]), weight=weight),
                 "aten.copy_": lambda: torch.empty_like(weight).copy_(weight), "numpy": lambda: kept.numpy(),
                 "tolist": lambda: kept.tolist(), "aten.+": lambda: copy.deepcopy(kept), "__reduce_ex__": lambda: pickle.dumps(kept)}

        def refuses():
            for name, read in reads.items():
                with self.subTest(name), self.assertRaisesRegex(
                        forebay.InvalidArgument, rf"{name}.* reads blocks\.0\.up\.weight of unit blocks\.0 outside"):
                    read()

        for step in range(4):
            loss = model(*models.batch(step, 0))
            refuses()
            loss.backward()
            refuses()
            optimizer.step()
            refuses()
            optimizer.zero_grad()
            for text in (repr(weight), f"{weight}", f"{kept}"):
                self.assertRegex(text, r"weight, shape \[.*: its values lie in shards, and are here in passes of")
        with forebay.gathered(model):
            for read in reads.values():
                read()
            self.assertNotIn("shards", f"{weight}")
            self.assertTrue(torch.equal(pickle.loads(pickle.dumps(kept)), weight))
            self.assertEqual({type(p) for p in model.parameters()}, {nn.Parameter})
        self.assertIsInstance(weight, nn.Parameter)
        self.assertEqual(repr(type(weight)), repr(nn.Parameter))

    def test_it_finds_reads_within_a_late_pass(self):
        model = Reader()
        optimizer = adamw(sharded(model, units=["Linear"]))
        model.forward = lambda x: model.second(model.first(x)).sum()
        train(model, optimizer, 3, torch.ones(2, 4))
        with torch.no_grad():
            model(torch.ones(2, 4))
        del model.forward
        with self.assertWarnsRegex(UserWarning, "unit second stays gathered"):
            model(torch.ones(2, 4))

    def test_a_tied_parameter_is_released_with_its_last_unit(self):
        model = models.make(tied=True)
        optimizer = adamw(sharded(model))
        train(model, optimizer, 2)
        read = []
        model.head.register_forward_hook(lambda *_: read.append(model.tokens.weight.sum()))
        loss = model(*models.batch(2, 0))
        self.assertEqual(len(read), 1)
        with self.assertRaisesRegex(forebay.InvalidArgument, r"reads tokens\.weight of unit tokens"):
            model.tokens.weight.sum()
        loss.backward()

    def test_a_watched_parameter_changes_no_choice_of_torch(self):
        """torch.nn.TransformerEncoder gives padding zeros where no weight has a class of its own."""
        results = []
        for is_sharded in (False, True):
            torch.manual_seed(0)
            model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 2)
            optimizer = adamw(sharded(model)) if is_sharded else plain_adamw(model)
            x, padding = torch.ones(2, 3, 8), torch.tensor([[False, False, True], [False, False, False]])
            seen = []
            for _ in range(4):
                with torch.no_grad():
                    seen.append(model.eval()(x, src_key_padding_mask=padding).tolist())
                loss = model.train()(x, src_key_padding_mask=padding).square().sum()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                seen.append(loss.item())
            results.append(seen)
        self.assertEqual(*results)

    def test_a_graph_of_the_backward_pass_is_refused_at_each_step(self):
        model = Reader()
        model.forward = lambda x: model.second(torch.tanh(model.first(x))).sum()
        optimizer = adamw(sharded(model, units=["Linear"]))
        for step in range(4):
            x = torch.ones(2, 4, requires_grad=True)
            with self.assertRaisesRegex(forebay.Unsupported, r"create_graph=True.*shard\(stage=2\)"):
                torch.autograd.grad(model(x), x, create_graph=True)
            optimizer.zero_grad()
            train(model, optimizer, 1, torch.ones(2, 4))
        self.assertTrue(released(model))

    def test_contexts_of_the_program_leave_torch_as_it_was(self):
        """torch.inference_mode() saves the dispatch keys of its thread, and brings them back at its end."""
        def made(steps):
            model = models.make(layers=1)
            optimizer = adamw(sharded(model))
            train(model, optimizer, steps)
            return model, optimizer

        def interrupted(model):
            model.norm.forward = mock.Mock(side_effect=KeyboardInterrupt)
            with contextlib.suppress(KeyboardInterrupt):
                model(*models.batch(0, 0))
            del model.norm.forward

        contexts = {
            "inference": torch.inference_mode, "not inference": lambda: torch.inference_mode(False), "no_grad": torch.no_grad,
            "autocast": lambda: torch.autocast("cpu", torch.bfloat16, enabled=False), "device": lambda: torch.device("cpu"),
            "hooks": lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)}
        for name, context in contexts.items():
            for steps in range(4):
                with self.subTest(f"{name} after {steps} steps"):
                    model, optimizer = made(steps)
                    with context():
                        model(*models.batch(0, 0))
                    with context(), contexts["not inference"]():
                        model(*models.batch(0, 0))
                    with context():
                        interrupted(model)
                    other = made(steps)
                    with context():
                        del other
                        gc.collect()
                    self.assertEqual(torch.utils._python_dispatch._len_torch_dispatch_stack(), 0)
                    torch.ones(1) + 1
                    optimizer.zero_grad()
                    train(model, optimizer, 2)
                    with context(), contexts["not inference"](), torch.enable_grad():
                        train(model, optimizer, 2)
                    torch.ones(1) + 1

    def test_another_thread_is_checked_too(self):
        model = models.make()
        adamw(sharded(model))
        with concurrent.futures.ThreadPoolExecutor(1) as pool, self.assertRaisesRegex(forebay.InvalidArgument, "reads norm.weight"):
            pool.submit(model.norm.weight.sum).result()

    def test_models_that_are_dropped_leave_nothing(self):
        for steps in (1, 3):
            model = models.make(layers=1)
            optimizer = adamw(sharded(model))
            train(model, optimizer, steps)
            gone = weakref.ref(model)
            del model, optimizer
            gc.collect()
            self.assertIsNone(gone())

    def test_it_finds_reads_outside_of_a_pass(self):
        model = models.make()
        adamw(sharded(model, check=True))
        model(*models.batch(0, 0)).backward()
        with self.assertRaisesRegex(forebay.InvalidArgument, r"aten\.pow.*blocks\.0\.up\.weight of unit blocks\.0"):
            model.blocks[0].up.weight.detach().pow(2)


if __name__ == "__main__":
    support.main()
