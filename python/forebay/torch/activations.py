"""Activations that wait for the backward pass off the device, partitioned over tensor-parallel ranks if wished."""

from __future__ import annotations

import functools
import itertools
import numbers
import warnings
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Set, Tuple

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from forebay import core
from forebay._library import InvalidArgument
from forebay.torch.uncompiled import calls_on_stack, uncompiled

_numbers = itertools.count()
_HASHED_WORDS = 1 << 18  # At a time, since each of them takes some more memory.
_ODD = (-0x61C8864680B583EB, 0x3C79AC492BA7B653)  # They mix places and words.


class _Pass:
    """One forward pass and its backward pass."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.saved = 0  # Storages so far.
        self.alive: Set[int] = set()  # Slots of saved activations that no backward pass has taken yet.
        self.known: Dict[Any, Tuple[StorageWeakRef, "_Saved"]] = {}


class _Saved:
    """The bytes of one storage in a slot of the checkpointer. Views of it share this object."""

    def __init__(self, owner: "ActivationOffload", of: _Pass, slot: int, storage: torch.UntypedStorage) -> None:
        self.owner, self.of, self.slot = owner, of, slot
        self.size = storage.nbytes()
        self.restored: Optional[torch.UntypedStorage] = None
        # Before the call: where KeyboardInterrupt ends it, __del__() discards what it may have saved.
        self.is_saved = True
        of.alive.add(slot)
        try:
            owner.checkpointer.save(0, slot, of.number, storage.data_ptr(), self.size, stream=owner.stream())
        except Exception:
            self.forget()
            raise
        owner.wait()

    def load(self) -> torch.UntypedStorage:
        """The bytes again. They stay while the graph can read them a second time."""
        if self.restored is None:
            owner, key = self.owner, (0, self.slot, self.of.number)
            made = torch.empty(self.size, dtype=torch.uint8, device=owner.device)
            data, size, _ = owner.checkpointer.load(*key, stream=owner.stream())
            owner.wait()
            owner.copier.copy(made.data_ptr(), data, size, owner.stream())
            owner.wait()
            owner.checkpointer.load_end(*key)
            self.forget()
            self.restored = made.untyped_storage()
        return self.restored

    def forget(self) -> None:
        self.is_saved = False
        self.of.alive.discard(self.slot)

    def __del__(self) -> None:
        if not getattr(self, "is_saved", False):
            return
        if self.owner.communicator.size > 1:
            self.owner.freed.append((self.of, self.slot))
            return
        self.forget()
        try:
            self.owner.checkpointer.discard(0, self.slot, self.of.number)
        except Exception:  # The checkpointer is closed, or KeyboardInterrupt came before it had saved.
            pass


class Kept(NamedTuple):
    """A tensor that stays, and its version: torch checks none of a tensor that a hook packs."""

    tensor: torch.Tensor
    version: Optional[int]


def keep(t: torch.Tensor) -> Kept:
    # A result that an operator saves would keep its graph alive, and with it itself. This view has the same version.
    t = t.detach()
    return Kept(t, None if t.is_inference() else t._version)


def kept(one: Kept) -> torch.Tensor:
    """Errors: RuntimeError, as torch's, where the tensor has changed since."""
    t, version = one
    if version is not None and t._version != version:
        raise RuntimeError(f"a tensor of shape {list(t.shape)} that the backward pass needs has been modified by an inplace "
                           f"operation: it is at version {t._version}; expected version {version}. Let the operation return "
                           "a new tensor; if it is a weight that a step has changed since the forward pass, call the model again")
    return t


# The saved_tensors_hooks() that the program is in. torch has it since 2.8.
program_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


