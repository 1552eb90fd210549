"""The hooks of forebay.shard() over an engine whose memory cannot be read while a unit is released.

Losses, norms, evaluations and weights equal plain torch bit for bit, because the fake engine updates by torch's AdamW.
"""

import copy
import faulthandler
import pickle
import unittest
from unittest import mock

import support

support.need("torch")

import torch
from torch import nn

import forebay
from fake_engine import FakeEngine
from forebay.torch.sharded import Sharded
import models

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


def plain_adamw(model, **options):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **{"lr": 1e-2, **options})


def released(model):
    return all(unit.held == 0 and not unit.calls and not unit.in_backward for unit in model._forebay.units)


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


class Passes(unittest.TestCase):
    """Orders of passes that are no plain loop."""

    def compare(self, body, steps=3, **model_options):
        plain, model = models.make(**model_options), models.make(**model_options)
        results = []
        for one, optimizer in ((plain, plain_adamw(plain)), (model, adamw(sharded(model)))):
            seen = []
            for step in range(steps):
                seen.append(body(one, optimizer, step))
            results.append((seen, one.state_dict()))
        self.assertEqual(results[0][0], results[1][0])
        for name, value in results[0][1].items():
            self.assertTrue(torch.equal(results[1][1][name], value), name)
        self.assertTrue(released(model))

    def test_two_forward_passes_before_one_backward_pass(self):
        def body(model, optimizer, step):
            loss = model(*models.batch(step, 0)) - 0.5 * model(*models.batch(step, 1))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.item()
        self.compare(body)

    def test_two_losses_with_backward_passes_of_their_own(self):
        def body(model, optimizer, step):
            first, second = model(*models.batch(step, 0)), model(*models.batch(step, 1))
            first.backward()
            second.backward()
            optimizer.step()
            optimizer.zero_grad()
            return first.item(), second.item()
        self.compare(body)

    def test_two_backward_passes_over_one_graph(self):
        def body(model, optimizer, step):
            loss = model(*models.batch(step, 0))
            loss.backward(retain_graph=True)
            (0.5 * loss).backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.item()
        self.compare(body)

    def test_evaluation_between_a_forward_pass_and_its_backward_pass(self):
        def body(model, optimizer, step):
            loss = model(*models.batch(step, 0))
            with torch.no_grad():
                reference = model(*models.batch(step, 1)).item()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.item(), reference
        self.compare(body)

    def test_evaluation_between_micro_steps(self):
        def body(model, optimizer, step):
            seen = []
            for i in range(3):
                loss = model(*models.batch(step, i)) / 3
                loss.backward()
                with torch.inference_mode():
                    seen += [loss.item(), model(*models.batch(step, 9)).item()]
            optimizer.step()
            optimizer.zero_grad()
            return seen
        self.compare(body)

    def test_gradients_that_are_cleared_before_the_step(self):
        def body(model, optimizer, step):
            model(*models.batch(step, 7)).backward()
            model.zero_grad()
            loss = model(*models.batch(step, 0))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.item()
        self.compare(body)

    def test_a_forward_pass_that_fails(self):
        def body(model, optimizer, step):
            if step == 1:
                with self.assertRaises(IndexError):
                    model(torch.full((1, 4), models.VOCABULARY + 5))
            loss = model(*models.batch(step, 0))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.item()
        self.compare(body)

    def test_a_backward_pass_that_fails(self):
        def body(model, optimizer, step):
            if step == 1:
                loss = model(*models.batch(step, 3))
                handle = model.blocks[1].register_full_backward_hook(lambda *_: 1 / 0)
                hidden = model(*models.batch(step, 3))
                with self.assertRaises(ZeroDivisionError):
                    hidden.backward()
                handle.remove()
                optimizer.zero_grad()
                del loss, hidden
            loss = model(*models.batch(step, 0))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.item()
        self.compare(body)

    def test_a_step_without_a_backward_pass_does_nothing(self):
        def body(model, optimizer, step):
            optimizer.step()
            return model(*models.batch(step, 0)).item()
        self.compare(body)

    def test_schedulers_and_parameter_groups(self):
        results = []
        for is_sharded in (False, True):
            model = models.make()
            if is_sharded:
                sharded(model)
            matrices = [p for p in model.parameters() if p.dim() > 1]
            others = [p for p in model.parameters() if p.dim() < 2]
            groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 1e-3}]
            made = torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.95))
            scheduler = torch.optim.lr_scheduler.StepLR(made, 1, 0.5)
            if is_sharded:
                with mock.patch.object(Sharded, "make_engine", lambda self: FakeEngine()):
                    optimizer = forebay.wrap(made)
            else:
                optimizer = made
            seen = []
            for step in range(4):
                loss = model(*models.batch(step, 0))
                loss.backward()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                seen.append((loss.item(), optimizer.param_groups[0]["lr"]))
            results.append(seen)
        self.assertEqual(results[0], results[1])


