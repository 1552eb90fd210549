"""The objects over libforebay-c.so.1: options, devices, memory, ranks as threads, an engine, plans. Python only."""

import array
import ctypes
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import unittest
from unittest import mock

import support

import forebay
from forebay import _library, core

support.need_library()

GPT2 = {"model_type": "gpt2", "n_layer": 4, "n_embd": 64, "n_head": 4, "n_positions": 128, "vocab_size": 512}


class Options(unittest.TestCase):
    def test_names_and_values_are_those_of_the_command_line(self):
        with forebay.Options(stage=3, offload="optimizer", offload_tier="nvme:/tmp", overlap=False) as options:
            self.assertEqual(options.get("stage"), "3")
            self.assertEqual(options.get("offload-tier"), "nvme:/tmp")
            self.assertEqual(options.get("overlap"), "off")
            self.assertTrue(all(set(row) == {"name", "value", "values", "help"} for row in options.list()))
        with forebay.Options(stage=0, offload_tier=["nvme:/tmp/a", pathlib.Path("/tmp/b")], overlap=None) as options:
            self.assertEqual(options.get("stage"), "0")
            self.assertEqual(options.get("offload_tier"), "nvme:/tmp/a,/tmp/b")
            self.assertEqual(options.get("overlap"), "on")
            options.set("agree.my_name", "mine")
            self.assertEqual(options.get("agree.my_name"), "mine")
            options.set("store", pathlib.Path("/tmp/\udcff"))  # A name of bytes that are no text.
            self.assertEqual(options.get("store"), "/tmp/\udcff")
            self.assertTrue(options.list())

    def test_mistakes_are_named(self):
        with self.assertRaisesRegex(forebay.InvalidArgument, "did you mean stage"):
            forebay.Options(stag=3)
        with self.assertRaisesRegex(forebay.InvalidArgument, r"no option zzzzz; forebay\.Options\(\)\.list\(\) lists all"):
            forebay.Options(zzzzz=3)
        with self.assertRaisesRegex(forebay.InvalidArgument, "stage"):
            forebay.Options(stage=7)
        with forebay.Device() as device, forebay.LocalGroup(1) as group:
            ranks = group.communicator(0, device)
            for make in (lambda **options: forebay.Device("host", **options), lambda **options: forebay.Arena(device, **options),
                         lambda **options: forebay.PinnedPool(device, **options), lambda **options: forebay.LocalGroup(1, **options),
                         lambda **options: forebay.Communicator(device, rank=0, size=1, **options),
                         lambda **options: forebay.Engine(**options), lambda **options: forebay.Engine(device, ranks, **options),
                         lambda **options: forebay.Checkpointer(device, ranks, **options)):
                with self.assertRaisesRegex(forebay.InvalidArgument, "did you mean deadline"):
                    make(dedline=5)
        # C would take the text before the zero byte.
        with self.assertRaisesRegex(forebay.InvalidArgument, "zero byte"):
            forebay.Options(store="/tmp\0/other")

    def test_the_environment_of_a_launcher_is_read(self):
        launched = {"RANK": "2", "WORLD_SIZE": "6", "LOCAL_RANK": "1", "FOREBAY_STORE": "/somewhere"}
        with forebay.Options() as options, mock.patch.dict("os.environ", launched):
            options.read_environment()
            self.assertEqual([options.get(name) for name in ("rank", "size", "local_rank")], ["2", "6", "1"])


class Store(unittest.TestCase):
    def test_texts_up_to_the_whole_capacity_are_copied(self):
        class OneText:
            def check(self, names):
                return names == ["there"]

            def get(self, name):
                return self.text

        store, capacity = OneText(), 8
        calls = core._StoreCalls(store)

        def get(name):
            memory, size = ctypes.create_string_buffer(b"." * capacity, capacity), ctypes.c_uint64()
            self.assertEqual(calls.get(None, name, ctypes.addressof(memory), capacity, ctypes.byref(size)), 0)
            return memory.raw, size.value

        self.assertEqual(get(b"absent"), (b"." * capacity, core._StoreCalls.ABSENT))
        for store.text in (b"", b"1234567", b"12345678", b"123456789"):
            fits = len(store.text) <= capacity
            self.assertEqual(get(b"there"), ((store.text if fits else b"").ljust(capacity, b"."), len(store.text)))

    def test_texts_are_set_once_or_again_and_removed(self):
        store = Texts()
        calls = core._StoreCalls(store)

        def call(function, name, text):
            memory = ctypes.create_string_buffer(text, len(text))
            return function(None, name, ctypes.addressof(memory), len(text))

        self.assertEqual(call(calls.set, b"name", b"a\0b"), 0)
        self.assertEqual(call(calls.set_if_absent, b"name", b"late"), 0)
        self.assertEqual(call(calls.set_if_absent, b"other", b"first"), 0)
        self.assertEqual(store.texts, {"name": b"a\0b", "other": b"first"})
        self.assertEqual(call(calls.set, b"name", b"new"), 0)
        calls.remove(None, b"other")
        self.assertEqual(store.texts, {"name": b"new"})

    def test_ctrl_c_while_ranks_meet(self):
        """Python raises it in the callback that comes next, of which ctypes only prints exceptions."""
        class Waits(Texts):
            def check(self, names):
                raise KeyboardInterrupt

        with core.Device("host") as device, self.assertRaises(KeyboardInterrupt):
            core.Communicator(device, Waits(), rank=0, size=2, join_deadline=20000)

    def test_ctrl_c_in_a_callback_is_raised_after_the_call(self):
        raised = [KeyboardInterrupt, ValueError]
        body = mock.Mock(side_effect=raised)
        call = ctypes.CFUNCTYPE(None)(body)
        with mock.patch("sys.unraisablehook") as printed:
            with self.assertRaises(KeyboardInterrupt), core._ctrl_c_in_callbacks():
                call()
            self.assertIs(sys.unraisablehook, printed)
            printed.assert_not_called()
            with core._ctrl_c_in_callbacks():
                call()
            self.assertIs(printed.call_args.args[0].exc_type, ValueError)

    def test_a_store_that_raises_does_not_work(self):
        calls = core._StoreCalls(object())
        for function in (calls.set, calls.set_if_absent):
            self.assertEqual(function(None, b"name", None, 0), forebay.Unavailable.code)
        self.assertEqual(calls.get(None, b"name", None, 0, ctypes.byref(ctypes.c_uint64())), forebay.Unavailable.code)


