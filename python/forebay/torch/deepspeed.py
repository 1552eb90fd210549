"""DeepSpeed's configuration (ds_config.json) as options of forebay.shard().

KEYS has one row for each key: it is honoured, has no effect, or is refused. docs/deepspeed.md shows the same table.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import warnings
from typing import Any, Dict, Iterator, List, Mapping, NamedTuple, Optional, Tuple, Union

from torch import nn

from forebay._library import InvalidArgument, Unsupported, open_to_read

_BYTES_MAX = 1 << 20
_SHOWN_MAX = 100  # Letters of a key or a value in a message.

HONOURED, NO_EFFECT, REFUSED = "honoured", "no effect", "refused"


class Key(NamedTuple):
    """A key by its path ("zero_optimization.stage"), its verdict, and the words for the documentation.

    For a refused key, `note` is the remedy, and the values in `neutral` have no effect. A path that ends with ".*"
    is a whole section.
    """

    path: str
    verdict: str
    note: str
    neutral: Tuple[Any, ...] = (False, None, "none", 0)


def _rows(verdict: str, prefix: str, note: str, *names: str, **fields: Any) -> List[Key]:
    return [Key(prefix + name, verdict, note, **fields) for name in names]


_ZERO = "zero_optimization."
_PLANNED = "the plan decides"
_CPU_CHECKPOINTING = "activation_checkpointing.cpu_checkpointing"

KEYS: List[Key] = [
    # Batches and steps
    Key("train_batch_size", HONOURED, "checked: micro-batch x accumulation x ranks"),
    Key("train_micro_batch_size_per_gpu", HONOURED, "checked with train_batch_size; the program makes the batches"),
    Key("gradient_accumulation_steps", HONOURED, "`micro_steps`: the most backward passes in a step; without it, that of "
        "the batches. The program divides its loss, as in plain torch"),
    Key("gradient_clipping", HONOURED, "the norm is clipped in `optimizer.step()`. Without the key nothing is clipped; "
        "DeepSpeed 0.19 clips to 1.0 then"),
    # Types
    Key("bf16.enabled", HONOURED, "`dtype=\"bf16\"`"),
    Key("bfloat16.enabled", HONOURED, "`dtype=\"bf16\"`"),
    Key("fp16.enabled", HONOURED, "`dtype=\"fp16\"`; multiply the loss by `optimizer.loss_scale`, as `accelerator.backward()` does"),
    Key("fp16.loss_scale", HONOURED, "0: dynamic; another number: that scale, for ever"),
    Key("fp16.initial_scale_power", HONOURED, "`loss_scale` = 2 to this power"),
    Key("fp16.loss_scale_window", HONOURED, "`loss_scale_growth_interval`"),
    Key("fp16.min_loss_scale", HONOURED, "`loss_scale_minimum`"),
    Key("fp16.hysteresis", REFUSED, "a skipped step halves the scale at once; set it to 1", (0, 1, None)),
    *_rows(REFUSED, "fp16.", "give the batches in fp16, or use bf16", "auto_cast"),
    *_rows(REFUSED, "", "master weights and sums of gradients are fp32; leave it out",
           "fp16.fp16_master_weights_and_grads", "bf16.bf16_master_weights_and_grads", "bf16.bf16_optimizer_states"),
    *_rows(NO_EFFECT, "", "sums are fp32 and exact", "fp16.consecutive_hysteresis", "bf16.immediate_grad_update",
           "bf16.check_grad_overflow", "data_types.grad_accum_dtype", "fp32_allreduce"),
    *_rows(REFUSED, "", "use `dtype=\"bf16\"` without autocast", "torch_autocast.*", "amp.*"),
    # ZeRO
    Key(_ZERO + "stage", HONOURED, "`stage`"),
    Key(_ZERO + "offload_optimizer.device", HONOURED, "cpu: `offload=\"optimizer\"`; nvme: in files too"),
    Key(_ZERO + "offload_optimizer.nvme_path", HONOURED, "`offload_tier=\"nvme:PATH\"`"),
    Key(_ZERO + "offload_optimizer.ratio", HONOURED, "`offload_fraction`, in whole layers from the first on"),
    Key(_ZERO + "offload_param.device", HONOURED,
        "`offload=\"optimizer+parameters\"` (stage 3): optimizer states move too"),
    Key(_ZERO + "offload_param.nvme_path", HONOURED, "`offload_tier=\"nvme:PATH\"`"),
    Key(_ZERO + "reduce_bucket_size", HONOURED, "`bucket`: elements x element size, at most all gradients"),
    Key(_ZERO + "overlap_comm", HONOURED, "`overlap`"),
    Key(_ZERO + "zero_hpz_partition_size", HONOURED, "N > 1: `order=\"group:N\"`, `shard_within=\"group\"`"),
    *_rows(REFUSED, _ZERO, "use `offload_optimizer` or `offload_param`", "cpu_offload", "cpu_offload_param",
           "cpu_offload_params"),
    *_rows(NO_EFFECT, _ZERO, _PLANNED, "contiguous_gradients", "reduce_scatter", "use_multi_rank_bucket_allreduce",
           "allgather_partitions", "allgather_bucket_size", "sub_group_size", "round_robin_gradients",
           "stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_prefetch_bucket_size",
           "stage3_param_persistence_threshold", "stage3_model_persistence_threshold",
           "stage3_module_granularity_threshold", "stage3_use_all_reduce_for_fetch_params",
           "stage3_allgather_sequential", "max_live_parameters", "max_reuse_distance", "prefetch_bucket_size",
           "param_persistence_threshold", "model_persistence_threshold", "module_granularity_threshold",
           "use_all_reduce_for_fetch_params", "allgather_sequential", "parameter_alignment", "legacy_stage1",
           "memory_efficient_linear", "override_module_apply", "cpu_offload_use_pin_memory",
           "offload_optimizer.pin_memory", "offload_optimizer.buffer_count", "offload_optimizer.pipeline_read",
           "offload_optimizer.pipeline_write", "offload_optimizer.pipeline", "offload_optimizer.fast_init",
           "offload_optimizer.super_offload", "offload_optimizer.cpuadam_cores_perc", "offload_param.pin_memory",
           "offload_param.buffer_count", "offload_param.buffer_size", "offload_param.max_in_cpu",
           "grad_hooks", "leaf_module.*"),
    *_rows(NO_EFFECT, _ZERO, "`state_dict()` always has whole weights", "stage3_gather_16bit_weights_on_model_save",
           "stage3_gather_fp16_weights_on_model_save", "gather_16bit_weights_on_model_save"),
    *_rows(NO_EFFECT, _ZERO, "`forebay.restore()` works at any number of ranks", "elastic_checkpoint",
           "load_from_fp32_weights", "pipeline_loading_checkpoint"),
    *_rows(NO_EFFECT, _ZERO, "`forebay.shard(check=True)` and `forebay.report()`", "log_trace_cache_warnings",
           "enable_sanity_checks", "compute_grad_norm", "ignore_unused_parameters"),
    *_rows(REFUSED, _ZERO, "forebay sends exact values; leave it out", "zero_quantized_weights",
           "zero_quantized_nontrainable_weights", "zero_quantized_gradients"),
    *_rows(REFUSED, _ZERO, "leave it out", "zenflow", "save_muon_momentum_buffer_in_memory"),
    *_rows(REFUSED, _ZERO, "use `zero_hpz_partition_size`", "mics_shard_size",
           "mics_hierarchical_params_gather", neutral=(False, None, 0, -1)),
    # Optimizer
    Key("optimizer.type", HONOURED, "Adam and AdamW: `forebay.AdamW(model)`; SGD and Lion: `forebay.SGD(model)`, "
        "`forebay.Lion(model)`; others are refused"),
    Key("optimizer.params.lr", HONOURED, "default of `forebay.AdamW(model)`"),
    Key("optimizer.params.betas", HONOURED, "default of `forebay.AdamW(model)`"),
    Key("optimizer.params.eps", HONOURED, "default of `forebay.AdamW(model)`"),
    Key("optimizer.params.weight_decay", HONOURED, "default of `forebay.AdamW(model)`"),
    Key("optimizer.params.momentum", HONOURED, "default of `forebay.SGD(model)`"),
    Key("optimizer.params.adam_w_mode", HONOURED, "false with `Adam`: `forebay.Adam(model)`"),
    Key("optimizer.params.torch_adam", HONOURED, "true: the default of `weight_decay` is 0.01"),
    *_rows(NO_EFFECT, "optimizer.", "one optimizer, in the engine", "params.fused", "params.foreach", "legacy_fusion"),
    *_rows(REFUSED, "optimizer.params.", "forebay updates by the plain rule", "amsgrad", "freeze_step", "nesterov",
           "dampening"),
    Key("optimizer.params.max_grad_norm", REFUSED, "use `gradient_clipping`", (0, 0.0, None)),
    Key("optimizer.params.bias_correction", REFUSED, "biases are always corrected", (True, None)),
    Key("scheduler.*", REFUSED, "make one of torch.optim.lr_scheduler over the optimizer", (None, {})),
    *_rows(NO_EFFECT, "", "there is one optimizer", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"),
    # Communication
    *_rows(REFUSED, "", "gradients are averaged exactly; leave it out", "prescale_gradients"),
    Key("gradient_predivide_factor", REFUSED, "gradients are averaged exactly; leave it out", (1, 1.0, None)),
    Key("gradient_allreduce_op", REFUSED, "gradients are averaged; multiply the loss by the number of ranks",
        ("mean", "avg", None)),
    Key("sparse_gradients", REFUSED, "make embeddings with sparse=False"),
    *_rows(NO_EFFECT, "", "gradients travel in their own type and are added in fp32", "communication_data_type",
           "seq_parallel_communication_data_type", "disable_allgather"),
    # Activations
    Key("activation_checkpointing.cpu_checkpointing", HONOURED, "`forebay.offload_activations(model)`"),
    Key("activation_checkpointing.partition_activations", REFUSED,
        "call `forebay.offload_activations(model, group=...)` with the tensor-parallel ranks"),
    *_rows(NO_EFFECT, "activation_checkpointing.", _PLANNED, "contiguous_memory_optimization", "number_checkpoints",
           "synchronize_checkpoint_boundary", "profile"),
    # The rest
    *_rows(NO_EFFECT, "", "`forebay.report(model)` has the figures", "steps_per_print", "wall_clock_breakdown",
           "memory_breakdown", "dump_state", "tensorboard.*", "wandb.*", "csv_monitor.*", "comet.*", "flops_profiler.*",
           "comms_logger.*", "timers.*", "log_level", "monitor_config.*"),
    *_rows(NO_EFFECT, "", "forebay has its own files and states", "aio.*", "checkpoint.*", "nebula.*",
           "load_universal_checkpoint"),
    *_rows(NO_EFFECT, "", "the program does it", "dataloader_drop_last", "seed", "managed_gradient_accumulation",
           "disable_python_gc", "compile.*", "hybrid_engine.*", "autotuning.*"),
    *_rows(REFUSED, "", "forebay does not change the model or its data; leave it out", "compression_training.*",
           "quantize_training.*", "progressive_layer_drop.*", "eigenvalue.*", "sparse_attention.*",
           "curriculum_learning.*", "data_efficiency.*", "elasticity.*", "weight_quantization.*"),
    *_rows(REFUSED, "", "divide the model over tensor-parallel, pipeline and expert ranks before shard()",
           "tensor_parallel.*", "pipeline.*", "sequence_parallel_size", "expert_parallel.*", neutral=(None, 0, 1)),
]

_BY_PATH = {row.path: row for row in KEYS}


def table() -> str:
    """KEYS as the lines of a table in Markdown."""
    lines = ["| key | | |", "|---|---|---|"]
    groups: Dict[Tuple[str, str], List[str]] = {}
    for row in KEYS:
        key = (row.verdict, row.note if row.verdict != HONOURED else row.path)
        groups.setdefault(key, []).append(f"`{row.path}`")
    notes = {(row.verdict, row.note if row.verdict != HONOURED else row.path): row.note for row in KEYS}
    for verdict in (HONOURED, NO_EFFECT, REFUSED):
        lines += [f"| {', '.join(paths)} | {verdict} | {notes[key]} |"
                  for key, paths in groups.items() if key[0] == verdict]
    return "\n".join(lines) + "\n"


class Meaning(NamedTuple):
    """A configuration in forebay's words."""

    options: Dict[str, Any]  # Of shard().
    optimizer: Dict[str, Any]  # Defaults of forebay.AdamW().
    clip: float  # The largest gradient norm; 0: no clipping.
    offload_activations: bool
    without_effect: List[str]


