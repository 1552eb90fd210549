"""The optimizers of a sharded model: AdamW, Adam, SGD, Lion, Adafactor and Muon in the engine, with the interface of torch.optim."""

from __future__ import annotations

import collections
import inspect
import math
import warnings
from typing import Any, Callable, Dict, Iterable, List, Optional, Set, Tuple

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from forebay import core
from forebay._library import InvalidArgument, Unsupported
from forebay.torch import describe
from forebay.torch.guard import unwatched
from forebay.torch.sharded import Sharded
from forebay.torch.uncompiled import uncompiled

# The engine's rules (its option `optimizer`), and the values that each takes from a parameter group.
_RULES: Dict[str, Dict[str, Any]] = {
    "adamw": {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2},
    "adam": {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0},
    "sgd": {"lr": 1e-3, "momentum": 0.0, "weight_decay": 0.0},
    "lion": {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0},
    "adafactor": {"lr": 1e-2, "weight_decay": 0.0},
    "muon": {"lr": 1e-3, "momentum": 0.95, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "use_muon": True,
             "adjust_lr_fn": None},
}
_NAMES = {"adamw": "AdamW", "adam": "Adam", "sgd": "SGD", "lion": "Lion", "adafactor": "Adafactor", "muon": "Muon"}
# Values of a parameter group that change the rule, and those that do not.
_OFF = {"amsgrad": False, "maximize": False, "differentiable": False, "nesterov": False, "dampening": 0,
        "cautious_factor": 1.0, "caution": False, "corrected_weight_decay": False}
# The constants of a rule, which are torch's defaults.
_CONSTANTS: Dict[str, Dict[str, Any]] = {
    "adafactor": {"eps": (None, 1e-3), "beta2_decay": -0.8, "d": 1.0},
    "muon": {"nesterov": True, "ns_coefficients": (3.4445, -4.7750, 2.0315), "ns_steps": 5},
}
# torch's names for the engine's option muon-rate.
_RATES = {"original": "original", "match_rms_adamw": "match-rms-adamw"}
_WITHOUT_EFFECT = ("foreach", "fused", "capturable")


_NO_MOMENTS = ("the state of this optimizer has moments, and those of a sharded model lie in shards; restore() takes the state of "
               "forebay.save(). To begin with moments of zero, load {**state, \"state\": {}}")


class _Moments(collections.defaultdict):
    """Optimizer.state, which has no entries."""

    def __missing__(self, p: Any) -> Any:
        raise Unsupported("optimizer.state of a sharded model: moments lie in shards. forebay.save(model, directory) saves "
                          "them, and restore() takes them")


