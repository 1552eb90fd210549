#!/usr/bin/env python3
"""A second implementation of forebay-gpt, written from samples/gpt/README.md alone.

It needs Python 3 and NumPy (Debian: python3-numpy), and no part of forebay. All numbers are float64; every derivative is
written out by hand. Each operation returns its result and a function from the derivative of that result to the
derivatives of its arguments.

With --expect it trains from --initial and compares losses and gradient norms with the report of a run; with
--check-initial it compares its own initial weights with those of the file. Exit codes: 0 all agree, 1 something
differs, 2 a mistake on the command line or in a file, 3 NumPy is missing.
"""

import argparse
import json
import math
import struct
import sys

try:
    import numpy as np
except ImportError:
    print("gpt_reference.py needs NumPy. On Debian or Ubuntu: apt-get install python3-numpy", file=sys.stderr)
    sys.exit(3)

VOCABULARY = 256  # Bytes.
SAMPLE_STREAM = 2**32  # Above every parameter's number, so that streams differ.


# ---- random numbers: pure functions of seed, stream and counter; uint64 arithmetic wraps ----


def splitmix64(x):
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def draw(seed, stream, counters):
    """One 64-bit number for each of `counters`. Arrays throughout: NumPy warns when a scalar wraps."""
    base = splitmix64(np.array([seed], np.uint64))
    base = splitmix64(base + np.array([stream], np.uint64))
    return splitmix64(base + np.asarray(counters, np.uint64))


# ---- parameters ----


def parameter_shapes(options):
    """Name to shape, in the order of registration."""
    c = options.hidden
    shapes = {"wte.weight": (VOCABULARY, c), "wpe.weight": (options.sequence, c)}
    for layer in range(options.layers):
        h = f"h.{layer}."
        shapes[h + "ln_1.weight"] = (c,)
        shapes[h + "ln_1.bias"] = (c,)
        shapes[h + "attn.c_attn.weight"] = (c, 3 * c)
        shapes[h + "attn.c_attn.bias"] = (3 * c,)
        shapes[h + "attn.c_proj.weight"] = (c, c)
        shapes[h + "attn.c_proj.bias"] = (c,)
        shapes[h + "ln_2.weight"] = (c,)
        shapes[h + "ln_2.bias"] = (c,)
        shapes[h + "mlp.c_fc.weight"] = (c, 4 * c)
        shapes[h + "mlp.c_fc.bias"] = (4 * c,)
        shapes[h + "mlp.c_proj.weight"] = (4 * c, c)
        shapes[h + "mlp.c_proj.bias"] = (c,)
    shapes["ln_f.weight"] = (c,)
    shapes["ln_f.bias"] = (c,)
    return shapes


def initial_parameters(options):
    parameters = {}
    for p, (name, shape) in enumerate(parameter_shapes(options).items()):
        if len(shape) == 2:
            deviation = 0.02
            if name.endswith("c_proj.weight"):
                deviation /= math.sqrt(2 * options.layers)
            i = np.arange(math.prod(shape), dtype=np.uint64)
            two = np.uint64(2)
            u = ((draw(options.seed, p, two * i) >> np.uint64(11)) + np.uint64(1)) / 2.0**53
            v = (draw(options.seed, p, two * i + np.uint64(1)) >> np.uint64(11)) / 2.0**53
            value = deviation * (np.sqrt(-2 * np.log(u)) * np.cos(2 * np.pi * v))
            parameters[name] = value.astype(np.float32).astype(np.float64).reshape(shape)
        else:
            parameters[name] = np.ones(shape) if name.endswith(".weight") else np.zeros(shape)
    return parameters


def read_safetensors(path):
    """Name to float64 array: a 64-bit length, a JSON header, then the data."""
    with open(path, "rb") as file:
        content = file.read()
    try:
        (header_bytes,) = struct.unpack_from("<Q", content)
        header = json.loads(content[8 : 8 + header_bytes])
    except (ValueError, struct.error) as error:
        raise ValueError(f"{path} is not a safetensors file: {error}") from error
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] != "F32":
            raise ValueError(f"{path}: {name} is {entry['dtype']}; only F32 is read here")
        begin, end = (8 + header_bytes + offset for offset in entry["data_offsets"])
        tensors[name] = np.frombuffer(content[begin:end], "<f4").astype(np.float64).reshape(entry["shape"])
    return tensors


