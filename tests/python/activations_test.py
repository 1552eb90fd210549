"""forebay.offload_activations(): the results of plain torch bit for bit, and what waits off the device."""

import contextlib
import gc
import json
import os
import sys
import tempfile
import threading
import time
import unittest

import support

support.need("torch")
support.need_library()

import torch
from torch import nn

import forebay
import models
from passes import plain_adamw

torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)


def losses(offload, steps=4, tier="cpu", body=None, **model_options):
    model = models.make(**model_options)
    offloaded = forebay.offload_activations(model, tier=tier, least_bytes=256) if offload else None
    optimizer = plain_adamw(model)
    seen = models.train(model, optimizer, steps=steps) if body is None else body(model, optimizer)
    return seen, [p.detach().clone() for p in model.parameters()], offloaded


class OneRank(unittest.TestCase):
    def compare(self, **options):
        expected, weights, _ = losses(False, **options)
        seen, mine, offloaded = losses(True, **options)
        self.assertEqual(seen, expected)
        for a, b in zip(mine, weights):
            self.assertTrue(torch.equal(a, b))
        gc.collect()
        statistics = offloaded.report()["statistics"]
        self.assertGreater(statistics["spilled_bytes"], 0)
        self.assertEqual(statistics["save_count"], statistics["load_count"])
        self.assertEqual([one for one in offloaded.in_flight if one.alive], [])
        return offloaded

    def test_plain(self):
        self.compare()

    def test_checkpointing_saves_less(self):
        whole = sum(self.compare().sizes)
        for kind in ("nonreentrant", "reentrant"):
            self.assertLess(sum(self.compare(recompute=kind).sizes), whole)

    def test_mistakes_are_named_at_once(self):
        for values, message in (({"tier": "disk"}, "activation-tier is disk; use cpu"), ({"group": 5}, "group is 5; give a"),
                                ({"least_bytes": -1}, "least_bytes is -1"), ({"passes": 0}, "passes is 0"),
                                ({"look_ahead": 2}, "no option look-ahead|did you mean")):
            with self.subTest(**values), self.assertRaisesRegex(forebay.InvalidArgument, message):
                forebay.offload_activations(torch.nn.Linear(2, 2), **values)

    def test_files(self):
        with tempfile.TemporaryDirectory() as directory:
            self.compare(tier=f"nvme:{directory}")

    def test_two_forward_passes_before_one_backward_pass(self):
        def body(model, optimizer):
            seen = []
            for step in range(4):
                loss = model(*models.batch(step, 0)) - 0.5 * model(*models.batch(step, 1))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                seen.append(loss.item())
            return seen
        self.compare(body=body)

    def test_two_backward_passes_over_one_graph(self):
        def body(model, optimizer):
            seen = []
            for step in range(3):
                loss = model(*models.batch(step, 0))
                loss.backward(retain_graph=True)
                (0.5 * loss).backward()
                optimizer.step()
                optimizer.zero_grad()
                seen.append(loss.item())
            return seen
        self.compare(body=body)

    def test_other_sizes_and_passes_without_a_backward_pass(self):
        def body(model, optimizer):
            seen = []
            for step in range(6):
                x, y = models.batch(step, 0, size=2 + step % 2)
                loss = model(x, y)
                if step == 3:
                    seen.append(loss.item())
                    continue  # The graph is dropped.
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                seen.append(loss.item())
            return seen
        expected, _, _ = losses(False, body=body)
        seen, _, offloaded = losses(True, body=body)
        self.assertEqual(seen, expected)
        del _
        gc.collect()
        self.assertEqual([one for one in offloaded.in_flight if one.alive], [])

    def test_a_sharded_model(self):
        digests = []
        for offload in (False, True):
            model = forebay.shard(models.make(), stage=3, guard=True)
            if offload:
                offloaded = forebay.offload_activations(model, least_bytes=256)
            models.train(model, forebay.AdamW(model, lr=1e-2))
            digests.append(forebay.digest(model))
        self.assertEqual(digests[0], digests[1])
        self.assertGreater(offloaded.report()["statistics"]["spilled_bytes"], 0)

    def test_a_deepspeed_configuration_asks_for_it(self):
        model = forebay.shard(models.make(), config={"activation_checkpointing": {"cpu_checkpointing": True}})
        self.assertEqual(len([h for h in model._forward_hooks.values() if "ActivationOffload" in str(h)]), 1)

    def test_an_inplace_change_after_saving(self):
        class Changes(nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

            def forward(self, x):
                h = self.a(x)
                h.sin()  # Saves the bytes of this moment, which no backward pass reads.
                h = torch.relu_(h)  # The version of the storage grows.
                k = h.view(64, -1).t()
                return (self.b(h) * h).sum() + k.exp().sum()

        self.expect_same_gradients(Changes, torch.ones(64, 64) / 64)

    def expect_same_gradients(self, make, x):
        results = []
        for offload in (False, True):
            torch.manual_seed(0)
            model = make()
            if offload:
                forebay.offload_activations(model, least_bytes=256)
            for _ in range(3):
                model.zero_grad()
                loss = model(x)
                loss.backward()
            results.append([loss.item(), *[p.grad.sum().item() for p in model.parameters()]])
        self.assertEqual(*results)

    def test_a_kernel_that_writes_what_an_operator_has_saved(self):
        class Kernel(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                loss = x.detach().square().sum()
                x.data.mul_(2)  # Without a new version, as by a kernel of the program's own.
                ctx.save_for_backward(x.detach())
                return loss

            @staticmethod
            def backward(ctx, gradient):
                return ctx.saved_tensors[0] * gradient

        class Measured(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = nn.Linear(8, 8)

            def forward(self, x):
                hidden = self.inner(x)
                self.metric = hidden.detach().requires_grad_().square().mean()
                return Kernel.apply(hidden)

        self.expect_same_gradients(Measured, torch.ones(64, 8))

    def test_views_that_are_conjugates_or_negatives(self):
        class Spectral(nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

            def forward(self, x):
                f, g = torch.fft.fft(self.a(x)), torch.fft.fft(self.b(x))
                i = g.conj().imag
                return (f * g.conj()).real.square().mean() + (i * i * self.a(x)).mean() + (f.mH @ g).abs().square().mean()

        self.expect_same_gradients(Spectral, torch.arange(64.0 * 64).view(64, 64) / 4096)

    def test_an_inplace_change_of_what_stays_is_refused(self):
        class Changes(nn.Module):
            def __init__(self):
                super().__init__()
                self.a = nn.Linear(64, 64)

            def forward(self, x):
                y = torch.sigmoid(self.a(x))  # Its backward pass reads y.
                y += 1
                return y.sum()

        model = Changes()
        for least_bytes in (1, 1 << 30):
            with forebay.offload_activations(model, least_bytes=least_bytes):
                with self.assertRaisesRegex(RuntimeError, "modified by an inplace operation.*expected version"):
                    model(torch.ones(64, 64)).backward()
        with self.assertRaisesRegex(RuntimeError, "modified by an inplace operation"):
            model(torch.ones(64, 64)).backward()

    def test_each_pass_says_why_there_is_no_place(self):
        model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
        with forebay.offload_activations(model, tier="nvme:/proc/no-such-directory", least_bytes=256):
            model(torch.ones(32, 64)).sum().backward()
            said = []
            for _ in range(2):
                with self.assertRaisesRegex(forebay.Error, "/proc/no-such-directory") as caught:
                    model(torch.ones(32, 64))
                said.append(str(caught.exception))
            self.assertEqual(said[0], said[1])

    def test_an_interrupted_forward_pass(self):
        class Interrupted(nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)
                self.is_interrupted = False

            def forward(self, x):
                h = torch.tanh(self.a(x))
                if self.is_interrupted:
                    raise KeyboardInterrupt
                return self.b(h).square().sum()

        model, x = Interrupted(), torch.ones(32, 64)
        offload = forebay.offload_activations(model, least_bytes=256)

        def saves_of_a_pass():
            before = offload.report()["statistics"]["save_count"] if offload.report() else 0
            model(x).backward()
            return (offload.report()["statistics"]["save_count"] if offload.report() else 0) - before

        def interrupt():
            model.is_interrupted = True
            with self.assertRaises(KeyboardInterrupt):
                model(x)
            model.is_interrupted = False

        saves_of_a_pass()
        saves = saves_of_a_pass()
        self.assertGreater(saves, 0)
        for _ in range(2):
            interrupt()
            self.assertEqual(saves_of_a_pass(), saves)
        interrupt()
        offload.remove()
        y = torch.ones(64, 64, requires_grad=True)
        y.exp().sum().backward()  # Autograd saves this outside of the model.
        self.assertEqual(y.grad.sum().item(), y.exp().sum().item())

    @unittest.skipUnless(hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"), "torch has it since 2.8")
    def test_an_interrupt_leaves_the_programs_hooks_as_they_were(self):
        def interrupt(*_):
            raise KeyboardInterrupt

        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        forebay.offload_activations(model, least_bytes=0)
        for handle in (None, model[1].register_forward_pre_hook(interrupt)):
            saved = []
            with contextlib.suppress(KeyboardInterrupt):
                with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
                    model(torch.ones(2, 8))
            x = torch.ones(2, requires_grad=True)
            x.exp()
            self.assertEqual(saved, [], handle)  # The model's pair hides the program's, which ends with its block.

    def test_an_interrupt_within_a_save(self):
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        x = torch.ones(6, 8)
        for interrupts_before in (True, False):
            with forebay.offload_activations(model, least_bytes=0) as offload:
                for _ in range(2):
                    model(x).sum().backward()
                save, calls = offload.checkpointer.save, []

                def interrupted(*arguments, **options):
                    calls.append(1)
                    if len(calls) == 2 and interrupts_before:
                        raise KeyboardInterrupt
                    save(*arguments, **options)
                    if len(calls) == 2:
                        raise KeyboardInterrupt

                offload.checkpointer.save = interrupted
                with self.assertRaises(KeyboardInterrupt):
                    model(x)
                before = offload.report()["statistics"]["save_count"]
                for _ in range(3):
                    model(x).sum().backward()
                self.assertEqual(offload.report()["statistics"]["save_count"], before + 3 * len(offload.sizes))

    def test_what_waits_off_the_device(self):
        """Tensors of `least_bytes` and of half of their storage at least, but no weights and no buffers."""
        class Keep(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, *kept):
                ctx.save_for_backward(*kept)
                return x * 1

            @staticmethod
            def backward(ctx, gradient):
                return (gradient, *[None for _ in ctx.saved_tensors])

        class Keeps(nn.Module):
            def __init__(self):
                super().__init__()
                self.line = nn.Linear(16, 512)
                self.register_buffer("table", torch.ones(4096))

            def forward(self, x):
                return Keep.apply(self.line(x), self.table, torch.zeros(256), torch.zeros(255), torch.zeros(1024)[:512],
                                  torch.zeros(2048)[:1023]).sum()

        model = Keeps()
        with forebay.offload_activations(model, least_bytes=1024) as offload:
            for _ in range(2):
                model(torch.ones(2, 16)).backward()
            self.assertEqual(offload.sizes, [1024, 4096])
            self.assertEqual(offload.report()["statistics"]["save_count"], 2)

    def test_as_many_passes_as_it_is_told_wait_off_the_device(self):
        model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
        for passes in (1, 2, 3):
            with forebay.offload_activations(model, least_bytes=256, passes=passes) as offload:
                model(torch.ones(8, 64)).sum().backward()
                sum(model(torch.ones(8, 64)).sum() for _ in range(3)).backward()
                self.assertEqual(offload.report()["statistics"]["save_count"], passes * len(offload.sizes))

    def test_an_evaluation_and_a_pass_that_is_dropped_take_no_place(self):
        model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
        with forebay.offload_activations(model, least_bytes=256) as offload:
            with torch.no_grad():
                model(torch.ones(8, 64))
            model(torch.ones(8, 64)).sum().backward()
            for count in (1, 2, 3):
                model(torch.ones(8, 64))  # Nobody differentiates it.
                self.assertEqual(offload.report()["statistics"]["save_count"], count * len(offload.sizes))

    def test_removed(self):
        model = models.make()
        with forebay.offload_activations(model, least_bytes=256) as offload:
            model(*models.batch(0, 0)).backward()
            model(*models.batch(0, 0)).backward()
        with self.assertRaisesRegex(forebay.InvalidArgument, "null"):
            offload.report()  # Its memory was given back.
        self.assertEqual(len(model._forward_hooks), 0)
        model(*models.batch(0, 0)).backward()


class Threads(unittest.TestCase):
    """Ranks as threads, which meet in a communicator of the program."""

    def trained(self, layers, differ=False, steps=3):
        """For each rank, with a model of so many layers: an error's text, or the bytes on the host and the number of saves.

        `differ`: the last rows of each rank's batch are its own.
        """
        results = [None] * len(layers)

        def made(count):
            torch.manual_seed(0)  # The generator is the process's: models made by several threads at once would differ.
            return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(count)))

        def run(rank, ranks):
            x = torch.cat([torch.ones(48, 64), torch.full((16, 64), rank / 4 if differ else 1.0)])
            with forebay.offload_activations(replicas[rank], group=ranks, least_bytes=256) as offload:
                try:
                    for _ in range(steps):
                        replicas[rank](x).sum().backward()
                    found = offload.report()
                    results[rank] = found["plan"]["host_bytes"], found["statistics"]["save_count"]
                except forebay.Error as error:
                    results[rank] = f"{type(error).__name__} {error}"

        replicas = [made(count) for count in layers]
        self.in_group(len(layers), run)
        return results

    def in_group(self, size, run, deadline=60000):
        def with_communicator(rank):
            device = forebay.Device()
            with group.communicator(rank, device) as ranks:
                run(rank, ranks)

        with forebay.LocalGroup(size, deadline=deadline) as group:
            threads = [threading.Thread(target=with_communicator, args=(rank,)) for rank in range(size)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

    def test_ranks_that_save_other_numbers_of_activations_are_refused(self):
        for text in self.trained([2, 2, 1]):
            self.assertRegex(text, r"InvalidArgument the tensor-parallel ranks save \[2, 3\] activations in one pass")

    def test_activations_that_differ_in_their_last_rows_are_not_shared(self):
        [(size, saves)] = self.trained([2])
        self.assertEqual(self.trained([2, 2, 2], differ=True), [(size, saves)] * 3)
        for part, count in self.trained([2, 2, 2]):
            self.assertEqual(count, saves)
            self.assertLess(part, 0.4 * size)

    def test_activations_in_another_order_are_not_shared(self):
        def run(rank, ranks):
            model = nn.Linear(64, 64)
            x = torch.arange(64.0 * 64).view(64, 64).roll(8 * rank, dims=rank % 2)
            with forebay.offload_activations(model, group=ranks, least_bytes=256) as offload:
                for _ in range(2):
                    model.zero_grad()
                    model(x).sum().backward()
                results[rank] = torch.equal(model.weight.grad, x.sum(0).expand(64, 64)), offload.partitioned

        results = [None] * 3
        self.in_group(3, run)
        self.assertEqual(results, [(True, [False])] * 3)

    def test_activations_that_are_the_same_in_the_first_pass_only(self):
        """As behind a weight that begins at zero, such as LoRA's."""
        class Adapter(nn.Module):
            def __init__(self, rank):
                super().__init__()
                torch.manual_seed(0)
                self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64, bias=False)
                nn.init.zeros_(self.b.weight)
                torch.manual_seed(1 + rank)
                self.c = nn.Linear(64, 1)

            def forward(self, x):
                return self.c(torch.tanh(self.b(torch.tanh(self.a(x))))).square().mean()

        def trained(model):
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            seen = []
            for _ in range(4):
                optimizer.zero_grad()
                model(torch.arange(64.0 * 64).view(64, 64) / 4096).backward()
                seen.append([p.grad.sum().item() for p in model.parameters()])
                optimizer.step()
            return seen

        def run(rank, ranks):
            with forebay.offload_activations(replicas[rank], group=ranks, least_bytes=256) as offload:
                results[rank] = trained(replicas[rank])
                saves[rank] = offload.report()["statistics"]["save_count"]

        results, saves = [None] * 3, [None] * 3
        replicas = [Adapter(rank) for rank in range(3)]
        with self.assertWarnsRegex(UserWarning, "the same on all ranks of the group in the first pass differ now"):
            self.in_group(3, run)
        for rank in range(3):
            self.assertEqual(results[rank], trained(Adapter(rank)), rank)
        self.assertGreater(saves[0], 0)
        self.assertEqual(saves, saves[:1] * 3)

    def test_a_rank_that_drops_a_pass_alone_goes_on(self):
        """Nothing is shared: each rank saves and drops what it has."""
        counts = [[], []]
        replicas = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in counts]

        def run(rank, communicator):
            with forebay.offload_activations(replicas[rank], group=communicator, least_bytes=0) as offload:
                for step in range(6):
                    # The last rank has another size in some steps, which stays on the device.
                    result = replicas[rank](torch.full((7 if rank and step == 4 else 6, 8), rank + 1.0)).sum()
                    if step != 2 or rank == 0:
                        result.backward()
                    del result
                    counts[rank].append(offload.report()["statistics"]["save_count"] if step else 0)

        self.in_group(2, run, deadline=10000)
        self.assertEqual(counts, [[0, 2, 4, 6, 8, 10], [0, 2, 4, 6, 6, 8]])

    def test_ranks_that_free_a_pass_at_different_times(self):
        """The first rank keeps a result that the others drop, for two steps or for good."""
        def made():
            torch.manual_seed(0)
            return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))

        def batch(number):
            return torch.randn(6, 8, generator=torch.Generator().manual_seed(number))

        def gradients(model, step, kept, keeps):
            model.zero_grad()
            first = model(batch(step)).pow(2).mean()
            result = model(batch(step + 50))  # For a log.
            if keeps and not kept:
                kept.append(result)
            del result
            second = model(batch(step + 90)).pow(2).mean()
            first.backward()
            second.backward()
            return [p.grad.clone() for p in model.parameters()]

        plain = made()
        expected = [gradients(plain, step, [], False) for step in range(6)]
        for ranks in (2, 3):
            for until in (3, 9):
                results = [None] * ranks
                replicas = [made() for _ in range(ranks)]

                def run(rank, communicator):
                    kept, found = [], []
                    with forebay.offload_activations(replicas[rank], group=communicator, least_bytes=0, passes=3) as offload:
                        for step in range(6):
                            if step >= until:
                                kept.clear()
                            found.append(gradients(replicas[rank], step, kept, rank == 0 and 1 <= step < until))
                        results[rank] = found, offload.report()["statistics"]["save_count"]

                self.in_group(ranks, run, deadline=10000)
                for rank, result in enumerate(results):
                    self.assertIsNotNone(result, (ranks, rank))
                    found, count = result
                    self.assertGreater(count, 0)
                    for step in range(6):
                        for one, other in zip(found[step], expected[step]):
                            self.assertTrue(torch.equal(one, other), (ranks, rank, step))