class Texts:
    """A store as torch.distributed has them, in this process."""

    def __init__(self):
        self.texts, self.names, self.lock = {}, set(), threading.Lock()

    def set(self, name, text):
        with self.lock:
            self.texts[name] = text
            self.names.add(name)

    def get(self, name):
        return self.texts[name]

    def check(self, names):
        return all(name in self.texts for name in names)

    def compare_set(self, name, expected, text):
        with self.lock:
            self.names.add(name)
            if self.texts.get(name, b"") == expected.encode():
                self.texts[name] = text

    def delete_key(self, name):
        with self.lock:
            self.texts.pop(name, None)


def on_ranks(size, body):
    """The results of body(rank) on a thread for each rank. The first exception is raised here."""
    results, errors = [None] * size, []

    def run(rank):
        try:
            results[rank] = body(rank)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


class Ranks(unittest.TestCase):
    def test_pieces_come_in_rank_order_and_a_failure_reaches_all(self):
        for size in (3, 4):
            met, looked = [], threading.Barrier(size)

            def body(rank):
                with forebay.Device() as device, group.communicator(rank, device) as ranks:
                    self.assertEqual((ranks.rank, ranks.size), (rank, size))
                    pieces = ranks.exchange(bytes([rank, 0, rank]))
                    self.assertEqual(ranks.exchange(b""), [b""] * size)
                    met.append(rank)
                    ranks.barrier()
                    self.assertEqual(len(met), size)
                    looked.wait()
                    if rank == size - 1:
                        ranks.abort(forebay.Corruption.code, "bytes are wrong")
                    with self.assertRaisesRegex(forebay.Corruption, "bytes are wrong"):
                        ranks.barrier()
                    return pieces

            with forebay.LocalGroup(size) as group:
                results = on_ranks(size, body)
            self.assertEqual(results, [[bytes([r, 0, r]) for r in range(size)]] * size)

    def test_they_meet_in_a_directory_or_in_a_store_of_the_program(self):
        def met(rank, **options):
            with forebay.Device() as device:
                with forebay.Communicator(device, rank=rank, size=3, deadline=60000, **options) as ranks:
                    return ranks.exchange(b"%d" % rank)

        with tempfile.TemporaryDirectory() as directory:
            store = pathlib.Path(directory)
            self.assertEqual(on_ranks(3, lambda rank: met(rank, store=store)), [[b"0", b"1", b"2"]] * 3)
        store = Texts()
        self.assertEqual(on_ranks(3, lambda rank: met(rank, store=store, prefix="mine")), [[b"0", b"1", b"2"]] * 3)
        self.assertEqual({name.split("/")[0] for name in store.names}, {"mine"})


