"""forebay beside DeepSpeed and FSDP2 on the CPU: step time and peak memory of one GPT, interleaved.

    python compare.py --model 25m --repetitions 3 plain forebay-3 fsdp2 deepspeed-3

Each run is a set of processes of its own. Memory is read from /proc by this program: at the peak, by source, above the
state in which all libraries are loaded and the ranks have met.
"""

import argparse
import json
import os
import pathlib
import socket
import statistics
import subprocess
import sys
import tempfile
import time

# Width, layers, heads, vocabulary.
MODELS = {"tiny": (64, 2, 4, 256), "25m": (512, 6, 8, 12000), "124m": (768, 12, 12, 50257)}
METHODS = ("forebay-0", "forebay-1", "forebay-2", "forebay-3", "fsdp2", "deepspeed-1", "deepspeed-2", "deepspeed-3")


def gpt(name):
    """The class of a model of MODELS, in plain PyTorch."""
    import torch
    from torch import nn
    import torch.nn.functional as F

    width, layers, heads, vocabulary = MODELS[name]

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x):
            q, k, v = self.qkv(self.norm1(x)).view(*x.shape[:2], 3, heads, -1).permute(2, 0, 3, 1, 4)
            x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape))
            return x + self.down(F.gelu(self.up(self.norm2(x))))

    class GPT(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(1024, width)
            self.blocks = nn.ModuleList(Block() for _ in range(layers))
            self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
            self.head.weight = self.tokens.weight
            for p in self.parameters():
                if p.dim() > 1:
                    nn.init.normal_(p, std=0.02)

        def forward(self, x, y):
            h = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
            for block in self.blocks:
                h = block(h)
            return F.cross_entropy(self.head(self.norm(h)).flatten(0, 1), y.flatten())

    return GPT


# --- a rank ---

def rank_main(arguments):
    import torch
    import torch.distributed

    vocabulary = MODELS[arguments.model][3]
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(arguments.threads)
    method, _, stage = arguments.method.partition("-")
    if method == "forebay":
        import forebay
        import forebay.torch
        torch.distributed.init_process_group("gloo")
    elif method == "deepspeed":
        import deepspeed
        deepspeed.init_distributed(dist_backend="gloo")
    else:
        from torch.distributed.fsdp import fully_shard
        torch.distributed.init_process_group("gloo")
    torch.distributed.barrier()
    torch.mm(torch.ones(64, 64), torch.ones(64, 64))
    say({"event": "ready"})

    torch.manual_seed(0)
    model = gpt(arguments.model)()
    if method == "forebay":
        model = forebay.shard(model, stage=int(stage), host_threads=arguments.threads)
        optimizer = forebay.AdamW(model, lr=1e-3)
    elif method == "fsdp2":
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    elif method == "deepspeed":
        model, optimizer, _, _ = deepspeed.initialize(
            model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
            config={"train_micro_batch_size_per_gpu": arguments.batch, "zero_allow_untested_optimizer": True,
                    "gradient_clipping": 0.0, "zero_optimization": {"stage": int(stage)}})
    else:
        model = torch.nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    say({"event": "made"})

    times, losses = [], []
    for step in range(arguments.steps + arguments.warm_up):
        generator = torch.Generator().manual_seed(100 * step + rank)
        tokens = torch.randint(0, vocabulary, (arguments.batch, arguments.length + 1), generator=generator)
        torch.distributed.barrier()
        began = time.perf_counter()
        loss = model(tokens[:, :-1], tokens[:, 1:])
        if method == "deepspeed":
            model.backward(loss)
            model.step()
        else:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.distributed.barrier()
        times.append(time.perf_counter() - began)
        losses.append(loss.item())
    say({"event": "done", "times": times[arguments.warm_up:], "losses": losses})
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def say(event):
    os.write(1, f"\nevent: {json.dumps(event)}\n".encode())


# --- the program that starts ranks and reads their memory ---

def memory_of(pid):
    """KiB by source. A page that several ranks share counts in parts (PSS), so that the ranks add up."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
            rows = dict(line.split(":", 1) for line in file if ":" in line and line.endswith("kB\n"))
        return {name: int(rows[key].split()[0]) for name, key in
                (("anonymous", "Pss_Anon"), ("shared", "Pss_Shmem"), ("files", "Pss_File"))}
    except (OSError, KeyError):  # The process has ended.
        return None


def run(arguments, method):
    """One run: the losses and step times of rank 0, and the memory of each rank in MiB above "ready"."""
    with socket.socket() as one:
        one.bind(("localhost", 0))
        port = one.getsockname()[1]
    ranks = []
    with tempfile.TemporaryDirectory() as directory:
        for rank in range(arguments.ranks):
            environment = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(arguments.ranks),
                           "LOCAL_WORLD_SIZE": str(arguments.ranks), "MASTER_ADDR": "localhost",
                           "MASTER_PORT": str(port), "OMP_NUM_THREADS": str(arguments.threads), "DS_ACCELERATOR": "cpu"}
            log = open(os.path.join(directory, f"{rank}.log"), "w+", encoding="utf-8")
            ranks.append((subprocess.Popen([sys.executable, "-W", "ignore", *sys.argv, "--rank-of", method],
                                           stdout=log, stderr=subprocess.STDOUT, env=environment), log))
        ready, peaks, found = [None] * len(ranks), [None] * len(ranks), [{} for _ in ranks]
        while any(process.poll() is None for process, _ in ranks):
            for i, (process, log) in enumerate(ranks):
                now = memory_of(process.pid)
                if not now:
                    continue
                if "ready" not in found[i]:
                    log.seek(0)
                    if 'event: {"event": "ready"}' not in log.read():
                        continue
                    found[i]["ready"], ready[i] = True, now
                if peaks[i] is None or sum(now.values()) > sum(peaks[i].values()):
                    peaks[i] = now
            time.sleep(0.03)
        results = []
        for process, log in ranks:
            log.seek(0)
            text = log.read()
            log.close()
            events = [json.loads(line[7:]) for line in text.splitlines() if line.startswith("event: ")]
            if process.returncode or not any(event["event"] == "done" for event in events):
                return {"error": text.strip().splitlines()[-1] if text.strip() else "no output", "log": text}
            results.append(next(event for event in events if event["event"] == "done"))
    above = [{name: (peak[name] - start[name]) / 1024 for name in peak} for peak, start in zip(peaks, ready)]
    return {"times": results[0]["times"], "losses": results[0]["losses"], "memory": above,
            "ready": [sum(one.values()) / 1024 for one in ready]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="*", default=list(METHODS), help=f"plain (DDP), {', '.join(METHODS)}")
    parser.add_argument("--model", choices=MODELS, default="25m")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="threads of each rank")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--json", type=pathlib.Path, help="a file for all figures")
    parser.add_argument("--rank-of", dest="method", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.method:
        rank_main(arguments)
        return
    sys.argv[0] = os.path.abspath(__file__)
    runs = {method: [] for method in arguments.methods}
    for repetition in range(arguments.repetitions):
        for method in arguments.methods:
            result = run(arguments, method)
            runs[method].append(result)
            if "error" in result:
                print(result["log"], file=sys.stderr)
            found = result.get("error") or f"{statistics.median(result['times']):.3f} s a step"
            print(f"# {repetition} {method}: {found}", f"load {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)
            if arguments.json:  # After every run, so that an interrupted comparison is not lost.
                options = {name: str(value) for name, value in vars(arguments).items()}
                arguments.json.write_text(json.dumps({"options": options, "runs": runs}), encoding="utf-8")
    print(table(arguments, runs))


def total(memory):
    return sum(memory.values())


def table(arguments, runs):
    """Markdown. The ratio of a method is the median over repetitions of its step time by the first method's."""
    lines = [f"| {arguments.model}, {arguments.ranks} ranks | step (s) | of {arguments.methods[0]} | tokens/s | "
             "peak MiB a rank | anonymous + shared + files | last loss |", "|---|---|---|---|---|---|---|"]
    first = None
    for method, found in runs.items():
        good = [one for one in found if "error" not in one]
        if not good:
            lines.append(f"| {method} | {found[0]['error']} | | | | | |")
            continue
        medians = [statistics.median(one["times"]) for one in good]
        first = first or medians
        step = statistics.median(medians)
        tokens = arguments.ranks * arguments.batch * arguments.length / step
        ratio = statistics.median(a / b for a, b in zip(medians, first))
        peaks = sorted((max(one["memory"], key=total) for one in good), key=total)
        peak = peaks[len(peaks) // 2]
        lines.append(f"| {method} | {step:.3f} | {ratio:.3f} | {tokens:.0f} | {total(peak):.0f} | "
                     f"{peak['anonymous']:.0f} + {peak['shared']:.0f} + {peak['files']:.0f} | "
                     f"{good[0]['losses'][-1]:.5f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
