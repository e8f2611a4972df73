import dataclasses
import importlib
import pkgutil

import pytest

import outsize.core
from outsize.core.errors import BudgetError, InputError, OutOfMemory, OutsizeError, StoreError
from outsize.core.memory import HOST, Allowance, Pool
from outsize.core.noun import Known, Noun
from outsize.core.plan import Peak, Plan, Step
from outsize.core.units import GiB, MiB


def all_nouns():
    for module in pkgutil.iter_modules(outsize.core.__path__):
        for value in vars(importlib.import_module(f"outsize.core.{module.name}")).values():
            if isinstance(value, type) and issubclass(value, Noun) and value is not Noun:
                yield value


@pytest.mark.parametrize(
    "noun", sorted(set(all_nouns()), key=lambda noun: noun.__name__), ids=lambda noun: noun.__name__
)
def test_every_noun_is_frozen_slotted_and_takes_keywords_only(noun):
    options = noun.__dataclass_params__
    assert options.frozen
    assert "__slots__" in vars(noun)
    assert all(field.kw_only for field in dataclasses.fields(noun))
    assert noun.__doc__


@pytest.mark.parametrize(
    "noun", sorted(set(all_nouns()), key=lambda noun: noun.__name__), ids=lambda noun: noun.__name__
)
def test_what_a_noun_leaves_out_of_json_is_a_property_that_it_has(noun):
    assert all(isinstance(getattr(noun, name), property) for name in noun.said_twice)


def test_properties_are_in_json_beside_the_fields_but_for_those_that_say_them_again():
    found = plan(GiB, GiB).to_dict()
    assert found["fits"] is True and found["read"] == 3 * GiB and found["steps"][0]["distance"] == 1.5
    assert "pool" not in found and "said_twice" not in found


def plan(peak: int, budget: int) -> Plan:
    step = Step(name="multiply", peaks=(Peak(pool=HOST, bytes=peak, known=Known.EXACT),), read=3 * GiB, floor=2 * GiB)
    allowance = Allowance(pool=HOST, bytes=budget, reason="set by you")
    return Plan(name="a @ b", steps=(step,), budgets=(allowance,), smallest=64 * MiB)


def test_a_plan_inside_its_budget_lets_itself_run():
    plan(GiB, GiB).check()
    assert plan(GiB, GiB).fits


def test_the_peak_of_a_plan_is_that_of_the_pool_whose_budget_comes_first_unless_another_is_named():
    card = Pool(kind="device", index=1)
    peaks = (Peak(pool=HOST, bytes=3 * GiB, known=Known.EXACT), Peak(pool=card, bytes=GiB, known=Known.EXACT))
    budgets = (Allowance(pool=card, bytes=2 * GiB, reason="set by you"), Allowance(pool=HOST, bytes=8 * GiB, reason=""))
    found = Plan(name="a step", steps=(Step(name="forward", peaks=peaks),), budgets=budgets, smallest=None)
    assert found.pool == card
    assert (found.peak(), found.peak(card), found.peak(HOST)) == (GiB, GiB, 3 * GiB)
    assert plan(GiB, GiB).peak() == plan(GiB, GiB).peak(HOST) == GiB


def test_a_plan_over_its_budget_refuses_itself_with_the_culprit_and_the_smallest_budget():
    with pytest.raises(BudgetError) as caught:
        plan(2 * GiB, GiB).check()
    error = caught.value
    assert (error.needed, error.budget, error.smallest, error.culprit) == (2 * GiB, GiB, 64 * MiB, "multiply")
    assert "64.00 MiB" in str(error)
    assert "multiply" in str(error)


def test_a_step_knows_its_distance_from_the_floor():
    assert plan(GiB, GiB).steps[0].distance == 1.5


def test_errors_are_also_what_a_python_user_would_catch():
    assert issubclass(InputError, ValueError)
    assert issubclass(OutOfMemory, MemoryError)
    assert issubclass(StoreError, OSError)
    for kind in (InputError, BudgetError, OutOfMemory, StoreError):
        assert issubclass(kind, OutsizeError)


def test_a_noun_that_report_cannot_draw_still_prints():
    @dataclasses.dataclass(frozen=True, slots=True, kw_only=True, repr=False)
    class Other(Plan):
        """A plan of another room."""

    other = Other(name="a @ b", steps=(), budgets=(), smallest=None)
    assert str(other).startswith("Other(name='a @ b'")