def read(config: Union[str, os.PathLike, Mapping[str, Any]]) -> Dict[str, Any]:
    """The configuration of a file or a mapping.

    Errors: InvalidArgument with the line that is no JSON; InputOutputError for a file that cannot be read.
    """
    if isinstance(config, Mapping):
        return dict(config)
    try:
        with open_to_read(os.fspath(config), encoding="utf-8") as file:
            text = file.read(_BYTES_MAX + 1)
    except UnicodeDecodeError:
        raise InvalidArgument(f"{config} is not UTF-8 text; give a DeepSpeed configuration, such as "
                              "ds_config.json") from None
    if len(text) > _BYTES_MAX:
        raise InvalidArgument(f"{config} is larger than 1 MiB; give a DeepSpeed configuration, such as ds_config.json")
    try:
        made = json.loads(text)
    except RecursionError:
        raise InvalidArgument(f"{config} is nested too deeply for a DeepSpeed configuration; give another file") from None
    except json.JSONDecodeError as error:
        line = text.split("\n")[error.lineno - 1].strip()[:_SHOWN_MAX]
        raise InvalidArgument(f"{config} is not valid JSON in line {error.lineno} ({line!r}): {error.msg}; a comma "
                              "before a closing bracket is the usual cause") from None
    except ValueError as error:  # A number of thousands of digits.
        raise InvalidArgument(f"{config} cannot be read: {error}; give a DeepSpeed configuration") from None
    if not isinstance(made, dict):
        raise InvalidArgument(f"{config} holds {type(made).__name__}; a DeepSpeed configuration is a JSON object")
    return made


