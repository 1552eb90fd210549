"""Tries one feature of PyTorch once. `forebay run --check` starts a process of this for each answer.

    probe.py FEATURE MODE CORE ANSWER

FEATURE is a function below. MODE is "cache" (PyTorch's own), "tensors" (backend:cudaMallocAsync) or "pluggable"
(forebay_torch_alloc of the library CORE). The answer is a line in the file ANSWER: "works", or "fails: " and why.
"""
import queue
import sys

MIB = 1 << 20


class Failed(Exception):
    """PyTorch did not do as it promises."""


def expect(condition, words):
    if not condition:
        raise Failed(words)


def allocator(torch, core, allocate="forebay_torch_alloc"):
    return torch.cuda.memory.CUDAPluggableAllocator(core, allocate, "forebay_torch_free")


def filled(torch, value):
    return torch.full((MIB,), value, dtype=torch.int32, device="cuda")


def allocation(torch, mode, core):
    tensors = [filled(torch, value) for value in range(4)]
    for value, tensor in enumerate(tensors):
        expect(int(tensor.sum()) == value * MIB, "a tensor has lost what was written")
    del tensors, tensor
    torch.cuda.synchronize()


def statistics(torch, mode, core):
    tensor = filled(torch, 1)
    found = torch.cuda.memory_stats().get("allocated_bytes.all.current", 0)
    expect(found >= 4 * MIB, "memory_stats has %d of %d bytes" % (found, 4 * MIB))
    del tensor


def history(torch, mode, core):
    torch.cuda.memory._record_memory_history(max_entries=1000)
    tensor = filled(torch, 1)
    snapshot = torch.cuda.memory._snapshot()
    expect(any(snapshot["device_traces"]), "the snapshot has no events")
    del tensor


def mempool(torch, mode, core):
    if mode == "pluggable":
        pool = torch.cuda.MemPool(allocator(torch, core, "forebay_torch_pool_alloc").allocator())
    else:
        pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        tensor = filled(torch, 2)
    expect(int(tensor.sum()) == 2 * MIB, "a tensor has lost what was written")
    if hasattr(pool, "snapshot"):
        expect(len(pool.snapshot()) > 0, "the tensor is not in the pool")


def graphs(torch, mode, core):
    x = torch.ones(1024, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x * 2 + 1
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x * 2 + 1
    others = [torch.full((1024,), 4.0, device="cuda") for _ in range(8)]
    for value in (3, 5):
        x.fill_(value)
        graph.replay()
        torch.cuda.synchronize()
        expect(float(y.sum()) == (2 * value + 1) * 1024, "the graph computes something else")
    expect(all(float(other.sum()) == 4 * 1024 for other in others), "the graph writes into other tensors")


def compiled_graphs(torch, mode, core):
    # Uses graphs as torch.compile(mode="reduce-overhead") does, but without Inductor's kernels, which need a C
    # compiler and minutes. If it cannot make a graph, it runs without and counts that.
    from torch._dynamo.utils import counters

    compiled = torch.compile(lambda x: x * 2 + 1, backend="cudagraphs")
    x = torch.ones(1024, device="cuda")
    for value in (1, 3, 5, 7):  # It warms up, captures and replays.
        x.fill_(value)
        expect(float(compiled(x).sum()) == (2 * value + 1) * 1024, "the compiled graph computes something else")
    expect(counters["inductor"]["cudagraph_skips"] == 0, "torch.compile does without a graph")


def ipc_child(inbox, outbox):
    import torch  # noqa: F401: it brings what turns a handle into a tensor.

    tensor = inbox.get()
    outbox.put(int(tensor.sum()))
    del tensor


def ipc(torch, mode, core):
    context = torch.multiprocessing.get_context("spawn")
    inbox, outbox = context.SimpleQueue(), context.Queue()
    tensor = filled(torch, 3)
    child = context.Process(target=ipc_child, args=(inbox, outbox), daemon=True)
    child.start()
    try:
        inbox.put(tensor)
        while True:
            try:
                found = outbox.get(timeout=0.5)
                break
            except queue.Empty:
                expect(child.is_alive(), "the process that was given the tensor ended with exit code %s" % child.exitcode)
        expect(found == 3 * MIB, "the other process sees other values")
        child.join()
    finally:
        child.kill()


def out_of_memory(torch, mode, core):
    total = torch.cuda.mem_get_info()[1]
    try:
        tensor = torch.empty(total + 1024 * MIB, dtype=torch.uint8, device="cuda")
    except torch.cuda.OutOfMemoryError:
        pass
    except Exception as error:
        raise Failed("raises %s in place of OutOfMemoryError: %s" % (type(error).__name__, first_line(error)))
    else:
        expect(tensor.data_ptr() != 0, "no exception, and a tensor without memory")
        raise Failed("no exception for more than the device has")
    expect(int(filled(torch, 1).sum()) == MIB, "a tensor has lost what was written after the refusal")


def first_line(error):
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else "no message"


def start(torch, mode, core):
    """The answer is a fact for each line: PyTorch's version, CUDA's, the device."""
    try:
        torch.cuda.init()
        name = torch.cuda.get_device_name(torch.cuda.current_device())
    except Exception as error:
        return "no device\n%s\n%s" % (torch.__version__, first_line(error))
    return "device\n%s\n%s\n%s" % (torch.__version__, torch.version.cuda, name)


def main():
    feature, mode, core, path = sys.argv[1:]
    answer = None
    try:
        import torch
    except Exception as error:
        answer = "no torch\n%s: %s" % (type(error).__name__, first_line(error))
    if answer is None:
        try:
            if mode == "pluggable" and feature != "mempool":
                torch.cuda.memory.change_current_allocator(allocator(torch, core))
            answer = globals()[feature](torch, mode, core) or "works"
        except Failed as error:
            answer = "fails: %s" % error
        except Exception as error:
            answer = "fails: %s: %s" % (type(error).__name__, first_line(error))
    with open(path, "w", encoding="utf-8", errors="replace") as file:
        file.write(answer + "\n")


if __name__ == "__main__":
    main()