class Memory(unittest.TestCase):
    def test_an_arena_gives_and_takes_blocks(self):
        with forebay.Device("host", device_memory=1 << 28) as device, forebay.Arena(device) as arena:
            tag = arena.tag("weights", limit=1 << 20)
            block = arena.allocate(1 << 16, tag=tag)
            self.assertEqual(block % 512, 0)
            self.assertEqual(arena.number("tags.weights.peak_live_bytes"), 1 << 16)
            with self.assertRaises(MemoryError):
                arena.allocate(1 << 21, tag=tag)
            arena.free(block)
            self.assertEqual(arena.number("live_bytes"), 0)
        with forebay.Device("host", device_memory=1 << 28) as device, forebay.Arena(device) as arena:
            arena.free(arena.allocate(1 << 20, core.NO_STREAM), core.NO_STREAM)
            held = arena.number("reserved_bytes")
            self.assertGreater(held, 0)
            self.assertEqual((arena.trim(), arena.number("reserved_bytes")), (held, 0))

    def test_copies_and_fills_run_on_a_stream(self):
        with forebay.Device() as device, forebay.Arena(device) as arena, forebay.PinnedPool(device) as pool:
            block, pinned = arena.allocate(512), pool.allocate(512)
            device.fill(block, 7, 512)
            device.copy(pinned, block, 512)
            device.synchronize()
            self.assertEqual(ctypes.string_at(pinned, 512), bytes([7] * 512))
            pool.free(pinned)
            arena.free(block)

    def test_whole_numbers_that_c_would_cut_off_are_refused(self):
        with forebay.Device("host", device_memory=1 << 28) as device, forebay.Arena(device) as arena:
            for size in (2**64 + 16, -1):
                with self.assertRaisesRegex(forebay.InvalidArgument, f"{size} was given; use a whole number from 0 to"):
                    arena.allocate(size)
            self.assertEqual(arena.number("live_bytes"), 0)
        with self.assertRaisesRegex(forebay.InvalidArgument, "4294967298 was given"):
            forebay.LocalGroup(2**32 + 2)

    def test_flags_reach_the_arena(self):
        with forebay.Device("host", device_memory=1 << 28) as device, forebay.Arena(device) as arena:
            with self.assertRaisesRegex(forebay.InvalidArgument, "flags"):
                arena.allocate(512, flags=1 << 20)
            with self.assertRaises(forebay.InvalidArgument):
                arena.pause(arena.tag("fixed"))
            pausable = arena.tag("pausable", flags=core.PAUSABLE)
            block = arena.allocate(1 << 16, tag=pausable)
            device.fill(block, 7, 1 << 16)
            device.synchronize()
            arena.pause(pausable)
            arena.resume(pausable)
            self.assertEqual(ctypes.string_at(block, 1 << 16), bytes([7]) * (1 << 16))
            arena.pause(pausable, keep=False)
            arena.resume(pausable)
            self.assertNotEqual(ctypes.string_at(block, 1 << 16), bytes([7]) * (1 << 16))
            arena.free(block)
            peak = arena.number("peak_live_bytes")
            arena.reset_peaks()
            self.assertLess(arena.number("peak_live_bytes"), peak)

    def test_a_pinned_pool_holds_what_it_is_told(self):
        with forebay.Device() as device, forebay.PinnedPool(device) as pool:
            with self.assertRaises(forebay.OutOfMemory):
                pool.prewarm(1 << 16, 1 << 62)
            pool.prewarm(1 << 20)
            held = pool.number("held_bytes")
            self.assertGreaterEqual(held, 1 << 20)
            self.assertEqual(pool.trim(), held)

    @unittest.skipUnless(os.path.exists(os.environ.get("FOREBAY_COMMAND", "")), "FOREBAY_COMMAND names no program")
    def test_a_snapshot_is_explained(self):
        with tempfile.TemporaryDirectory() as directory, forebay.Device() as device, forebay.Arena(device) as arena:
            arena.allocate(1 << 20, tag=arena.tag("weights"))
            path = os.path.join(directory, "snapshot.pickle")
            arena.snapshot(path)
            self.assertIn("1", forebay.explain(path))
            with self.assertRaisesRegex(forebay.Error, "missing"):
                forebay.explain(os.path.join(directory, "missing"))

    def test_a_closed_handle_is_refused(self):
        device = forebay.Device()
        device.close()
        device.close()
        with self.assertRaisesRegex(forebay.InvalidArgument, "null"):
            device.report()


class Streams(unittest.TestCase):
    """Work behind a gate: a function on a stream that ends when the test says so."""

    def setUp(self):
        self.device = forebay.Device("host", device_memory=1 << 28)
        self.arena, self.pool = forebay.Arena(self.device), forebay.PinnedPool(self.device)
        self.gate, self.stream, self.other = threading.Event(), self.device.stream_create(), self.device.stream_create()
        self.wait_for_gate = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: self.gate.wait() and None)
        function = ctypes.cast(self.wait_for_gate, ctypes.c_void_p)
        _library.library().stream_call(self.device, self.stream, function, None)

    def tearDown(self):
        self.gate.set()
        for stream in (self.stream, self.other):
            self.device.synchronize(stream)
            self.device.stream_destroy(stream)
        for handle in (self.pool, self.arena, self.device):
            handle.close()

    def test_copies_and_fills_wait_for_the_work_before_them(self):
        class Numbered:
            cuda_stream = self.stream

        class Versioned:
            def __cuda_stream__(self, stream=self.stream):
                return 0, stream

        block = self.arena.allocate(1024)
        memory = (ctypes.c_ubyte * 1024).from_address(block)
        memory[:] = [1] * 1024
        self.device.fill(block, 7, 256, Numbered())
        self.device.fill(block + 256, 7, 256, Versioned())
        self.device.copy(block + 512, block, 512, self.stream)
        self.device.synchronize()
        self.assertEqual(memory[:], [1] * 1024)
        self.gate.set()
        self.device.synchronize(self.stream)
        self.assertEqual(memory[:], [7] * 1024)

    def test_a_stream_waits_for_another(self):
        block = self.arena.allocate(512)
        self.device.fill(block, 1, 512, self.stream)
        self.device.wait(self.other, self.stream)
        self.device.fill(block, 2, 512, self.other)
        self.device.synchronize()
        self.gate.set()
        self.device.synchronize(self.other)
        self.assertEqual(ctypes.string_at(block, 512), bytes([2] * 512))
        self.device.synchronize(self.stream)
        self.assertEqual(ctypes.string_at(block, 512), bytes([2] * 512))

    def test_memory_waits_for_the_last_use_on_a_stream(self):
        freed, recorded, pinned = self.arena.allocate(512), self.arena.allocate(512), self.pool.allocate(4096)
        self.arena.free(freed, self.stream)
        self.arena.record_stream(recorded, self.stream)
        self.arena.free(recorded)
        self.pool.free(pinned, self.stream)
        blocks = {self.arena.allocate(512) for _ in range(3)}
        self.assertFalse(blocks & {freed, recorded})
        again = self.pool.allocate(4096)
        self.assertNotEqual(again, pinned)
        self.pool.free(again)
        self.assertEqual(self.pool.allocate(4096), again)

    def test_something_else_is_no_stream(self):
        with self.assertRaisesRegex(forebay.InvalidArgument, "stream is str; give 0, an address"):
            self.device.synchronize("0")


