"""Every remedy and every pair of remedies gives the plain step's gradients, on networks drawn at random."""

import copy
import dataclasses
import itertools
import time
import types
from collections import namedtuple

import networks as nets
import pytest
import torch
from effort import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

import outsize
from outsize.model.fitting import batch as batches
from outsize.model.fitting import chunked_cross_entropy, in_trainer, lightning_step, trainer_loss
from outsize.model.fitting.axes import Axes
from outsize.model.fitting.choice import Choice
from outsize.model.fitting.move.stores import DiskStore
from outsize.model.fitting.recipes.survey import Survey
from outsize.model.fitting.run.resident import open_resident
from outsize.model.fitting.run.runner import Work

SINGLE = {
    "slices": {"slices": 2}, "checkpoint": {"checkpoint": "blocks"}, "offload": {"offload": "blocks"},
    "in_backward": {"in_backward": True}, "state_away": {"state_away": True}, "gradients_away": {"gradients_away": True},
    "stream": {"stream": "all"}, "chunks": {"chunks": 3}, "recipes": {"recipes": "calls"},
    "tensors_away": {"tensors_away": ("*",)},
}  # fmt: skip
TOGETHER = [(name,) for name in SINGLE] + [
    pair
    for pair in itertools.combinations(SINGLE, 2)
    if set(pair) not in ({"slices", "in_backward"}, {"in_backward", "gradients_away"}, {"stream", "chunks"})
    and not ("stream" in pair and {"recipes", "tensors_away"} & set(pair))
]


def run_steps(model, loss, batch, choice, store, seed, steps=2):
    torch.manual_seed(seed)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    written = {m: tuple(m._buffers) for m in model.modules() if isinstance(m, nn.BatchNorm2d)}
    work = Work(model=model, loss=loss, optimizer=optimizer, written=written, heads=("head",))
    runner = open_resident(work, choice, store)
    for _ in range(steps):
        runner.step(batch)
    runner.gather()


def every_call(model, loss, batch, store):
    """Names of all calls of operators in a forward pass."""
    runner = open_resident(Work(model=copy.deepcopy(model), loss=loss, optimizer=None), Choice(), store)
    runner.weights.survey = Survey(runner.work.model, time.perf_counter)
    runner.backward(batch)
    return tuple(row.site for row in runner.weights.survey.rows)


def choose(names, blocks, everything, calls):
    changes, named = {}, {"blocks": blocks, "all": everything, "calls": calls}
    for name in names:
        for key, value in SINGLE[name].items():
            changes[key] = named.get(value, value) if isinstance(value, str) else value
    return Choice(**changes)


@examples(8)
@given(
    kind=st.sampled_from(["language", "group", "batch", "patches"]), dropout=st.sampled_from([0.0, 0.2]), shared=st.booleans(),
    rows=st.integers(2, 5), seed=st.integers(0, 2**16),
)  # fmt: skip
def test_fitted_training_equals_plain_training_for_every_remedy_and_pair(
    tmp_path_factory, kind, dropout, shared, rows, seed
):
    torch.manual_seed(seed)
    if kind == "language":
        base, loss, batch = nets.Language(2, 8, 31, dropout, shared), nets.language_loss, nets.make_tokens(rows, 5, 31)
        blocks, everything = ("blocks.0", "blocks.1"), ("embed", "blocks.0", "blocks.1", "head")
    elif kind == "patches":
        base, loss, batch = nets.Patches(2, 8), nets.vision_loss, nets.make_images(rows, 8)
        blocks, everything = ("blocks.0", "blocks.1"), ("cut", "blocks.0", "blocks.1", "head")
    else:
        base, loss, batch = nets.Vision(2, 4, kind), nets.vision_loss, nets.make_images(rows, 8)
        blocks, everything = ("stages.0", "stages.1"), ("stem", "stages.0", "stages.1", "head")
    store = DiskStore(str(tmp_path_factory.mktemp("store")))
    plain = copy.deepcopy(base)
    run_steps(plain, loss, batch, Choice(), store, seed)
    expected = [*plain.parameters(), *plain.buffers()]
    calls = every_call(base, loss, batch, store)
    for names in TOGETHER:
        if "slices" in names and (kind == "batch" or dropout):
            continue
        if "chunks" in names and kind != "language":  # a few classes are not worth pieces, and their head has a bias
            continue
        model = copy.deepcopy(base)
        run_steps(model, loss, batch, choose(names, blocks, everything, calls), store, seed)
        got = [*model.parameters(), *model.buffers()]
        if {"slices", "chunks"} & set(names):
            assert nets.worst_difference(got, expected) < 1e-5, names
        else:
            assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)), names
    assert store.held == 0
    store.close()