class Hooks:
    """As torch.autograd.graph.saved_tensors_hooks, from here to leave(). The pair that the program is in, `replaced`, returns then.

    After KeyboardInterrupt torch calls no hook of a module, so nobody calls leave(). A context of the program around the pass then pops the
    top of the stack: this pair, which is in the place of its own.
    """

    def __init__(self, pack: Callable[..., Any], unpack: Callable[..., Any]) -> None:
        self.is_left = False
        self.replaced = program_hooks(False) if program_hooks is not None else None
        pack = functools.partial(pack)
        pack.hooks = self
        if self.replaced is not None:
            torch._C._autograd._pop_saved_tensors_default_hooks()
        torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)

    @staticmethod
    def of(pair: Optional[Tuple[Any, Any]]) -> Optional["Hooks"]:
        hooks = getattr(pair[0], "hooks", None) if pair is not None else None
        return hooks if isinstance(hooks, Hooks) else None

    def leave(self) -> None:
        if program_hooks is None:
            torch._C._autograd._pop_saved_tensors_default_hooks()
            return
        self.is_left = True
        above = []  # After an interrupt the program may have entered others.
        while (pair := program_hooks(False)) is not None:
            torch._C._autograd._pop_saved_tensors_default_hooks()
            if self.of(pair) is self:
                above.append(self.replaced)
                self.replaced = None  # A graph may keep `pack`, and must not keep the program's hooks with it.
                break
            above.append(pair)
        for pair in reversed(above):
            while (hooks := self.of(pair)) is not None and hooks.is_left:
                pair = hooks.replaced
            if pair is not None:
                torch._C._autograd._push_saved_tensors_default_hooks(*pair)


