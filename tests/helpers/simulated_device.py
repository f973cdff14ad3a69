"""An accelerator that is not there: tensors that claim to live on it and are computed on the CPU.

    import simulated_device
    ledger = simulated_device.install()
    x = torch.zeros(3, device="simgpu")

`install` cannot be undone, so it is for a process of its own: on_simulated_device.py runs a
script's main() so. After it

- an operation on tensors of the device and of the CPU is refused where CUDA refuses it;
- the ledger counts operations on the device (kernel launches) and synchronisations, moments in
  which the host waits for the device, with the line of the script that asks for them.

It cannot show memory, speed, rounding of real kernels, asynchronous copies, or more than one
device. Attention is computed by torch's math backend, and
counts as many kernels where a GPU has one.
"""

import os
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

NAME = "simgpu"
CPU = torch.device("cpu")

# Transfers: the operations that take tensors of both devices.
TRANSFERS = {"copy_", "_to_copy", "_copy_from", "_copy_from_and_resize"}
INDEXING = {"index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_"}
# Of operations that are not elementwise only these take a CPU tensor without dimensions.
TAKE_SCALARS = {"fill", "masked_fill", "index_fill", "index_put", "_index_put_impl"}
NO_SCALARS = {"lerp"}  # elementwise, and yet it takes none
# Their result's shape depends on values, or the result is a value.
READING = """_local_scalar_dense is_nonzero equal nonzero masked_select _unique2 unique_dim
    unique_consecutive bincount""".split()
NO_KERNEL = {"lift_fresh", "_unsafe_view", "_reshape_alias", "set_", "resize_"}

# What torch.autocast computes in bf16 on CUDA (aten/src/ATen/autocast_mode.h), as far as language
# models go.
LOWER_PRECISION = "linear matmul mm bmm addmm baddbmm addbmm addmv mv einsum conv1d"
LOWER_PRECISION += " scaled_dot_product_attention"


class MixedDevices(RuntimeError):
    """An operation on tensors of the device and of the CPU, which CUDA refuses."""


@dataclass
class Ledger:
    launches: int = 0
    syncs: Counter[tuple[str, ...]] = field(default_factory=Counter)

    def sync(self, kind: str) -> None:
        self.syncs[kind, *place()] += 1

    def rows(self) -> list[list[Any]]:
        """Synchronisations, the most frequent first: count, kind, functions, line."""
        return [[count, *at] for at, count in self.syncs.most_common()]


LEDGER = Ledger()
kernels: list[torch.library.Library] = []  # they are registered as long as these exist


def place() -> tuple[str, str]:
    """Where in the code an operation comes from: functions of the script and of plumbing/, from
    the outermost (main/rollout/sample), and the line. A backward pass runs in a thread of its own,
    while the main one waits in it."""
    functions = []
    line = ""
    innermost = sys._current_frames()[threading.main_thread().ident]
    for frame, number in traceback.walk_stack(innermost):
        folder, name = os.path.split(frame.f_code.co_filename)
        if folder.removesuffix("/plumbing") == os.path.dirname(sys.argv[0]):
            line = line or f"{name}:{number}"
            functions.append(frame.f_code.co_name)
    return "/".join(reversed(functions)), line


class SimTensor(Tensor):
    """A tensor on the simulated device; `raw`, on the CPU, has its values."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    raw: Tensor

    @staticmethod
    def __new__(cls, raw: Tensor) -> "SimTensor":
        wrapper = Tensor._make_wrapper_subclass(
            cls,
            raw.size(),
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=torch.device(NAME, 0),
        )
        wrapper.raw = raw
        return wrapper

    @classmethod
    def __torch_dispatch__(
        cls, func: OpOverload, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        return dispatch(func, args, kwargs or {})

    def tolist(self) -> Any:
        LEDGER.sync("copy to the host")
        return self.raw.tolist()

    def numpy(self, **_: Any) -> Any:
        """Refused, as on CUDA: NumPy has no tensors of a device."""
        raise TypeError(f"can't convert {NAME}:0 device type tensor to numpy: use Tensor.cpu()")

    def __array__(self, *_: Any, **__: Any) -> Any:
        self.numpy()

    # Libraries that write weights look for tensors that share their memory.

    def data_ptr(self) -> int:
        return self.raw.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.raw.untyped_storage()

    def __reduce_ex__(self, protocol: int) -> Any:
        """torch.save writes the values. They are read back on the CPU, as accelerate does it with
        those of a GPU."""
        LEDGER.sync("copy to the host")
        return self.raw.__reduce_ex__(protocol)


def name_of(func: OpOverload) -> str:
    """The operation's name, without its namespace and its overload."""
    return func._schema.name.split("::")[1]


