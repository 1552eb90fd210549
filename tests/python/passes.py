"""Orders of passes that are no plain loop, and modules of torch: with and without shard(), the same results.

A test class that inherits from these defines adamw(model), which shards the model and makes its optimizer, and
same(seen, expected) for losses and same_weights(seen, expected) for tensors.
"""

import contextlib
import types
import unittest
import warnings

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import forebay
import models


# torch tells which hooks of saved tensors the program has, so forebay sees reads of weights in the backward pass.
SHOWS_READS = hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks")


def plain_adamw(model, **options):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **{"lr": 1e-2, **options})


class Interrupted:
    """An engine of which one call raises KeyboardInterrupt, before or after its work, as a signal handler does."""

    CALLS = ("acquire", "release", "gradient", "evaluation_begin", "evaluation_end", "step_begin", "micro_step_begin", "norm", "step",
             "abandon")

    def __init__(self, engine, after):
        self.engine, self.after = engine, after
        self.left = 0  # The call that raises, counted from the next; 0: none.
        self.made = []

    def __getattr__(self, name):
        function = getattr(self.engine, name)
        if name not in self.CALLS:
            return function

        def call(*arguments):
            self.left -= 1
            if self.left == 0 and not self.after:
                raise KeyboardInterrupt
            result = function(*arguments)
            self.made.append(name)
            if self.left == 0:
                raise KeyboardInterrupt
            return result
        return call