class ActivationOffload:
    """The result of offload_activations(). remove() ends it; so does `with`."""

    def __init__(self, model: nn.Module, tier: str, group: Any, least_bytes: int, passes: int,
                 options: Dict[str, Any]) -> None:
        for name, value, least in (("least_bytes", least_bytes, 0), ("passes", passes, 1)):
            if not isinstance(value, numbers.Integral) or value < least:
                raise InvalidArgument(f"{name} is {value!r}; use a whole number of {least} or more")
        if not (group is None or isinstance(group, core.Communicator) or hasattr(group, "rank")):
            raise InvalidArgument(f"group is {group!r}; give a torch.distributed.ProcessGroup or a forebay.Communicator")
        # So that mistakes are named now.
        core.Options(activation_tier=tier, activation_micro_batches=passes, **options).close()
        self.model, self.tier, self.group = model, tier, group
        self.least_bytes, self.passes, self.options = least_bytes, passes, options
        self.device = next((p.device for p in model.parameters() if not p.is_meta), torch.device("cpu"))
        self.checkpointer: Optional[core.Checkpointer] = None
        self.copier = group.device if isinstance(group, core.Communicator) else core.Device(
            "host" if self.device.type == "cpu" else f"cuda:{self.device.index or 0}")
        self.sizes: List[int] = []  # By slot, from the first pass.
        self.sums: List[int] = []
        self.partitioned: List[bool] = []  # Whether each rank of the group keeps a slice, by slot.
        self.has_warned = False
        self.current: Optional[_Pass] = None
        self.in_flight: List[_Pass] = []
        # Saved activations whose graph is gone on this rank. When it goes depends on the rank (garbage collection, a
        # reference that one of them keeps), and the order of the gathers on what is in flight.
        self.freed: List[Tuple[_Pass, int]] = []
        self.hooks: Optional[Hooks] = None
        self.depth, self.count = 0, 0
        self.skipped: set = set()
        self.handles = [model.register_forward_pre_hook(self._before, prepend=True),
                        model.register_forward_hook(self._after, always_call=True)]

    def stream(self) -> Optional[int]:
        return torch.cuda.current_stream(self.device).cuda_stream if self.device.type == "cuda" else None

    def wait(self) -> None:
        if self.device.type == "cpu":  # Operators of torch run at once there, not on a stream.
            self.copier.synchronize()

    # --- the forward pass ---

    @uncompiled
    def _before(self, module: nn.Module, *_: Any) -> None:
        if self.depth and self.depth > calls_on_stack(module) - 1:
            self._end_pass()  # KeyboardInterrupt ended it: torch calls no hook then.
        self.depth += 1
        if self.depth > 1 or not torch.is_grad_enabled():
            return
        if self.sizes and self.checkpointer is None:
            self._commit()
        if self.checkpointer is not None:
            self.checkpointer.check()
            self._discard_freed()
        self.in_flight = [one for one in self.in_flight if one.alive]
        self.current = _Pass(self.count)
        self.count += 1
        self.skipped = {t.untyped_storage().data_ptr() for t in
                        itertools.chain(self.model.parameters(), self.model.buffers()) if not t.is_meta}
        self.hooks = Hooks(self._pack, self._unpack)

    @uncompiled
    def _after(self, *_: Any) -> None:
        self.depth -= 1
        if self.depth == 0:
            self._end_pass()

    def _end_pass(self) -> None:
        self.depth = 0
        if self.hooks is None:
            return
        self.hooks.leave()
        self.current.known.clear()
        if self.current.alive:
            self.in_flight.append(self.current)
        self.hooks = self.current = None

    def _pack(self, t: torch.Tensor) -> Any:
        of = self.current
        if (of is None or type(t) is not torch.Tensor or t.layout != torch.strided or t.device != self.device
                or t.is_conj() or t.is_neg()):  # A view whose values are not the bytes.
            return keep(t)
        storage = t.untyped_storage()
        size = storage.nbytes()
        # A small part of a large storage would bring all of it along.
        if size < self.least_bytes or storage.data_ptr() in self.skipped or 2 * t.numel() * t.element_size() < size:
            return keep(t)
        reference = StorageWeakRef(storage)
        # A kernel of a program's own function writes without a new version, and saves a detached tensor then.
        key = (reference.cdata, t._version, t.requires_grad)
        if key not in of.known:
            of.known[key] = (reference, self._save(of, storage))
        saved = of.known[key][1]
        if saved is None:
            return keep(t)
        return saved, t.dtype, t.storage_offset(), t.shape, t.stride()

    def _save(self, of: _Pass, storage: torch.UntypedStorage) -> Optional[_Saved]:
        slot, size = of.saved, storage.nbytes()
        of.saved += 1
        if self.checkpointer is None:  # The first pass tells the sizes.
            if of.number == 0:
                self.sizes.append(size)
                self.sums.append(self._sum_of(storage) if self.group is not None else 0)
            return None
        if slot >= len(self.sizes):
            return None
        has_place = size == self.sizes[slot] and (bool(of.alive) or len(self.in_flight) < self.passes)
        if self.partitioned[slot]:  # All ranks decide alike, since they gather it together.
            has_place = self._is_shared(has_place, storage)
        return _Saved(self, of, slot, storage) if has_place else None

    def _discard_freed(self) -> None:
        """Discards what was freed and is held on no rank of the group any more. Collective."""
        if self.communicator.size == 1:
            return
        freed = list(self.freed)
        gone = set(freed)
        held = " ".join(f"{of.number}/{slot}" for of in self.in_flight for slot in of.alive if (of, slot) not in gone).encode()
        sizes = [[int(word) for word in one.split()]
                 for one in self.communicator.exchange(f"{len(held)} {len(freed)}".encode().ljust(64))]
        if not any(count for _, count in sizes):
            return
        everyone = self.communicator.exchange(held.ljust(max(size for size, _ in sizes)))
        holding = {key for one in everyone for key in one.decode().split()}
        for of, slot in freed:
            if f"{of.number}/{slot}" in holding:
                continue
            try:
                self.checkpointer.discard(0, slot, of.number)
            except InvalidArgument:  # KeyboardInterrupt came before it had saved.
                pass
            of.alive.discard(slot)
            self.freed.remove((of, slot))

    def _sum_of(self, storage: torch.UntypedStorage) -> int:
        """A hash of all bytes and their places, computed where they are."""
        data = torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)
        end = data.numel() // 8 * 8
        words = data[:end].view(torch.int64)
        found = int.from_bytes(bytes(data[end:].tolist()), "little")
        for begin in range(0, words.numel(), _HASHED_WORDS):
            part = words[begin:begin + _HASHED_WORDS]
            mixed = part + torch.arange(begin, begin + part.numel(), device=self.device) * _ODD[0]
            mixed = (mixed ^ mixed >> 31) * _ODD[1]
            found += int((mixed ^ mixed >> 29).sum())
        return found % (1 << 64)

    def _is_shared(self, has_place: bool, storage: torch.UntypedStorage) -> bool:
        """Whether all ranks of the group have a place for these bytes, and the bytes are the same. Collective."""
        mine = f"{int(has_place)} {storage.nbytes()} {self._sum_of(storage) if has_place else 0}".encode()
        self.copier.synchronize()
        everyone = set(self.communicator.exchange(mine.ljust(64)))
        if len(everyone) > 1 and not self.has_warned and all(one.startswith(b"1") for one in everyone):
            self.has_warned = True
            warnings.warn("activations that were the same on all ranks of the group in the first pass differ now, as behind weights "
                          "that begin at zero; they stay on the device. Call offload_activations() after the first steps, and "
                          "each rank keeps its own off the device")
        return has_place and len(everyone) == 1

    def _unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, Kept):
            return kept(packed)
        saved, dtype, offset, shape, stride = packed
        return torch.empty(0, dtype=dtype, device=self.device).set_(saved.load(), offset, shape, stride)

    # --- the checkpointer ---

    def _commit(self) -> None:
        self.communicator = self._communicator()
        made = core.Checkpointer(self.copier, self.communicator, activation_tier=self.tier,
                                 activation_micro_batches=self.passes, **self.options)
        shared = self._shared(self.communicator)
        for slot, (size, is_shared) in enumerate(zip(self.sizes, shared)):
            made.declare(0, slot, size, activation_placement="partition+spill", activation_shared=is_shared)
        made.commit()
        self.partitioned = [is_shared and self.communicator.size > 1 for is_shared in shared]
        self.checkpointer = made  # Not before: the next pass tries again, and says the same.

    def _communicator(self) -> core.Communicator:
        if self.group is None:
            self._alone = core.LocalGroup(1)
            return self._alone.communicator(0, self.copier)
        if isinstance(self.group, core.Communicator):
            return self.group
        ranks = torch.distributed.get_process_group_ranks(self.group)
        store = torch.distributed.distributed_c10d._get_default_store()
        name = "-".join(map(str, ranks))
        return core.Communicator(self.copier, store, prefix=f"forebay/activations/{next(_numbers)}/{name}/",
                                 rank=torch.distributed.get_rank(self.group), size=len(ranks), **self.options)

    def _shared(self, communicator: core.Communicator) -> List[bool]:
        """Whether all ranks of the group saved the same bytes in the first pass, by slot."""
        if communicator.size == 1:
            return [True] * len(self.sizes)
        counts = {int.from_bytes(one, "little") for one in communicator.exchange(len(self.sizes).to_bytes(4, "little"))}
        if len(counts) > 1:
            raise InvalidArgument(f"the tensor-parallel ranks save {sorted(counts)} activations in one pass; give all "
                                  "of them the same model and batch")
        mine = b"".join(f"{size} {sum_of}".encode().ljust(64) for size, sum_of in zip(self.sizes, self.sums))
        everyone = communicator.exchange(mine)
        return [len({one[64 * slot:64 * slot + 64] for one in everyone}) == 1 for slot in range(len(self.sizes))]

    def report(self) -> Dict[str, Any]:
        """{"plan", "statistics"} of the checkpointer; empty before the second pass."""
        return self.checkpointer.report() if self.checkpointer is not None else {}

    def remove(self) -> None:
        """Ends the offload. Activations of passes without a backward pass are lost."""
        for handle in self.handles:
            handle.remove()
        self.handles = []
        self._end_pass()
        if self.checkpointer is not None:
            self.checkpointer.discard_all()
            self.checkpointer.close()

    def __enter__(self) -> "ActivationOffload":
        return self

    def __exit__(self, *exception: Any) -> None:
        self.remove()


def offload_activations(model: nn.Module, tier: str = "cpu", group: Any = None, least_bytes: int = 1 << 16,
                        passes: int = 1, **options: Any) -> ActivationOffload:
    """From its second forward pass on, the tensors that autograd saves in `model` wait off the device.

    Works for any module, sharded or not, with and without activation checkpointing. Results stay the same bit for bit.
    The first pass keeps its activations and tells the sizes; later ones of another size stay on the device.
      tier         "cpu" (pinned memory) or "nvme:DIR[,DIR...]".
      group        the tensor-parallel ranks: a ProcessGroup or a forebay.Communicator. Each rank keeps its slice of
                   the activations that are the same on all of them in the first pass and in this one, which they compare
                   each time. Collective.
      least_bytes  smaller tensors stay.
      passes       forward passes whose backward pass is outstanding, at most; more stay on the device.
    Options: activation_look_ahead, activation_staging_count, ... The result's report() has the figures.
    """
    return ActivationOffload(model, tier, group, least_bytes, passes, options)