# batches


@dataclasses.dataclass
class Pair:
    left: torch.Tensor
    right: list


Named = namedtuple("Named", "x y")


@given(rows=st.integers(1, 40), slices=st.integers(1, 50), first=st.integers(0, 50))
def test_slices_cover_every_row_once_in_order_and_none_is_empty(rows, slices, first):
    runs = batches.cut(rows, slices, first)
    assert [row for start, stop in runs for row in range(start, stop)] == list(range(rows))
    assert all(stop > start for start, stop in runs) and len(runs) == min(rows, slices)
    if 0 < first <= rows - len(runs) + 1 and len(runs) > 1:
        assert runs[0] == (0, first)


@pytest.mark.parametrize("rows", [1, 4, 7])
def test_a_nested_batch_is_cut_in_its_own_structure(rows):
    transformers = pytest.importorskip("transformers")
    x = torch.arange(rows * 2).view(rows, 2)
    encoding = transformers.BatchEncoding({"input_ids": x})
    given = {"a": x, "b": (x, [x, "text"]), "c": Pair(x, [x]), "d": Named(x, 3), "e": encoding, "f": torch.tensor(1.0)}
    assert Axes().count(given) == rows
    part = Axes().take(given, 0, 1)
    assert type(part["e"]) is type(encoding) and type(part["d"]) is Named and isinstance(part["c"], Pair)
    for tensor in batches.tensors_of(part).values():
        assert not tensor.dim() or tensor.shape[0] == 1
    assert part["b"][1][1] == "text" and encoding["input_ids"].shape[0] == rows


# the rest of the family


def test_the_loss_in_pieces_is_the_loss_in_one():
    hidden, weight = torch.randn(3, 7, 8, requires_grad=True), torch.randn(50, 8, requires_grad=True)
    labels = torch.randint(0, 50, (3, 7))
    labels[0, 2:] = -100
    total, count = chunked_cross_entropy(hidden, weight, labels, chunks=4)
    (total / count).backward()
    got = hidden.grad.clone(), weight.grad.clone()
    hidden.grad = weight.grad = None
    whole = functional.cross_entropy((hidden @ weight.T).flatten(0, 1), labels.flatten())
    whole.backward()
    assert torch.allclose(total / count, whole)
    assert torch.allclose(got[0], hidden.grad, atol=1e-6) and torch.allclose(got[1], weight.grad, atol=1e-6)
    with pytest.raises(outsize.InputError, match="do not belong together"):
        chunked_cross_entropy(hidden, weight, labels[:2])


def make_gpt2():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=2003, n_positions=32, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    tokens = torch.randint(0, 2003, (4, 24))
    return transformers.GPT2LMHeadModel(config), {"input_ids": tokens, "labels": tokens.clone()}


def hf_loss(model, batch):
    return model(**batch).loss


