"""fit on two ranks: one plan, the gradients of one process, peaks inside, and no rank that waits for one that has failed."""

import pytest
import ranks

SCENARIOS = ("ddp:0.6:forward+counted", "fsdp:0.6:backward", "fsdp:0.9:error")


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    by_rank = ranks.run_ranks(tmp_path_factory.mktemp("ranks"), 2, *SCENARIOS)
    assert [len(rows) for rows in by_rank] == [len(SCENARIOS)] * 2
    return dict(zip(SCENARIOS, zip(*by_rank, strict=True), strict=True))


WHOLE = [scenario for scenario in SCENARIOS if not scenario.endswith("error")]


@pytest.mark.parametrize("scenario", WHOLE)
def test_the_gradients_and_weights_of_all_ranks_are_those_of_one_process(seen, scenario):
    for rank in seen[scenario]:
        assert rank["slices"][0] > 1, "the batch is cut, so that slices are compared with the whole"
        assert rank["gradients"] < 1e-5
        assert rank["weights"] < 1e-5


@pytest.mark.parametrize("scenario", WHOLE)
def test_no_rank_holds_more_than_was_projected_and_that_is_inside_the_budget(seen, scenario):
    for rank in seen[scenario]:
        for held, projected in rank["peaks"]:
            assert 0 < held <= projected <= rank["budget"] < rank["plain"]


@pytest.mark.parametrize("scenario", WHOLE)
def test_out_of_memory_on_one_rank_becomes_the_same_tighter_plan_on_all(seen, scenario):
    first, second = seen[scenario]
    assert first["first"] == second["first"] != first["last"] == second["last"]
    assert first["slices"][1] > first["slices"][0]
    assert any("out of memory on rank 1" in note for note in first["notes"])
    assert any("can't allocate" in note or "out of memory" in note for note in second["notes"])


def test_an_error_of_one_rank_ends_the_step_on_all_of_them(seen):
    first, second = seen["fsdp:0.9:error"]
    assert first["error"] == "PeerFailed: rank 1 failed with an error of its own"
    assert second["error"] == "KeyError: 'labels'"
    assert first["weights"] == second["weights"] < 1e-5, "nobody has taken the step"


def test_the_plan_says_which_rank_holds_most(seen):
    for scenario in WHOLE:
        assert any("on 2 ranks: all run this plan; rank" in note for note in seen[scenario][0]["notes"])