class Passes:
    """A mixin."""

    def compare(self, body, steps=3, **model_options):
        plain, model = models.make(**model_options), models.make(**model_options)
        results = []
        for one, optimizer in ((plain, plain_adamw(plain)), (model, self.adamw(model))):
            seen = []
            for step in range(steps):
                seen.append(body(one, optimizer, step))
            results.append((seen, one.state_dict()))
        self.same(results[1][0], results[0][0])
        for name, value in results[0][1].items():
            self.same_weights(results[1][1][name], value)
        self.assertTrue(all(unit.held == 0 and not unit.calls for unit in model._forebay.units))

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

    def test_gradients_that_are_cleared_after_the_next_forward_pass(self):
        def body(model, optimizer, step):
            model(*models.batch(step, 7)).backward()
            loss = model(*models.batch(step, 0)) + model(*models.batch(step, 1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.item()
        self.compare(body)

    def test_no_sync(self):
        def body(model, optimizer, step):
            seen = []
            for i in range(3):
                with model.no_sync() if i < 2 and hasattr(model, "no_sync") else contextlib.nullcontext():
                    loss = model(*models.batch(step, i)) / 3
                    loss.backward()
                seen.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
            return seen
        self.compare(body)

    def test_gradients_that_are_set_to_zero(self):
        def body(model, optimizer, step):
            model(*models.batch(step, 7)).backward()
            model.zero_grad(set_to_none=False)
            loss = model(*models.batch(step, 0))
            loss.backward()
            optimizer.step()
            model.zero_grad(set_to_none=False)
            return loss.item()
        self.compare(body)

    def test_a_keyboard_interrupt(self):
        """torch calls no hook then."""
        def body(model, optimizer, step):
            if step in (1, 2):
                def interrupt(*_):
                    raise KeyboardInterrupt
                block = model.blocks[1]
                hook = (block.norm1.register_forward_pre_hook if step == 1 else block.register_full_backward_hook)(interrupt)
                with self.assertRaises(KeyboardInterrupt):
                    model(*models.batch(step, 3)).backward()
                hook.remove()
                optimizer.zero_grad()
            loss = model(*models.batch(step, 0))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.item()
        self.compare(body, steps=4)

    def test_a_keyboard_interrupt_at_any_call_of_the_engine(self):
        def body(model, optimizer, step):
            with torch.no_grad():
                evaluated = model(*models.batch(step, 1)).item()
            loss = model(*models.batch(step, 0))
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()
            optimizer.step()
            optimizer.zero_grad()
            return evaluated, loss.item(), norm

        for after in (False, True):
            plain, model = models.make(layers=1), models.make(layers=1)
            both = ((model, self.adamw(model)), (plain, plain_adamw(plain)))
            seen = [[body(one, optimizer, step) for step in range(2)] for one, optimizer in both]
            engine = model._forebay.engine = Interrupted(model._forebay.engine, after)
            at = 0
            while engine.left <= 0:  # Else the pass has no more calls.
                at += 1
                with self.subTest(after=after, call=at):
                    engine.left, engine.made = at, []
                    try:
                        body(*both[0], at)
                    except KeyboardInterrupt:
                        both[0][1].zero_grad()
                    if "step" in engine.made:
                        body(*both[1], at)
                    if engine.left <= 0:
                        if at % 2:  # An evaluation does not end the interrupted pass.
                            with torch.no_grad():
                                model(*models.batch(0, 2))
                        for results, (one, optimizer) in zip(seen, both):
                            results.append(body(one, optimizer, 100 + at))
                        if at % 3 == 0:
                            self.assertTrue(torch.isfinite(model.state_dict()["head.weight"]).all())
                self.same(seen[0][-1], seen[1][-1])
            engine.left = 0
            self.assertGreater(at, 30)
            for name, value in plain.state_dict().items():
                self.same_weights(model.state_dict()[name], value, most=2e-6)  # After more than a hundred steps.

    def test_a_gradient_that_is_not_finite_is_skipped_when_it_is_clipped(self):
        for bad in (float("inf"), float("nan")):
            plain, model = models.make(layers=1), models.make(layers=1)
            for one, optimizer in ((model, self.adamw(model)), (plain, plain_adamw(plain))):
                for step in range(4):
                    loss = one(*models.batch(step, 0)) * (bad if step == 1 else 1)
                    loss.backward()
                    norm = torch.nn.utils.clip_grad_norm_(one.parameters(), 0.5)
                    self.assertEqual(bool(torch.isfinite(norm)), step != 1)
                    if one is model or step != 1:
                        optimizer.step()
                    optimizer.zero_grad()
            for name, value in plain.state_dict().items():
                self.same_weights(model.state_dict()[name], value)

    def test_a_scaler_of_gradients(self):
        def body(model, optimizer, step):
            if step == 0:
                model.scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
            loss = model(*models.batch(step, 0))
            model.scaler.scale(loss * (1e38 if step == 1 else 1)).backward()
            norm = None
            if step != 2:
                model.scaler.unscale_(optimizer)
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item() if step != 1 else None
            model.scaler.step(optimizer)
            model.scaler.update()
            optimizer.zero_grad()
            return loss.item(), norm, model.scaler.get_scale()
        self.compare(body, steps=4)

    def test_a_generator_and_a_discriminator(self):
        """The generator's loss leaves gradients in the discriminator, which are cleared before or after its passes."""
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # All gradients are cleared.
            for is_early in (False, True):
                self.compare_generators(is_early)

    def test_a_discriminator_that_is_frozen_for_the_generator(self):
        self.compare_generators(True, freezes=True)

    def test_a_parameter_that_is_frozen_after_a_step(self):
        def body(model, optimizer, step):
            model.tokens.requires_grad_(step == 0)
            loss = model(*models.batch(step, 0))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.item()
        self.compare(body)

    def compare_generators(self, is_early, freezes=False):
        results = []
        for is_sharded in (False, True):
            torch.manual_seed(0)
            both = Judge(8, 16), Judge(16, 1)
            made = [self.adamw(one) if is_sharded else plain_adamw(one) for one in both]
            seen = []
            for step in range(3):
                z = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
                fake = both[0](z)
                both[1].requires_grad_(not freezes)
                both[1](fake).mean().backward()
                both[1].requires_grad_(True)
                made[0].step()
                made[0].zero_grad()
                if is_early:
                    made[1].zero_grad()
                loss = both[1](torch.ones(4, 16)).mean() - both[1](fake.detach()).mean()
                if not is_early:
                    made[1].zero_grad()
                loss.backward()
                made[1].step()
                seen += [loss.item(), fake.sum().item()]
            results.append(seen)
        self.same(results[1], results[0])

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
                self.shard(model)
            matrices = [p for p in model.parameters() if p.dim() > 1]
            others = [p for p in model.parameters() if p.dim() < 2]
            groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 1e-3}]
            made = torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.95))
            scheduler = torch.optim.lr_scheduler.StepLR(made, 1, 0.5)
            optimizer = self.wrap(made) if is_sharded else made
            optimizer.load_state_dict(optimizer.state_dict())  # The scheduler's groups stay the optimizer's.
            seen = []
            for step in range(4):
                loss = model(*models.batch(step, 0))
                loss.backward()
                optimizer.step()
                with warnings.catch_warnings():
                    warnings.simplefilter("error")  # Schedulers warn if they miss the step.
                    scheduler.step()
                optimizer.zero_grad()
                seen.append((loss.item(), optimizer.param_groups[0]["lr"]))
            results.append(seen)
        self.same(results[1], results[0])


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


class Judge(nn.Module):
    def __init__(self, width, out):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, 32), nn.LeakyReLU(0.2), nn.Linear(32, out))

    def forward(self, x):
        return self.layers(x)