def test_a_transformers_model_takes_its_loss_in_pieces_and_its_gradients_stay():
    model, batch = make_gpt2()
    twin = copy.deepcopy(model)
    hf_loss(twin, batch).backward()
    peak = outsize.fit(
        model, hf_loss, torch.optim.SGD(model.parameters(), 0.1), batch, budget="1GiB", dry_run=True
    ).plan.plain
    fitted = outsize.fit(
        model, hf_loss, torch.optim.SGD(model.parameters(), 0.1), batch, budget=int(peak * 0.7), own_step=True,
        without=("slices", "offload", "recipes", "tensors_away"),
    )  # fmt: skip
    assert fitted.choice.chunks
    fitted.backward(batch)
    assert nets.worst_difference([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()]) < 1e-5
    fitted.undo()
    assert model(**batch).logits.shape == (4, 24, 2003) and model.config.use_cache


def test_the_largest_batch_is_found_by_projection_and_one_more_would_not_fit():
    model, batch = nets.Language(2, 16, 31), nets.make_tokens(2, 8, 31)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def peak(rows):
        tokens = nets.make_tokens(rows, 8, 31)
        return outsize.fit(model, nets.language_loss, optimizer, tokens, budget="1GiB", dry_run=True).plan.plain

    budget = peak(5) + 100
    assert outsize.batch_size(model, nets.language_loss, optimizer, batch, budget=budget) == 5
    with pytest.raises(outsize.BudgetError, match="one sample"):
        outsize.batch_size(model, nets.language_loss, optimizer, batch, budget=100)


def test_a_loader_counts_workers_batches_ahead_and_pinned_copies():
    data = torch.utils.data.TensorDataset(torch.zeros(64, 1000))
    small = outsize.data_loader(data, 8, budget="100KiB")
    assert small.num_workers == 0 and small.outsize["batch"] == 8 * 4000 and small.outsize["bytes"] <= 102400
    assert len(list(small)) == 8
    assert outsize.data_loader(data, 8, budget="1GiB", workers=2).num_workers == 2
    with pytest.raises(outsize.BudgetError, match="host memory"):
        outsize.data_loader(data, 8, budget="1KiB")


