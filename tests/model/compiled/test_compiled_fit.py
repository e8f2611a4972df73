"""A compiled model is fitted as compiled: inside its budget, with the plain step's gradients."""

import pytest

torch = pytest.importorskip("torch")

import networks as nets  # noqa: E402
from effort import long  # noqa: E402

import outsize  # noqa: E402
from outsize.core.errors import BudgetError, InputError, StoreError  # noqa: E402
from outsize.model.fitting import compiling  # noqa: E402
from outsize.model.torch_port.objects import is_compiled  # noqa: E402
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
    with pytest.raises(InputError, match="'sometimes' is unknown"):
        outsize.fit(compiled, loss, optimizer, BATCH, budget="1GiB", compile="sometimes")
    with pytest.raises(InputError, match="_orig_mod"):  # an inference
        outsize.fit(compiled, None, None, BATCH, budget="1GiB")
    with pytest.raises(InputError, match="compile=True is for training"):
        outsize.fit(model, None, None, BATCH, budget="1GiB", compile=True)


@pytest.fixture
def by_graphs(monkeypatch):
    """A model is compiled without a C++ compiler."""
    monkeypatch.setattr(compiling, "BACKEND", "aot_eager")
    monkeypatch.setattr(compiling, "why_not_compiled", lambda device: "")


def test_a_model_is_compiled_for_its_fit_and_no_longer(by_graphs, tmp_path):
    _, model, optimizer = make(count=1)
    fitted = outsize.fit(model, loss, optimizer, BATCH, budget="1GiB", compile=True)
    assert any("compiled by aot_eager for this fit" in note and "by traces" in note for note in fitted.plan.notes)
    assert graphs_in(lambda: fitted.step(BATCH)) >= 1
    fitted.step(BATCH)
    assert fitted.measured <= fitted.plan.peak()
    for expected, found in zip(trained(count=1), model.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    fitted.plan.save(tmp_path / "plan.json")
    assert fitted.undo() is model
    assert graphs_in(lambda: loss(model, BATCH)) == 0
    known = outsize.fit(model, loss, optimizer, BATCH, budget="1GiB", dry_run=True).plan
    assert any("not compiled (the plain step holds" in note for note in known.notes)
    _, model, optimizer = make(count=1)  # the plan asks for it, and the user does not
    again = outsize.fit(model, loss, optimizer, BATCH, plan=tmp_path / "plan.json")
    assert (again.choice, again.plan.steps) == (fitted.choice, fitted.plan.steps)
    assert graphs_in(lambda: again.step(BATCH)) >= 1
    again.step(BATCH)
    assert again.measured <= again.plan.peak()
    again.undo()
    with pytest.raises(StoreError, match="compile=False forbids"):
        outsize.fit(model, loss, optimizer, BATCH, plan=tmp_path / "plan.json", compile=False)


@pytest.mark.parametrize("own", [False, True])
def test_a_compiled_model_is_fitted_as_it_was_written_where_the_user_says_so(own):
    compiled, model, optimizer = make(own=own, count=1)
    fitted = outsize.fit(compiled, loss, optimizer, BATCH, budget="1GiB", compile=False)
    assert any("came compiled and is fitted as it was written" in note for note in fitted.plan.notes)
    assert graphs_in(lambda: fitted.step(BATCH)) == 0
    fitted.step(BATCH)
    for expected, found in zip(trained(count=1), model.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert fitted.undo() is compiled
    assert graphs_in(lambda: loss(compiled, BATCH)) == 1


def test_a_compiled_part_of_a_model_is_called_as_it_was_written():
    _, model, _ = make(count=2)
    model.blocks[1] = torch.compile(model.blocks[1], backend="aot_eager")
    answers = outsize.fit(model, None, None, BATCH, budget="1GiB", compile=False)
    assert graphs_in(lambda: answers.infer(BATCH)) == 0
    answers.undo()
    assert graphs_in(lambda: loss(model, BATCH)) == 1


def test_where_nothing_can_be_compiled_one_sentence_says_why(monkeypatch):
    _, model, optimizer = make()
    monkeypatch.setattr(compiling.shutil, "which", lambda name: None)
    with pytest.raises(InputError, match=r"cannot be compiled here: there is no C\+\+ compiler"):
        outsize.fit(model, loss, optimizer, BATCH, budget="1GiB", compile=True)
    plan = outsize.fit(model, loss, optimizer, BATCH, budget="1GiB", dry_run=True).plan
    assert not any("compile=True" in note for note in plan.notes)
    monkeypatch.setattr(compiling.importlib.util, "find_spec", lambda name: None)
    assert "triton" in compiling.why_not_compiled("cuda")


def test_a_plan_says_that_compiling_was_not_measured(by_graphs):
    _, model, optimizer = make(count=1)
    plan = outsize.fit(model, loss, optimizer, BATCH, budget="1GiB", dry_run=True).plan
    assert "bytes and time not measured" in plan.notes[-1]
    compiled, _, optimizer = make(count=1)
    assert not any(
        "compile=True" in note
        for note in outsize.fit(compiled, loss, optimizer, BATCH, budget="1GiB", dry_run=True).plan.notes
    )


def test_a_failed_fit_leaves_the_model_as_it_came(by_graphs):
    def broken(model, batch):
        return model(batch)[:, 0].square()  # no scalar

    compiled, _, optimizer = make(own=True, count=1)
    with pytest.raises(InputError, match="scalar"):
        outsize.fit(compiled, broken, optimizer, BATCH, budget="1GiB", compile=False)
    assert graphs_in(lambda: loss(compiled, BATCH)) == 1
    _, model, optimizer = make(count=1)
    with pytest.raises(InputError, match="scalar"):
        outsize.fit(model, broken, optimizer, BATCH, budget="1GiB", compile=True)
    assert not is_compiled(model)


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
def test_a_model_is_compiled_for_its_fit_by_inductor():
    _, model, optimizer = make(count=1)
    fitted = outsize.fit(model, loss, optimizer, BATCH, budget="1GiB", compile=True)
    assert graphs_in(lambda: fitted.step(BATCH)) >= 1
    fitted.step(BATCH)
    assert fitted.measured <= fitted.plan.peak()
    for expected, found in zip(trained(count=1), model.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not long(), reason="compiles C++: the long run")
@pytest.mark.parametrize("part, without", [(1.0, ()), (0.7, ("slices",)), (0.6, ())])
def test_inductors_kernels_run_inside_the_budget(part, without):
    check(part, backend="inductor", without=without)
