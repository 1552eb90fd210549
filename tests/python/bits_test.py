"""One rank equals plain torch bit for bit: losses, norms and weights, if torch updates by the contract's optimizers.

Nothing of the library takes part in the reference, except for the division of the model into units.
"""

import math
import os
import unittest

import support

support.need("torch", "numpy")
support.need_library()

import torch

import contract
import forebay
import models
from forebay.torch import describe

torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)


def gradients(model):
    return [[p.grad for p in unit.own if p.grad is not None] for unit in describe.find_units(model)]


def parameters(model, groups):
    trainable = [p for p in model.parameters() if p.requires_grad]
    if not groups:
        return trainable
    return [{"params": [p for p in trainable if p.dim() > 1]},
            {"params": [p for p in trainable if p.dim() < 2], "lr": 3e-3, "weight_decay": 0.0, "betas": (0.8, 0.9),
             "eps": 1e-6}]


def trained(model, batches, is_sharded, micro_steps=2, clip=None, groups=False, rule="AdamW", **values):
    """Losses and norms as numbers, and the weights."""
    if is_sharded:
        forebay.shard(model, stage=3, guard=True)
    make = getattr(forebay if is_sharded else contract, rule)
    optimizer = make(parameters(model, groups), **{"lr": 1e-2, "weight_decay": 0.1, **values})
    seen = []
    for step, batch in enumerate(batches):
        for i in range(micro_steps):
            torch.manual_seed(100 * step + i)
            loss = batch(model, i) / micro_steps
            loss.backward()
            seen.append(loss.item())
        if clip is not None:
            found = torch.nn.utils.clip_grad_norm_(model.parameters(), clip).item() if is_sharded else clipped(
                model, clip)
            seen.append(found)
        elif not is_sharded:
            seen.append(contract.norm(gradients(model)))
        optimizer.step()
        if is_sharded and clip is None:
            seen.append(optimizer.grad_norm)
        elif is_sharded:
            assert math.isclose(optimizer.grad_norm, found, rel_tol=1e-5), "the norm is that before clipping"
        optimizer.zero_grad()
    return seen, {name: value.clone() for name, value in model.state_dict().items()}


def clipped(model, clip):
    """torch.nn.utils.clip_grad_norm_() by the contract's norm."""
    norm = torch.tensor(contract.norm(gradients(model)), dtype=torch.float32)
    factor = torch.clamp(clip / (norm + 1e-6), max=1.0)
    for p in model.parameters():
        if p.grad is not None:
            p.grad.mul_(factor)
    return norm.item()


class Bits(unittest.TestCase):
    def compare(self, make, batches, **options):
        torch.manual_seed(0)
        plain = make()
        torch.manual_seed(0)
        model = make()
        expected, weights = trained(plain, batches, False, **options)
        seen, found = trained(model, batches, True, **options)
        self.assertEqual(seen, expected)
        self.assertEqual(set(found), set(weights))
        for name, value in weights.items():
            self.assertTrue(torch.equal(found[name], value), name)

    def test_fma(self):
        import ctypes
        library = ctypes.CDLL("libm.so.6")
        library.fmaf.restype, library.fmaf.argtypes = ctypes.c_float, [ctypes.c_float] * 3
        generator = torch.Generator().manual_seed(3)
        exponents = torch.randint(-60, 60, (3, 20000), generator=generator)
        a, b, c = torch.ldexp(torch.randn(3, 20000, generator=generator), exponents)
        c[:10000] = -(a * b)[:10000]  # The sum cancels but for a few bits.
        expected = torch.tensor([library.fmaf(*numbers) for numbers in zip(a.tolist(), b.tolist(), c.tolist())])
        self.assertTrue(torch.equal(contract.fma(a, b, c), expected))

    def gpt(self, clip=None, groups=False, optimizer=None, **options):
        batches = [lambda model, i, step=step: model(*models.batch(step, i)) for step in range(4)]
        self.compare(lambda: models.make(**options), batches, clip=clip, groups=groups, **(optimizer or {}))

    def test_gpt(self):
        self.gpt()

    def test_models(self):
        for options in ({"tied": False}, {"shared_block": True}, {"frozen": ["tokens", "positions"]}, {"dropout": 0.1},
                        {"recompute": "nonreentrant", "segment": 2, "dropout": 0.1}, {"recompute": "reentrant"},
                        {"frozen": ["tokens", "positions", "qkv", "up", "down", "norm1", "norm2", "norm"],
                         "tied": False}):
            with self.subTest(options):
                self.gpt(**options)

    def test_clipping(self):
        self.gpt(clip=0.5)

    def test_parameter_groups(self):
        self.gpt(groups=True)

    def test_other_optimizers(self):
        for optimizer in ({"rule": "Adam"}, {"rule": "SGD", "momentum": 0.9}, {"rule": "SGD", "weight_decay": 0.0},
                          {"rule": "Lion", "lr": 1e-3}):
            with self.subTest(optimizer):
                self.gpt(optimizer=optimizer)

    def test_families_of_transformers(self):
        if not support.importlib.util.find_spec("transformers"):
            self.skipTest("no module transformers")
        import huggingface_test as families
        # Not T5: several blocks use one activation twice each, and autograd adds their gradients by block then.
        for make in (families.gpt2, families.llama, families.bert, families.vit):
            with self.subTest(make.__name__):
                batches = [lambda model, i, step=step: model(**families.inputs(model, 10 * step + i)).loss
                           for step in range(3)]
                self.compare(make, batches)