def refuse(func: OpOverload, why: str) -> None:
    _, line = place()
    says = f"expected all tensors to be on the same device, but {why} ({line})"
    raise MixedDevices(f"{name_of(func)}: {says}")


def is_on_cpu(x: Any) -> bool:
    """Whether it is a tensor, and not one of the device."""
    return isinstance(x, Tensor) and not isinstance(x, SimTensor)


def check_devices(func: OpOverload, args: tuple, tensors: Sequence[Tensor]) -> None:
    """Raises MixedDevices for tensors of the device and of the CPU that CUDA does not take."""
    base = name_of(func).rstrip("_")
    indices = []
    if name_of(func) in INDEXING:
        indices = [id(x) for x in args[1] if x is not None]
    if indices and is_on_cpu(args[0]):
        refuse(func, "the indexed tensor is on the CPU")
    takes_scalars = torch.Tag.pointwise in func.tags or base in TAKE_SCALARS
    takes_scalars |= base.startswith("_foreach")
    takes_scalars &= base not in NO_SCALARS
    for x in tensors:
        if is_on_cpu(x) and id(x) not in indices and (x.dim() > 0 or not takes_scalars):
            refuse(func, f"one of shape {tuple(x.shape)} is on the CPU")
    for value, argument in zip(args, func._schema.arguments, strict=False):
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if is_written and any(map(is_on_cpu, pytree.tree_leaves(value))):
            refuse(func, "the tensor that is written is on the CPU")


def count_syncs(func: OpOverload, args: tuple, kwargs: dict, to_device: bool) -> None:
    """Counts the synchronisations that the operation causes on CUDA."""
    name = name_of(func)
    if name in READING:
        LEDGER.sync(name)
    if name == "repeat_interleave" and kwargs.get("output_size") is None:
        LEDGER.sync("value read")
    for index in args[1] if name in INDEXING else ():
        fills = "put" in name and args[2].numel() == 1
        if is_on_cpu(index):
            LEDGER.sync("index from the host")
        elif index is not None and index.dtype in (torch.bool, torch.uint8) and not fills:
            LEDGER.sync("nonzero")
    if name in TRANSFERS:
        # a copy, which may be one between the device and the CPU
        source = args[1] if name == "copy_" else args[0]
        if name == "copy_":
            to_device = isinstance(args[0], SimTensor)
        if source.numel() > 0 and isinstance(source, SimTensor) and not to_device:
            LEDGER.sync("copy to the host")
        if source.numel() > 0 and is_on_cpu(source) and to_device:
            LEDGER.sync("copy from the host")


def to_host(x: Any) -> Any:
    """The values of a tensor of the device, the CPU in place of the device, or x itself."""
    if isinstance(x, SimTensor):
        return x.raw
    if isinstance(x, torch.device) and x.type == NAME:
        return CPU
    return x


