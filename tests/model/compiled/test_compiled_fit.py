"""A compiled model is fitted as compiled: inside its budget, with the plain step's gradients."""

import pytest

torch = pytest.importorskip("torch")

import networks as nets  # noqa: E402
from effort import long  # noqa: E402

import outsize  # noqa: E402
from outsize.core.errors import BudgetError, InputError  # noqa: E402
from outsize.model.torch_port.parts import is_older_than  # noqa: E402

pytestmark = pytest.mark.skipif(is_older_than("2.9"), reason="the compiler of this torch is not followed")


@pytest.fixture(autouse=True)
def nothing_compiled():
    yield
    torch._dynamo.reset()


class Blocks(torch.nn.Module):
    def __init__(self, count=5, width=32, breaks=False):
        super().__init__()
        self.breaks = breaks
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.LayerNorm(width), torch.nn.Linear(width, 4 * width), torch.nn.Tanh(),
                                torch.nn.Linear(4 * width, width))
            for _ in range(count)
        )  # fmt: skip

    def forward(self, x):
        for block in self.blocks[:3]:
            x = x + block(x)
        if self.breaks:
            torch._dynamo.graph_break()
        for block in self.blocks[3:]:
            x = x + block(x)
        return x


def loss(model, batch):
    return model(batch).square().mean()


def make(backend="aot_eager", own=False, **how):
    torch.manual_seed(0)
    model = Blocks(**how)
    optimizer = torch.optim.Adam(model.parameters())
    if own:
        model.compile(backend=backend)
        return model, model, optimizer
    return torch.compile(model, backend=backend), model, optimizer


BATCH = torch.rand(256, 32, generator=torch.Generator().manual_seed(3))


def trained(steps=2, **how):
    """The weights of a plain training."""
    torch.manual_seed(0)
    model = Blocks(**how)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model, BATCH).backward()
        optimizer.step()
    return list(model.parameters())


def plain_peak(**how):
    """What the plain step holds, uncompiled."""
    _, model, optimizer = make(**how)
    return nets.plain_peak(model, loss, BATCH, optimizer)


def graphs_in(call):
    """How many compiled graphs a call runs."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        call()
    return sum(event.name == "CompiledFunction" for event in seen.events())


def check(part, backend="aot_eager", without=("slices",), own=False, **how):
    peak = plain_peak(**how)
    compiled, model, optimizer = make(backend, own, **how)
    budget = int(part * peak)
    fitted = outsize.fit(compiled, loss, optimizer, BATCH, budget=budget, without=without)
    for _ in range(2):
        fitted.step(BATCH)
    assert fitted.measured <= fitted.plan.peak(fitted.plan.pool) <= budget
    for expected, found in zip(trained(**how), model.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    return fitted


def test_a_compiled_model_runs_inside_its_budget_by_computing_its_graphs_again():
    fitted = check(0.6)
    assert fitted.choice.again > 0
    assert any("compiled graphs" in remedy.name for remedy in fitted.plan.remedies)
    fitted.undo()


def test_slices_of_a_compiled_model_run_its_graphs():
    fitted = check(0.7, without=("again", "state_away", "gradients_away", "in_backward"))
    assert fitted.choice.slices > 1
    assert graphs_in(lambda: fitted.step(BATCH)) >= fitted.choice.slices


def test_regions_between_graph_breaks_are_computed_again_each():
    others = ("slices", "state_away", "gradients_away", "in_backward")
    assert check(0.9, without=others, own=True, breaks=True).choice.again > 0


def test_a_budget_that_no_graph_fits_is_refused_with_the_smallest_that_has_a_plan():
    compiled, _, optimizer = make(count=1)
    with pytest.raises(BudgetError, match="smallest"):
        outsize.fit(
            compiled, loss, optimizer, BATCH, budget="50KiB", without=("slices", "state_away", "gradients_away")
        )


def test_words_for_compiled_models_are_checked():
    compiled, model, optimizer = make()
    with pytest.raises(InputError, match="_orig_mod"):
        outsize.fit(compiled, loss, optimizer, BATCH, budget="1GiB", compile=False)
    with pytest.raises(InputError, match=r"model.compile\(\)"):
        outsize.fit(model, loss, optimizer, BATCH, budget="1GiB", compile=True)
    with pytest.raises(InputError, match="'sometimes' is unknown"):
        outsize.fit(compiled, loss, optimizer, BATCH, budget="1GiB", compile="sometimes")
    with pytest.raises(InputError, match="_orig_mod"):  # an inference
        outsize.fit(compiled, None, None, BATCH, budget="1GiB")


@pytest.mark.skipif(not long(), reason="many plans: the long run")
def test_a_smaller_budget_never_holds_more():
    peak = plain_peak()
    peaks = []
    for part in (1.0, 0.9, 0.8, 0.7, 0.6):
        compiled, _, optimizer = make()
        plan = outsize.fit(
            compiled, loss, optimizer, BATCH, budget=int(part * peak), without=("slices",), dry_run=True
        ).plan
        peaks.append(plan.peak(plan.pool))
    assert peaks == sorted(peaks, reverse=True)


@pytest.mark.skipif(not long(), reason="compiles C++: the long run")
@pytest.mark.parametrize("part, without", [(1.0, ()), (0.7, ("slices",)), (0.6, ())])
def test_inductors_kernels_run_inside_the_budget(part, without):
    check(part, backend="inductor", without=without)
