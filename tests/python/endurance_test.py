"""10,000 steps: memory, descriptors, hooks and objects of Python do not grow."""

import gc
import os
import unittest

import support

support.need("torch")
support.need_library()

import torch

import forebay
import models
from training_test import resident_bytes

torch.set_num_threads(1)

STEPS = int(os.environ.get("FOREBAY_STEPS", "10000"))


def hooks(model):
    return sum(len(found) for module in model.modules() for name, found in vars(module).items()
               if name.endswith("_hooks") and found is not None)


class Endurance(unittest.TestCase):
    def test_nothing_grows(self):
        model = forebay.shard(models.make(layers=1, width=16, recompute="nonreentrant"), stage=3, offload="optimizer")
        optimizer = forebay.AdamW(model)
        offload = forebay.offload_activations(model, least_bytes=1024)

        def figures():
            gc.collect()
            return {"hooks": hooks(model), "descriptors": len(os.listdir("/proc/self/fd")),
                    "views": len(model._forebay.views), "passes": len(offload.in_flight),
                    "objects": len(gc.get_objects())}

        def steps(count):
            for step in range(count):
                model(*models.batch(step, 0)).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

        steps(200)
        before, size = figures(), resident_bytes()
        steps(STEPS)
        after, grown = figures(), resident_bytes() - size
        objects = after.pop("objects") - before.pop("objects")
        self.assertEqual(after, before)
        self.assertLess(objects, 100)
        self.assertLess(grown, 4 << 20)


if __name__ == "__main__":
    support.main()
