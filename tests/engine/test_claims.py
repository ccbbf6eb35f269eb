"""One call is replayed by one thread at a time; others wait for what it makes."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from lowtide.engine import checkpoint, is_replaying
from lowtide.engine._claims import CLAIMED, release, wait_for


class _Meeting:
    """A function to be a region, whose replay waits until it may go on."""

    def __init__(self) -> None:
        self.began, self.go_on = threading.Event(), threading.Event()
        self.alone, self.crowded = threading.Lock(), threading.Event()  # numbers would be what they were in each replay

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if is_replaying():
            first = self.alone.acquire(blocking=False)
            if not first:
                self.crowded.set()
            self.began.set()
            assert self.go_on.wait(20)
            if first:
                self.alone.release()
        return (x * 2).sin(), (x * 3).cos()


def _asks(loss: torch.Tensor, x: torch.Tensor, into: list[tuple[int, torch.Tensor]], which: int = 0) -> threading.Thread:
    thread = threading.Thread(target=lambda: into.append((which, torch.autograd.grad(loss, x, retain_graph=True)[0])))
    thread.start()
    return thread


@pytest.mark.parametrize("learned", [False, True])
def test_who_asks_for_what_another_thread_makes_waits_for_it(learned: bool) -> None:
    meeting, x = _Meeting(), torch.ones(3, requires_grad=True)
    run = checkpoint(meeting)
    if learned:
        meeting.go_on.set()
        for _ in range(3):
            sum(run(x)).sum().backward()
        meeting.go_on.clear()
        meeting.began.clear()
    found: list[tuple[int, torch.Tensor]] = []
    losses = [out.sum() for out in run(x)]  # of two nodes: autograd itself has threads wait for each other at one
    threads = [_asks(losses[1], x, found, 1)]
    assert meeting.began.wait(20)
    threads += [_asks(losses[0], x, found, 0)]
    time.sleep(0.05)
    meeting.go_on.set()
    for thread in threads:
        thread.join(20)
    expected = [torch.autograd.grad(out.sum(), x)[0] for out in ((x * 2).sin(), (x * 3).cos())]
    assert len(found) == 2
    assert all(torch.equal(gradient, expected[which]) for which, gradient in found)
    assert not meeting.crowded.is_set()
    assert not CLAIMED


def test_a_replay_that_fails_lets_others_have_the_call() -> None:
    works = threading.Event()  # no part of what a replay is given as it was

    def fn(x: torch.Tensor) -> torch.Tensor:
        if is_replaying() and not works.wait(0):
            raise KeyError("failed")
        return x.sin().exp()

    x, found = torch.ones(3, requires_grad=True), list[tuple[int, torch.Tensor]]()
    loss = checkpoint(fn)(x).sum()
    with pytest.raises(KeyError):
        torch.autograd.grad(loss, x, retain_graph=True)
    assert not CLAIMED
    works.set()
    thread = _asks(loss, x, found)
    thread.join(20)
    assert len(found) == 1


def test_a_claim_is_waited_for_as_long_as_another_has_it_and_no_longer() -> None:
    mine, number = threading.get_ident(), -5
    CLAIMED[number] = mine
    had: list[int] = []

    def claim() -> None:
        wait_for(number, threading.get_ident())
        had.append(CLAIMED[number])
        release(number, mine)  # of another: nothing happens
        assert CLAIMED[number] == threading.get_ident()
        release(number, threading.get_ident())

    threads = [threading.Thread(target=claim) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    assert not had
    release(number, mine)
    for thread in threads:
        thread.join(20)
    assert sorted(had) == sorted({thread.ident for thread in threads})
    assert number not in CLAIMED