class Reports(unittest.TestCase):
    def test_each_object_has_its_own_and_numbers_where_the_interface_has_them(self):
        with forebay.Device() as device, forebay.Arena(device) as arena, forebay.PinnedPool(device) as pool, \
                forebay.LocalGroup(1) as group, group.communicator(0, device) as ranks, forebay.Engine(device, ranks) as engine, \
                forebay.Checkpointer(device, ranks) as checkpointer:
            engine.add_parameter(engine.add_unit("unit"), "weight", 4)
            checkpointer.declare(0, 0, 4096)
            for one, key in ((device, "name"), (arena, "reserved_bytes"), (pool, "held_bytes"), (ranks, "size"),
                             (engine, "options"), (checkpointer, "plan")):
                self.assertIn(key, one.report())
                has_numbers = one._prefix + "_number" in _library.FUNCTIONS
                self.assertEqual(hasattr(one, "number"), has_numbers, one._prefix)


class Handles(unittest.TestCase):
    def test_the_garbage_collector_gives_them_back_once(self):
        library = _library.library()
        with mock.patch.object(library, "options_destroy", wraps=library.options_destroy) as destroy:
            options = forebay.Options()
            del options
            self.assertEqual(destroy.call_count, 1)
            options = forebay.Options()
            options.close()
            del options
            self.assertEqual(destroy.call_count, 2)

    def test_those_that_are_left_are_given_back_before_the_interpreter_ends(self):
        program = ("import atexit, sys\n"
                   "atexit.register(lambda: print(options._as_parameter_.value))\n"  # Runs after those registered later.
                   "import forebay\n"
                   "options = forebay.Options()\n"
                   "print(options._as_parameter_.value is None)")
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True,
                              env={**os.environ, "PYTHONPATH": str(support.ROOT / "python")})
        self.assertEqual(done.stdout.split(), ["False", "None"])


def train(rank, group, stage, offload, seen, steps=3):
    """Two units of 1000 and 500 elements; each gradient is the parameter plus the rank."""
    device = forebay.Device()
    with group.communicator(rank, device) as ranks:
        engine = forebay.Engine(device, ranks, stage=stage, offload=offload, bucket=4096)
        sizes = (1000, 500)
        for unit, count in enumerate(sizes):
            engine.add_parameter(engine.add_unit(f"unit {unit}"), f"weight {unit}", count)
        engine.commit()
        for unit, count in enumerate(sizes):
            values = array.array("f", [0.001 * i for i in range(count)])
            engine.set(unit, 0, "fp32", values.buffer_info()[0], count)
        engine.hyperparameter("lr", 0.01, 0)
        for _ in range(steps):
            engine.step_begin()
            engine.micro_step_begin(0)
            for unit in (0, 1):
                engine.acquire(unit)
                engine.release(unit)
            for unit in (1, 0):
                engine.acquire(unit, backward=True)
                address, _ = engine.gradient(unit, 0)
                shown = (forebay._library.ctypes.c_float * sizes[unit])
                weight, gradient = shown.from_address(engine.parameter(unit, 0)), shown.from_address(address)
                gradient[:] = [w + rank for w in weight]
                engine.release(unit)
            result = engine.step()
        seen[rank] = (engine.digest(), result.grad_norm)
        engine.close()


