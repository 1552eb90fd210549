"""The contract's optimizers and norm of gradients (ARCHITECTURE.md), in operations of torch and numpy that round once each."""

import math

import numpy
import torch


def fma(a, b, c):
    """a * b + c, rounded once. Shape: c's; `a` may be a number of fp32. All in fp32."""
    product = torch.as_tensor(a, dtype=torch.float32).double() * b.double()  # Exact: 24 + 24 bits.
    c = c.double()
    total = product + c
    other = total - product
    error = (product - (total - other)) + (c - other)  # total + error is the exact sum.
    bits = total.view(torch.int64)
    # To odd, so that rounding to fp32 afterwards is rounding once.
    towards = torch.where((error > 0) == (total > 0), 1, -1)
    bits = bits + torch.where((error != 0) & (bits % 2 == 0), towards, 0)
    return bits.view(torch.float64).float()


def sqrt(v):
    """Rounded once. torch's own square root is MKL's, which is not."""
    return torch.from_numpy(numpy.sqrt(v.numpy()))


class Rule:
    """A mixin: an optimizer of torch with the arithmetic of the contract, for fp32."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(step=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
                state["step"] += 1
                self.update(group, state, p)


def single(*numbers):
    return [numpy.float32(number) for number in numbers]


class Adam(Rule, torch.optim.Adam):
    decoupled = False

    def update(self, group, state, p):
        lr, decay, eps = single(group["lr"], group["weight_decay"], group["eps"])
        beta1, beta2 = group["betas"]
        c1, s2 = single(1 - beta1 ** state["step"], math.sqrt(1 - beta2 ** state["step"]))
        a1, a2 = single(1 - beta1, 1 - beta2)
        g, m, v = p.grad, state["m"], state["v"]
        if self.decoupled:
            p.copy_(fma(-(lr * decay), p, p))
        else:
            g = fma(decay, p, g)
        m.copy_(fma(beta1, m, g * a1.item()))
        v.copy_(fma(beta2, v, (g * g) * a2.item()))
        p.copy_(fma(-(lr / c1), m / (sqrt(v) / s2.item() + eps.item()), p))


class AdamW(Adam):
    decoupled = True

    def __init__(self, params, weight_decay=1e-2, **values):
        super().__init__(params, weight_decay=weight_decay, **values)


class SGD(Rule, torch.optim.SGD):
    def update(self, group, state, p):
        lr, decay, momentum = single(group["lr"], group["weight_decay"], group["momentum"])
        state["m"].copy_(fma(momentum, state["m"], fma(decay, p, p.grad)))
        p.copy_(fma(-lr, state["m"], p))


class Lion(Rule, torch.optim.Optimizer):
    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def update(self, group, state, p):
        lr, decay, beta1, beta2 = single(group["lr"], group["weight_decay"], *group["betas"])
        a1, a2 = single(1 - group["betas"][0], 1 - group["betas"][1])
        g, m = p.grad, state["m"]
        u = fma(beta1, m, g * a1.item())
        p.copy_(fma(-(lr * decay), p, p))
        p.copy_(fma(-lr, torch.sign(u), p))
        m.copy_(fma(beta2, m, g * a2.item()))


def pairs(values):
    """The sum of doubles: adjacent pairs, level by level. An odd one passes up."""
    while len(values) > 1:
        even = len(values) // 2 * 2
        values = torch.cat([values[:even:2] + values[1:even:2], values[even:]])
    return values.sum()


def norm(units):
    """The norm of gradients of one rank. `units`: for each unit the gradients, in order of registration."""
    sums = []
    for gradients in units:
        padded = [torch.nn.functional.pad(g.flatten(), (0, -g.numel() % 64)) for g in gradients]
        flat = torch.cat(padded) if padded else torch.zeros(0)
        rows = torch.nn.functional.pad(flat, (0, -flat.numel() % 512)).double().view(-1, 32, 16)
        lanes = torch.zeros(len(rows), 16, dtype=torch.float64)
        for row in rows.unbind(1):
            lanes = lanes + row * row
        while lanes.shape[1] > 1:
            half = lanes.shape[1] // 2
            lanes = lanes[:, :half] + lanes[:, half:]
        sums.append(pairs(lanes.flatten()) if padded else torch.zeros((), dtype=torch.float64))
    return math.sqrt(pairs(torch.stack(sums)).item())  # torch's square root is not rounded correctly.