def _leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[Tuple[str, Any]]:
    """Paths and values. A section that KEYS has as a whole is one value."""
    for name, value in config.items():
        path = prefix + str(name)
        if value is None and path not in _BY_PATH and any(known.startswith(path + ".") for known in _BY_PATH):
            continue  # A section that is left out.
        if isinstance(value, Mapping) and path + ".*" not in _BY_PATH and path not in _BY_PATH:
            if not value and not any(known.startswith(path + ".") for known in _BY_PATH):
                raise _unknown(path)
            yield from _leaves(value, path + ".")
        else:
            yield path, value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_MAX else text[:_SHOWN_MAX] + "..."


def _unknown(path: str) -> InvalidArgument:
    path = _shown(path)[1:-1] if len(path) <= _SHOWN_MAX else _shown(path)
    near = difflib.get_close_matches(path, [row.path.replace(".*", "") for row in KEYS], 1)
    return InvalidArgument(f"the DeepSpeed configuration has {path}, which forebay does not know; "
                           + (f"did you mean {near[0]}? Else leave it out" if near else "leave it out"))


def _row(path: str) -> Key:
    row = _BY_PATH.get(path) or _BY_PATH.get(path + ".*")
    if row is None:
        section = path.rpartition(".")[0]
        row = _BY_PATH.get(section + ".*")
    if row is None:
        raise _unknown(path)
    return row


