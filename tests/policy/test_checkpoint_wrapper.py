"""A wrapper that is seen in the call alone: names, state and attributes are those of the module inside."""

from __future__ import annotations

import copy
import functools
import io

import pytest
import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import lowtide
from lowtide.errors import InvalidInputError

# Of PyTorch's sharding code, about itself.
OTHERS_WARNINGS = ("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


class Block(nn.Module):
    """Parameters and buffers of its own, children, a state of an older format, and an attribute that its forward reads."""

    _version = 2

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(width))
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.inner = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Dropout(0.3))
        self.gain = 1.0
        self.versions: list[int | None] = []

    def forward(self, x, shift=0.0):
        self.calls += 1
        return torch.tanh(self.inner(x * self.scale)) * self.gain + shift

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *args):
        self.versions.append(local_metadata.get("version"))
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


def wrap(module, **options):
    return lowtide.CheckpointWrapper(module, **options)


def nothing(module, **_):
    return module


def model(around=nothing, **options):
    torch.manual_seed(3)
    first, second = Block(), Block()
    return nn.Sequential(around(first, **options), nn.Linear(4, 4), around(nn.Sequential(around(second, **options)), **options))


def gradients(net, steps=3):
    torch.manual_seed(5)
    seen = []
    for _ in range(steps):
        net.zero_grad()
        net(torch.randn(6, 4)).square().sum().backward()
        seen += [parameter.grad.clone() for parameter in net.parameters()] + [buffer.clone() for buffer in net.buffers()]
    return [*seen, torch.get_rng_state()]


def same(found, expected):
    return len(found) == len(expected) and all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def names(net):
    return [[name for name, _ in walk] for walk in (net.named_parameters(), net.named_buffers(), net.state_dict().items())]


def test_gradients_and_buffers_are_those_of_the_plain_module_nested_too():
    assert same(gradients(model(wrap)), gradients(model()))


def test_it_replays():
    replays = bytearray()  # no list: a replay would be given a copy of that

    class Counting(Block):
        def forward(self, x):
            replays.append(lowtide.is_replaying())
            return super().forward(x)

    wrap(Counting())(torch.randn(6, 4)).sum().backward()
    assert list(replays) == [False, True]


def test_names_are_those_of_the_module_inside_seen_from_the_wrapper_and_from_around_it():
    assert names(model(wrap)) == names(model())
    assert names(wrap(Block())) == names(Block())


def test_state_goes_both_ways_between_wrapped_and_plain():
    plain, wrapped = model(), model(wrap)
    with torch.no_grad():
        for tensor in plain.state_dict().values():
            tensor.add_(1)
    wrapped.load_state_dict(plain.state_dict())
    assert same([*wrapped.state_dict().values()], [*plain.state_dict().values()])
    again = model()
    again.load_state_dict(wrapped.state_dict())
    assert same([*again.state_dict().values()], [*plain.state_dict().values()])


@pytest.mark.parametrize("saved", [model, lambda: model(wrap)], ids=["plain", "wrapped"])
def test_modules_inside_read_the_version_that_their_state_was_saved_with(saved):
    wrapped = model(wrap)
    wrapped.load_state_dict(saved().state_dict())
    assert [module.versions for module in wrapped.modules() if isinstance(module, Block)] == [[2], [2]]


def test_missing_and_unexpected_entries_are_reported_by_their_names():
    state = model().state_dict()
    state["0.other"] = state.pop("0.scale")
    result = model(wrap).load_state_dict(state, strict=False)
    assert result.missing_keys == ["0.scale"]
    assert result.unexpected_keys == ["0.other"]


def test_attributes_and_items_are_those_of_the_module_inside():
    block = wrap(Block())
    assert block.gain == 1.0
    assert block.inner[0].in_features == 4
    assert isinstance(wrap(nn.Sequential(nn.Linear(2, 2), nn.Tanh()))[1], nn.Tanh)
    with pytest.raises(AttributeError, match="nothing"):
        block.nothing  # noqa: B018