@pytest.mark.parametrize("sliced", [False, True])
@pytest.mark.parametrize("own", [False, True])
def test_a_trainer_runs_the_fitted_step_and_keeps_everything_else(tmp_path, own, sliced):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    model, batch = make_gpt2()
    batch["labels"] = batch["labels"].clone()
    batch["labels"][0, : batch["labels"].shape[1] // 2] = -100  # slices do not count alike
    rows = [{name: value[i] for name, value in batch.items()} for i in range(4)]
    twin = copy.deepcopy(model)
    options = {
        "max_steps": 2,
        "optim": "sgd",  # Adam's first steps are the signs of gradients, also of those that are rounding only
        "learning_rate": 0.1,
        "per_device_train_batch_size": 4,
        "use_cpu": True,
        "report_to": [],
        "save_strategy": "no",
    }
    arguments = transformers.TrainingArguments(str(tmp_path), **options)
    trainer = transformers.Trainer(model, arguments, train_dataset=rows)
    optimizer, loss = torch.optim.SGD(model.parameters(), 0.1), hf_loss if own else trainer_loss(trainer)
    plain = outsize.fit(model, loss, optimizer, batch, budget="1GiB", own_step=True, dry_run=True).plan.plain
    budget, others = (
        (int(0.7 * plain), ("checkpoint", "offload", "recipes", "tensors_away", "chunks")) if sliced else (2**30, ())
    )
    fitted = outsize.fit(model, loss, optimizer, batch, budget=budget, own_step=True, without=others)
    assert (fitted.choice.slices > 1) == sliced
    with in_trainer(trainer, fitted):
        trainer.train()
    transformers.Trainer(twin, arguments, train_dataset=rows).train()
    assert nets.worst_difference(list(model.parameters()), list(twin.parameters())) < 1e-5


def test_adapters_refuse_what_they_cannot_serve():
    with pytest.raises(outsize.InputError, match="no transformers Trainer"), in_trainer(object(), None):
        pass
    with pytest.raises(outsize.InputError, match="automatic_optimization"):
        lightning_step(nn.Linear(1, 1), None, None)
    model, batch = nn.Linear(4, 1), torch.randn(6, 4)
    fitted = outsize.fit(model, lambda m, b: m(b).square().mean(), None, batch, budget="1GiB", own_step=True)
    settings = types.SimpleNamespace(gradient_accumulation_steps=1)
    trainer = types.SimpleNamespace(args=settings, training_step=None, model=nn.Linear(4, 1))
    with pytest.raises(outsize.InputError, match=r"fit trainer\.model"), in_trainer(trainer, fitted):
        pass
    with pytest.raises(outsize.InputError, match="not NoneType"), in_trainer(trainer, None):
        pass
    module = types.SimpleNamespace(automatic_optimization=False, optimizers=lambda: [1, 2])
    with pytest.raises(outsize.InputError, match="2 optimizers"):
        lightning_step(module, fitted, batch)


@given(
    sizes=st.lists(
        st.tuples(st.integers(1, 1000), st.integers(1, 1000), st.floats(1e-6, 1e-2)), min_size=6, max_size=6
    ),
    least=st.integers(0, 200),
)
def test_a_ladder_frees_more_with_every_rung_and_never_holds_a_module_inside_another(sizes, least):
    from outsize.model.fitting.plan.facts import Part
    from outsize.model.fitting.plan.take_apart import build_ladder

    names = ("a", "a.x", "a.x.y", "a.z", "b", "b.x")
    parts = {
        name: Part(name=name, kept=kept, freed=min(kept, freed), seconds=seconds)
        for name, (kept, freed, seconds) in zip(names, sizes, strict=True)
    }
    ladder = build_ladder(parts, ("a", "b"), least)
    freed = [sum(parts[name].freed for name in rung) for rung in ladder]
    took = [sum(parts[name].seconds for name in rung) for rung in ladder]
    assert freed == sorted(set(freed)) and all(parts[name].freed > least for rung in ladder for name in rung)
    for rung in ladder:
        assert not any(one.startswith(other + ".") for one in rung for other in rung)
    pairs = itertools.pairwise(zip(freed, took, strict=True))
    slopes = [(b[0] - a[0]) / max(b[1] - a[1], 1e-12) for a, b in pairs]
    assert all(later <= earlier * (1 + 1e-6) for earlier, later in itertools.pairwise(slopes))


def test_times_lie_on_lines_between_sizes_and_launches_take_as_long_below():
    from outsize.model.fitting.plan.speeds import Timing

    points = ((1, 1.0, 2.0), (4, 1.0, 2.0), (8, 2.0, 4.0))
    timing = Timing(points=points, modules={"block": 0.5}, link=1e9, measured=True)
    assert [timing.passes(rows) for rows in (1, 2, 4, 6, 8, 16)] == [3.0, 3.0, 3.0, 4.5, 6.0, 12.0]
    assert timing.module("block", 16) == 1.0 and timing.module("other", 16) == 0.0


def test_on_a_card_the_peak_is_what_the_allocator_reserves_and_its_kernels_take():
    from outsize.model.fitting.plan.dry_run import Stage

    model, batch = nets.Language(), nets.make_tokens()
    works = [Work(model=model, loss=nets.language_loss, optimizer=None, device=kind) for kind in ("cpu", "cuda")]
    host, card = (Stage(work, batch).project(Choice()) for work in works)
    assert host.peak < 2 * 2**20 and "reserved" not in host.peaks
    assert card.peak == card.peaks["reserved"] and card.peak % (2 * 2**20) == 0
    assert card.peak > 64 * 2**20  # cuBLAS keeps a workspace for each thread that uses it
    assert card.settles(card.peak) and not card.settles(card.peak // 2)


def test_a_step_that_slices_is_traced_for_two_slices_and_holds_as_much_as_for_all():
    from outsize.model.fitting.plan.dry_run import Stage

    model, batch = nets.Language(), nets.make_tokens(rows=8)
    work = Work(model=model, loss=nets.language_loss, optimizer=torch.optim.SGD(model.parameters(), 0.1))
    stage = Stage(work, batch)
    peaks = [stage.project(Choice(slices=count)).peak for count in (1, 2, 4, 8)]
    assert peaks == sorted(peaks, reverse=True)


@examples(10)
@given(rows=st.integers(3, 9), slices=st.integers(2, 3), first=st.integers(1, 9), seed=st.integers(0, 2**16))
def test_a_larger_first_slice_trains_like_the_whole_batch_and_other_batches_are_cut_no_larger_than_the_later_ones(
    tmp_path_factory, rows, slices, first, seed
):
    store = DiskStore(str(tmp_path_factory.mktemp("store")))
    torch.manual_seed(seed)
    model, batch = nets.Language(1, 8, 31), nets.make_tokens(rows, 5, 31)
    plain = copy.deepcopy(model)
    run_steps(plain, nets.language_loss, batch, Choice(), store, seed)
    choice = Choice(slices=slices, first=min(first, rows - slices + 1))
    run_steps(model, nets.language_loss, batch, choice, store, seed)
    assert nets.worst_difference(list(model.parameters()), list(plain.parameters())) < 1e-5
    work = Work(model=model, loss=nets.language_loss, optimizer=torch.optim.SGD(model.parameters(), 0.1))
    runner = open_resident(work, choice, store, rows=rows)
    later = [stop - start for start, stop in runner.weights.cut(rows)][1:]
    assert max(stop - start for start, stop in runner.weights.cut(3 * rows)) <= max(later)
    store.close()


def test_logits_that_a_loss_takes_in_pieces_never_exist_and_any_other_use_makes_them():
    from outsize.model.fitting.run.chunked_loss import chunked_heads

    model, tokens = nets.Language(), nets.make_tokens()
    wanted = tokens.flatten()
    uses = {
        "flat": (lambda out: functional.cross_entropy(out.flatten(0, 1), wanted), 0),
        "view": (lambda out: functional.cross_entropy(out.float().view(-1, 101), wanted, reduction="sum"), 0),
        "cut": (lambda out: functional.cross_entropy(out[:, 1:].reshape(-1, 101), tokens[:, 1:].flatten()), 0),
        "smoothed": (lambda out: functional.cross_entropy(out.flatten(0, 1), wanted, label_smoothing=0.1), 1),
        "across": (lambda out: functional.cross_entropy(out.transpose(1, 2), tokens), 1),
        "both": (lambda out: functional.cross_entropy(out.flatten(0, 1), wanted) + out.square().mean(), 1),
        "column": (lambda out: out[..., 3].sum(), 1),
    }
    for name, (loss, made) in uses.items():
        gradients = []
        for chunks in (0, 3):
            model.zero_grad()
            with chunked_heads(model, ("head",) if chunks else (), chunks, "cpu") as heads:
                loss(model(tokens)).backward()
            gradients.append([p.grad.clone() for p in model.parameters()])
        assert heads.made == made, name
        assert nets.worst_difference(*gradients) < 1e-5, name


def test_the_search_names_no_remedy():
    import ast
    import inspect

    from outsize.model.fitting.plan import search, training_search
    from outsize.model.fitting.plan.remedies import REMEDIES

    tree = [node for module in (search, training_search) for node in ast.walk(ast.parse(inspect.getsource(module)))]
    named = {node.attr for node in tree if isinstance(node, ast.Attribute)}
    named |= {node.arg for node in tree if isinstance(node, ast.keyword)}
    named |= {node.value for node in tree if isinstance(node, ast.Constant)}
    assert not named & {kind.key for kind in REMEDIES}


def test_every_remedy_is_in_the_docstring_of_fit_and_in_its_page():
    import pathlib

    from outsize.model.fitting.fit import fit
    from outsize.model.fitting.plan.remedies import REMEDIES

    page = (pathlib.Path(__file__).parents[3] / "docs" / "fit.md").read_text()
    for kind in REMEDIES:
        assert kind.key in (fit.__doc__ or "").replace("\n", " ")
        assert f"| `{kind.key}` |" in page