# ---- operations ----


def linear(x, weight, bias):
    def backward(dy):
        rows, drows = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
        return dy @ weight.T, rows.T @ drows, drows.sum(axis=0)

    return x @ weight + bias, backward


def layer_norm(x, weight, bias):
    mean = x.mean(axis=-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(axis=-1, keepdims=True)
    deviation = np.sqrt(variance + 1e-5)
    normal = (x - mean) / deviation

    def backward(dy):
        dnormal = dy * weight
        dx = dnormal - dnormal.mean(axis=-1, keepdims=True)
        dx = (dx - normal * (dnormal * normal).mean(axis=-1, keepdims=True)) / deviation
        over = tuple(range(dy.ndim - 1))
        return dx, (dy * normal).sum(axis=over), dy.sum(axis=over)

    return normal * weight + bias, backward


def gelu(z):
    root = math.sqrt(2 / math.pi)
    t = np.tanh(root * (z + 0.044715 * z**3))

    def backward(dy):
        return dy * (0.5 * (1 + t) + 0.5 * z * (1 - t**2) * root * (1 + 3 * 0.044715 * z**2))

    return 0.5 * z * (1 + t), backward


def attention(qkv, heads):
    batch, positions, columns = qkv.shape
    width = columns // 3 // heads

    def split(x):  # [batch, positions, heads * width] to [batch, heads, positions, width]
        return x.reshape(batch, positions, heads, width).transpose(0, 2, 1, 3)

    def merge(x):
        return x.transpose(0, 2, 1, 3).reshape(batch, positions, heads * width)

    q, k, v = (split(part) for part in np.split(qkv, 3, axis=-1))
    scores = q @ k.transpose(0, 1, 3, 2) / math.sqrt(width)
    scores = np.where(np.tril(np.ones((positions, positions), bool)), scores, -np.inf)
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)

    def backward(dy):
        do = split(dy)
        dp = do @ v.transpose(0, 1, 3, 2)
        dscores = p * (dp - (dp * p).sum(axis=-1, keepdims=True)) / math.sqrt(width)
        dq, dk, dv = dscores @ k, dscores.transpose(0, 1, 3, 2) @ q, p.transpose(0, 1, 3, 2) @ do
        return np.concatenate([merge(dq), merge(dk), merge(dv)], axis=-1)

    return merge(p @ v), backward