def test_what_is_set_on_the_wrapper_is_what_the_module_inside_reads():
    wrapped, plain = wrap(Block()), Block()
    plain.load_state_dict(wrapped.state_dict())
    for block in (wrapped, plain):
        block.gain = 3.0
        block.scale = nn.Parameter(torch.full((4,), 0.5))
    assert same(gradients(wrapped), gradients(plain))
    del wrapped.scale
    assert "scale" not in dict(wrapped.named_parameters())


def test_training_mode_conversion_and_initialisation_reach_the_module_inside():
    wrapped, seen = model(wrap), []
    wrapped.eval()
    assert not any(module.training for module in wrapped.modules())
    wrapped.train()
    assert all(module.training for module in wrapped.modules())
    assert {parameter.dtype for parameter in wrapped.double().parameters()} == {torch.float64}
    wrapped.apply(lambda module: seen.append(type(module)))
    assert seen.count(Block) == 2


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda net: torch.load(_saved(net), weights_only=False)], ids=["copy", "pickle"])
def test_a_copy_runs_on_its_own_parameters(duplicate):
    original = model(wrap)
    gradients(original)
    twin = duplicate(original)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(2)
    fresh = model()
    fresh.load_state_dict(twin.state_dict())
    assert same(gradients(twin), gradients(fresh))


def _saved(net):
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    return file


@pytest.mark.parametrize(
    "checkpoint_fn",
    [
        functools.partial(lowtide.checkpoint, early_stop=False),
        functools.partial(torch_checkpoint, use_reentrant=False),
        functools.partial(lowtide.torch_compat.checkpoint, use_reentrant=False),
        lambda module, *args, **kwargs: module(*args, **kwargs),
    ],
    ids=["options", "torch", "compat", "own"],
)
def test_any_checkpoint_function_can_be_plugged_in(checkpoint_fn):
    """Of parameters only: not every function keeps buffers from being updated twice."""
    wrapped, plain = wrap(Block(), checkpoint_fn=checkpoint_fn), Block()
    plain.load_state_dict(wrapped.state_dict())
    seen = []
    for block in (wrapped, plain):
        torch.manual_seed(1)
        block(torch.ones(3, 4), shift=1.0).sum().backward()
        seen.append([parameter.grad for parameter in block.parameters()])
    assert same(*seen)


def test_what_is_no_module_or_no_function_is_refused():
    with pytest.raises(InvalidInputError, match="needs a module, not function"):
        wrap(lambda x: x)
    with pytest.raises(InvalidInputError, match="must be a function, not bool"):
        wrap(nn.Linear(2, 2), checkpoint_fn=True)


def test_data_parallel_is_refused():
    with pytest.raises(InvalidInputError, match="DistributedDataParallel"):
        DataParallel(model(wrap)).module[0]._replicate_for_data_parallel()


@pytest.fixture
def one_process(tmp_path):
    dist = torch.distributed
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("needs the gloo backend")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.device_mesh.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@pytest.mark.filterwarnings(*OTHERS_WARNINGS)
def test_under_ddp(one_process):
    assert same(gradients(DistributedDataParallel(model(wrap))), gradients(DistributedDataParallel(model())))


@pytest.mark.filterwarnings(*OTHERS_WARNINGS)
@pytest.mark.parametrize("wrapped_first", [True, False], ids=["sharded around", "sharded inside"])
def test_under_fully_shard(one_process, wrapped_first):
    fsdp = pytest.importorskip("torch.distributed.fsdp")

    def sharded(around):
        net = model(around if wrapped_first else nothing)
        for index in (0, 2):
            fsdp.fully_shard(net[index], mesh=one_process)
            net[index] = net[index] if wrapped_first else around(net[index])
        return fsdp.fully_shard(net, mesh=one_process)

    found, expected = sharded(wrap), sharded(nothing)
    assert list(found.state_dict()) == list(model().state_dict())
    assert same([full(t) for t in gradients(found)], [full(t) for t in gradients(expected)])