def plain(world, clip=0.5, steps=3):
    """Losses, norms and evaluations of each rank, as models.train() gives them: torch with the gradients of all ranks."""
    seen = [[] for _ in range(world)]
    model = models.make()
    optimizer = contract.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        for i in range(2):
            for rank in range(world):
                torch.manual_seed(100 * step + i)
                loss = model(*models.batch(step, i, rank)) / 2
                (loss / world).backward()
                seen[rank].append(loss.item())
        found = clipped(model, clip)
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            value = model(*models.batch(99, 0)).item()
        model.train()
        for one in seen:
            one += [found, value]
    return seen


class Contract(unittest.TestCase):
    def test_its_optimizers_are_those_of_torch(self):
        """To 1e-5 after 50 steps in fp32, and to torch in fp64."""
        seed = int(os.environ.get("FOREBAY_TEST_SEED", "3"))
        print(f"FOREBAY_TEST_SEED={seed}")
        torch.manual_seed(seed)
        start, gradients = torch.randn(5000), torch.randn(50, 5000)
        for name, values in (("AdamW", {"lr": 1e-3}), ("Adam", {"lr": 1e-3}), ("SGD", {"lr": 1e-2, "momentum": 0.9})):
            results = []
            for make, dtype in ((getattr(contract, name), torch.float32), (getattr(torch.optim, name), torch.float32),
                                (getattr(torch.optim, name), torch.float64)):
                p = torch.nn.Parameter(start.to(dtype, copy=True))
                optimizer = make([p], weight_decay=0.1, **values)
                for gradient in gradients:
                    p.grad = gradient.to(dtype, copy=True)
                    optimizer.step()
                results.append(p.detach().double())
            for other in results[1:]:
                self.assertLessEqual((results[0] - other).abs().max().item(), 1e-5, name)


class Product(torch.nn.Module):
    """Its gradient is the input."""

    def __init__(self, start):
        super().__init__()
        self.weight = torch.nn.Parameter(start.clone())

    def forward(self, gradient):
        return (self.weight * gradient).sum()


def orthogonal(u):
    """The steps of torch.optim.Muon in the type of u."""
    is_tall = u.shape[0] > u.shape[1]
    x = u.T if is_tall else u
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if is_tall else x


