"""A step that is stopped happens as a whole or not at all, wherever the stop comes: Ctrl-C at any line of ours."""

import copy
import signal
import sys

import networks as nets
import pytest
import torch
from effort import points

import outsize
from outsize.model.fitting.choice import Choice
from outsize.model.fitting.faster_plans import FasterPlans
from outsize.model.fitting.run.resident import open_resident

CHOICES = {
    "plain": Choice(),
    "slices": Choice(slices=3, state_away=True, gradients_away=True),
    "in the backward pass": Choice(in_backward=True, state_away=True),
}


class Stop:
    """Ctrl-C at one of the lines of the package that run inside the block."""

    def __init__(self, at):
        self.left = at

    def __enter__(self):
        sys.settrace(self._trace)

    def __exit__(self, *_):
        sys.settrace(None)

    def _trace(self, frame, event, arg):
        if "/outsize/" not in frame.f_code.co_filename:
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                signal.raise_signal(signal.SIGINT)
        return self._trace


def fit_as(choice):
    """A fitted model under a choice, a batch, and the optimizer."""
    torch.manual_seed(3)
    batch = nets.make_tokens(rows=3, length=6, words=11)
    model = nets.Language(blocks=1, width=8, words=11, dropout=0.1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    fitted = outsize.fit(model, nets.language_loss, optimizer, batch, budget="1GiB", allow="distribution")
    fitted._faster = FasterPlans(0)
    fitted._used.runner = open_resident(fitted._now.work, choice, fitted._now.weights.store)
    fitted._used.choice = choice
    fitted.step(batch)
    return fitted, model, optimizer, batch


def state(model, optimizer):
    """All that a step changes."""
    momenta = [optimizer.state[p]["momentum_buffer"] for p in model.parameters()]
    return [t.detach().clone() for t in (*model.parameters(), *momenta, torch.get_rng_state())]


def equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("choice", CHOICES)
def test_a_step_that_is_interrupted_at_any_line_happens_as_a_whole_or_not_at_all(choice):
    fitted, model, optimizer, batch = fit_as(CHOICES[choice])
    counter = Stop(-1)
    with counter:
        fitted.step(batch)
    lines = -1 - counter.left
    seen = set()
    for at in points(range(1, lines + 1, 7), 24):
        fitted.gather()
        before, twin = state(model, optimizer), copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        fitted.step(batch)
        fitted.gather()
        after = state(model, optimizer)
        model.load_state_dict(twin[0])
        optimizer.load_state_dict(twin[1])
        torch.set_rng_state(before[-1])
        interrupted = False
        try:
            with Stop(at):
                fitted.step(batch)
        except KeyboardInterrupt:
            interrupted = True
        fitted.gather()
        now = state(model, optimizer)
        assert equal(now, after) or (interrupted and equal(now, before)), at
        assert all(p.grad is None for p in model.parameters())
        seen.add(equal(now, before))
    assert seen == {True, False}
    fitted.undo()
