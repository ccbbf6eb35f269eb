"""What ``_native_short.c``, ``_native_outside.c`` and ``_native_unpack.c`` use of lowtide and torch: they are given it here, by name."""

from __future__ import annotations

import threading

import torch
from torch import nn

from lowtide import _torch_private as private
from lowtide.engine._acceleration import native
from lowtide.engine._claims import CLAIMED, WAITING, release
from lowtide.engine._clock import clock, enter_at
from lowtide.engine._frame import Frame
from lowtide.engine._guards._ambient import surroundings, take_ambient
from lowtide.engine._guards._memory import writable_copy
from lowtide.engine._guards._outside import STAND_INS
from lowtide.engine._guards._random import NO_DEVICES, ONLY_CPU, memory_of_cpu, moved, put_random, take_cpu, take_random
from lowtide.engine._observers import OBSERVERS
from lowtide.engine._packing import forget
from lowtide.engine._parts import Box, Held, empty_list
from lowtide.engine._replay import SECONDS, KeepAll, fail, replay_all, unpack_in_replay
from lowtide.engine._short import STOPPED, give_others
from lowtide.engine._steady import NEWS, TENSOR, SteadyCall, learn_rebound
from lowtide.engine._thread import StopReplay, state
from lowtide.engine._tree import ATOMS, MUTABLE
from lowtide.engine._unpack import THREAD, unpack

if native is not None:
    native.configure_short(
        {
            "DUAL_LEVEL": private.DUAL_LEVEL,
            "Frame": Frame,
            "Held": Held,
            "KeepAll": KeepAll,
            "NEWS": NEWS,
            "NO_DEVICES": NO_DEVICES,
            "OBSERVERS": OBSERVERS,
            "ONLY_CPU": ONLY_CPU,
            "RANDOM_MEMORY": memory_of_cpu(),
            "STOPPED": STOPPED,
            "SteadyCall": SteadyCall,
            "StopReplay": StopReplay,
            "TENSOR": TENSOR,
            "Tensor": torch.Tensor,
            "clock": clock,
            "copy": writable_copy,
            "enter_at": enter_at,
            "forget": forget,
            "functorch_active": private.functorch_active,
            "give_others": give_others,
            "hooks_allowed": private.hooks_allowed,
            "is_grad_enabled": torch.is_grad_enabled,
            "is_write_to_leaf": private.is_write_to_leaf,
            "learn_rebound": learn_rebound,
            "moved": moved,
            "next_sequence_number": private.next_sequence_number,
            "pop_hooks": private.pop_hooks,
            "profiler_active": private.profiler_active,
            "push_hooks": private.push_hooks,
            "put_random": put_random,
            "set_grad_enabled": private.set_grad_enabled,
            "state": state,
            "surroundings": surroundings,
            "take_ambient": take_ambient,
            "take_cpu": take_cpu,
            "take_random": take_random,
            "threading": threading,
            "top_hooks": private.top_hooks,
            "unpack": unpack,
            "unpack_in_replay": unpack_in_replay,
        }
    )
    native.configure_outside(
        {
            "ATOMS": ATOMS,
            "Box": Box,
            "MUTABLE": MUTABLE,
            "Module": nn.Module,
            "STAND_INS": STAND_INS,
            "Tensor": torch.Tensor,
            "extend_list": list.extend,
            "make_list": empty_list,
        }
    )
    native.configure_unpack(
        {
            "CLAIMED": CLAIMED,
            "DUAL_LEVEL": private.DUAL_LEVEL,
            "OBSERVERS": OBSERVERS,
            "WAITING": WAITING,
            "fail": fail,
            "graph_task_id": private.graph_task_id,
            "release": release,
            "replay_all": replay_all,
            "seconds": SECONDS,
            "state": state,
            "thread": THREAD,
        }
    )
