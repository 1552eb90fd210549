"""DeepSpeed configurations: each key is honoured, without effect, or refused with a remedy."""

import json
import os
import tempfile
import unittest
import warnings
from unittest import mock

import support

support.need("torch")

import torch

import forebay
from forebay.torch import deepspeed
import models

# The configurations of transformers' documentation, with "auto" for the values of the trainer.
STAGE_2 = """{
  "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16,
           "hysteresis": 2, "min_loss_scale": 1},
  "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
  "zero_optimization": {
    "stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": true}, "allgather_partitions": true,
    "allgather_bucket_size": 2e8, "overlap_comm": true, "reduce_scatter": true, "reduce_bucket_size": 2e8,
    "contiguous_gradients": true},
  "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "train_batch_size": "auto",
  "train_micro_batch_size_per_gpu": "auto"
}"""
STAGE_3 = """{
  "bf16": {"enabled": true},
  "zero_optimization": {
    "stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/local", "pin_memory": true, "buffer_count": 4,
                                      "fast_init": false},
    "offload_param": {"device": "nvme", "nvme_path": "/local", "pin_memory": true, "buffer_count": 5,
                      "buffer_size": 1e8, "max_in_cpu": 1e9},
    "overlap_comm": true, "contiguous_gradients": true, "sub_group_size": 1e9, "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto",
    "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": true},
  "gradient_clipping": 1.0, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4,
  "train_batch_size": 16, "steps_per_print": 2000, "wall_clock_breakdown": false
}"""