class Optimizer(torch.optim.Optimizer):
    """Updates a sharded model. Schedulers change `param_groups` as usual; forebay.wrap() shares them.

    `rule`: "adamw", "adam", "sgd", "lion", "adafactor" or "muon".
    `grad_norm`: the norm of the last step's averaged gradients, before clip_grad_norm_(); None if the step was skipped.
    `step()` is collective.
    """

    wrapped: Tuple[torch.optim.Optimizer, ...] = ()
    _step_supports_amp_scaling = True  # torch.amp.GradScaler calls step() always; one that is not finite changes nothing.

    def __init__(self, sharded: Sharded, rule: str, groups: List[Dict[str, Any]], defaults: Dict[str, Any]) -> None:
        super().__init__(groups, defaults)
        self.sharded, self.rule = sharded, rule
        self.state = _Moments()
        self.last: Optional[core.StepResult] = None
        self.grad_norm: Optional[float] = None
        self.is_stepped = False  # Since zero_grad().
        self.fixed = {**_OFF, **_CONSTANTS.get(rule, {})}
        self._check_groups()
        self.choices = [self._choices(group) for group in self.param_groups]
        if rule == "muon":
            self._set_rate()
        given = sharded.options.get("optimizer", rule) if sharded.engine is None else sharded.rule
        if given != rule:
            raise InvalidArgument(f"the sharded model updates by {_NAMES[given]}, and the optimizer is {_NAMES[rule]}; give "
                                  f"shard(optimizer=\"{rule}\"), or make the optimizer right after shard()")
        sharded.commit(self.param_groups, rule)
        if sharded.optimizer is not None:
            sharded.between_steps()
            sharded.engine.reset_moments()
            sharded.optimizer = self
        sharded.guard.begin_step()
        self.members = self._members()
        wanted = _groups_of(self.param_groups)
        if {p: sharded.groups.get(p, 0) for p in wanted} != wanted:
            raise InvalidArgument("the model was used, or had another optimizer, before this one with other parameter "
                                  "groups was made; make one optimizer right after shard()")

    @property
    def param_groups(self) -> List[Dict[str, Any]]:
        """The groups that the wrapped optimizers have now: load_state_dict() gives them others."""
        if not self.wrapped:
            return self._groups
        return self.wrapped[0].param_groups if len(self.wrapped) == 1 else [group for one in self.wrapped for group in one.param_groups]

    @param_groups.setter
    def param_groups(self, groups: List[Dict[str, Any]]) -> None:
        for one in self.wrapped[:-1]:
            count = len(one.param_groups)
            one.param_groups, groups = groups[:count], groups[count:]
        if self.wrapped:
            self.wrapped[-1].param_groups = groups
        else:
            self._groups = groups

    def _members(self) -> List[Set[int]]:
        return [set(map(id, group["params"])) for group in self.param_groups]

    def _check_groups(self) -> None:
        grouped = _groups_of(self.param_groups)
        for group in self.param_groups:
            self._check_group(group)
        for p in self.sharded.parameters:
            if p.requires_grad and p not in grouped:
                raise InvalidArgument(f"parameter {self.sharded.names[p]} is trainable and in no parameter group; one "
                                      "optimizer updates the whole model, so give it there, or freeze it before "
                                      "shard()")
        for p in grouped:
            if describe.is_held(p) and getattr(p, "_forebay", None) is not self.sharded:
                raise InvalidArgument(f"a parameter of shape {list(p.shape)} in the optimizer does not belong to the sharded model; "
                                      "give it an optimizer of its own")

    def _check_group(self, group: Dict[str, Any]) -> None:
        for name, off in self.fixed.items():
            value = group.get(name, off)
            if value != off and (not isinstance(value, list) or tuple(value) != off):
                raise Unsupported(f"{name}={group[name]}; forebay updates by plain {_NAMES[self.rule]}, so leave it out")
        _check_values(group)

    def _check_changes(self) -> None:
        """The program may have changed values of groups since the optimizer was made."""
        for group, choices in zip(self.param_groups, self.choices):
            self._check_group(group)
            for name, value in self._choices(group).items():
                if value != choices[name]:
                    raise Unsupported(f"{name} of a parameter group became {value} after the optimizer was made with {choices[name]}; "
                                      "set it back, or make the model and the optimizer again")

    def _choices(self, group: Dict[str, Any]) -> Dict[str, Any]:
        """The values that the engine takes over when the optimizer is made."""
        if self.rule == "muon":
            uses = bool(group.get("use_muon"))
            return {"use_muon": uses, "adjust_lr_fn": group.get("adjust_lr_fn") or "original" if uses else None}
        if self.rule in ("adam", "adamw"):  # PyTorch since 2.7 has the value in the groups of both.
            return {"decoupled_weight_decay": bool(group.get("decoupled_weight_decay", self.rule == "adamw"))}
        return {}

    def _set_rate(self) -> None:
        """Muon: refuses groups of matrices that have others, and gives the engine the factor of their rates."""
        matrices = [group for group in self.param_groups if group["use_muon"]]
        for group in matrices:
            for p in group["params"]:
                if p.dim() != 2:
                    raise InvalidArgument(f"parameter {self.sharded.names.get(p, '')} has {p.dim()} dimensions, and Muon "
                                          "updates matrices; put it in a parameter group with use_muon=False, which AdamW "
                                          "updates")
        rates = {group["adjust_lr_fn"] for group in matrices}
        if len(rates) > 1 or not rates <= {None, *_RATES}:
            raise Unsupported(f"adjust_lr_fn is {' and '.join(sorted(map(str, rates)))}; use original or match_rms_adamw, the "
                              "same for all parameter groups")
        rate = _RATES.get(next(iter(rates), None))
        if rate is not None and self.sharded.engine is None:
            self.sharded.options["muon_rate"] = rate
        elif rate is not None and self.sharded.rule == "muon" and self.sharded.options.get("muon_rate", "original") != rate:
            raise InvalidArgument(f"adjust_lr_fn is {matrices[0]['adjust_lr_fn']}, and the model was used, or had another optimizer, "
                                  "with the other rate; make one optimizer right after shard()")

    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:
        try:
            return self._step(closure)
        except BaseException:
            self._forget_scaler()
            raise
        finally:
            self.is_stepped = True

    def _forget_scaler(self) -> None:
        """GradScaler takes its factor back only behind a step() that returns, and would multiply what it finds before the next."""
        self.__dict__.pop("grad_scale", None)
        self.__dict__.pop("found_inf", None)

    def _step(self, closure: Optional[Callable[[], Any]]) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for wrapped in self.wrapped:
            if wrapped.state:
                raise InvalidArgument(_NO_MOMENTS)
            wrapped._opt_called = True  # Its schedulers ask for this.
        if self._members() != self.members:
            raise Unsupported("parameters were taken out of param_groups, added or moved after the optimizer was made, as by "
                              "add_param_group(), and the engine updates those that it had then; give all groups at once, or freeze a "
                              "parameter by requires_grad_(False) between steps, which leaves it as it is")
        _tell_muon(self.rule, self.param_groups)
        if self.sharded.optimizer not in (None, self):
            raise InvalidArgument("another optimizer of this model makes its steps, and the moments are that one's; call its "
                                  "step(), or make a new optimizer, which begins with moments of zero")
        self._check_changes()
        if not self.sharded.scale_is_known and self.sharded.has_gradients and self.sharded.engine.loss_scale() != 1:
            raise InvalidArgument("the step divides gradients in fp16 by optimizer.loss_scale, and nothing has multiplied the loss by "
                                  "it; call (loss * optimizer.loss_scale).backward()")
        scale = getattr(self, "grad_scale", None)  # GradScaler's, while gradients are scaled.
        if scale is not None:
            for gradient in self.sharded.stand_ins.values():
                gradient.scale(1.0 / float(scale))
        result = self.sharded.step(self.param_groups)
        if result is not None:
            self.last = result
            self.sharded.optimizer = self
            self.grad_norm = None if result.skipped else self.sharded.norm
        return loss

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise Unsupported("pickling or copying an optimizer of forebay, whose moments lie in shards; use forebay.save(model, directory) "
                          "and forebay.restore()")

    @uncompiled
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients since the last step."""
        if self.sharded.tasks:
            self.sharded.recover()
        if not self.is_stepped:  # A hook before step() raised. A hook behind it may be the caller, before GradScaler goes on.
            self._forget_scaler()
        self.is_stepped = False
        with unwatched():
            for group in self.param_groups:
                for p in group["params"]:
                    p.grad = None

    @property
    def loss_scale(self) -> float:
        """fp16: multiply the loss by this before backward(). 1 for other types. Accelerator.backward() and Lightning do so."""
        self.sharded.scale_is_known = True
        return self.sharded.engine.loss_scale()

    def state_dict(self) -> Dict[str, Any]:
        if self.last is not None:
            warnings.warn("optimizer.state_dict() has no moments: they lie in shards. forebay.save(model, directory) "
                          "saves them with the weights", stacklevel=2)
        return super().state_dict()

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        """Takes the parameter groups. Errors: InvalidArgument for moments."""
        if state_dict.get("state"):
            raise InvalidArgument(_NO_MOMENTS)
        super().load_state_dict(state_dict)
        for group, loaded in zip(self.param_groups, self.__dict__.pop("param_groups")):  # Where torch puts them, past the property.
            group.update(loaded)
        self.state = _Moments()

    def add_param_group(self, param_group: Dict[str, Any]) -> None:
        if hasattr(self, "sharded"):
            raise Unsupported("add_param_group() after the optimizer was made; give all groups at once")
        # torch's wrapper of this loads torch._dynamo.
        add = torch.optim.Optimizer.add_param_group
        getattr(add, "__wrapped__", add)(self, param_group)


def _check_values(group: Dict[str, Any]) -> None:
    """Refuses values with which no step is possible, before the engine takes its memory."""
    def check(name: str, value: Any, fits: Callable[[float], bool], allowed: str) -> None:
        try:
            good = fits(float(value))
        except (TypeError, ValueError):
            good = False
        if not good:
            raise InvalidArgument(f"{name} is {value!r}; use {allowed}")

    for name in ("lr", "weight_decay"):
        check(name, group.get(name), lambda value: 0 <= value < math.inf, "a number of 0 or more")
    betas = group.get("betas", (0, 0))
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise InvalidArgument(f"betas is {betas!r}; use two numbers, as in betas=(0.9, 0.999)")
    for name, beta in (("momentum", group.get("momentum", 0)), ("betas[0]", betas[0]), ("betas[1]", betas[1])):
        check(name, beta, lambda value: 0 <= value < 1, "a number of 0 or more, below 1")
    if not isinstance(group.get("eps", ()), (tuple, list)):  # Adafactor's pair is one of its constants.
        check("eps", group["eps"], lambda value: 0 < value < math.inf, "a number above 0")


def _groups_of(groups: Iterable[Dict[str, Any]]) -> Dict[nn.Parameter, int]:
    return {p: i for i, group in enumerate(groups) for p in group["params"]}


def _listed(groups: Iterable[Any]) -> List[Any]:
    """Parameters, or groups with lists of them, without names: a generator could be read once only."""
    def unnamed(one: Any) -> Any:
        return one[1] if isinstance(one, tuple) else one

    def listed(group: Dict[str, Any]) -> Dict[str, Any]:
        params = group["params"]
        return {**group, "params": [params] if isinstance(params, torch.Tensor) else [unnamed(p) for p in params]}
    return [listed(one) if isinstance(one, dict) else unnamed(one) for one in groups]


def _make(rule: str, model: Any, params: Any, given: Dict[str, Any], switches: Dict[str, Any]) -> Optimizer:
    for name in switches:
        if name not in _OFF and name not in _WITHOUT_EFFECT:
            raise TypeError(f"{_NAMES[rule]}() got an unexpected keyword argument {name!r}")
    if isinstance(model, nn.Module):
        sharded = sharded_of(model)
        if params is None:
            sharded.refuse_changed(trained=model)
        groups = _listed(params) if params is not None else [p for p in sharded.parameters if p.requires_grad]
    else:  # The order of torch.optim.
        groups, given["lr"] = _listed(model), params if given["lr"] is None else given["lr"]
        sharded = _owner_of(groups)
        groups = [one for one in groups if isinstance(one, dict) or one.requires_grad]
    if rule == "muon":
        groups = _with_tables_apart(sharded, groups)
    configured = sharded.optimizer_defaults if sharded.options.get("optimizer", "adamw") == rule else {}
    return Optimizer(sharded, rule, groups, {**_RULES[rule], **configured,
                                             **{name: value for name, value in given.items() if value is not None},
                                             **{name: value for name, value in switches.items() if name in _OFF}})


def AdamW(model: Any, params: Any = None, lr: Optional[float] = None,
          betas: Optional[Tuple[float, float]] = None, eps: Optional[float] = None,
          weight_decay: Optional[float] = None, **switches: Any) -> Optimizer:
    """AdamW over a sharded model, with the defaults of torch.optim.AdamW, or those of shard(config=...).

    `model`: the model, or its parameters as torch.optim.AdamW takes them. `params`: parameters or parameter groups;
    None: all trainable parameters of the model. foreach, fused and capturable have no effect. Collective.
    Errors: OutOfMemory, because the engine takes its memory here.
    """
    return _make("adamw", model, params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}, switches)


def Adam(model: Any, params: Any = None, lr: Optional[float] = None,
         betas: Optional[Tuple[float, float]] = None, eps: Optional[float] = None,
         weight_decay: Optional[float] = None, **switches: Any) -> Optimizer:
    """Adam, with the weight decay as a part of the gradient: torch.optim.Adam. Else as AdamW()."""
    return _make("adam", model, params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}, switches)


def SGD(model: Any, params: Any = None, lr: Optional[float] = None, momentum: Optional[float] = None,
        weight_decay: Optional[float] = None, **switches: Any) -> Optimizer:
    """Gradient descent with momentum: torch.optim.SGD. It keeps one moment. Else as AdamW()."""
    return _make("sgd", model, params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}, switches)


def Lion(model: Any, params: Any = None, lr: Optional[float] = None,
         betas: Optional[Tuple[float, float]] = None, weight_decay: Optional[float] = None, **switches: Any) -> Optimizer:
    """Lion (arXiv 2302.06675), as in the package lion-pytorch. It keeps one moment. Else as AdamW()."""
    return _make("lion", model, params, {"lr": lr, "betas": betas, "weight_decay": weight_decay}, switches)


def Adafactor(model: Any, params: Any = None, lr: Optional[float] = None,
              weight_decay: Optional[float] = None, **switches: Any) -> Optimizer:
    """torch.optim.Adafactor with its constants. In place of v it keeps a factor for each row and column. Else as AdamW().

    On a CUDA device the units have to be offloaded: shard(offload="optimizer"). Errors: Unsupported if they are not.
    """
    return _make("adafactor", model, params, {"lr": lr, "weight_decay": weight_decay}, switches)


def Muon(model: Any, params: Any = None, lr: Optional[float] = None, momentum: Optional[float] = None,
         weight_decay: Optional[float] = None, betas: Optional[Tuple[float, float]] = None, eps: Optional[float] = None,
         adjust_lr_fn: Optional[str] = None, **switches: Any) -> Optimizer:
    """torch.optim.Muon with its constants for matrices, in fp32, and AdamW for all other parameters. Else as AdamW().

    `params`: parameter groups; those with use_muon=False are updated by AdamW with their `betas` and `eps`, the others
    by Muon with their `momentum`. None, or parameters: Muon for those of two dimensions but the tables of nn.Embedding
    and what is tied to them. An output layer that is not tied belongs in a group with use_muon=False.
    `adjust_lr_fn`: "original" or "match_rms_adamw", with which a rate of AdamW fits all groups.
    On a CUDA device the units have to be offloaded: shard(offload="optimizer"). Errors: Unsupported if they are not.
    """
    given = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "betas": betas, "eps": eps,
             "adjust_lr_fn": adjust_lr_fn}
    return _make("muon", model, params, given, switches)


def _with_tables_apart(sharded: Sharded, groups: List[Any]) -> List[Any]:
    """Parameters as two groups: matrices, and the others."""
    if any(isinstance(one, dict) for one in groups):
        return groups
    tables = {p for module in sharded.model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    parts: Tuple[List[nn.Parameter], List[nn.Parameter]] = ([], [])
    for p in groups:
        parts[p.dim() == 2 and p not in tables].append(p)
    return [{"params": part, "use_muon": bool(i)} for i, part in enumerate(parts) if part]


def wrap(optimizer: torch.optim.Optimizer, others: Optional[torch.optim.Optimizer] = None) -> Optimizer:
    """An optimizer of the same parameter groups that updates by the engine. Collective.

    `optimizer`: torch.optim.AdamW, Adam, SGD, Adafactor or Muon, or Lion of lion-pytorch or timm, over the parameters of
    one sharded model, before its first step. `others`: beside Muon, the torch.optim.AdamW of the parameters that are no
    matrices. Errors: Unsupported for others.
    """
    if isinstance(optimizer, Optimizer):
        return optimizer
    rule = _rule_of(optimizer)
    wrapped = (optimizer,) if others is None else (optimizer, others)
    if others is not None and (rule != "muon" or _rule_of(others) != "adamw"):
        raise Unsupported(f"{type(optimizer).__name__} and {type(others).__name__} over one model; give Muon, and an AdamW of "
                          "the parameters that are no matrices")
    if any(one.state for one in wrapped):
        raise InvalidArgument("the optimizer has made a step, and its moments cannot move; wrap it before the first")
    groups = [group for one in wrapped for group in one.param_groups]
    _tell_muon(rule, groups)
    made = Optimizer(_owner_of(groups), rule, [dict(group) for group in groups], dict(optimizer.defaults))
    made.wrapped = wrapped  # Schedulers of the given optimizers go on working.
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):  # And so do hooks, also those to come.
        hooks = [getattr(one, name) for one in wrapped]
        setattr(made, name, hooks[0] if others is None else collections.ChainMap(*hooks))
    return made


def _tell_muon(rule: str, groups: List[Dict[str, Any]]) -> None:
    """Groups of torch.optim.Muon, and of the AdamW beside it, say which of the two they are."""
    for group in groups if rule == "muon" else ():
        group.setdefault("use_muon", "momentum" in group)


def _rule_of(optimizer: torch.optim.Optimizer) -> str:
    kind = type(optimizer)
    is_adamw = isinstance(optimizer, torch.optim.AdamW)
    if is_adamw or isinstance(optimizer, torch.optim.Adam):
        base = torch.optim.AdamW if is_adamw else torch.optim.Adam
        if inspect.unwrap(kind.step) is not inspect.unwrap(base.step):
            raise Unsupported(f"{kind.__name__} derives from {base.__name__} and has a step() of its own, which cannot run in shards; "
                              f"use torch.optim.{base.__name__}")
        decoupled = {bool(group.get("decoupled_weight_decay", is_adamw)) for group in optimizer.param_groups}
        if len(decoupled) == 1:
            return "adamw" if decoupled.pop() else "adam"
    if kind is torch.optim.SGD:
        return "sgd"
    if kind is getattr(torch.optim, "Adafactor", ()):  # Not in PyTorch 2.4.
        return "adafactor"
    if kind is getattr(torch.optim, "Muon", ()):  # Not before PyTorch 2.9.
        return "muon"
    known = {"params", "initial_lr", *_RULES["lion"], *_OFF, *_WITHOUT_EFFECT}
    if (kind.__name__ == "Lion" and all(known.issuperset(group) for group in optimizer.param_groups)
            and not getattr(optimizer, "decoupled_wd", False)):
        return "lion"
    raise Unsupported(f"{kind.__module__}.{kind.__name__} cannot run in shards; use torch.optim.AdamW, Adam, SGD, Adafactor or Muon, or "
                      "forebay.Lion(model)")


def _owner_of(groups: Iterable[Any]) -> Sharded:
    """The sharded model of these parameters or parameter groups."""
    owners = {getattr(p, "_forebay", None)
              for group in groups for p in (group["params"] if isinstance(group, dict) else [group]) if describe.is_held(p)}
    if len(owners) != 1 or None in owners:
        raise InvalidArgument("the optimizer's parameters are not those of one sharded model; call forebay.shard() "
                              "first")
    return owners.pop()


def _refuse_other(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Before every step() of any optimizer: one of torch would read and write memory that is not there."""
    if isinstance(optimizer, Optimizer):
        return
    for group in optimizer.param_groups:
        for p in group["params"][:1]:
            if getattr(p, "_forebay", None) is not None:
                raise InvalidArgument(
                    f"{type(optimizer).__name__}.step() over parameters of a sharded model; use forebay.AdamW(model, "
                    "lr=...), or forebay.wrap(optimizer) for AdamW, Adam, SGD, Lion, Adafactor and Muon, and "
                    "call its step()")


register_optimizer_step_pre_hook(_refuse_other)


def sharded_of(model: nn.Module) -> Sharded:
    """The engine side of a sharded model. Errors: InvalidArgument for another module."""
    made = getattr(model, "_forebay", None)
    if not isinstance(made, Sharded):
        raise InvalidArgument(f"this {type(model).__name__} is not sharded; call forebay.shard(model) first")
    return made