class SeveralRanks(unittest.TestCase):
    def test_slices_of_what_the_tensor_parallel_ranks_share(self):
        expected, _, _ = losses(False, recompute="nonreentrant")
        alone = losses(True, recompute="nonreentrant")[2].report()["plan"]
        results = support.torchrun(__file__, 2, {"batches": [0, 0], "recompute": "nonreentrant"})
        for one in results:
            self.assertEqual(one["seen"], expected)
            self.assertGreater(one["spilled"], 0)
            self.assertLess(one["host"], 0.75 * alone["host_bytes"])

    def test_each_rank_keeps_activations_that_differ_between_ranks(self):
        results = support.torchrun(__file__, 3, {"batches": [0, 1, 2]})
        self.assertEqual(sorted(one["rank"] for one in results), [0, 1, 2])
        for one in results:
            expected, _, _ = losses(False, body=lambda *trained: models.train(*trained, rank=one["rank"]))
            self.assertEqual(one["seen"], expected, one["rank"])
            self.assertGreater(one["spilled"], 0)

    def test_two_tensor_parallel_groups_with_batches_of_their_own(self):
        batches = [0, 0, 1, 1]
        alone = losses(True)[2].report()["plan"]
        results = support.torchrun(__file__, 4, {"batches": batches, "groups": [[0, 1], [2, 3]]})
        self.assertEqual(sorted(one["rank"] for one in results), [0, 1, 2, 3])
        for one in results:
            expected, _, _ = losses(False, body=lambda *trained: models.train(*trained, rank=batches[one["rank"]]))
            self.assertEqual(one["seen"], expected, one["rank"])
            self.assertLess(one["host"], 0.75 * alone["host_bytes"])

    def test_a_rank_waits_for_the_others_until_its_deadline(self):
        waited, other = sorted(support.torchrun(__file__, 2, {"deadline": 1500}), key=lambda one: one["rank"])
        self.assertEqual((waited["error"], other["error"]), ("Timeout", None))
        self.assertGreater(waited["seconds"], 1)
        self.assertLess(waited["seconds"], 60)  # The default.