class Keys(unittest.TestCase):
    def test_the_documentation_shows_the_table(self):
        text = (support.ROOT / "docs" / "deepspeed.md").read_text(encoding="utf-8")
        self.assertIn(deepspeed.table(), text)

    def test_each_key_has_one_row(self):
        self.assertEqual(len(deepspeed._BY_PATH), len(deepspeed.KEYS))

    def test_configurations_of_transformers(self):
        model = models.make()
        made = deepspeed.understand(json.loads(STAGE_2), model=model)
        count = sum(p.numel() for p in model.parameters())
        self.assertEqual(made.options["stage"], 2)
        self.assertEqual(made.options["offload"], "optimizer")
        self.assertEqual(made.options["bucket"], max(1 << 20, -(-4 * count // 4096) * 4096))
        self.assertEqual((made.clip, made.optimizer), (0.0, {"weight_decay": 0.0}))
        self.assertNotIn("gradient_clipping", " ".join(made.without_effect))  # It is "auto".
        self.assertIn("DeepSpeed 0.19 clips to 1.0", deepspeed.understand({}).without_effect[0])
        for fp16, is_said in (({"enabled": True}, True), ({"enabled": True, "hysteresis": 1}, False),
                              ({"enabled": False}, False)):
            said = " ".join(deepspeed.understand({"fp16": fp16}).without_effect)
            self.assertEqual("DeepSpeed's is 2" in said, is_said, fp16)
        made = deepspeed.understand(json.loads(STAGE_3), ranks=2)
        self.assertEqual(made.options, {
            "stage": 3, "micro_steps": 4, "dtype": "bf16", "offload": "optimizer+parameters",
            "offload_tier": "nvme:/local", "overlap": True})
        self.assertEqual(made.clip, 1.0)
        self.assertIn("steps_per_print", made.without_effect)

    def test_the_optimizer(self):
        def understood(kind, **values):
            made = deepspeed.understand({"optimizer": {"type": kind, "params": values}})
            return made.options.get("optimizer"), made.optimizer
        self.assertEqual(understood("Adam", weight_decay=0.1), (None, {"weight_decay": 0.1}))
        self.assertEqual(understood("Adam", weight_decay=0.1, adam_w_mode=False), ("adam", {"weight_decay": 0.1}))
        self.assertEqual(understood("SGD", lr=1, momentum=0.9),
                         ("sgd", {"lr": 1.0, "momentum": 0.9, "weight_decay": 0.0}))
        self.assertEqual(understood("Lion", betas=[0.8, 0.9]),
                         ("lion", {"lr": 1e-3, "betas": (0.8, 0.9), "weight_decay": 0.0}))
        # As DeepSpeed has it: AdamW stays AdamW, and torch's has a weight decay.
        self.assertEqual(understood("AdamW", adam_w_mode=False), (None, {"weight_decay": 0.0}))
        self.assertEqual(understood("Adam", torch_adam=True), (None, {"weight_decay": 0.01}))
        self.assertEqual(understood("Adam", torch_adam=True, adam_w_mode=False), ("adam", {"weight_decay": 0.0}))
        for kind, name in (("SGD", "betas"), ("Lion", "eps"), ("AdamW", "momentum")):
            self.refused({"optimizer": {"type": kind, "params": {name: 0.5}}}, f"params.{name}", f"none of {kind}'s")

    def test_words_that_are_true_or_false(self):
        self.assertNotIn("dtype", deepspeed.understand({"bf16": {"enabled": "false"}, "fp16": {"enabled": 0}}).options)
        self.assertEqual(deepspeed.understand({"bf16": {"enabled": "True"}}).options["dtype"], "bf16")
        made = deepspeed.understand({"optimizer": {"type": "Adam", "params": {"adam_w_mode": 0}}})
        self.assertEqual(made.options["optimizer"], "adam")
        self.refused({"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1.0}}}, "use gradient_clipping")
        self.refused({"bf16": {"enabled": "perhaps"}}, "bf16.enabled is 'perhaps'", "true or false")

    def test_what_is_left_out(self):
        made = deepspeed.understand({"zero_optimization": {"stage": 3, "offload_optimizer": None, "offload_param": None},
                                     "tensor_parallel": {"autotp_size": 1}, "train_batch_size": 32,
                                     "train_micro_batch_size_per_gpu": 4}, ranks=2)
        self.assertEqual(made.options, {"stage": 3, "micro_steps": 4})
        self.refused({"zero_optimization": {"stage": 2.7}}, "stage is 2.7", "whole number")
        self.refused({"gradient_accumulation_steps": 1.5}, "gradient_accumulation_steps is 1.5")
        for name in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
            self.refused({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 4, name: 0}, f"{name} is 0", "from 1")
        self.refused({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 5}, "ranks are 30")
        self.refused({"train_batch_size": "32", "train_micro_batch_size_per_gpu": 5, "gradient_accumulation_steps": 2},
                     "ranks are 10")

    def test_the_loss_scale(self):
        fp16 = {"enabled": True, "initial_scale_power": 12, "loss_scale_window": 50, "hysteresis": 1,
                "min_loss_scale": 4}
        made = deepspeed.understand({"fp16": fp16}).options
        self.assertEqual((made["loss_scale"], made["loss_scale_growth_interval"], made["loss_scale_minimum"]),
                         (4096.0, 50, 4.0))
        made = deepspeed.understand({"fp16": {"enabled": True, "loss_scale": 128}}).options
        self.assertEqual((made["loss_scale"], made["loss_scale_minimum"], made["loss_scale_growth_interval"]),
                         (128.0, 128.0, 2**31 - 1))
        self.assertEqual(deepspeed.understand({"fp16": {"enabled": True}}).options, {
            "stage": 0, "dtype": "fp16", "loss_scale": 65536.0, "loss_scale_growth_interval": 1000, "loss_scale_minimum": 1.0})
        self.refused({"fp16": {"enabled": True, "loss_scale_window": 0}}, "loss_scale_window is 0", "from 1")

    def test_options_of_zero(self):
        def understood(**zero):
            found = deepspeed.understand({"zero_optimization": {"stage": 3, **zero}}).options
            return {name: value for name, value in found.items() if name != "stage"}
        self.assertEqual(understood(overlap_comm=False), {"overlap": False})
        self.assertEqual(understood(zero_hpz_partition_size=4), {"order": "group:4", "shard_within": "group"})
        self.assertEqual(understood(zero_hpz_partition_size=1), {})
        self.assertEqual(understood(offload_optimizer={"device": "cpu", "ratio": 0.5}),
                         {"offload": "optimizer", "offload_fraction": 0.5})
        self.assertEqual(understood(offload_param={"device": "nvme", "nvme_path": "/local"}),
                         {"offload": "optimizer+parameters", "offload_tier": "nvme:/local"})
        cpu, nvme = {"device": "cpu"}, {"device": "nvme", "nvme_path": "/local"}
        for zero, *words in (({"offload_optimizer": cpu, "offload_param": nvme}, "different devices", "one device for both"),
                             ({"offload_optimizer": nvme, "offload_param": {**nvme, "nvme_path": "/other"}},
                              "different nvme_paths", "one path for both"),
                             ({"offload_optimizer": {"device": "disk"}}, "offload_optimizer.device is 'disk'", "cpu, nvme or none"),
                             ({"offload_optimizer": {"device": "cpu", "ratio": 1.5}}, "ratio is 1.5", "from 0 to 1"),
                             ({"stage": 4}, "stage is 4", "from 0 to 3")):
            self.refused({"zero_optimization": {"stage": 3, **zero}}, *words)

    def test_the_bucket_has_whole_pages_of_the_elements_of_gradients(self):
        with torch.device("meta"):
            models_of = {dtype: torch.nn.Linear(1000, 1001, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)}

        def bucket(elements, model=None, **config):
            config["zero_optimization"] = {"reduce_bucket_size": elements}
            return deepspeed.understand(config, model=models_of.get(model)).options["bucket"]
        bf16, pages = {"bf16": {"enabled": True}}, lambda size: -(-size // 4096) * 4096
        self.assertEqual(bucket(1e6), pages(4_000_000))
        self.assertEqual(bucket(1e6, **bf16), pages(2_000_000))
        self.assertEqual(bucket(1e6, fp16={"enabled": True}), pages(2_000_000))
        self.assertEqual(bucket(1024 * 1024), 4 << 20)
        self.assertEqual(bucket(5e5, torch.bfloat16), 1 << 20)
        self.assertEqual(bucket(1e6, torch.bfloat16), pages(2_000_000))
        self.assertEqual(bucket(2e6, torch.float32), pages(4 * 1001 * 1001))
        self.assertEqual(bucket(2e6, torch.float32, **bf16), pages(2 * 1001 * 1001))

    def refused(self, config, *words, kind=forebay.Error, ranks=1):
        with self.assertRaises(kind) as caught:
            deepspeed.understand(config, ranks)
        for word in words:
            self.assertIn(word, str(caught.exception))

    def test_refusals_name_the_key_and_a_remedy(self):
        self.refused({"optimizer": {"type": "Lamb"}}, "Lamb", "AdamW")
        self.refused({"scheduler": {"type": "WarmupLR", "params": {}}}, "scheduler", "torch.optim.lr_scheduler")
        self.refused({"fp16": {"enabled": True, "hysteresis": 2}}, "hysteresis", "set it to 1")
        self.refused({"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}, "zero_quantized_weights",
                     "exact")
        self.refused({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}, "stage 3")
        self.refused({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}}, "nvme_path")
        self.refused({"train_batch_size": 9, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2},
                     "2 ranks are 8", ranks=2)
        self.refused({"optimizer": {"type": "SGD", "params": {"nesterov": True}}}, "nesterov")
        self.refused({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "keep one")

        self.refused({"amp": {"enabled": True, "opt_level": "O1"}}, "amp", "without autocast")

    def test_unknown_keys_are_refused_with_the_nearest(self):
        self.refused({"zero_optimization": {"stagee": 3}}, "zero_optimization.stagee", "zero_optimization.stage?")
        self.refused({"gradient_cliping": 1.0}, "gradient_clipping?")
        self.refused({"zero_optimisation": {}}, "zero_optimisation")

    def test_values_that_switch_a_refused_key_off(self):
        config = {"sparse_gradients": False, "prescale_gradients": False, "gradient_predivide_factor": 1.0,
                  "amp": {"enabled": False}, "elasticity": {"enabled": False},
                  "fp16": {"enabled": False, "hysteresis": 2},
                  "bf16": {"enabled": False, "bf16_master_weights_and_grads": True},
                  "zero_optimization": {"stage": 1, "zero_quantized_gradients": False,
                                        "offload_param": {"device": "none"}}}
        self.assertEqual(deepspeed.understand(config).options, {"stage": 1})

    def test_a_file_that_is_not_valid(self):
        with tempfile.TemporaryDirectory() as directory:
            path = os.path.join(directory, "ds_config.json")
            with open(path, "w", encoding="utf-8") as file:
                file.write('{\n  "zero_optimization": {"stage": 2},\n}\n')
            self.refused(path, "line 3", "comma")

    def test_hostile_values_are_refused_with_their_key(self):
        hostile = [None, "x", [], {"a": 1}, [1, 2, 3], "1e999", float("nan"), float("inf"), -1, 10**400, "\x1b[2J" * 10_000]
        sections = {"zero_optimization.": ("stage", "reduce_bucket_size", "zero_hpz_partition_size"),
                    "fp16.": ("loss_scale", "initial_scale_power", "loss_scale_window", "min_loss_scale"),
                    "optimizer.params.": ("lr", "betas", "eps", "weight_decay"),
                    "zero_optimization.offload_optimizer.": ("ratio", "device"),
                    "": ("gradient_clipping", "gradient_accumulation_steps", "optimizer.type")}
        for section, names in sections.items():
            for path in (section + name for name in names):
                for value in hostile:
                    config = {"fp16": {"enabled": True}, "zero_optimization": {"offload_optimizer": {"device": "cpu"}},
                              "optimizer": {"params": {}}}
                    inner = config
                    for word in path.split(".")[:-1]:
                        inner = inner.setdefault(word, {})
                    inner[path.split(".")[-1]] = value
                    with self.subTest(path=path, value=str(type(value))):
                        try:
                            deepspeed.understand(config)
                        except forebay.Error as error:
                            self.assertLess(len(str(error)), 600)
                            self.assertNotIn("\x1b", str(error))
        self.refused({"fp16": {"enabled": True, "initial_scale_power": 10**12}}, "initial_scale_power", "0 to 127")
        self.refused({"optimizer": {"params": {"betas": "ab"}}}, "betas", "two numbers")
        self.refused({"\x1b[2J" + "x" * 1_000_000: 1}, "does not know")
        self.refused({1: 2}, "does not know")

    def test_hostile_files_are_refused(self):
        with tempfile.TemporaryDirectory() as directory:
            path = os.path.join(directory, "ds_config.json")
            for text, word in [(b'{"a":' * 100_000, "nested"), (b"\xff\xfe{}", "UTF-8"), (b"[" * 2_000_000, "1 MiB"),
                               (b"[]", "JSON object"), (b"", "not valid JSON"), (b"{\n", "not valid JSON in line 2"),
                               (b'{"train_batch_size": ' + b"9" * 5000 + b"}", "")]:
                with open(path, "wb") as file:
                    file.write(text)
                self.refused(path, word)
            self.refused("/dev/zero", "1 MiB")

    def test_every_key_of_the_installed_deepspeed_is_known(self):
        try:
            from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
            from deepspeed.runtime.zero.offload_config import (DeepSpeedZeroOffloadOptimizerConfig,
                                                               DeepSpeedZeroOffloadParamConfig)
            from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
        except ImportError as error:
            self.skipTest(f"no deepspeed: {error}")
        for section, kind in (("zero_optimization", DeepSpeedZeroConfig), ("fp16", DeepSpeedFP16Config),
                              ("zero_optimization.offload_optimizer", DeepSpeedZeroOffloadOptimizerConfig),
                              ("zero_optimization.offload_param", DeepSpeedZeroOffloadParamConfig),
                              ("bf16", DeepSpeedBF16Config)):
            for name, field in kind.model_fields.items():
                path = f"{section}.{field.alias or name}"
                if any(row.path.startswith(path + ".") for row in deepspeed.KEYS):
                    continue
                with self.subTest(path):
                    deepspeed._row(path)


class Training(unittest.TestCase):
    def setUp(self):
        support.need_library()

    def test_a_configuration_trains_as_its_options_do(self):
        config = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "sub_group_size": 1e9},
                  "gradient_clipping": 0.5, "gradient_accumulation_steps": 2,
                  "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.8, 0.95], "weight_decay": 0.1}}}
        deepspeed._said.clear()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            model = forebay.shard(models.make(), config=config)
            forebay.shard(models.make(), config=config)
        found = [str(one.message) for one in said if "DeepSpeed" in str(one.message)]
        self.assertEqual(len(found), 1, found)  # Said once.
        self.assertIn("sub_group_size", found[0])
        with mock.patch.dict(os.environ, {"RANK": "1"}), warnings.catch_warnings():
            warnings.simplefilter("error")
            deepspeed.say(["a key"])  # Rank 0 says it.
        models.train(model, forebay.AdamW(model), steps=2)

        other = forebay.shard(models.make(), stage=1)
        optimizer = forebay.AdamW(other, lr=1e-2, betas=(0.8, 0.95), weight_decay=0.1)
        other._forebay.clip = 0.5
        models.train(other, optimizer, steps=2)
        self.assertEqual(forebay.digest(model), forebay.digest(other))
        self.assertEqual(forebay.report(model)["options"]["offload"], "optimizer")

    def test_options_by_name_win(self):
        model = forebay.shard(models.make(), stage=1, config={"zero_optimization": {"stage": 3}})
        self.assertEqual(model._forebay.stage, 1)
        planned = forebay.plan(models.make(), ranks=8, config={
            "zero_optimization": {"stage": 3}, "train_batch_size": 32, "train_micro_batch_size_per_gpu": 2})
        self.assertEqual((int(planned["options"]["stage"]), int(planned["options"]["micro-steps"])), (3, 2))
        with mock.patch.dict(os.environ, {"WORLD_SIZE": "2"}):
            model = forebay.shard(models.make(), config={"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2})
            self.assertEqual(model._forebay.options["micro_steps"], 8)

    def test_the_defaults_of_an_optimizer_are_those_of_its_rule(self):
        config = {"optimizer": {"type": "AdamW", "params": {"lr": 0.5, "weight_decay": 0.25}}}
        for make, lr, decay in ((forebay.AdamW, 0.5, 0.25), (forebay.SGD, 1e-3, 0.0)):
            group = make(forebay.shard(models.make(layers=1), config=config)).param_groups[0]
            self.assertEqual((group["lr"], group["weight_decay"]), (lr, decay))


if __name__ == "__main__":
    support.main()
