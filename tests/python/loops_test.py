"""Loops that people write around a model, on one rank: the weights of plain torch, at stages 0 and 3."""

import concurrent.futures
import gc
import io
import itertools
import pickle
import tempfile
import threading
import types
import unittest
import warnings
from unittest import mock

import support

support.need("torch")
support.need_library()

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import forebay
import passes

torch.set_num_threads(1)
STAGES = (0, 3)


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


def inputs(step):
    return torch.full((2, 8), 0.5 + 0.25 * step)


def refusals(*calls):
    """The texts of the calls that are refused."""
    texts = []
    for call in calls:
        try:
            call()
        except forebay.InvalidArgument as error:
            texts.append(str(error))
    return texts


class Loops(unittest.TestCase):
    def compare(self, loop, stage, rule="AdamW"):
        """`loop(model, optimizer)`; optimizer(model) makes one of that rule."""
        plain, model = make(), forebay.shard(make(), stage=stage)
        loop(plain, lambda m: getattr(torch.optim, rule)(m.parameters(), lr=0.05))
        loop(model, lambda m: getattr(forebay, rule)(m, lr=0.05))
        values = model.state_dict()
        for name, value in plain.state_dict().items():
            self.assertLess((values[name] - value).abs().max().item(), 2e-6, (stage, name))

    def test_an_evaluation_between_backward_and_clipping(self):
        def loop(model, adamw):
            optimizer = adamw(model)
            for step in range(3):
                model(inputs(step)).square().sum().backward()
                with torch.no_grad():
                    model(inputs(step))
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
        for stage in STAGES:
            self.compare(loop, stage)

    def test_a_forward_pass_that_nobody_differentiates(self):
        def loop(model, adamw, before, clips):
            optimizer = adamw(model)
            for step in range(3):
                if before:
                    model(inputs(step))
                model(inputs(step)).square().sum().backward()
                if not before:
                    model(inputs(step))
                if clips:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
        for stage in STAGES:
            for before in (False, True):
                for clips in (False, True):
                    self.compare(lambda *given: loop(*given, before, clips), stage, "SGD")

    def test_parameters_are_frozen_and_unfrozen_after_a_forward_pass_that_nobody_differentiates(self):
        def loop(model, sgd, whole):
            optimizer = sgd(model)

            def call(step):
                return model(inputs(step)) if whole else model[2](model[1](model[0](inputs(step))))

            for step in range(6):
                if step in (1, 3):
                    model.seen = call(step)  # It stays alive.
                    model[0].weight.requires_grad_(step == 3)
                elif step in (2, 4):
                    handle = model[2].register_forward_hook(lambda *_: 1 / 0)
                    with self.assertRaises(ZeroDivisionError):
                        call(step)
                    handle.remove()
                    optimizer.zero_grad()
                    model[2].requires_grad_(step == 4)
                call(step).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        for stage in STAGES:
            for whole in (False, True):
                self.compare(lambda *given: loop(*given, whole), stage, "SGD")

    def test_a_parameter_that_is_frozen_after_the_forward_pass_gets_no_gradient(self):
        def loop(model, sgd, looks):
            optimizer = sgd(model)
            for step in range(3):
                loss = model(inputs(step)).square().sum()
                if step == 0:
                    model[0].weight.requires_grad_(False)
                    if looks:
                        model(inputs(step))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        for stage in STAGES:
            for looks in (False, True):
                self.compare(lambda *given: loop(*given, looks), stage, "SGD")

    def test_a_norm_that_is_taken_while_a_forward_pass_waits(self):
        def loop(model, sgd, clears):
            optimizer = sgd(model)
            for step in range(3):
                model(inputs(step)).square().sum().backward()
                loss = model(inputs(step + 3)).square().sum()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                if clears < 2:  # The step is given up before or after the next forward pass, or for the loss that waits.
                    loss = model(inputs(step)).square().sum() if clears else loss
                    optimizer.zero_grad()
                    if not clears:
                        loss = model(inputs(step)).square().sum()
                    loss.backward()
                elif clears == 2:
                    optimizer.zero_grad()
                    loss.backward()
                else:
                    model(inputs(step))
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                optimizer.step()
                optimizer.zero_grad()
        for stage in STAGES:
            for clears in range(4):
                self.compare(lambda *given: loop(*given, clears), stage, "SGD")

    def test_a_norm_between_two_backward_passes_is_refused(self):
        for limit in (1e9, 0.1):
            for waits in (False, True):
                model, expected = (forebay.shard(make(), stage=1) for _ in range(2))
                optimizer, other = (forebay.AdamW(one, lr=0.05) for one in (model, expected))
                for step in range(3):
                    model(inputs(step)).square().sum().backward()
                    loss = model(inputs(step)).square().sum() if waits else None
                    torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
                    loss = loss if waits else model(inputs(step)).square().sum()
                    with self.assertRaisesRegex(forebay.Unsupported, "their norm was taken, between two backward passes of a step"):
                        loss.backward()
                    if step < 2:
                        optimizer.zero_grad()
                        model(inputs(step)).square().sum().backward()
                    for one in (optimizer, other):
                        if one is other:
                            expected(inputs(step)).square().sum().backward()
                            if step == 2:
                                torch.nn.utils.clip_grad_norm_(expected.parameters(), limit)
                        one.step()
                        one.zero_grad()
                self.assertEqual(forebay.digest(model), forebay.digest(expected))

    def test_a_module_whose_output_is_detached_stays(self):
        for stage in STAGES:
            model = forebay.shard(make(), stage=stage, units=["Linear"])
            optimizer = forebay.AdamW(model, lr=0.05, weight_decay=0.5)
            before = {name: value.clone() for name, value in model.state_dict().items()}
            for step in range(3):
                h = model[1](model[0](inputs(step)))
                model[2](h.detach()).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            for name, value in model.state_dict().items():
                self.assertEqual(torch.equal(value, before[name]), name.startswith("0."), (stage, name))

    def test_a_second_optimizer_begins_anew(self):
        def loop(model, adamw):
            for _ in range(2):
                optimizer = adamw(model)
                for step in range(3):
                    model(inputs(step)).square().sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
        for stage in STAGES:
            self.compare(loop, stage)

    def test_an_optimizer_that_another_replaced_makes_no_step(self):
        model = forebay.shard(make(), stage=1)
        first, second = forebay.AdamW(model, lr=0.05), forebay.AdamW(model, lr=0.05)
        model(inputs(0)).square().sum().backward()
        first.step()  # Neither had made one.
        first.zero_grad()
        model(inputs(0)).square().sum().backward()
        with self.assertRaisesRegex(forebay.InvalidArgument, "another optimizer of this model makes its steps"):
            second.step()
        first.step()
        first.zero_grad()
        with self.assertRaisesRegex(forebay.InvalidArgument, "gradients wait"):
            model(inputs(0)).square().sum().backward()
            forebay.AdamW(model, lr=0.05)
        first.zero_grad()
        third = forebay.AdamW(model, lr=0.05)
        model(inputs(0)).square().sum().backward()
        with self.assertRaisesRegex(forebay.InvalidArgument, "another optimizer of this model makes its steps"):
            first.step()
        third.step()

    def test_an_optimizer_that_is_made_after_a_restore_has_the_moments_of_the_state(self):
        model = forebay.shard(make(), stage=1)

        def step(optimizer):
            model(inputs(0)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            return forebay.digest(model)

        first = forebay.AdamW(model, lr=0.05)
        step(first)
        with tempfile.TemporaryDirectory() as directory:
            forebay.save(model, directory)
            expected = step(first)
            forebay.restore(model, directory)
        self.assertEqual(step(forebay.AdamW(model, lr=0.05)), expected)

    def test_what_shards_cannot_do_is_refused(self):
        model = forebay.shard(make(), stage=1)
        optimizer = forebay.AdamW(model, lr=0.05)
        model(inputs(0)).square().sum().backward()
        with self.assertRaisesRegex(forebay.Unsupported, "multiplied by a tensor of 8 elements"):
            model[0].bias.grad.mul_(torch.ones(8))
        taken = optimizer.param_groups[0]["params"].pop()
        with self.assertRaisesRegex(forebay.Unsupported, "taken out of param_groups"):
            optimizer.step()
        optimizer.param_groups[0]["params"].append(taken)
        optimizer.step()

    def test_reads_between_steps_are_refused_at_stage_3(self):
        model = forebay.shard(make(), stage=3, units=["Linear"])
        optimizer = forebay.AdamW(model, lr=0.05)
        for step in range(5):
            model(inputs(step)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            average = torch.zeros(8, 8)
            with self.assertRaisesRegex(forebay.InvalidArgument, r"reads 0\.weight .*outside of the forward"):
                average.add_(model[0].weight.data, alpha=0.5)
            with forebay.gathered(model):
                average.add_(model[0].weight.data, alpha=0.5)
            model(inputs(step))
        average.add_(1)  # No more is checked.

    def test_weights_are_read_between_passes_below_stage_3(self):
        def loop(model, adamw):
            optimizer = adamw(model)
            average = [p.detach().clone() for p in model.parameters()]
            seen = []
            for step in range(4):
                for micro_step in range(2):
                    hidden = model[1](model[0](inputs(step)))
                    output = nn.functional.linear(hidden, model[2].weight, model[2].bias) if micro_step else model(inputs(step))
                    output.square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                for mean, p in zip(average, model.parameters()):
                    mean.lerp_(p.detach(), 0.5)
                seen.append([mean.clone() for mean in average])
            return seen

        expected = loop(make(), lambda model: torch.optim.SGD(model.parameters(), lr=0.05))
        for stage in range(3):
            found = loop(forebay.shard(make(), stage=stage), lambda model: forebay.SGD(model, lr=0.05))
            for one, other in zip(sum(expected, []), sum(found, [])):
                self.assertLess((one - other).abs().max().item(), 2e-6, stage)

    def test_all_reads_are_checked_where_it_is_told_so(self):
        model = forebay.shard(make(), stage=1, check=True)
        optimizer = forebay.AdamW(model, lr=0.05)
        for step in range(3):
            model(inputs(step)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        for evaluates in (False, True):
            if evaluates:
                with torch.no_grad():
                    model(inputs(0))
            with self.assertRaisesRegex(forebay.InvalidArgument, r"reads 0\.weight .*outside of the forward"):
                model[0].weight.data.clone()

    def test_reads_in_a_block_of_gathered_are_there_where_all_are_checked(self):
        for stage in range(4):
            model = forebay.shard(make(), stage=stage, check=True)
            optimizer = forebay.AdamW(model, lr=0.05)
            for step in range(3):
                model(inputs(step)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                with forebay.gathered(model):
                    found = [p.detach() + 0 for p in model.parameters()]
                    with self.assertRaisesRegex(forebay.InvalidArgument, r"writes 0\.weight within gathered\(model\); .*write=True"):
                        model[0].weight.mul_(2)
                for p, expected in zip(found, model.state_dict().values()):
                    self.assertTrue(torch.equal(p, expected), (stage, step))

    def test_modules_that_come_and_go_are_named(self):
        model = forebay.shard(make(), stage=1)
        there = list(model.parameters())
        model[2] = nn.Linear(8, 8)
        with self.assertRaisesRegex(forebay.InvalidArgument, r"module of parameter 2\.weight was replaced or removed"):
            forebay.AdamW(model, lr=0.05)
        forebay.AdamW(model, there, lr=0.05)
        with self.assertRaisesRegex(forebay.InvalidArgument, r"module of parameter 2\.weight was replaced or removed"):
            model(inputs(0))
        model = forebay.shard(make(), stage=1)
        there = list(model.parameters())
        model.append(nn.Linear(8, 8))  # A new head, or an adapter.
        for whole in (model, nn.Sequential(model)):
            whole._forebay = model._forebay
            with self.assertRaisesRegex(forebay.InvalidArgument, r"3\.weight joined the model after shard.*cannot train it"):
                forebay.AdamW(whole, lr=0.05)
        forebay.AdamW(model, there, lr=0.05)
        model = forebay.shard(make(), stage=1)
        forebay.AdamW(model, lr=0.05)
        model.append(nn.Linear(8, 8))
        with self.assertWarnsRegex(UserWarning, r"3\.weight joined the model after shard.*does not train it"):
            model(inputs(0)).sum().backward()
        model = forebay.shard(make(), stage=1)
        optimizer = forebay.AdamW(model, lr=0.05)
        model(inputs(0)).sum().backward()
        optimizer.step()
        model.append(nn.Linear(8, 8))  # After the first pass.
        with self.assertWarnsRegex(UserWarning, r"3\.weight joined the model after shard"):
            model(inputs(0))

        def step_past_the_call(model):
            model.forward(inputs(0)).sum().backward()
            optimizer.step()

        for call in (lambda model: model(inputs(0)), lambda model: forebay.save(model, "/nowhere"), step_past_the_call):
            model = forebay.shard(make(), stage=1)
            optimizer = forebay.AdamW(model, lr=0.05)
            for step in range(4):
                model(inputs(step)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            model[2] = nn.Linear(8, 8)
            with self.assertRaisesRegex(forebay.InvalidArgument, r"module of parameter 2\.weight was replaced or removed"):
                call(model)

    def test_a_backward_pass_of_which_forebay_sees_no_output(self):
        class Policy(nn.Module):
            def __init__(self):
                super().__init__()
                self.mean, self.log_std = nn.Linear(8, 3), nn.Parameter(torch.zeros(3))

            def forward(self, x):
                return torch.distributions.Normal(self.mean(x), self.log_std.exp())

        def losses(model, make_optimizer):
            optimizer = make_optimizer(model)
            values = []
            for step in range(3):
                for micro_step in range(2):
                    loss = -model(inputs(step + micro_step)).log_prob(torch.ones(2, 3)).mean()
                    loss.backward()
                    values.append(loss.item())
                optimizer.step()
                optimizer.zero_grad()
            return values

        def policy():
            torch.manual_seed(0)
            return Policy()

        expected = losses(policy(), lambda model: torch.optim.SGD(model.parameters(), lr=0.05))
        for stage in range(4):
            found = losses(forebay.shard(policy(), stage=stage), lambda model: forebay.SGD(model, lr=0.05))
            for one, other in zip(expected, found):
                self.assertAlmostEqual(one, other, places=5)

    def test_a_loss_that_a_block_keeps_besides_its_output(self):
        class Block(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear, self.gate, self.kept = nn.Linear(8, 8), nn.Parameter(torch.ones(8)), []

            def forward(self, x):
                y = self.linear(x * self.gate) if self.uses_gate else self.linear(x)
                self.kept.append((self.gate * y.detach()).square().mean())
                return y

        def losses(blocks, uses, uses_gate, stage):
            torch.manual_seed(0)
            model = nn.Sequential(*(Block() for _ in range(blocks)))
            for block in model:
                block.uses_gate = uses_gate
            optimizer = (torch.optim.SGD(model.parameters(), lr=0.05) if stage is None else
                         forebay.SGD(forebay.shard(model, stage=stage), lr=0.05))
            values = []
            for step in range(4):
                loss = sum(model(inputs(step + i)).square().mean() for i in range(uses))
                for block in model:
                    loss = loss + sum(block.kept)
                    block.kept.clear()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                values.append(loss.item())
            return values

        for blocks, uses, uses_gate in itertools.product((1, 2), (1, 2), (False, True)):
            expected = losses(blocks, uses, uses_gate, None)
            for stage in range(4):
                for one, other in zip(expected, losses(blocks, uses, uses_gate, stage)):
                    self.assertAlmostEqual(one, other, places=5, msg=f"{blocks} {uses} {uses_gate} {stage}")

    def test_a_parameter_that_changes_its_shape_is_named(self):
        model = forebay.shard(make(), stage=1)
        optimizer = forebay.AdamW(model, lr=0.05)
        with self.assertRaisesRegex(forebay.InvalidArgument, r"2\.weight got shape \[9, 8\] within gathered"):
            with forebay.gathered(model, write=True):
                model[2].weight.data = torch.zeros(9, 8)
        model(inputs(0)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        model[2].weight.data = torch.zeros(9, 8)
        with self.assertRaisesRegex(forebay.InvalidArgument, r"2\.weight has shape \[9, 8\], and had \[8, 8\]"):
            model(inputs(0))

    def test_a_parameter_that_is_given_another_tensor_is_named(self):
        def assign(model):
            model[2].weight.data = torch.zeros(8, 8)

        def assign_all(model):
            torch.nn.utils.vector_to_parameters(torch.linspace(-1, 1, 144), model.parameters())

        def turn(model):
            model[2].weight.data = model[2].weight.data.t()

        def use(model):
            with torch.no_grad():
                model[2].weight.set_(torch.zeros(8, 8))

        for stage in STAGES:
            for change in (assign, assign_all, turn, use):
                for steps in (0, 3):
                    model = forebay.shard(make(), stage=stage, check=False)
                    optimizer = forebay.AdamW(model, lr=0.05)
                    for step in range(steps):
                        model(inputs(step)).square().sum().backward()
                        optimizer.step()
                        optimizer.zero_grad()
                    change(model)
                    with tempfile.TemporaryDirectory() as directory:
                        for call in (lambda: model(inputs(0)), optimizer.step, model.state_dict, lambda: forebay.save(model, directory),
                                     lambda: forebay.digest(model), lambda: forebay.gathered(model).__enter__()):
                            with self.assertRaisesRegex(forebay.InvalidArgument, r"[02]\.weight was given another tensor, as by p\.data = "
                                                        r".* write values by p\.data\.copy_.* within forebay\.gathered\(model, write=True"):
                                call()

    def test_tensors_that_were_assigned_are_taken_over(self):
        def loop(model, sgd, within):
            optimizer = sgd(model)
            for step in range(4):
                model(inputs(step)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                if step % 2:
                    continue
                block = forebay.gathered(model, write=True) if hasattr(model, "_forebay") else torch.no_grad()
                if within:
                    with block:
                        torch.nn.utils.vector_to_parameters(torch.linspace(-1, 1, 144), model.parameters())
                else:
                    model[2].weight.data = torch.full((8, 8), 0.1 * step)
                    with block:
                        pass
        for stage in STAGES:
            for within in (False, True):
                self.compare(lambda *given: loop(*given, within), stage, "SGD")

    def test_parameters_that_were_exchanged_are_named(self):
        model = forebay.shard(make(), stage=1)
        forebay.AdamW(model, lr=0.05)
        torch.utils.swap_tensors(model[2].weight, nn.Parameter(torch.zeros(8, 8)))
        for call in (lambda: model(inputs(0)), lambda: forebay.gathered(model, write=True).__enter__()):
            with self.assertRaisesRegex(forebay.InvalidArgument, r"2\.weight was replaced or removed after shard"):
                call()

    def test_a_pass_in_another_thread_is_refused_and_leaves_the_first_one_whole(self):
        def loop(model, adamw):
            optimizer = adamw(model)
            inside, go_on = threading.Event(), threading.Event()

            def wait(*_):
                inside.set()
                go_on.wait()

            for step in range(4):
                if step == 2:
                    handle = model[2].register_forward_pre_hook(wait)
                    with concurrent.futures.ThreadPoolExecutor() as threads:
                        loss = threads.submit(lambda: model(inputs(2)).square().sum())
                        inside.wait()
                        handle.remove()
                        try:
                            refused = refusals(lambda: model(inputs(0)), lambda: model[2](inputs(0)), model.state_dict)
                        finally:
                            go_on.set()
                        loss.result().backward()
                else:
                    model(inputs(step)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            if hasattr(model, "_forebay"):
                self.assertEqual([("called in another thread" in text and "Lock" in text) for text in refused], [True] * 3)
        for stage in STAGES:
            self.compare(loop, stage)

    def test_a_pass_that_an_interrupt_ended_in_another_thread(self):
        def interrupt(*_):
            raise KeyboardInterrupt

        def call(model):
            with self.assertRaises(KeyboardInterrupt):
                model(inputs(0))

        for stage in STAGES:
            model = forebay.shard(make(), stage=stage)
            optimizer = forebay.AdamW(model, lr=0.05)
            handle = model[2].register_forward_pre_hook(interrupt)
            with concurrent.futures.ThreadPoolExecutor() as threads:
                threads.submit(call, model).result()
                handle.remove()
                model[0](inputs(0))
                model(inputs(0)).square().sum().backward()
            optimizer.step()
            self.assertTrue(all(unit.held == 0 for unit in model._forebay.units))

    def test_an_interrupt_before_the_first_acquisition_of_a_backward_pass(self):
        def interrupt(unit, backward, stream):
            if backward:
                raise KeyboardInterrupt
            acquire(unit, backward, stream)

        def loop(model, adamw, reentrant, evaluates):
            nonlocal acquire
            optimizer = adamw(model)
            for step in range(4):
                for micro_step in range(2):
                    def loss():
                        x = inputs(step + micro_step).requires_grad_()
                        h = checkpoint(model[0], x, use_reentrant=True) if reentrant else model[0](x)
                        return model[2](torch.tanh(h)).square().sum()
                    if step in (1, 2) and micro_step == step - 1 and hasattr(model, "_forebay"):
                        acquire = model._forebay.engine.acquire
                        with mock.patch.object(model._forebay.engine, "acquire", interrupt), self.assertRaises(KeyboardInterrupt):
                            loss().backward()
                    if step in (1, 2) and micro_step == step - 1:
                        optimizer.zero_grad()
                        if evaluates:
                            with torch.no_grad():
                                model(inputs(step))
                    loss().backward()
                optimizer.step()
                optimizer.zero_grad()

        acquire = None
        for stage in STAGES:
            for reentrant, evaluates in ((True, False), (True, True), (False, True)):
                with self.subTest(stage=stage, reentrant=reentrant, evaluates=evaluates):
                    self.compare(lambda *given: loop(*given, reentrant, evaluates), stage)

    def test_an_interrupt_while_a_step_notes_the_weights_that_changed(self):
        def interrupt(p):
            counted(p)
            seen.append(p)
            if len(seen) == 2:
                raise KeyboardInterrupt

        counted = torch.autograd.graph.increment_version
        for options in ({"stage": 0, "offload": "optimizer"}, {"stage": 2, "offload": "optimizer"}):
            with self.subTest(options=options), tempfile.TemporaryDirectory() as directory:
                seen = []
                model = forebay.shard(make(), **options)
                optimizer = forebay.AdamW(model, lr=0.05)
                for step in range(3):
                    model(inputs(step)).square().sum().backward()
                    if step == 1:
                        with mock.patch.object(torch.autograd.graph, "increment_version", interrupt):
                            with self.assertRaises(KeyboardInterrupt):
                                optimizer.step()
                        forebay.save(model, directory)
                    else:
                        optimizer.step()
                    optimizer.zero_grad()

    def test_gradients_from_before_an_interrupt_are_dropped_by_zero_grad_of_the_model(self):
        def interrupt(*_):
            raise KeyboardInterrupt

        def loop(model, adamw, set_to_none):
            optimizer = adamw(model)
            for step in range(4):
                if step in (1, 2):
                    handle = model[0].register_full_backward_hook(interrupt)  # The other module has its gradients then.
                    with self.assertRaises(KeyboardInterrupt):
                        model(inputs(7).requires_grad_()).square().sum().backward()
                    handle.remove()
                    model.zero_grad(set_to_none=set_to_none)
                model(inputs(step)).square().sum().backward()
                optimizer.step()
                model.zero_grad()

        for stage in STAGES:
            for set_to_none in (True, False):
                self.compare(lambda *given: loop(*given, set_to_none), stage)

    @unittest.skipUnless(hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"), "torch has it since 2.8")
    def test_an_interrupt_leaves_no_hooks_of_the_contexts_around_it(self):
        """torch calls no hook of a module after KeyboardInterrupt, and each context pops the top of the stack."""
        handles = []

        def interrupt(*_):
            raise KeyboardInterrupt

        def hooks():
            return torch.autograd.graph.saved_tensors_hooks(lambda t: t + 1, lambda t: t)

        def alone(model, x):
            return model(x)

        def plain(model, x):
            with hooks():
                return model(x)

        def nested(model, x):
            with torch.autograd.graph.save_on_cpu(), hooks():
                return model(x)

        def checkpointed(model, x):
            return checkpoint(model, x, use_reentrant=False)

        def blocks(model, x):
            for block in model:
                x = checkpoint(block, x, use_reentrant=False)
            return x

        def caught(model, x):
            with hooks():
                before = top()
                try:
                    model(x)
                except KeyboardInterrupt:
                    handles.pop().remove()
                    model.zero_grad()
                    model(inputs(9))
                    self.assertEqual(top(), before)
                    raise

        def top():
            return torch._C._autograd._top_saved_tensors_default_hooks(False)

        def loop(model, adamw, call):
            optimizer = adamw(model)
            for step in range(4):
                if step in (1, 2):
                    handles.append(model[2].register_forward_pre_hook(interrupt))
                    with self.assertRaises(KeyboardInterrupt):
                        call(model, inputs(step))
                    while handles:
                        handles.pop().remove()
                    if call is not alone:  # Else those of the unit stay until the next pass.
                        self.assertIsNone(top())
                    if step == 1:
                        optimizer.zero_grad()
                with torch.autograd.graph.save_on_cpu():
                    result = (blocks if call is blocks else checkpointed)(model, inputs(step))
                self.assertIsNone(top())
                result.square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()

        def clean():  # So that this test alone fails.
            while top():
                torch._C._autograd._pop_saved_tensors_default_hooks()

        self.addCleanup(clean)
        for stage in STAGES:
            for call in (alone, plain, nested, checkpointed, blocks, caught):
                with self.subTest(call=call.__name__, stage=stage):
                    self.compare(lambda *given: loop(*given, call), stage)

    def test_the_model_goes_on_after_an_interrupt_in_state_dict(self):
        def interrupt(*_):
            raise KeyboardInterrupt

        def loop(model, adamw):
            optimizer = adamw(model)
            for step in range(3):
                handle = model[2].register_state_dict_pre_hook(interrupt)  # The model and its last unit have begun then.
                with self.assertRaises(KeyboardInterrupt):
                    model.state_dict()
                handle.remove()
                if hasattr(model, "_forebay"):
                    (forebay.save(model, directory), forebay.digest(model), model.state_dict())[step]
                model(inputs(step)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()

        for stage in STAGES:
            with tempfile.TemporaryDirectory() as directory:
                self.compare(loop, stage)

    def test_state_dict_in_two_threads(self):
        for stage in STAGES:
            model = forebay.shard(make(), stage=stage)
            order = []
            begun, first_is_done = threading.Barrier(2, timeout=20), threading.Event()

            def both_have_begun(*_):
                begun.wait()
                if threading.current_thread() is not order[0]:
                    first_is_done.wait(20)  # The one that began first also ends first.

            def collected():
                order.append(threading.current_thread())
                values = model.state_dict()
                first_is_done.set()
                return values

            handle = model[2].register_state_dict_pre_hook(both_have_begun)
            with concurrent.futures.ThreadPoolExecutor(2) as pool:
                found = [future.result() for future in [pool.submit(collected) for _ in range(2)]]
            handle.remove()
            for values in found:
                for name, value in make().state_dict().items():
                    self.assertTrue(torch.equal(values[name], value), (stage, name))
            optimizer = forebay.AdamW(model, lr=0.05)
            model(inputs(0)).square().sum().backward()
            optimizer.step()

    def test_the_model_goes_on_after_an_interrupt_where_writing_begins(self):
        def interrupt(*_):
            raise KeyboardInterrupt

        def loop(model, adamw):
            optimizer = adamw(model)
            for step in range(2):
                if hasattr(model, "_forebay"):
                    with mock.patch.object(model._forebay.guard, "follow_all", interrupt), self.assertRaises(KeyboardInterrupt):
                        with forebay.gathered(model, write=True):
                            self.fail("it began")
                    with forebay.gathered(model):
                        self.assertTrue(torch.isfinite(model[0].weight).all())
                model(inputs(step)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()

        for stage in STAGES:
            self.compare(loop, stage)

    def test_a_parameter_that_has_its_values_is_pickled_as_a_plain_one(self):
        def saved(value):
            file = io.BytesIO()
            torch.save(value, file)
            file.seek(0)
            return torch.load(file, weights_only=True)

        def check(model, plain):
            for copied in (lambda value: pickle.loads(pickle.dumps(value)), saved):
                first, second = copied([model[0].weight, model[0].weight])
                self.assertIs(first, second)
                self.assertIs(type(first), nn.Parameter)
                self.assertTrue(torch.equal(first, plain[0].weight))
                self.assertFalse(copied(model[2].bias).requires_grad)
                self.assertFalse(hasattr(first, "_forebay"))

        for stage in STAGES:
            for is_meta in (False, True):
                plain, model = make(), make()
                if is_meta:
                    model.to("meta")
                model[2].bias.requires_grad_(False)
                forebay.shard(model, stage=stage, device="cpu")
                optimizer = forebay.AdamW(model, lr=0.0)
                model.load_state_dict(plain.state_dict())
                for step in range(4):
                    if stage == 0:
                        check(model, plain)
                    else:
                        with self.assertRaisesRegex(forebay.Unsupported, r"pickling parameter 0\.weight while .* released.*gathered"):
                            pickle.dumps(model[0].weight)
                    with forebay.gathered(model):
                        check(model, plain)
                    model(inputs(step)).sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
        model = forebay.shard(make(), stage=3)
        model[0].weight.note = "kept"
        self.assertEqual(pickle.loads(pickle.dumps(model[0].weight)).note, "kept")  # No optimizer yet.

    def test_a_backward_pass_in_another_thread_is_refused_and_leaves_the_first_one_whole(self):
        def loop(model, adamw, reentrant):
            optimizer = adamw(model)
            inside, go_on = threading.Event(), threading.Event()

            def loss(step):
                h = checkpoint(model[0], inputs(step).requires_grad_(), use_reentrant=True) if reentrant else model[0](inputs(step))
                return model[2](torch.tanh(h)).square().sum()

            def wait(*_):
                inside.set()
                go_on.wait()

            for step in range(4):
                if step == 2 and hasattr(model, "_forebay"):
                    second = loss(7)
                    with concurrent.futures.ThreadPoolExecutor() as threads:
                        handle = model[2].register_full_backward_hook(wait)
                        first = loss(step)
                        handle.remove()
                        waiting = threads.submit(first.backward)
                        inside.wait()
                        try:
                            refused = refusals(second.backward, lambda: model(inputs(0)), lambda: model[2](inputs(0)), optimizer.step)
                        finally:
                            go_on.set()
                        waiting.result()
                else:
                    loss(step).backward()
                optimizer.step()
                optimizer.zero_grad()
            if hasattr(model, "_forebay"):
                self.assertEqual([("runs in another thread" in text and "Lock" in text) for text in refused], [True] * 4, refused)

        for stage in STAGES:
            for reentrant in (False, True):
                with self.subTest(stage=stage, reentrant=reentrant):
                    self.compare(lambda *given: loop(*given, reentrant), stage)

    def test_a_backward_pass_that_an_exception_ended_in_another_thread(self):
        def fail(*_):
            raise KeyboardInterrupt

        def call(loss):
            with self.assertRaises(KeyboardInterrupt):
                loss.backward()

        for stage in STAGES:
            model = forebay.shard(make(), stage=stage)
            optimizer = forebay.AdamW(model, lr=0.05)
            handle = model[0].register_full_backward_hook(fail)
            losses = [model(inputs(step).requires_grad_()).square().sum() for step in range(2)]
            handle.remove()
            with concurrent.futures.ThreadPoolExecutor(1) as threads:
                threads.submit(call, losses[0]).result()
                optimizer.zero_grad()
                model(inputs(0)).square().sum().backward()
            optimizer.step()
            self.assertTrue(all(unit.held == 0 for unit in model._forebay.units))

    def test_transforms_of_functions_that_cannot_be_followed_are_named(self):
        model = forebay.shard(make(), stage=1)
        optimizer = forebay.AdamW(model, lr=0.05)
        with self.assertRaisesRegex(forebay.Unsupported, r"torch\.func\.grad.*use torch\.autograd\.grad"):
            torch.func.grad(lambda x: model(x).sum())(inputs(0))
        for step in range(2):
            model(inputs(step)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        model(inputs(0)).square().sum().backward()
        optimizer.step()

    @unittest.skipUnless(passes.SHOWS_READS, "needs torch 2.8")
    def test_a_backward_pass_through_vmap(self):
        def loop(model, adamw):
            optimizer = adamw(model)
            for step in range(3):
                torch.vmap(model)(inputs(step)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    self.assertTrue(torch.allclose(torch.vmap(model)(inputs(0)), model(inputs(0))))

        for stage in STAGES:
            self.compare(loop, stage)

    def test_weights_that_are_not_followed_where_the_backward_pass_reads_them(self):
        from forebay.torch import sharded

        for context in (lambda: mock.patch.object(sharded, "program_hooks", None),
                        lambda: torch.autograd.graph.disable_saved_tensors_hooks("")):
            for check in (None, False):
                model = forebay.shard(make(), stage=3, check=check)
                optimizer = forebay.AdamW(model, lr=0.05)
                for _ in range(2):
                    with context(), self.assertRaisesRegex(forebay.Unsupported, r"2 got a gradient before .* returned.*in a tuple"):
                        torch.vmap(model)(inputs(0)).square().sum().backward()
                    optimizer.zero_grad()
                with context():
                    model(inputs(0)).square().sum().backward()
                optimizer.step()

    @unittest.skipUnless(passes.SHOWS_READS, "needs torch 2.8")
    def test_transforms_of_functions_over_activations_within_a_unit(self):
        class Corrected(nn.Linear):
            def forward(self, x):
                y = super().forward(x)
                return y + torch.func.grad(lambda y: y.tanh().square().sum())(y)

        def loop(model, adamw):
            model[2].__class__ = Corrected
            optimizer = adamw(model)
            for step in range(3):
                with torch.autograd.graph.disable_saved_tensors_hooks("torch.func"):
                    loss = model(inputs(step)).square().sum()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

        for stage in STAGES:
            self.compare(loop, stage)

    def test_two_backward_passes_over_a_graph_of_two_uses_after_a_lost_pass(self):
        def loop(model, adamw):
            optimizer = adamw(model)
            for step in range(3):
                model(inputs(2))  # Nobody differentiates it.
                loss = model(model(inputs(step))).square().sum()
                loss.backward(retain_graph=True)
                (0.5 * loss).backward()
                optimizer.step()
                optimizer.zero_grad()

        for stage in STAGES:
            self.compare(loop, stage)

    def test_a_graph_of_weights_that_have_changed_is_refused(self):
        def step(model, optimizer):
            optimizer.step()
            optimizer.zero_grad()

        def write(model, optimizer):
            optimizer.zero_grad()
            with forebay.gathered(model, write=True):
                for p in model.parameters():
                    p.data.mul_(0.5)

        def load(model, optimizer):
            optimizer.zero_grad()
            model.load_state_dict(model.state_dict())

        for change in (step, write, load):
            for stage in (0, 1, 3):
                for uses_before in (0, 2):  # In the first steps passes are checked.
                    with self.subTest(change=change.__name__, stage=stage, uses_before=uses_before):
                        model = forebay.shard(make(), stage=stage)
                        optimizer = forebay.AdamW(model, lr=0.05)
                        for i in range(uses_before):
                            model(inputs(i)).square().sum().backward()
                            step(model, optimizer)
                        late, loss = (model(inputs(i)).square().sum() for i in range(2))
                        loss.backward(retain_graph=True)
                        change(model, optimizer)
                        for one in (late, loss):
                            with self.assertRaisesRegex(RuntimeError, "modified by an inplace operation"):
                                one.backward()
                            optimizer.zero_grad()
                        model(inputs(0)).square().sum().backward()
                        optimizer.step()
                        self.assertGreater(optimizer.grad_norm, 0)

    def test_lists_and_dicts_that_a_unit_changes(self):
        class Layer(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = nn.Linear(8, 8)

            def forward(self, h, skips, state, losses):
                out = torch.tanh(self.linear(h + state["h"][0]))
                losses.append(out.square().mean())
                state["h"] = (out, state["h"][0])
                if len(skips) > 2:
                    out = out + skips.pop()
                skips.append(out)
                return out

        class Layers(nn.Module):
            def __init__(self, test):
                super().__init__()
                self.layers, self.test = nn.ModuleList(Layer() for _ in range(4)), test

            def forward(self, x):
                h, skips, losses = x, [x], []
                state = {"h": (x, x)}
                for layer in self.layers:
                    h = layer(h, skips, state, losses)
                self.test.assertIs(skips[0], x)
                self.test.assertEqual((len(skips), len(losses)), (3, 4))
                return h + sum(losses) + state["h"][1]

        def loop(model, adamw):
            optimizer = adamw(model)
            for step in range(3):
                model(inputs(step).requires_grad_()).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()

        def made():
            torch.manual_seed(0)
            return Layers(self)

        for stage in STAGES:
            plain, model = made(), forebay.shard(made(), units=[Layer], stage=stage)
            loop(plain, lambda m: torch.optim.AdamW(m.parameters(), lr=0.05))
            loop(model, lambda m: forebay.AdamW(m, lr=0.05))
            values = model.state_dict()
            for name, value in plain.state_dict().items():
                self.assertLess((values[name] - value).abs().max().item(), 2e-6, (stage, name))

    def test_one_unit_directly_and_under_a_reentrant_checkpoint(self):
        class Layer(nn.Linear):
            def forward(self, h):
                return torch.tanh(super().forward(h.h if isinstance(h, types.SimpleNamespace) else h))

        class Uses(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.layer, self.last = nn.Linear(8, 8), Layer(8, 8), nn.Linear(8, 8)

            def forward(self, x, order):
                h = self.first(x)
                for use in order:
                    h = {"direct": lambda: self.layer(h), "hidden": lambda: self.layer(types.SimpleNamespace(h=h)),
                         "reentrant": lambda: checkpoint(self.layer, h, use_reentrant=True)}[use]()
                return self.last(h)

        def made():
            torch.manual_seed(0)
            return Uses()

        for order in itertools.permutations(("direct", "hidden", "reentrant")):
            for stage in (0, 2, 3):
                plain, model = made(), forebay.shard(made(), units=[Layer], stage=stage)
                for one, optimizer in ((plain, torch.optim.SGD(plain.parameters(), lr=1.0)), (model, forebay.SGD(model, lr=1.0))):
                    for step in range(2):
                        one(inputs(step), order).square().sum().backward()
                        optimizer.step()
                        optimizer.zero_grad()
                values = model.state_dict()
                for name, value in plain.state_dict().items():
                    self.assertLess((values[name] - value).abs().max().item(), 1e-5, (order, stage, name))

    def test_results_that_an_operator_saves_die_with_their_graph(self):
        class Saves(torch.autograd.Function):
            alive = 0

            @staticmethod
            def forward(ctx, x):
                result = x.exp()
                ctx.save_for_backward(result)
                ctx.note = Note()
                return result

            @staticmethod
            def backward(ctx, gradient):
                return gradient * ctx.saved_tensors[0]

        class Note:
            def __init__(self):
                Saves.alive += 1

            def __del__(self):
                Saves.alive -= 1

        class Layer(nn.Linear):
            def forward(self, x):
                return Saves.apply(super().forward(x))

        for wrap in (lambda m: forebay.offload_activations(m, least_bytes=0), lambda m: forebay.shard(m, units=[Layer], stage=3)):
            model = nn.Sequential(Layer(8, 8), Layer(8, 8))
            wrap(model)
            for _ in range(3):
                model(inputs(0).requires_grad_())  # Nobody differentiates it.
            gc.collect()
            self.assertEqual(Saves.alive, 0)

    def test_parameters_with_their_names(self):
        model = forebay.shard(make(), stage=1)
        optimizer = forebay.AdamW(model.named_parameters(), 0.05)
        self.assertEqual([id(p) for p in optimizer.param_groups[0]["params"]], [id(p) for p in model.parameters()])
        model = forebay.shard(make(), stage=1)
        optimizer = forebay.AdamW(model, [{"params": model.named_parameters(), "lr": 0.05}])
        self.assertEqual(len(optimizer.param_groups[0]["params"]), 4)
        model = forebay.shard(make(), stage=1)
        first, *others = model.parameters()
        optimizer = forebay.AdamW(model, [{"params": first, "lr": 0.5}, {"params": iter(others)}], lr=0.05)
        self.assertEqual([(len(group["params"]), group["lr"]) for group in optimizer.param_groups], [(1, 0.5), (3, 0.05)])


if __name__ == "__main__":
    with warnings.catch_warnings():
        support.main()