def cross_entropy(logits, targets):
    """The mean over all tokens, and its derivative by the logits."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    log_p = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    chosen = np.eye(logits.shape[-1])[targets]
    return -(log_p * chosen).sum() / targets.size, (np.exp(log_p) - chosen) / targets.size


# ---- the model ----


def loss_and_gradients(w, tokens, targets, options):
    """w: name to array. tokens, targets: [batch, positions]."""
    x = w["wte.weight"][tokens] + w["wpe.weight"]
    layers = []
    for layer in range(options.layers):
        h = f"h.{layer}."
        a, ln_1 = layer_norm(x, w[h + "ln_1.weight"], w[h + "ln_1.bias"])
        qkv, c_attn = linear(a, w[h + "attn.c_attn.weight"], w[h + "attn.c_attn.bias"])
        o, attend = attention(qkv, options.heads)
        y, attn_proj = linear(o, w[h + "attn.c_proj.weight"], w[h + "attn.c_proj.bias"])
        x = x + y
        m, ln_2 = layer_norm(x, w[h + "ln_2.weight"], w[h + "ln_2.bias"])
        z, c_fc = linear(m, w[h + "mlp.c_fc.weight"], w[h + "mlp.c_fc.bias"])
        g, activate = gelu(z)
        y, mlp_proj = linear(g, w[h + "mlp.c_proj.weight"], w[h + "mlp.c_proj.bias"])
        x = x + y
        layers.append((h, ln_1, c_attn, attend, attn_proj, ln_2, c_fc, activate, mlp_proj))
    f, ln_f = layer_norm(x, w["ln_f.weight"], w["ln_f.bias"])
    loss, dlogits = cross_entropy(f @ w["wte.weight"].T, targets)

    d = {}

    def put(name, weight, bias):
        d[name + ".weight"], d[name + ".bias"] = weight, bias

    flat_dlogits, flat_f = dlogits.reshape(-1, VOCABULARY), f.reshape(-1, options.hidden)
    d["wte.weight"] = flat_dlogits.T @ flat_f  # The head's share; the embedding adds its own below.
    dx, *rest = ln_f(dlogits @ w["wte.weight"])
    put("ln_f", *rest)
    for h, ln_1, c_attn, attend, attn_proj, ln_2, c_fc, activate, mlp_proj in reversed(layers):
        dg, *rest = mlp_proj(dx)
        put(h + "mlp.c_proj", *rest)
        dm, *rest = c_fc(activate(dg))
        put(h + "mlp.c_fc", *rest)
        branch, *rest = ln_2(dm)
        put(h + "ln_2", *rest)
        dx = dx + branch
        do, *rest = attn_proj(dx)
        put(h + "attn.c_proj", *rest)
        da, *rest = c_attn(attend(do))
        put(h + "attn.c_attn", *rest)
        branch, *rest = ln_1(da)
        put(h + "ln_1", *rest)
        dx = dx + branch
    np.add.at(d["wte.weight"], tokens, dx)
    d["wpe.weight"] = dx.sum(axis=0)
    return loss, d


# ---- training ----


def samples(text, numbers, options):
    """Tokens and targets of the samples with these numbers."""
    starts = draw(options.seed, SAMPLE_STREAM, numbers) % np.uint64(len(text) - options.sequence)
    at = starts.astype(np.int64)[:, None] + np.arange(options.sequence)
    return text[at], text[at + 1]


def train(parameters, text, options):
    """One (loss, gradient norm) for each step. Changes `parameters`."""
    m = {name: np.zeros_like(w) for name, w in parameters.items()}
    v = {name: np.zeros_like(w) for name, w in parameters.items()}
    n, b, k = options.ranks, options.batch, options.micro_steps
    results = []
    for t in range(options.steps):
        loss = 0.0
        gradients = {name: np.zeros_like(w) for name, w in parameters.items()}
        for i in range(k):
            for r in range(n):
                first = t * k * n * b + (i * n + r) * b
                tokens, targets = samples(text, np.arange(first, first + b), options)
                own_loss, own = loss_and_gradients(parameters, tokens, targets, options)
                loss += own_loss / (n * k)
                for name in gradients:
                    gradients[name] += own[name] / (n * k)
        norm = math.sqrt(sum(float((g**2).sum()) for g in gradients.values()))
        results.append((loss, norm))

        factor = options.clip / norm if options.clip > 0 and norm > options.clip else 1.0
        for name, p in parameters.items():
            g = gradients[name] * factor
            if p.ndim == 2:  # Matrices and embeddings decay; biases and LayerNorm weights do not.
                p -= options.lr * options.weight_decay * p
            m[name] = options.beta1 * m[name] + (1 - options.beta1) * g
            v[name] = options.beta2 * v[name] + (1 - options.beta2) * g**2
            m_hat = m[name] / (1 - options.beta1 ** (t + 1))
            v_hat = v[name] / (1 - options.beta2 ** (t + 1))
            p -= options.lr * m_hat / (np.sqrt(v_hat) + options.epsilon)
    return results


# ---- comparing ----


def relative(found, expected):
    return abs(found - expected) / max(abs(expected), 1e-300)


def initial_agrees(options, exported):
    worst, worst_name, other_bits, count = 0.0, "none", 0, 0
    for name, own in initial_parameters(options).items():
        # An exported 0 (a bias) must be exactly 0.
        difference = np.abs(own - exported[name]) / np.maximum(np.abs(exported[name]), 1e-300)
        other_bits += int((own != exported[name]).sum())
        count += own.size
        if difference.max() > worst:
            worst, worst_name = float(difference.max()), name
    print(f"initial weights: largest relative difference {worst:.3g} ({worst_name}), limit "
          f"{options.initial_tolerance:g}; {other_bits} of {count} are not the same fp32 number")
    return worst <= options.initial_tolerance


def run_agrees(options, parameters, text):
    with open(options.expect, encoding="utf-8") as file:
        report = json.load(file)
    asked = {"world_size": options.ranks, "first_step": 0, "steps": options.steps, "dtype": "fp32",
             "parameters": sum(w.size for w in parameters.values())}
    for key, value in asked.items():
        if report.get(key) != value:
            raise ValueError(f"{options.expect}: {key} is {report.get(key)!r} where {value!r} was asked for")
    if len(report["loss"]) != options.steps or len(report["grad_norm"]) != options.steps:
        raise ValueError(f"{options.expect}: it does not have {options.steps} losses and gradient norms")

    if None in report["loss"] or None in report["grad_norm"]:
        raise ValueError(f"{options.expect}: a step was skipped; fp32 has none that can be compared")

    results = train(parameters, text, options)
    agrees = True
    for index, (what, limit) in enumerate([("loss", options.tolerance), ("grad_norm", options.tolerance)]):
        own = [result[index] for result in results]
        differences = [relative(a, b) for a, b in zip(own, report[what])]
        worst = max(range(options.steps), key=lambda step: differences[step])
        print(f"{what}: first step {own[0]:.9g}, report {report[what][0]:.9g}, relative difference "
              f"{differences[0]:.3g}, limit {options.first_tolerance:g}")
        print(f"{what}: largest relative difference {differences[worst]:.3g} at step {worst} (here {own[worst]:.9g}, "
              f"report {report[what][worst]:.9g}), limit {limit:g}")
        # A NaN counts as a difference.
        agrees = agrees and differences[0] <= options.first_tolerance and all(d <= limit for d in differences)
    clipped = sum(norm > options.clip > 0 for _, norm in results)
    print(f"{clipped} of {options.steps} steps were clipped; loss from {results[0][0]:.4f} to {results[-1][0]:.4f}")
    return agrees


def parse_command():
    parser = argparse.ArgumentParser(description="Trains as forebay-gpt does and compares with its report.")
    add = parser.add_argument
    add("--initial", required=True, help="initial weights, safetensors, of forebay-gpt --steps 0 --export")
    add("--text", required=True, nargs="+", help="text files, in forebay-gpt's order")
    add("--expect", help="report of forebay-gpt: train and compare with it")
    add("--check-initial", action="store_true", help="compare own initial weights with --initial")
    for name, default in [("layers", 4), ("hidden", 128), ("heads", 4), ("sequence", 64), ("batch", 8),
                          ("micro-steps", 1), ("ranks", 1), ("steps", 100), ("seed", 1)]:
        add("--" + name, type=int, default=default)
    for name, default in [("lr", 1e-3), ("weight-decay", 0.1), ("clip", 1.0), ("beta1", 0.9), ("beta2", 0.95),
                          ("epsilon", 1e-8)]:
        add("--" + name, type=float, default=default)
    add("--tolerance", type=float, default=1e-4, help="relative, of every loss and gradient norm")
    add("--first-tolerance", type=float, default=1e-5, help="relative, of those of the first step")
    add("--initial-tolerance", type=float, default=1e-6, help="relative, of each initial weight")
    options = parser.parse_args()
    if not options.expect and not options.check_initial:
        parser.error("nothing to do: give --expect, --check-initial or both")
    if options.expect and options.steps < 1:
        parser.error("--expect needs --steps of at least 1")
    return options


def main():
    options = parse_command()
    text = np.concatenate([np.fromfile(path, np.uint8) for path in options.text])
    parameters = read_safetensors(options.initial)
    wanted = parameter_shapes(options)
    for name in {**wanted, **parameters}:
        found = parameters[name].shape if name in parameters else None
        if found != wanted.get(name):
            raise ValueError(f"{options.initial}: {name} has the shape {found} where {wanted.get(name)} is wanted")
    agrees = True
    if options.check_initial:
        agrees = initial_agrees(options, parameters)
    if options.expect:
        agrees = run_agrees(options, parameters, text) and agrees
    print("agrees" if agrees else "DIFFERS")
    return 0 if agrees else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (OSError, ValueError) as error:
        print(f"gpt_reference.py: {error}", file=sys.stderr)
        sys.exit(2)