def understand(config: Union[str, os.PathLike, Mapping[str, Any]], ranks: int = 1,
               model: Optional[nn.Module] = None) -> Meaning:
    """Turns a DeepSpeed configuration into options. "auto" leaves the value to the program.

    `ranks`: for the check of the batch sizes. `model`: bounds the bucket.
    Errors: InvalidArgument for unknown keys and values that contradict, Unsupported for refused keys with the remedy.
    """
    values: Dict[str, Any] = {}
    without_effect: List[str] = []
    if "gradient_clipping" not in read(config):
        without_effect.append("(no gradient_clipping: nothing is clipped, where DeepSpeed 0.19 clips to 1.0)")
    fp16 = read(config).get("fp16")
    if isinstance(fp16, Mapping) and "hysteresis" not in fp16 and _enabled(read(config), "fp16"):
        without_effect.append("(no fp16.hysteresis: it is 1, where DeepSpeed's is 2)")
    for path, value in _leaves(read(config)):
        row = _row(path)
        if isinstance(value, str) and value == "auto":
            continue
        if row.verdict == NO_EFFECT:
            without_effect.append(path)
        elif row.verdict == REFUSED:
            off = value in row.neutral or (isinstance(value, Mapping) and (
                not value.get("enabled", bool(value)) or all(one in row.neutral for one in value.values())))
            # Keys of a 16-bit type that is off say nothing.
            section = path.partition(".")[0]
            if not off and not (section in ("fp16", "bf16") and not _enabled(read(config), section)):
                raise Unsupported(f"{path} = {_shown(value)} of the DeepSpeed configuration: {row.note.replace('`', '')}")
        else:
            values[path] = value
    return _meaning(values, ranks, model, without_effect)


