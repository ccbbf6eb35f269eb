"""Private names of torch that lowtide needs, each with what it is for. All were read in 2.11, 2.13 and 2.14.

Nothing else in lowtide but the files beside this one may touch a name of torch that starts with an underscore. On a release that was not
read the import fails: a private name that still exists but means something else would be worse than none.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensor as FakeTensor
from torch._subclasses import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutputException
from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException
from torch._subclasses.fake_tensor import unset_fake_temporarily as unset_fake_temporarily
from torch.autograd import forward_ad
from torch.nn.utils import parametrize
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._python_dispatch import _pop_mode as _pop_dispatch
from torch.utils._python_dispatch import _push_mode as _push_dispatch

from lowtide.errors import MissingExtraError

READ_FOR = ((2, 11), (2, 14))


def check_release(version: str) -> None:
    """Raise unless the private names below were read for this release of torch.

    Raises:
        MissingExtraError: they were not.
    """
    release = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    if not READ_FOR[0] <= release <= READ_FOR[1]:
        first, last = (".".join(map(str, bound)) for bound in READ_FOR)
        raise MissingExtraError(
            f"lowtide needs torch {first} to {last}, for it relies on internals that were read there, but found {version}: "
            f"pip install 'torch>={first},<{READ_FOR[1][0]}.{READ_FOR[1][1] + 1}'"
        )


check_release(torch.__version__)


# Saved-tensor hooks. The context manager of torch.autograd.graph calls just these two.
push_hooks: Callable[[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]], None] = (
    torch._C._autograd._push_saved_tensors_default_hooks
)
pop_hooks: Callable[[], None] = torch._C._autograd._pop_saved_tensors_default_hooks
hooks_allowed: Callable[[], bool] = torch._C._autograd._saved_tensors_hooks_is_enabled  # type: ignore[attr-defined]
# Why hooks are forbidden; to forbid them, with or without an error where some are in force; to allow them.
hooks_forbidden_by: Callable[[], str | None] = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message
forbid_hooks: Callable[[str, bool], None] = torch._C._autograd._saved_tensors_hooks_disable
allow_hooks: Callable[[], None] = torch._C._autograd._saved_tensors_hooks_enable
# The pack and unpack hook that are in force, if any. Calls of kept results ask each time, so it is no function of Python.
top_hooks: Callable[[], tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]] | None] = functools.partial(
    torch._C._autograd._top_saved_tensors_default_hooks, False
)
is_zero_tensor: Callable[[torch.Tensor], bool] = torch.Tensor._is_zerotensor
"""Whether it stands for zeros, as forward-mode derivatives make them: its memory holds anything."""
functorch_active: Callable[[], bool] = torch._C._are_functorch_transforms_active


def dual_level() -> int:
    """How many levels of forward-mode derivatives are open, less one."""
    return forward_ad._current_level


def bytes_of(tensor: torch.Tensor) -> int:
    """How many bytes the elements of a tensor take; of a sparse one, those that it has and where they are."""
    return tensor._indices().nbytes + tensor._values().nbytes if tensor.is_sparse else tensor.nbytes


MODULE_CALL: CodeType = torch.nn.Module._call_impl.__code__  # runs a forward with its hooks: what is called from there is in that module
tracing_jit: Callable[[], Any] = torch._C._get_tracing_state
set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled
# What the engine itself looks at is no business of the user's modes.
without_function_modes: Callable[[], Any] = torch._C.DisableTorchFunction
without_dispatch_modes: Callable[[], Any] = torch._C._DisableTorchDispatch
is_functorch_wrapped: Callable[[torch.Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
functorch_unwrapped: Callable[[torch.Tensor], torch.Tensor] = torch._C._functorch.get_unwrapped
profiler_active: Callable[[], bool] = torch._C._autograd._profiler_enabled
told_by_replica: Callable[[Any], dict[str, Any]] = torch.nn.parallel.DistributedDataParallel._get_ddp_logging_data
graph_task_id: Callable[[], int] = torch._C._current_graph_task_id
keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph  # by the backward that runs in this thread
push_function_mode: Callable[[Any], None] = torch._C._push_on_torch_function_stack
pop_function_mode: Callable[[], Any] = torch._C._pop_torch_function_stack

# Ambient state that has no public getter, or none that is cheap.
any_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled
function_mode_count: Callable[[], int] = torch._C._len_torch_function_stack
dispatch_mode_count: Callable[[], int] = torch._C._len_torch_dispatch_stack
attention_flags: tuple[tuple[Callable[[], bool], Callable[[bool], None]], ...] = (
    (torch._C._get_flash_sdp_enabled, torch._C._set_sdp_use_flash),
    (torch._C._get_mem_efficient_sdp_enabled, torch._C._set_sdp_use_mem_efficient),
    (torch._C._get_math_sdp_enabled, torch._C._set_sdp_use_math),
    (torch._C._get_cudnn_sdp_enabled, torch._C._set_sdp_use_cudnn),
)
attention_order: Callable[[], list[int]] = torch._C._get_sdp_priority_order
set_attention_order: Callable[[list[int]], None] = torch._C._set_sdp_priority_order

ComputedWeights = tuple[int, dict[tuple[int, str], torch.Tensor | None]]
NO_WEIGHTS: ComputedWeights = (0, {})
WEIGHTS_ARE_COMPUTED, DUAL_LEVEL = (vars(parametrize), "_cache_enabled"), (vars(forward_ad), "_current_level")  # how often entered


def computed_weights() -> ComputedWeights:
    """Depth of ``torch.nn.utils.parametrize.cached()`` and what was computed in it so far, by module and name."""
    return (parametrize._cache_enabled, dict(parametrize._cache)) if parametrize._cache_enabled else NO_WEIGHTS


def set_computed_weights(wanted: ComputedWeights) -> None:
    """Put a copy of these in place."""
    parametrize._cache_enabled, parametrize._cache = wanted[0], dict(wanted[1])


def is_write_to_leaf(error: RuntimeError) -> bool:
    """Whether autograd refused to write in place to a leaf that requires gradients, or to a view of one."""
    return "leaf Variable that requires grad" in str(error)


def in_backward() -> bool:
    """Whether this thread is running a backward pass."""
    return torch._C._current_graph_task_id() != -1


def running_node_name() -> str:
    """Name of the backward node that is running, empty outside of backward."""
    node = torch._C._current_autograd_node()
    return "" if node is None else node.name()


next_sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""The number that the next backward node of this thread gets."""