class Reference(unittest.TestCase):
    def test_muon_is_that_of_torch(self):
        """After 50 steps, to 1e-5 of torch's formulas in fp64, and of torch, whose products are bf16, as near as these are."""
        seed = int(os.environ.get("FOREBAY_TEST_SEED", "3"))
        print(f"FOREBAY_TEST_SEED={seed}")
        lr, decay, momentum, steps = 1e-3, 0.1, 0.95, 50
        for shape, rate in (((50, 100), None), ((100, 50), "original"), ((100, 50), "match_rms_adamw"), ((1, 700), None)):
            torch.manual_seed(seed)
            start, gradients = torch.randn(shape), torch.randn(steps, *shape)

            def trained(make, model):
                optimizer = make(model.parameters(), lr=lr, weight_decay=decay, momentum=momentum, adjust_lr_fn=rate)
                for gradient in gradients:
                    model(gradient).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                return model.state_dict()["weight"].double()

            actual = trained(forebay.Muon, forebay.shard(Product(start), stage=3))
            rows, columns = shape
            ratio = 0.2 * max(shape) ** 0.5 if rate == "match_rms_adamw" else max(1.0, rows / columns) ** 0.5
            p, m = start.double(), torch.zeros(shape, dtype=torch.float64)
            for gradient in gradients.double():
                m = momentum * m + (1 - momentum) * gradient
                p = p * (1 - lr * decay) - lr * ratio * orthogonal(momentum * m + (1 - momentum) * gradient)
            self.assertLessEqual((actual - p).abs().max().item(), 1e-5, (shape, rate))
            if hasattr(torch.optim, "Muon"):
                moved = (p - start).norm().item()
                from_torch = (actual - trained(torch.optim.Muon, Product(start))).norm().item()
                self.assertLessEqual(from_torch, 0.05 * moved, (shape, rate))

    def test_muon_updates_other_parameters_by_adamw(self):
        """Bit for bit as AdamW does, where the matrices' gradients are no others' input."""
        class Parts(torch.nn.Module):
            def __init__(self):
                super().__init__()
                torch.manual_seed(5)
                self.table, self.line = torch.nn.Embedding(20, 8), torch.nn.Linear(8, 8)

            def forward(self, gradient):
                return (self.table.weight * gradient).sum() + (self.line.bias * gradient[0]).sum() + (
                    self.line.weight * gradient[:8]).sum()

        results = []
        for make in (lambda model: forebay.Muon(model, lr=1e-2, weight_decay=0.1, betas=(0.8, 0.9), eps=1e-6),
                     lambda model: forebay.AdamW(model, lr=1e-2, weight_decay=0.1, betas=(0.8, 0.9), eps=1e-6)):
            model = forebay.shard(Parts(), stage=2, offload="optimizer")
            optimizer = make(model)
            for step in range(5):
                model(torch.randn(20, 8, generator=torch.Generator().manual_seed(step))).backward()
                optimizer.step()
                optimizer.zero_grad()
            results.append(model.state_dict())
        for name in ("table.weight", "line.bias"):
            self.assertTrue(torch.equal(results[0][name], results[1][name]), name)
        self.assertFalse(torch.equal(results[0]["line.weight"], results[1]["line.weight"]))

    @unittest.skipUnless(hasattr(torch.optim, "Adafactor"), "this PyTorch has no Adafactor")
    def test_adafactor_is_that_of_torch(self):
        """To 1e-5 after 50 steps in fp32, and to torch in fp64."""
        seed = int(os.environ.get("FOREBAY_TEST_SEED", "3"))
        print(f"FOREBAY_TEST_SEED={seed}")
        for shape in ((5000,), (50, 100), (2, 100, 25), (1, 700), (700, 1)):
            torch.manual_seed(seed)
            start, gradients = torch.randn(shape), torch.randn(50, *shape)
            results = []
            for make, dtype in ((forebay.Adafactor, torch.float32), (torch.optim.Adafactor, torch.float32),
                                (torch.optim.Adafactor, torch.float64)):
                model = Product(start.to(dtype))
                if make is forebay.Adafactor:
                    forebay.shard(model, stage=3)
                optimizer = make(model.parameters(), lr=1e-2, weight_decay=0.1)
                for gradient in gradients:
                    model(gradient.to(dtype)).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                results.append(model.state_dict()["weight"].double())
            for other in results[1:]:
                self.assertLessEqual((results[0] - other).abs().max().item(), 1e-5, shape)


class Ranks(unittest.TestCase):
    def test_two_and_three(self):
        """To 1e-6: ranks add gradients in another order than one program does."""
        for world in (2, 3):
            expected = plain(world)
            results = support.torchrun(os.path.join(os.path.dirname(__file__), "ranks.py"), world,
                                       {"options": {"stage": 3, "guard": True}, "clip": 0.5})
            self.assertEqual(len({one["digest"] for one in results}), 1)
            for one in results:
                for a, b in zip(one["seen"], expected[one["rank"]]):
                    self.assertLessEqual(abs(a - b), 1e-6 * abs(b), (world, one["seen"], expected[one["rank"]]))


if __name__ == "__main__":
    support.main()
