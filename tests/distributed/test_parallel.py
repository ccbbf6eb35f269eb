"""Regions in training by many processes: every gradient, on every process, is that of the same training without regions, bit for bit."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from ._processes import Outcomes, cases_of, run_cases

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs the gloo backend"),
]

TWO = cases_of("collectives", "data_parallel", "flat", "fully_sharded", "gathers", "pipeline", "tensor_parallel", "fit")
FOUR = cases_of("four_processes")


@pytest.fixture(scope="module")
def on_two(tmp_path_factory) -> Outcomes:
    return run_cases(2, TWO, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def on_four(tmp_path_factory) -> Outcomes:
    return run_cases(4, FOUR, tmp_path_factory.mktemp("four"))


@pytest.mark.parametrize("case", TWO)
def test_on_two_processes(on_two, case):
    assert not on_two[case], "\n".join(on_two[case])


@pytest.mark.parametrize("case", FOUR)
def test_on_four_processes(on_four, case):
    assert not on_four[case], "\n".join(on_four[case])