class Both(nn.Module):
    """An encoder and a longer decoder. Both units of the decoder read one activation, so sums round otherwise."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Transformer(32, 4, 1, 2, 64, 0.0, batch_first=True)

    def forward(self, h):
        return self.layers(h, h)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(32, 32, 3, padding=1, bias=False), nn.BatchNorm1d(32), nn.ReLU(inplace=True),
            nn.Conv1d(32, 32, 3, padding=1, bias=False), nn.BatchNorm1d(32))

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


class HeadOfEmbedding(Words):
    """The head reads the table of the embedding by a function."""

    def __init__(self):
        super().__init__(nn.Linear(32, 32))
        del self.head

    def forward(self, x):
        return nn.functional.linear(self.middle(self.embed(x)), self.embed.weight) * self.scale


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.scale = nn.Linear(32, 32), nn.Linear(32, 32), nn.Parameter(torch.ones(32))
        self.in_part = False  # Whether a checkpoint is within.

    def forward(self, h):
        if isinstance(h, types.SimpleNamespace):
            h = h.h
        return checkpoint(self.part, h, use_reentrant=False) if self.in_part else self.part(h)

    def part(self, h):
        return self.second(torch.tanh(self.first(h))) * self.scale


class Chain(nn.Module):
    """Blocks. Tensors with their graphs leave them otherwise than as outputs that stay as they are."""

    def __init__(self, way, trained):
        super().__init__()
        self.blocks, self.way, self.beside = nn.ModuleList(Block() for _ in range(6)), way, []
        for name, p in self.named_parameters():
            p.requires_grad_(trained in name)
        for block in self.blocks:
            block.in_part = "checkpoint" in way
            block.register_forward_hook(self.leave)

    def leave(self, block, args, out):
        if self.way == "a view that is changed":
            return out.transpose(0, 1)
        if "object" in self.way:
            return types.SimpleNamespace(h=out)
        if self.way == "a list":
            self.beside.append(block.second(torch.tanh(block.first(2 * args[0]))).square().mean())

    def forward(self, h):
        self.beside.clear()
        for i, block in enumerate(self.blocks):
            if self.way == "two uses":
                out = block(checkpoint(block, h, use_reentrant=True) if i % 2 else block(h))
            else:
                out = block(types.SimpleNamespace(h=h) if self.way == "objects" else h)
            if self.way == "a view that is changed":
                out += h.transpose(0, 1)
                out = out.transpose(0, 1)
            h = out.h if "object" in self.way else out
        return h + sum(self.beside)


class CheckpointedTable(Words):
    def forward(self, x):
        h = checkpoint(lambda x: self.embed(x) * self.embed(x + 1), x % 49, use_reentrant=False)
        return self.head(self.middle(h)) * self.scale


class NormedTable(Words):
    """The weight of the table is computed from two parameters in each pass."""

    def __init__(self, middle):
        super().__init__(middle)
        self.embed = nn.utils.weight_norm(self.embed)


class ReadTable(Words):
    """A hook of the program reads the table, and its result has a graph."""

    def __init__(self, middle):
        super().__init__(middle)
        self.embed.register_forward_hook(lambda table, args, out: out + table.weight.square().mean())


class Modules:
    """A mixin."""

    others = ()  # More models.

    def test_a_head_that_reads_the_embedding(self):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            self.compare(HeadOfEmbedding)
        self.assertEqual(sum("resident" in str(one.message) for one in said), 1)  # The sharded model says it once.

    @unittest.skipUnless(SHOWS_READS, "needs torch 2.8")
    def test_tensors_that_leave_a_module_otherwise(self):
        for way in ("a view that is changed", "an object", "a list", "a checkpoint and an object", "objects"):
            for trained in ("", "scale", "none"):  # All parameters, one of each block, none.
                with self.subTest(way=way, trained=trained):
                    self.compare(lambda: Words(Chain(way, trained)))

    def test_a_block_under_a_reentrant_checkpoint_and_without(self):
        for trained in ("", "none", *(["scale"] if SHOWS_READS else [])):
            with self.subTest(trained=trained):
                self.compare(lambda: Words(Chain("two uses", trained)))

    def test_tables_that_are_read_in_the_backward_pass(self):
        for make in (CheckpointedTable, NormedTable, *([ReadTable] if SHOWS_READS else [])):
            with self.subTest(make):
                self.compare(lambda: make(Chain("", "")))

    def test_those_of_torch(self):
        encoder = lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True), 2)
        for make in (encoder, Attention, First, Residual, Experts, *self.others):
            with self.subTest(make):
                self.compare(lambda: Words(make()), evaluates=True)

    def compare(self, make, evaluates=False):
        results = []
        for is_sharded in (False, True):
            torch.manual_seed(0)
            model = make()
            optimizer = self.adamw(model) if is_sharded else plain_adamw(model)
            seen = []
            for step in range(4):
                x = torch.randint(0, 50, (2, 8), generator=torch.Generator().manual_seed(step))
                loss = nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten())
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                seen.append(loss.item())
                if evaluates:
                    model.eval()
                    with torch.no_grad():
                        seen.append(model(x).sum().item())
                    model.train()
            results.append(seen)
        self.same(results[1], results[0])