def train_and_save(directory, in_background):
    """Trains four steps, saves after the second; freezes the second unit for the third. The digest, and that of the state."""
    device, group = forebay.Device(), forebay.LocalGroup(1)
    with group.communicator(0, device) as ranks:
        engine = forebay.Engine(device, ranks, stage=1, save_async=in_background)
        for unit in (0, 1):
            engine.add_parameter(engine.add_unit(f"unit {unit}"), f"weight {unit}", 600)
            engine.declare_shape(unit, 0, [20, 30])
        engine.commit()
        engine.hyperparameter("lr", 0.01, 0)
        for step in range(4):
            engine.freeze(1, 0, step == 2)
            engine.step_begin()
            engine.micro_step_begin(0)
            for unit in (0, 1):
                engine.acquire(unit)
                engine.release(unit)
            for unit in (1, 0):
                engine.acquire(unit, backward=True)
                address = engine.zeroed_gradient(unit, 0)
                assert (address == 0) == (step == 2 and unit == 1)
                if address:
                    gradient = (forebay._library.ctypes.c_float * 600).from_address(address)
                    assert step == 0 or max(gradient) == min(gradient) == 0
                    gradient[:] = [0.5 + unit] * 600
                engine.release(unit)
            engine.step()
            if step == 1 and in_background:
                engine.save_begin(directory, b"two", keep=2)
            elif step == 1:
                engine.save(directory, b"two")
        if in_background:
            engine.save_end()
        digest = engine.digest()
        assert engine.load(directory) == b"two"
        loaded = engine.digest()
        engine.close()
    return digest, loaded


class Engines(unittest.TestCase):
    def test_a_state_is_saved_while_training_goes_on(self):
        with tempfile.TemporaryDirectory() as directory:
            waiting = train_and_save(os.path.join(directory, "waiting"), False)
            self.assertEqual(train_and_save(os.path.join(directory, "background"), True), waiting)
            self.assertNotEqual(*waiting)

    def test_one_digest_for_all_stages_and_offloads(self):
        seen = set()
        for stage in range(4):
            for offload in ("none", "optimizer"):
                results = [None] * 3
                with forebay.LocalGroup(3) as group:
                    threads = [threading.Thread(target=train, args=(rank, group, stage, offload, results))
                               for rank in range(3)]
                    for thread in threads:
                        thread.start()
                    for thread in threads:
                        thread.join()
                seen.update(results)
        self.assertEqual(len(seen), 1, seen)

    def test_a_saved_state_returns(self):
        with tempfile.TemporaryDirectory() as directory, forebay.LocalGroup(1) as group:
            device = forebay.Device()
            engine = forebay.Engine(device, group.communicator(0, device), stage=2)
            engine.add_parameter(engine.add_unit("unit"), "weight", 100)
            engine.commit()
            values = array.array("f", range(100))
            engine.set(0, 0, "fp32", values.buffer_info()[0], 100)
            before = engine.digest()
            engine.save(directory, b"\x00 the trainer's own")
            engine.set(0, 0, "fp32", array.array("f", [0] * 100).buffer_info()[0], 100)
            self.assertEqual(engine.load(directory), b"\x00 the trainer's own")
            self.assertEqual(engine.digest(), before)
            with self.assertRaises(forebay.InputOutputError):
                engine.load(os.path.join(directory, "nothing"))


class One:
    """An engine on one rank, with units of one parameter each."""

    def __init__(self, counts=(8, 4), groups=(0, 0), **options):
        self.device, self.group = forebay.Device(), forebay.LocalGroup(1)
        self.ranks = self.group.communicator(0, self.device)
        self.engine = forebay.Engine(self.device, self.ranks, **options)
        self.counts = counts
        for unit, count in enumerate(counts):
            self.engine.add_parameter(self.engine.add_unit(f"unit {unit}"), f"weight {unit}", count, groups[unit])

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        for handle in (self.engine, self.ranks, self.group, self.device):
            handle.close()

    def set(self, unit, values, first=0):
        given = array.array("f", values)
        self.engine.set(unit, 0, "fp32", given.buffer_info()[0], len(given), first)

    def get(self, unit, count=None, first=0):
        got = array.array("f", [0] * (self.counts[unit] if count is None else count))
        self.engine.get(unit, 0, "fp32", got.buffer_info()[0], len(got), first)
        return list(got)

    def micro_step(self, index):
        """Each gradient has one more in each element. Whether the addresses had values already."""
        adding = []
        self.engine.micro_step_begin(index)
        for unit in range(len(self.counts)):
            self.engine.acquire(unit)
            self.engine.release(unit)
        for unit in reversed(range(len(self.counts))):
            self.engine.acquire(unit, backward=True)
            address, adds = self.engine.gradient(unit, 0)
            gradient = (ctypes.c_float * self.counts[unit]).from_address(address)
            gradient[:] = [1.0 + (g if adds else 0.0) for g in gradient]
            adding.append(adds)
            self.engine.release(unit)
        return adding

    def step(self, micro_steps=1):
        self.engine.step_begin()
        for index in range(micro_steps):
            self.micro_step(index)
        return self.engine.step()