def dispatch(func: OpOverload, args: tuple, kwargs: dict) -> Any:
    """One operation of torch on the device: checked, counted, and computed on the CPU."""
    if func._can_decompose():  # seen only without autograd, as in inference mode
        decomposed = func.decompose(*args, **kwargs)
        if decomposed is not NotImplemented:
            return decomposed
    leaves, spec = pytree.tree_flatten((args, kwargs))
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    on_device = [x for x in tensors if isinstance(x, SimTensor)]
    device = kwargs.get("device")
    to_device = bool(on_device) if device is None else torch.device(device).type == NAME
    name = name_of(func)
    if on_device and len(on_device) < len(tensors) and name not in TRANSFERS:
        check_devices(func, args, tensors)
    count_syncs(func, args, kwargs, to_device)
    is_allocation = name in NO_KERNEL or name.startswith(("empty", "new_empty"))
    if to_device and not func.is_view and not is_allocation:
        LEDGER.launches += 1

    raw_args, raw_kwargs = pytree.tree_unflatten([to_host(x) for x in leaves], spec)
    if device is not None:
        raw_kwargs["device"] = to_host(torch.device(device))
    raw_kwargs.pop("pin_memory", None)
    out = func(*raw_args, **raw_kwargs)
    wrappers = {id(x.raw): x for x in on_device}

    def wrap(x: Tensor) -> Tensor:
        known = wrappers.get(id(x))  # written in place
        if known is None:
            return SimTensor(x) if to_device else x
        if x.shape != known.shape or x.stride() != known.stride():
            Tensor.data.__set__(known, SimTensor(x))  # as `out` was resized
        return known

    return pytree.tree_map_only(Tensor, wrap, out)


# torch.simgpu, as far as libraries ask for it. Random numbers are the CPU's.
NOTHING = "set_device empty_cache manual_seed manual_seed_all set_rng_state"
MODULE = SimpleNamespace(
    **dict.fromkeys(NOTHING.split(), lambda *_: None),
    is_available=lambda: True,
    is_initialized=lambda: True,
    device_count=lambda: 1,
    current_device=lambda: 0,
    synchronize=lambda *_: LEDGER.sync("synchronize"),
    get_rng_state=lambda device=0: torch.get_rng_state(),
    get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
    _is_in_bad_fork=lambda: False,
)


def register_kernels() -> list[torch.library.Library]:
    """What torch asks a device for where no argument is a SimTensor: memory, above all."""

    def empty(*sizes: Sequence[int], dtype: Any = None, **_: Any) -> Tensor:
        make = torch.empty if len(sizes) == 1 else torch.empty_strided
        return SimTensor(make(*sizes, dtype=dtype, device=CPU))

    # torch.tensor copies so, past __torch_dispatch__.
    def copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
        return dispatch(torch.ops.aten.copy_.default, (target, source, non_blocking), {})

    def any_other(func: OpOverload, *args: Any, **kwargs: Any) -> Any:
        return dispatch(func, args, kwargs)

    aten = torch.library.Library("aten", "IMPL")
    aten.impl("empty.memory_format", empty, "PrivateUse1")
    aten.impl("empty_strided", empty, "PrivateUse1")
    aten.impl("_copy_from", copy_from, "PrivateUse1")
    every = torch.library.Library("_", "IMPL")
    every.fallback(any_other, "PrivateUse1")
    return [aten, every]


def cast(x: Tensor) -> Tensor:
    """A floating tensor in autocast's type; all else as it is."""
    return x.to(torch.get_autocast_dtype(NAME)) if x.is_floating_point() else x


def register_autocast() -> list[torch.library.Library]:
    """Kernels for torch.autocast, which a device other than CUDA has to bring along. What CUDA
    computes in fp32 has the type of its inputs here."""
    aten = torch.library.Library("aten", "IMPL")

    def register(name: str) -> None:
        func = getattr(torch.ops.aten, name).default

        def kernel(*args: Any, **kwargs: Any) -> Any:
            with torch._C._DisableAutocast():
                args, kwargs = pytree.tree_map_only(SimTensor, cast, (args, kwargs))
                return func(*args, **kwargs)

        aten.impl(name, kernel, "AutocastPrivateUse1")

    for name in LOWER_PRECISION.split():
        register(name)
    every = torch.library.Library("_", "IMPL")
    every.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    return [aten, every]


def install() -> Ledger:
    """Makes the device, torch's only accelerator and the one that accelerate takes. Returns the
    ledger. Cannot be undone."""
    from accelerate.state import PartialState
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend(NAME, MODULE)
    kernels.extend(register_kernels() + register_autocast())
    # Weights stay the same objects in module.to(device), as they do on CUDA: tied ones stay tied.
    torch.__future__.set_swap_module_params_on_conversion(True)
    torch.accelerator.is_available = lambda: True
    PartialState.default_device = property(lambda self: torch.device(NAME, 0))
    return LEDGER
