"""The objects over libforebay-c.so.1: options, devices, memory, ranks as threads, an engine, plans. Python only."""

import array
import ctypes
import os
import tempfile
import threading
import unittest

import support

import forebay
from forebay import core

support.need_library()

GPT2 = {"model_type": "gpt2", "n_layer": 4, "n_embd": 64, "n_head": 4, "n_positions": 128, "vocab_size": 512}


class Options(unittest.TestCase):
    def test_names_and_values_are_those_of_the_command_line(self):
        with forebay.Options(stage=3, offload="optimizer", offload_tier="nvme:/tmp", overlap=False) as options:
            self.assertEqual(options.get("stage"), "3")
            self.assertEqual(options.get("offload-tier"), "nvme:/tmp")
            self.assertEqual(options.get("overlap"), "off")
            self.assertTrue(all(set(row) == {"name", "value", "values", "help"} for row in options.list()))

    def test_mistakes_are_named(self):
        with self.assertRaisesRegex(forebay.InvalidArgument, "did you mean stage"):
            forebay.Options(stag=3)
        with self.assertRaisesRegex(forebay.InvalidArgument, "stage"):
            forebay.Options(stage=7)
        # C would take the text before the zero byte.
        with self.assertRaisesRegex(forebay.InvalidArgument, "zero byte"):
            forebay.Options(store="/tmp\0/other")


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

    def test_copies_and_fills_run_on_a_stream(self):
        with forebay.Device() as device, forebay.Arena(device) as arena, forebay.PinnedPool(device) as pool:
            block, pinned = arena.allocate(512), pool.allocate(512)
            device.fill(block, 7, 512)
            device.copy(pinned, block, 512)
            device.synchronize()
            self.assertEqual(ctypes.string_at(pinned, 512), bytes([7] * 512))
            pool.free(pinned)
            arena.free(block)

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
                    (forebay._library.ctypes.c_float * 600).from_address(address)[:] = [0.5 + unit] * 600
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


class Activations(unittest.TestCase):
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


class Plans(unittest.TestCase):
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
            self.assertEqual(forebay.plan(directory, ranks=2), forebay.plan(path, ranks=2))


@unittest.skipUnless(os.path.exists(os.environ.get("FOREBAY_COMMAND", "")), "FOREBAY_COMMAND names no program")
class Simulations(unittest.TestCase):
    def test_a_step_on_another_cluster(self):
        fast = forebay.simulate(GPT2, ranks=8, stage=3, batch=4, no_changes=True)
        slow = forebay.simulate(GPT2, ranks=8, stage=3, batch=4, recompute="block", no_changes=True)
        self.assertGreater(slow["step_seconds"], fast["step_seconds"])
        self.assertNotIn("changes", fast)
        self.assertRegex(str(fast), r"^8 ranks of dgx-h100, .*\n  step +[0-9.]+ s\n")
        with tempfile.TemporaryDirectory() as directory:
            step = os.path.join(directory, "step.json")
            with_changes = forebay.simulate(GPT2, cluster="dgx-2", stage=2, offload="optimizer", timeline=step)
            self.assertGreater(os.path.getsize(step), 0)
        self.assertGreater(with_changes["memory"]["host"], 0)
        self.assertRegex(str(with_changes), "pinned host memory, GiB.*\n  would help")

    def test_mistakes_are_named_as_options_of_python(self):
        with self.assertRaisesRegex(forebay.InvalidArgument, "ranks is 3, which tensor_parallel 2 times pipeline_parallel 1 does not divide"):
            forebay.simulate(GPT2, ranks=3, tensor_parallel=2)
        with self.assertRaisesRegex(forebay.InvalidArgument, "there is no option overlap"):
            forebay.simulate(GPT2, overlap=True)
        with self.assertRaisesRegex(forebay.InvalidArgument, "nowhere"):
            forebay.simulate(GPT2, cluster="nowhere")
        with self.assertRaises(forebay.OutOfMemory):
            forebay.simulate({**GPT2, "n_embd": 16384, "n_layer": 96}, ranks=1)


if __name__ == "__main__":
    support.main()