def late_rank(deadline):
    """The last rank makes no forward pass; the other one waits for it."""
    torch.distributed.init_process_group("gloo")
    mine = torch.distributed.get_rank()
    model = models.make()
    offloaded = forebay.offload_activations(model, group=torch.distributed.group.WORLD, least_bytes=256, deadline=deadline)
    error, began = None, time.monotonic()
    if mine == 0:
        try:
            models.train(model, plain_adamw(model), steps=1)
        except forebay.Error as caught:
            error = type(caught).__name__
    support.show({"rank": mine, "error": error, "seconds": time.monotonic() - began})
    torch.distributed.barrier()
    support.leave()


def rank(batches, groups=(), **options):
    """`batches`: the batch of each rank. `groups`: the ranks of each tensor-parallel group; without: all ranks are one."""
    torch.distributed.init_process_group("gloo")
    mine = torch.distributed.get_rank()
    made = [torch.distributed.new_group(members) for members in groups]  # By all ranks, in one order.
    group = next((one for one, members in zip(made, groups) if mine in members), torch.distributed.group.WORLD)
    model = models.make(**options)
    offloaded = forebay.offload_activations(model, group=group, least_bytes=256)
    seen = models.train(model, plain_adamw(model), rank=batches[mine])
    found = offloaded.report()
    offloaded.remove()
    support.show({"rank": mine, "seen": seen, "spilled": found["statistics"]["spilled_bytes"],
                  "host": found["plan"]["host_bytes"]})
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1].startswith("{"):
        case = json.loads(sys.argv[1])
        (late_rank if "deadline" in case else rank)(**case)
    else:
        support.main()