class Steps(unittest.TestCase):
    def test_elements_are_set_and_read_where_they_belong(self):
        with One() as one:
            one.engine.commit()
            one.set(0, range(8))
            one.set(0, [70, 80], first=5)
            self.assertEqual(one.get(0), [0, 1, 2, 3, 4, 70, 80, 7])
            self.assertEqual(one.get(0, 3, first=4), [4, 70, 80])

    def test_parameter_groups_have_their_own_values(self):
        with One(groups=(0, 1)) as one:
            one.engine.commit()
            one.engine.hyperparameter("lr", 0.5, 1)
            one.engine.hyperparameter("lr", 0.0, 0)
            one.engine.hyperparameter("gradient-factor", 3.0)
            result = one.step()
            self.assertAlmostEqual(result.grad_norm, 3.0 * 12**0.5, places=5)
            self.assertEqual(one.get(0), [0.0] * 8)
            self.assertLess(max(one.get(1)), -0.4)

    def test_a_gradient_says_whether_it_has_a_value(self):
        with One(micro_steps=2, accumulate="local") as one:
            one.engine.commit()
            one.engine.step_begin()
            self.assertEqual(one.micro_step(0), [False, False])
            self.assertEqual(one.micro_step(1), [True, True])
            one.engine.step()

    def test_a_tie_is_the_parameter_of_the_other_unit(self):
        with One() as one:
            one.engine.add_parameter(0, "second", 3)
            tied = one.engine.tie(1, 0, 1)
            one.engine.commit()
            self.assertEqual(tied, 1)
            self.assertEqual(one.engine.address(1, tied), one.engine.address(0, 1))

    def test_a_part_that_a_tensor_does_not_have_is_refused(self):
        with One(counts=(6,)) as one:
            with self.assertRaises(forebay.InvalidArgument):
                one.engine.declare_split(0, 0, (4, 3), 0, 2, 2)
            one.engine.declare_split(0, 0, (4, 3), 0, 1, 2)

    def test_evaluations_end_and_steps_are_given_up(self):
        with One(micro_steps=2, order_of_units="recorded") as one:
            one.engine.commit()
            one.engine.evaluation_begin()
            one.engine.acquire(0)
            one.engine.release(0)
            one.engine.evaluation_end()
            one.engine.step_begin()
            one.micro_step(0)
            with self.assertRaises(forebay.InvalidArgument):
                one.engine.abandon(-1)
            one.engine.abandon()
            one.step(2)

    def test_the_average_is_exchanged_with_the_weights(self):
        with One(ema=0.5) as one:
            one.engine.commit()
            one.engine.hyperparameter("lr", 0.5, 0)
            one.step()
            weights = one.get(0)
            one.engine.swap_average()
            self.assertNotEqual(one.get(0), weights)
            one.engine.swap_average()
            self.assertEqual(one.get(0), weights)

    def test_a_directory_that_cannot_be_locked_is_refused(self):
        with One() as one, tempfile.NamedTemporaryFile() as file:
            one.engine.commit()
            with self.assertRaises(forebay.Error):
                one.engine.lock(file.name)

    def test_as_many_states_are_kept_as_it_is_told(self):
        with One(save_async=True) as one, tempfile.TemporaryDirectory() as directory:
            one.engine.commit()
            for state in (b"one", b"two", b"three"):
                one.step()
                one.engine.save_begin(directory, state, keep=2)
                one.engine.save_end()
                self.assertEqual(one.engine.load(directory), state)
            self.assertEqual(len([name for name in os.listdir(directory) if name.startswith("step")]), 2)
            one.step()
            one.engine.save_begin(directory, b"four")
            one.engine.save_end()
            self.assertEqual(len([name for name in os.listdir(directory) if name.startswith("step")]), 1)

    def test_states_are_spilled_and_fetched(self):
        with One(spillable=True) as one:
            one.engine.commit()
            one.set(0, range(8))
            with self.assertRaisesRegex(forebay.InvalidArgument, "flags is 16"):
                one.engine.spill(16)
            one.engine.spill()
            with self.assertRaises(forebay.InvalidArgument):
                one.engine.step_begin()
            one.engine.fetch()
            self.assertEqual(one.get(0), list(range(8)))
            one.step()


class Activations(unittest.TestCase):
    def test_a_saved_one_is_dropped_or_loaded_once(self):
        with forebay.LocalGroup(1) as group, forebay.Device() as device, forebay.Arena(device) as arena:
            with forebay.Checkpointer(device, group.communicator(0, device)) as checkpointer:
                checkpointer.declare(0, 0, 4096, activation_state_bytes=16)
                size = checkpointer.number("plan.device_bytes")
                region, source = arena.allocate(size), arena.allocate(4096)
                checkpointer.commit(region)

                def save():
                    checkpointer.save(0, 0, 0, source, 4096, record=b"a\0seed")

                def end():
                    address, _, record = checkpointer.load(0, 0, 0)
                    self.assertIn(address - region, range(size))
                    self.assertEqual(record, b"a\0seed")
                    checkpointer.load_end(0, 0, 0)

                for drop in (lambda: checkpointer.discard(0, 0, 0), checkpointer.discard_all, end):
                    save()
                    with self.assertRaises(forebay.InvalidArgument):
                        save()
                    drop()
                save()
                end()

    def test_a_checkpointer_returns_them_with_their_record(self):
        with forebay.LocalGroup(1) as group, forebay.Device() as device, forebay.Arena(device) as arena:
            ranks = group.communicator(0, device)
            with forebay.Checkpointer(device, ranks) as checkpointer:
                checkpointer.declare(0, 0, 4096, activation_placement="partition+spill", activation_state_bytes=16)
                checkpointer.commit()
                source = arena.allocate(4096)
                device.fill(source, 5, 4096)
                checkpointer.save(0, 0, 0, source, 4096, record=b"a seed")
                device.fill(source, 0, 4096)
                data, size, record = checkpointer.load(0, 0, 0)
                device.synchronize()
                self.assertEqual((size, record), (4096, b"a seed"))
                self.assertEqual(ctypes.string_at(data, size), bytes([5] * 4096))
                checkpointer.load_end(0, 0, 0)
                checkpointer.check()