# What an event of the profiler says of the device when it was on the CPU.
CPU_EVENT: Any = torch._C._autograd.DeviceType.CPU


def start_memory_profile() -> None:
    """Have what the CPU allocator does in this thread noted, by the one of torch's profilers that starts and stops in microseconds.

    Raises:
        RuntimeError: a profiler is running in this thread.
    """
    _start_profile(_OF_MEMORY)
    # To be told of what each op is made of as well would take longer than most ops.
    _tell_of_ops(False)


def stop_memory_profile() -> list[int]:
    """Sizes of what was allocated since, in bytes and in order; negative when freed."""
    _tell_of_ops(True)
    events = _stop_profile()
    return [event.cpu_memory_usage() for each in events for event in each if event.kind() == "memory_alloc"]


_start_profile: Callable[[Any], None] = torch._C._autograd._enable_profiler_legacy
_stop_profile: Callable[[], list[list[Any]]] = torch._C._autograd._disable_profiler_legacy
_tell_of_ops: Callable[[bool], None] = torch._C._autograd._enable_record_function
_OF_MEMORY: Any = torch._C._profiler.ProfilerConfig(
    torch._C._profiler.ProfilerState.CPU, False, True, False, False, False, torch._C._profiler._ExperimentalConfig()
)


class BareDispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode whose handler is called as it is: for one under which nothing is compiled anyhow.

    Other modes get theirs wrapped in what keeps the compiler off, which imports the compiler first.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def swap_tensors(one: torch.Tensor, other: torch.Tensor) -> None:
    """Exchange all that two tensors are, but for their identities.

    As ``torch.utils.swap_tensors``, which refuses tensors that anything refers to weakly, or whose gradients are accumulated by a live
    graph. Here what is exchanged is always exchanged back before anybody else looks. Tables of hooks stay with the identity in Python
    but with the contents in C++, so that they have to be handed over.
    """
    hooks = [(tensor._backward_hooks, tensor._post_accumulate_grad_hooks) for tensor in (one, other)]
    one.__class__, other.__class__ = other.__class__, one.__class__
    one.__dict__, other.__dict__ = other.__dict__, one.__dict__
    torch._C._swap_tensor_impl(one, other)
    for tensor, (backward, accumulated) in zip((other, one), hooks, strict=True):
        tensor._backward_hooks = backward
        if tensor.is_leaf:
            tensor._post_accumulate_grad_hooks = accumulated