class Words(nn.Module):
    """An embedding, something in the middle, and a head."""

    def __init__(self, middle):
        super().__init__()
        self.embed, self.middle, self.head = nn.Embedding(50, 32), middle, nn.Linear(32, 50)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.head(self.middle(self.embed(x))) * self.scale


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, h):
        return h + self.attention(h, h, h)[0]


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts, self.count = nn.ModuleList(nn.Linear(32, 32) for _ in range(4)), 0

    def forward(self, h):
        self.count += 1
        return self.experts[self.count % 2](h) + self.experts[2](h)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv1d(32, 32, 3, padding=1), nn.BatchNorm1d(32), nn.ReLU(inplace=True),
                                    nn.Conv1d(32, 32, 3, padding=1), nn.BatchNorm1d(32))

    def forward(self, h):
        h = h.transpose(1, 2)
        out = self.layers(h)
        out += h
        return torch.relu_(out).transpose(1, 2)


class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells = nn.LSTM(32, 32, 2, batch_first=True)

    def forward(self, h):
        return self.cells(h)[0]


class Modules(unittest.TestCase):
    def test_those_of_torch(self):
        encoder = lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True), 2)
        for make in (encoder, Attention, First, Residual, Experts):
            with self.subTest(make):
                results = []
                for is_sharded in (False, True):
                    torch.manual_seed(0)
                    model = Words(make())
                    optimizer = adamw(sharded(model)) if is_sharded else plain_adamw(model)
                    seen = []
                    for step in range(4):
                        x = torch.randint(0, 50, (2, 8), generator=torch.Generator().manual_seed(step))
                        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten())
                        loss.backward()
                        optimizer.step()
                        optimizer.zero_grad()
                        model.eval()
                        with torch.no_grad():
                            seen += [loss.item(), model(x).sum().item()]
                        model.train()
                    results.append(seen)
                self.assertEqual(results[0], results[1])


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
        model.to("cpu").float()  # Nothing changes.
        with self.assertRaisesRegex(forebay.Unsupported, "SGD"):
            forebay.wrap(torch.optim.SGD(model.parameters(), lr=1))
        with self.assertRaisesRegex(forebay.InvalidArgument, "already"):
            forebay.shard(model)
        with self.assertRaisesRegex(forebay.Unsupported, "autocast"):
            with torch.autocast("cpu", torch.bfloat16):
                model(*models.batch(0, 0))
        with self.assertRaisesRegex(forebay.Unsupported, "create_graph"):
            model(*models.batch(0, 0)).backward(create_graph=True)
        optimizer.zero_grad()
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

    def test_two_types(self):
        model = models.make()
        model.norm.bfloat16()
        with self.assertRaisesRegex(forebay.InvalidArgument, r"norm\.weight is torch\.bfloat16"):
            sharded(model)


class Reader(nn.Module):
    """Reads a parameter of a module that it does not call."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return nn.functional.linear(self.first(x), self.second.weight).sum()


class Guard(unittest.TestCase):
    def test_it_names_operator_and_unit(self):
        model = Reader()
        adamw(sharded(model))
        with self.assertRaisesRegex(forebay.InvalidArgument, r"aten\..*second\.weight of unit second.*resident"):
            model(torch.ones(2, 4))

    def test_residents_are_gathered_for_the_whole_pass(self):
        plain, model = Reader(), Reader()
        model.load_state_dict(plain.state_dict())
        optimizer, expected = adamw(sharded(model, resident=["second"])), plain_adamw(plain)
        for _ in range(2):
            for one, made in ((plain, expected), (model, optimizer)):
                one(torch.ones(2, 4)).backward()
                made.step()
                made.zero_grad()
        with forebay.gathered(model):
            self.assertTrue(torch.equal(model.second.weight, plain.second.weight))

    def test_it_finds_reads_outside_of_a_pass(self):
        model = models.make()
        adamw(sharded(model, check=True))
        model(*models.batch(0, 0)).backward()
        with self.assertRaisesRegex(forebay.InvalidArgument, r"aten\.pow.*blocks\.0\.up\.weight of unit blocks\.0"):
            model.blocks[0].up.weight.detach().pow(2)
        model._forebay.guard.leave()


if __name__ == "__main__":
    support.main()