class Machine(unittest.TestCase):
    def test_without_a_driver_there_is_no_device(self):
        with mock.patch.object(core, "report", side_effect=forebay.Unavailable("no driver")):
            self.assertEqual(forebay.devices(), [])

    def test_a_command_is_asked_in_its_own_words(self):
        echo = [sys.executable, "-c", "import sys; print(sys.argv[1:])"]
        self.assertEqual(forebay.explain(pathlib.Path("a snapshot"), command=echo).strip(), "['explain', 'a snapshot']")
        with self.assertRaisesRegex(forebay.Unavailable, "^/no/such/program cannot be started"):
            forebay.explain("a snapshot", command=["/no/such/program"])
        with self.assertRaisesRegex(forebay.Error, "explain ended with 3"):
            forebay.explain("a snapshot", command=[sys.executable, "-c", "import sys; print('out'); sys.exit(3)"])

    def test_the_variable_comes_before_the_wheels_file(self):
        with mock.patch.object(pathlib.Path, "exists", return_value=True):
            with mock.patch.dict("os.environ", {"FOREBAY_COMMAND": "/a/program"}):
                self.assertEqual(_library.command(), "/a/program")
            with mock.patch.dict("os.environ"):
                os.environ.pop("FOREBAY_COMMAND", None)
                self.assertEqual(_library.command(), str(pathlib.Path(_library.__file__).with_name("lib") / "forebay"))
        with mock.patch.object(pathlib.Path, "exists", return_value=False), mock.patch.dict("os.environ"):
            os.environ.pop("FOREBAY_COMMAND", None)
            self.assertEqual(_library.command(), "forebay")  # The system searches it.

    def test_a_library_of_another_abi_or_of_fewer_functions_is_refused(self):
        path = _library.library().path
        with mock.patch.object(_library, "ABI", 2), self.assertRaisesRegex(forebay.Unavailable, "has ABI 1, and .* 2"):
            _library.Library(path)
        more = {**_library.FUNCTIONS, "of_tomorrow": "h"}
        with mock.patch.object(_library, "FUNCTIONS", more):
            with self.assertRaisesRegex(forebay.Unavailable, "forebay_of_tomorrow"):
                _library.Library(path)

    def test_advice_is_added_where_it_belongs(self):
        with mock.patch.dict(_library.ADVICE, {"did you mean stage": "Look it up", "of something else": "No"}):
            with self.assertRaisesRegex(forebay.InvalidArgument, "did you mean stage.*[.] Look it up$"):
                forebay.Options(stag=3)