def know_value(fake: torch.Tensor, value: torch.Tensor) -> None:
    """Tell a fake tensor its value, so that it can be read until an op writes one that is not known."""
    fake.constant = value  # type: ignore[attr-defined]
    fake.fake_mode.fake_tensor_converter.add_constant_storage_mapping(fake)  # type: ignore[attr-defined]


def fix_weakly_held(tensor: torch.Tensor) -> None:
    """To be called on what a weak reference gave: if only C++ still owned it, it has to be told that Python owns it again."""
    tensor._fix_weakref()  # type: ignore[attr-defined]


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Have ``callback`` called when the backward pass that runs in this thread is over."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def function_modes() -> tuple[Any, ...]:
    """The stack of function modes, innermost last."""
    return tuple(_get_current_function_mode_stack())  # type: ignore[no-untyped-call]


def set_function_modes(modes: tuple[Any, ...]) -> None:
    """Make this the stack of function modes."""
    while function_mode_count():
        _pop_mode()  # type: ignore[no-untyped-call]
    for mode in modes:
        _push_mode(mode)  # type: ignore[no-untyped-call]


def dispatch_modes() -> tuple[Any, ...]:
    """The stack of dispatch modes, innermost last."""
    return tuple(_get_current_dispatch_mode_stack())


def set_dispatch_modes(modes: tuple[Any, ...]) -> None:
    """Make this the stack of dispatch modes."""
    for _ in dispatch_modes():
        _pop_dispatch()
    for mode in modes:
        _push_dispatch(mode)


_MEASURING = ("torch.utils.flop_counter", "torch.utils._debug_mode", "torch.distributed._tools", "torch.distributed.tensor.debug")


def is_measuring(mode: Any) -> bool:
    """Whether a dispatch mode is one of torch's own that only look at what runs: counters of operations, memory and communication."""
    return type(mode).__module__.startswith(_MEASURING)


# What torch.utils.checkpoint itself is made of: for lowtide.torch_compat, which keeps its semantics.
graph_exec_group: Callable[[], Any] = torch._C._get_graph_exec_group
tree_flatten: Callable[[Any], tuple[list[Any], Any]] = torch.utils._pytree.tree_flatten
tree_unflatten: Callable[[list[Any], Any], Any] = torch.utils._pytree.tree_unflatten
SavedTensor: Any = torch._C._autograd.SavedTensor
backward_takes_all_gradients: Callable[[], bool] = torch.autograd._is_checkpoint_valid
checkpoint_debug: Callable[[], tuple[Callable[[], Any], Callable[[Any], Any]]] = torch.utils.checkpoint._get_debug_context_and_cb
CheckpointFunction: Any = torch.utils.checkpoint.CheckpointFunction
CachingMode: Any = torch.utils.checkpoint._CachingTorchDispatchMode
CachedMode: Any = torch.utils.checkpoint._CachedTorchDispatchMode

MODES_RESPECT_HOOKS = hasattr(torch.utils.checkpoint, "_current_user_saved_tensors_hooks")  # from 2.14 on

_GENERATORS = ("_checkpoint_without_reentrant_generator_impl", "_checkpoint_without_reentrant_generator")
CHECKPOINT_GENERATORS: tuple[Any, ...] = tuple(getattr(torch.utils.checkpoint, name, None) for name in _GENERATORS)
"""As they are before any substitution; ``None`` for one that this release lacks."""
CHECKPOINT_GENERATOR = next(name for name in _GENERATORS if hasattr(torch.utils.checkpoint, name))
"""What ``checkpoint`` advances before and after the forward of its non-reentrant form; named anew in 2.14."""


