"""An engine for tests of the hooks: one rank, recorded order, and memory that cannot be read while a unit is released.

Parameters are readable while their unit is acquired, gradients writable while it is acquired backward. So a hook that
comes too late or goes too early ends the process by a signal.
"""

import ctypes
import hashlib
import math
import mmap

import torch

from forebay import core

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
NONE, READ, WRITE = 0, 1, 3


class Range:
    """fp32 elements on pages of their own."""

    def __init__(self, count):
        self.size = -(-max(count, 1) * 4 // mmap.PAGESIZE) * mmap.PAGESIZE
        self.map = mmap.mmap(-1, self.size)
        self.tensor = torch.frombuffer(self.map, dtype=torch.float32, count=count)
        self.address = self.tensor.data_ptr()

    def protect(self, access):
        assert _libc.mprotect(self.address, self.size, access) == 0, ctypes.get_errno()


class Unit:
    def __init__(self, name):
        self.name, self.parameters, self.tied, self.leases = name, [], [], []
        self.forwards = self.backwards = 0


class Parameter:
    def __init__(self, name, count, group, frozen):
        self.name, self.count, self.group, self.frozen = name, count, group, frozen
        self.readers = self.writers = 0
        self.used = False  # In this step.


class FakeEngine:
    communicator = None

    def __init__(self):
        self.units, self.log = [], []
        self.in_step = self.evaluating = False
        self.micro_step = -1
        self.factor = 1.0
        self.values = {}

    # --- description ---

    def add_unit(self, name, flags=0):
        self.units.append(Unit(name))
        return len(self.units) - 1

    def declare_shape(self, unit, index, shape):
        pass

    def add_parameter(self, unit, name, count, group=0, flags=0):
        self.units[unit].parameters.append(Parameter(name, count, group, bool(flags & core.FROZEN)))
        return len(self.units[unit].parameters) - 1

    def tie(self, unit, of_unit, of_index):
        assert of_unit < unit
        self.units[unit].tied.append(self.units[of_unit].parameters[of_index])
        return len(self.units[unit].parameters) + len(self.units[unit].tied) - 1

    def commit(self):
        for p in self.all():
            p.master = torch.zeros(p.count, requires_grad=not p.frozen)
            p.data = p.master.data_ptr()
            p.sum, p.shown, p.gradient = torch.zeros(p.count), Range(p.count), Range(p.count)
            p.shown.protect(NONE)
            p.gradient.protect(NONE)
        groups = {}
        for p in self.all():
            if not p.frozen:
                groups.setdefault(p.group, []).append(p.master)
        self.optimizer = torch.optim.AdamW([{"params": groups[g]} for g in sorted(groups)])

    def all(self):
        return [p for unit in self.units for p in unit.parameters]

    def find(self, unit, index):
        return (self.units[unit].parameters + self.units[unit].tied)[index]

    def address(self, unit, index):
        return self.find(unit, index).shown.address

    # --- values ---

    def set(self, unit, index, dtype, values, count, first=0, changed=False):
        # `changed` or not: in fp32 an element that has its value has its master.
        assert dtype == "fp32" and not self.in_step
        with torch.no_grad():
            ctypes.memmove(self.find(unit, index).master.data_ptr() + 4 * first, values, 4 * count)

    def digest(self):
        return hashlib.sha256(b"".join(p.master.detach().numpy().tobytes() for p in self.all())).hexdigest()

    def freeze(self, unit, index, frozen=True):
        assert not self.in_step and not self.evaluating and not self.find(unit, index).frozen

    # --- steps ---

    def hyperparameter(self, name, value, group=core.WHOLE_STEP):
        if name == "gradient-factor":
            self.factor = value
        else:
            self.values[name, group] = value

    def step_begin(self):
        assert not self.in_step and not self.evaluating
        self.in_step, self.micro_step = True, -1
        self.started = set()

    def micro_step_begin(self, index):
        assert self.in_step and not self.evaluating and index == self.micro_step + 1
        assert not any(unit.leases for unit in self.units)
        self.micro_step = index
        for unit in self.units:
            unit.forwards = unit.backwards = 0

    def evaluation_begin(self):
        assert not self.evaluating and not any(unit.leases for unit in self.units)
        self.evaluating = True

    def evaluation_end(self):
        assert self.evaluating and not any(unit.leases for unit in self.units)
        self.evaluating = False

    def acquire(self, index, backward=False, stream=None):
        unit = self.units[index]
        assert self.evaluating or self.in_step
        if not self.evaluating:
            unit.backwards += backward
            unit.forwards += not backward
            assert unit.backwards <= unit.forwards, f"{unit.name}: its gradient is complete"
        unit.leases.append(backward)
        self.log.append(("B" if backward else "F") + unit.name)
        for p in unit.parameters + unit.tied:
            p.readers += 1
            p.writers += backward
            if p.readers == 1:
                p.shown.protect(WRITE)
                ctypes.memmove(p.shown.address, p.data, 4 * p.count)
                p.shown.protect(READ)
            if backward and p.writers == 1:
                p.gradient.protect(WRITE)

    def gradient(self, unit, index):
        p = self.find(unit, index)
        assert True in self.units[unit].leases and not p.frozen
        adds, p.written = getattr(p, "written", False), True
        return p.gradient.address, adds

    def release(self, index, stream=None):
        unit = self.units[index]
        backward = unit.leases.pop()
        for p in unit.parameters + unit.tied:
            p.readers -= 1
            p.writers -= backward
            if backward and p.writers == 0:
                if getattr(p, "written", False):
                    p.sum += p.gradient.tensor
                    p.used = True
                p.written = False
                ctypes.memset(p.gradient.address, 0xFF, p.gradient.size)
                p.gradient.protect(NONE)
            if p.readers == 0:
                p.shown.protect(WRITE)
                ctypes.memset(p.shown.address, 0xFF, p.shown.size)
                p.shown.protect(NONE)

    def number(self, name):
        return {"open_steps": int(self.in_step), "begun_micro_steps": self.micro_step + 1 if self.in_step else 0,
                "open_evaluations": int(self.evaluating),
                "open_acquisitions": sum(len(unit.leases) for unit in self.units)}[name]

    def loss_scale(self):
        return 1

    def norm(self):
        return float(torch.linalg.vector_norm(torch.stack(
            [torch.linalg.vector_norm(p.sum) for p in self.all() if not p.frozen])))

    def step(self):
        assert self.in_step and not any(unit.leases for unit in self.units)
        result = core.StepResult(grad_norm=self.norm(), loss_scale=1)
        self.in_step = False
        if not math.isfinite(result.grad_norm):
            result.skipped = 1
            self.drop()
            return result
        for p in self.all():
            if not p.frozen:
                p.master.grad = p.sum * self.factor if p.used else None
                p.sum, p.used = torch.zeros(p.count), False
        groups = sorted({p.group for p in self.all() if not p.frozen})
        for group, options in zip(groups, self.optimizer.param_groups):
            options.update(lr=self.values["lr", group], weight_decay=self.values["weight-decay", group],
                           eps=self.values["epsilon", group],
                           betas=(self.values["beta1", group], self.values["beta2", group]))
        self.optimizer.step()
        return result

    def abandon(self, micro_steps=0):
        assert self.in_step and micro_steps == self.micro_step + 1
        for index, unit in enumerate(self.units):
            while unit.leases:
                self.release(index)
        self.drop()
        self.in_step = False

    def drop(self):
        """Forgets the gradients of the step."""
        for p in self.all():
            p.sum, p.used = torch.zeros(p.count), False