class Plans(unittest.TestCase):
    def test_the_summary_says_what_a_whole_model_takes(self):
        for dtype, optimizer, size in (("fp32", "adamw", 16), ("bf16", "adamw", 16), ("bf16", "sgd", 12)):
            engine = forebay.Engine(size=8, dtype=dtype, optimizer=optimizer)
            unit = engine.add_unit("unit")
            engine.add_parameter(unit, "trained", 3 << 20)
            engine.add_parameter(unit, "frozen", 1 << 20, flags=core.FROZEN)
            frozen = 4 if dtype == "fp32" else 2
            self.assertRegex(str(engine.report()), f"\n  without sharding +{3 * size + frozen:.1f}\n")

    def test_the_summary_has_each_place_that_holds_memory(self):
        report = core.Report(
            options={"dtype": "bf16", "optimizer": "adamw", "stage": 2, "offload": "optimizer"}, model={"units": [
                {"parameters": [{"count": 1 << 20, "frozen": False}]}]},
            plan={"ranks": 3, "bytes": {"total": 5 << 20}, "host": {"total": 7 << 20}, "files": {"total": 0}},
            statistics={"peak": {"total": 6 << 20}, "host_bytes": 8 << 20, "file_bytes": 9 << 20})
        lines = ["1,048,576 parameters in bf16, ranks: 3, ZeRO stage 2, offload optimizer",
                 "memory of a rank, MiB    planned  measured",
                 "  without sharding          16.0",
                 "  device                     5.0       6.0",
                 "  host                       7.0       8.0"]
        self.assertEqual(str(report).splitlines(), lines)
        report["plan"]["files"]["total"] = 1 << 19
        self.assertEqual(str(report).splitlines(), [*lines, "  files                      0.5       9.0"])
        del report["statistics"]
        self.assertEqual(str(report).splitlines()[-1], "  files                      0.5")

    def test_a_config_is_planned_without_a_device(self):
        whole = forebay.plan(GPT2, ranks=8, stage=0)
        parts = forebay.plan(GPT2, ranks=8, stage=3, dtype="bf16")
        self.assertGreater(whole["plan"]["bytes"]["optimizer"], 5 * parts["plan"]["bytes"]["optimizer"])

    def test_a_file_and_a_directory_are_read(self):
        import json
        with tempfile.TemporaryDirectory() as directory:
            path = os.path.join(directory, "config.json")
            with open(path, "w", encoding="utf-8") as file:
                json.dump(GPT2, file)
            expected = forebay.plan(path, ranks=2)
            self.assertEqual(forebay.plan(directory, ranks=2), expected)
        with self.assertRaisesRegex(forebay.InvalidArgument, "/dev/zero is no regular file"):
            forebay.plan("/dev/zero")
        with self.assertRaises(TypeError):
            forebay.plan(5)
        for ranks in (0, -1, 1.5):
            with self.assertRaisesRegex(forebay.InvalidArgument, f"ranks is {ranks}; use a whole number of 1 or more"):
                forebay.plan(GPT2, ranks=ranks)
        made = mock.Mock(spec=["to_dict"], to_dict=lambda: GPT2)
        for config in (GPT2, made, "\n " + json.dumps(GPT2)):
            self.assertEqual(forebay.plan(config, ranks=2), expected)


@unittest.skipUnless(os.path.exists(os.environ.get("FOREBAY_COMMAND", "")), "FOREBAY_COMMAND names no program")
class Simulations(unittest.TestCase):
    def test_the_summary_has_each_figure_in_its_unit(self):
        simulation = core.Simulation(
            ranks=3, cluster="a cluster", device="a device", step_seconds=1.25, tokens_per_second=4096,
            model_flops_utilisation=0.421, bottleneck="compute",
            memory={"reserved": 3 << 29, "device": 5 << 30, "host": 7 << 30, "files": 9 << 30},
            changes=[{"change": "slower links", "step_seconds": 1.2}, {"change": "faster links", "step_seconds": 0.9}])
        self.assertEqual(str(simulation).splitlines(), [
            "3 ranks of a cluster, a device, simulated",
            "  step                      1.25 s",
            "  tokens/s                  4096",
            "  model FLOPs utilisation   42.1 %",
            "  most time                 compute",
            "  device memory, GiB        1.50 of 5.00",
            "  pinned host memory, GiB   7.00",
            "  files, GiB                9.00",
            "  would help                faster links: 0.9 s"])

    def test_a_model_without_a_config_is_refused(self):
        with self.assertRaisesRegex(forebay.InvalidArgument, "without a config"):
            forebay.simulate(mock.Mock(spec=["named_parameters"]))

    def test_a_step_on_another_cluster(self):
        fast = forebay.simulate(GPT2, ranks=8, stage=3, batch=4, no_changes=True)
        slow = forebay.simulate(GPT2, ranks=8, stage=3, batch=4, recompute="block", no_changes=True)
        self.assertGreater(slow["step_seconds"], fast["step_seconds"])
        self.assertNotIn("changes", fast)
        self.assertRegex(str(fast), r"^8 ranks of dgx-h100, .*\n  step +[0-9.]+ s\n")
        with tempfile.TemporaryDirectory() as directory:
            step = os.path.join(directory, "step.json")
            with_changes = forebay.simulate(GPT2, cluster="dgx-2", stage=2, offload="optimizer", timeline=step,
                                           no_changes=False)
            self.assertGreater(os.path.getsize(step), 0)
        self.assertGreater(with_changes["memory"]["host"], 0)
        self.assertRegex(str(with_changes), "pinned host memory, GiB.*\n  would help")

    def test_mistakes_are_named_as_options_of_python(self):
        with self.assertRaisesRegex(forebay.InvalidArgument, "ranks is 3, which tensor_parallel 2 times pipeline_parallel 1 does not divide"):
            forebay.simulate(GPT2, ranks=3, tensor_parallel=2)
        with self.assertRaisesRegex(forebay.InvalidArgument, "there is no option overlap .forebay simulate --help lists"):
            forebay.simulate(GPT2, overlap=True)
        with self.assertRaisesRegex(forebay.InvalidArgument, 'the config has "model_type": "x"'):
            forebay.simulate({"model_type": "x"})
        with self.assertRaisesRegex(forebay.InvalidArgument, "nowhere"):
            forebay.simulate(GPT2, cluster="nowhere")
        with self.assertRaises(forebay.OutOfMemory):
            forebay.simulate({**GPT2, "n_embd": 16384, "n_layer": 96}, ranks=1)


if __name__ == "__main__":
    support.main()