def _enabled(config: Mapping[str, Any], section: str) -> bool:
    return _flag(f"{section}.enabled", (config.get(section) or {}).get("enabled"))


def _number(path: str, value: Any, least: float = 0, most: float = 2.0**53) -> float:
    """Errors: InvalidArgument if it is no number within the bounds. The word "1e9" is one, as for DeepSpeed."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not least <= number <= most:
        raise InvalidArgument(f"{path} is {_shown(value)} in the DeepSpeed configuration; use a number from {least:g} to "
                              f"{most:g}")
    return number


def _flag(path: str, value: Any) -> bool:
    """Errors: InvalidArgument if it is neither true nor false. The words and 0 and 1 are, as for DeepSpeed."""
    if value is None or (isinstance(value, str) and value.lower() == "auto"):
        return False
    found = {"true": True, "1": True, "false": False, "0": False}.get(str(value).lower())
    if found is None:
        raise InvalidArgument(f"{path} is {_shown(value)} in the DeepSpeed configuration; use true or false")
    return found


def _count(path: str, value: Any, least: float = 0, most: float = 2.0**53) -> int:
    """The same for a whole number."""
    number = _number(path, value, least, most)
    if not number.is_integer():
        raise InvalidArgument(f"{path} is {_shown(value)} in the DeepSpeed configuration; use a whole number")
    return int(number)


def _meaning(values: Dict[str, Any], ranks: int, model: Optional[nn.Module], without_effect: List[str]) -> Meaning:
    options: Dict[str, Any] = {}
    zero = {path[len(_ZERO):]: value for path, value in values.items() if path.startswith(_ZERO)}
    options["stage"] = _count(_ZERO + "stage", zero.get("stage", 0), most=3)
    micro_steps = _micro_steps(values, ranks)
    if micro_steps is not None:
        options["micro_steps"] = micro_steps
    bf16, bfloat16, fp16 = (_flag(path, values.get(path)) for path in ("bf16.enabled", "bfloat16.enabled", "fp16.enabled"))
    bf16 = bf16 or bfloat16
    if bf16 and fp16:
        raise InvalidArgument("both bf16 and fp16 are enabled in the DeepSpeed configuration; keep one")
    if bf16:
        options["dtype"] = "bf16"
    elif fp16:
        options["dtype"] = "fp16"
        options.update(_loss_scale(values))
    rule, defaults = _optimizer(values)
    if rule:
        options["optimizer"] = rule
    options.update(_offload(zero, options["stage"]))
    if zero.get("overlap_comm") is not None:
        options["overlap"] = _flag(_ZERO + "overlap_comm", zero["overlap_comm"])
    group = _count(_ZERO + "zero_hpz_partition_size", zero.get("zero_hpz_partition_size", 1))
    if group > 1:
        options.update(order=f"group:{group}", shard_within="group")
    if zero.get("reduce_bucket_size") is not None:
        elements = _count(_ZERO + "reduce_bucket_size", zero["reduce_bucket_size"])
        options["bucket"] = _bucket(elements, options.get("dtype"), model)
    return Meaning(options, defaults, _number("gradient_clipping", values.get("gradient_clipping") or 0),
                   _flag(_CPU_CHECKPOINTING, values.get(_CPU_CHECKPOINTING)), without_effect)


def _micro_steps(values: Mapping[str, Any], ranks: int) -> Optional[int]:
    """The number of micro-steps: the one given, or that of the batch. None where the configuration leaves it open."""
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    batch, micro_batch, steps = (None if values.get(name) is None else _count(name, values[name], 1) for name in names)
    if batch is None or micro_batch is None:
        return steps
    found = steps or max(1, batch // (micro_batch * ranks))
    if batch != micro_batch * found * ranks:
        raise InvalidArgument(f"train_batch_size is {batch} in the DeepSpeed configuration, and {micro_batch} a "
                              f"micro-batch x {found} micro-steps x {ranks} ranks are "
                              f"{micro_batch * found * ranks}; change one of them")
    return found


def _loss_scale(values: Mapping[str, Any]) -> Dict[str, Any]:
    def number(name: str, default: float, least: float = 0, most: float = 2.0**53) -> float:
        return _number("fp16." + name, values.get("fp16." + name, default), least, most)

    fixed = _number("fp16.loss_scale", values.get("fp16.loss_scale") or 0, most=2.0**127)
    if fixed:
        return {"loss_scale": fixed, "loss_scale_minimum": fixed, "loss_scale_growth_interval": 2**31 - 1}
    return {"loss_scale": 2.0 ** int(number("initial_scale_power", 16, most=127)),
            "loss_scale_growth_interval": int(number("loss_scale_window", 1000, 1)),
            "loss_scale_minimum": number("min_loss_scale", 1, most=2.0**127)}


def _offload(zero: Mapping[str, Any], stage: int) -> Dict[str, Any]:
    kinds = {name: str(zero.get(f"{name}.device") or "none") for name in ("offload_optimizer", "offload_param")}
    used = {name: kind for name, kind in kinds.items() if kind != "none"}
    if not used:
        return {}
    for name, kind in used.items():
        if kind not in ("cpu", "nvme"):
            raise InvalidArgument(f"zero_optimization.{name}.device is {_shown(kind)} in the DeepSpeed configuration; use "
                                  "cpu, nvme or none")
    if len(set(used.values())) > 1:
        raise Unsupported("offload_optimizer and offload_param have different devices in the DeepSpeed configuration, "
                          "and forebay offloads both to one tier; use one device for both")
    if "offload_param" in used and stage != 3:
        raise InvalidArgument(f"offload_param needs stage 3, and the DeepSpeed configuration has stage {stage}; leave "
                              "it out or set the stage")
    options: Dict[str, Any] = {"offload": "optimizer+parameters" if "offload_param" in used else "optimizer"}
    name, kind = next(iter(used.items()))
    if kind == "nvme":
        path = zero.get(f"{name}.nvme_path")
        if not path:
            raise InvalidArgument(f"zero_optimization.{name}.nvme_path is missing in the DeepSpeed configuration; name "
                                  "a directory")
        if any(zero.get(f"{other}.nvme_path") not in (None, path) for other in used):
            raise Unsupported("offload_optimizer and offload_param have different nvme_paths in the DeepSpeed "
                              "configuration, and forebay offloads both to one tier; use one path for both")
        options["offload_tier"] = f"nvme:{path}"
    fraction = _number(_ZERO + "offload_optimizer.ratio", zero.get("offload_optimizer.ratio", 1), most=1)
    if fraction != 1:
        options["offload_fraction"] = fraction
    return options


def _bucket(elements: int, dtype: Optional[str], model: Optional[nn.Module]) -> int:
    """Bytes of a bucket of `elements`, a multiple of 4 KiB, no larger than the model's gradients need."""
    size = 2 if dtype in ("bf16", "fp16") else 4
    if model is not None:
        sizes = {p.element_size() for p in model.parameters()}
        size = size if dtype else max(sizes, default=4)
        elements = min(elements, sum(p.numel() for p in model.parameters()))
    return max(1 << 20, -(-elements * size // 4096) * 4096)


# Parameters that a rule does not have.
_FOREIGN = {None: ("momentum",), "sgd": ("betas", "eps", "adam_w_mode", "torch_adam"),
            "lion": ("eps", "momentum", "adam_w_mode", "torch_adam")}


def _optimizer(values: Mapping[str, Any]) -> Tuple[Optional[str], Dict[str, Any]]:
    """The option `optimizer`, where it is no AdamW, and the optimizer's defaults."""
    kind = values.get("optimizer.type", "AdamW")
    rule = {"adam": None, "adamw": None, "sgd": "sgd", "lion": "lion"}.get(str(kind).lower(), "")
    if rule == "":
        raise Unsupported(f"optimizer.type = {_shown(kind)} of the DeepSpeed configuration; forebay updates by AdamW, Adam, "
                          "SGD and Lion, so use \"AdamW\"")
    params = {name: values.get(f"optimizer.params.{name}")
              for name in ("lr", "betas", "eps", "weight_decay", "momentum", "adam_w_mode", "torch_adam")}
    found = {name: value for name, value in params.items() if value is not None}
    for name in _FOREIGN[rule]:
        if name in found:
            raise InvalidArgument(f"optimizer.params.{name} of the DeepSpeed configuration is none of {kind}'s; leave it out")
    uses_torch = _flag("optimizer.params.torch_adam", found.pop("torch_adam", False))
    decouples = _flag("optimizer.params.adam_w_mode", found.pop("adam_w_mode", True))
    if not decouples and str(kind).lower() == "adam":  # AdamW stays AdamW, as there.
        rule = "adam"
    betas = found.pop("betas", None)
    made: Dict[str, Any] = {name: _number(f"optimizer.params.{name}", value) for name, value in found.items()}
    if betas is not None:
        if not isinstance(betas, (list, tuple)) or len(betas) != 2:
            raise InvalidArgument(f"optimizer.params.betas is {_shown(betas)} in the DeepSpeed configuration; use two "
                                  "numbers")
        made["betas"] = tuple(_number("optimizer.params.betas", value, most=1) for value in betas)
    if "optimizer.type" in values:  # DeepSpeed's defaults.
        made.setdefault("weight_decay", 0.01 if uses_torch and rule is None else 0.0)
        if rule == "lion":
            made = {"lr": 1e-3, "betas": (0.9, 0.999), **made}
    return rule, made


_said: set = set()


def say(without_effect: List[str]) -> None:
    """Names the keys without effect, each once in a process."""
    new = [path for path in without_effect if path not in _said]
    _said.update(new)
    if new and os.environ.get("RANK", "0") == "0":
        warnings.warn(f"keys of the DeepSpeed configuration without effect: {', '.join(new)}", stacklevel=4)