def checkpoint_generator() -> Callable[..., Any]:
    """That function, as it is now."""
    return getattr(torch.utils.checkpoint, CHECKPOINT_GENERATOR)  # type: ignore[no-any-return]


def checkpoint_debug_forced() -> bool | None:
    """What ``set_checkpoint_debug_enabled`` has in force; ``None`` leaves it to each call."""
    return torch.utils.checkpoint._checkpoint_debug_enabled


def checkpoint_advice() -> str:
    """What this release of torch advises when a replay did not match."""
    return str(torch.utils.checkpoint._debug_tip_msg)


def engine_memory(generator: torch.Generator) -> ctypes.Array[ctypes.c_char] | None:
    """A window on the memory in which a CPU generator has its whole state: the numbers made in advance, and a sample of two kinds.

    Reading it is a copy of 2.5 kB. The public way makes a tensor of twice as much, which costs fifteen times the time.

    Returns:
        ``None`` where the state that the generator tells is not found in its memory as expected.
    """
    state = bytes(generator.get_state().numpy())
    seed, left, seeded, position = struct.unpack_from("=QiiQ", state)
    words = struct.pack(f"={_WORDS}I", *struct.unpack_from(f"={_WORDS}Q", state, 24))
    memory = ctypes.string_at(generator._cdata, _HEADER + 256 + len(words) + _SAMPLES)  # type: ignore[attr-defined]
    start = memory.find(words) - _HEADER
    if start < 0 or struct.unpack_from("=Qi?xxxI", memory, start) != (seed, left, bool(seeded), position):
        return None
    size = (_HEADER + len(words) + 7) // 8 * 8 + _SAMPLES
    return (ctypes.c_char * size).from_address(generator._cdata + start)  # type: ignore[attr-defined]


_HEADER, _SAMPLES = 20, 24  # the samples: a float and a double, each with a byte after it that says whether there is one
_WORDS = 624


def storage_key(tensor: torch.Tensor) -> int:
    """A number that two tensors share if they share their storage; 0 where a tensor has none."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        return 0


HOOKS_OF_ALL_MODULES: tuple[dict[int, Any], ...] = (
    nn.modules.module._global_forward_pre_hooks,
    nn.modules.module._global_forward_hooks,
    nn.modules.module._global_forward_hooks_with_kwargs,
    nn.modules.module._global_forward_hooks_always_called,
)
"""What ``register_module_forward_pre_hook`` and ``register_module_forward_hook`` register, and which of these are special, by number."""


def in_input_backward() -> bool:
    """Whether a pipeline's schedule goes backward for a stage's inputs alone, and for its weights later; looked up in every thread's stack.

    Backward runs Python in threads of its own on accelerators, while the one that asked for it waits.
    """
    function = getattr(sys.modules.get("torch.distributed.pipelining._backward"), "stage_backward_input", None)
    return function is not None and any(_runs(frame, function.__code__) for frame in sys._current_frames().values())


def _runs(frame: FrameType | None, code: CodeType) -> bool:
    while frame is not None:
        if frame.f_code is code:
            return True
        frame = frame.f_back
    return False


def attach_out_of_memory_observer(callback: Callable[[int, int, int, int], None]) -> None:
    """Have the CUDA allocator call ``callback(device, asked, allocated, free)``, in bytes, when it is about to fail; for good."""
    torch._C._cuda_attach_out_of_memory_observer(callback)  # type: ignore[attr-defined]


def record_allocations(enabled: bool) -> None:
    """Whether the CUDA allocator notes, for each block, the Python lines that asked for it."""
    if enabled:
        torch.cuda.memory._record_memory_history("state", context="alloc", stacks="python")
    else:
        torch.cuda.memory._record_memory_history(None)


def allocator_snapshot() -> list[dict[str, Any]]:
    """The segments of the CUDA allocator with their blocks, as they are now."""
    return list(torch.cuda.memory._snapshot()["segments"])
