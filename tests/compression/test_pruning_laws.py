"""Laws of structured pruning on random networks: shapes stay consistent, and what is zero leaves without a trace."""

import copy
import math

import numpy as np
import pytest
import torch
from effort import examples
from hypothesis import given
from hypothesis import strategies as st
from random_networks import networks

from outsize.compression.pruning.choose import Shrinking
from outsize.compression.pruning.prune import prune
from outsize.compression.pruning.removal import masked
from outsize.compression.pruning.structure import find_structure
from outsize.compression.weights import count_bytes
from outsize.core.errors import InputError


def output(model, batch):
    with torch.no_grad():
        return model(*batch)


def square_loss(model, batch):
    return (model(*batch) ** 2).mean()


@examples(48)
@given(networks(), st.sampled_from([0.3, 0.6, 0.9]), st.booleans())
def test_what_is_left_of_a_random_network_runs_and_is_smaller(case, keep, through_norms):
    model, batch = case
    whole = output(model, batch)
    try:
        pruned = prune(model, [batch], keep=keep, loss=square_loss, through_norms=through_norms)
    except InputError as error:
        assert "pruning reaches" in str(error)
        return
    assert pruned.after == count_bytes(pruned.model) <= keep * pruned.before
    assert output(pruned.model, batch).shape == whole.shape
    assert torch.equal(output(model, batch), whole)
    for module in pruned.model.modules():
        if isinstance(module, torch.nn.Linear):
            assert module.weight.shape == (module.out_features, module.in_features)
        if isinstance(module, torch.nn.Conv2d):
            assert module.weight.shape[:2] == (module.out_channels, module.in_channels // module.groups)
    square_loss(pruned.model, batch).backward()


@examples(32)
@given(networks(), st.data())
def test_zeros_leave_first_and_the_output_stays_as_it_was(case, data):
    model, batch = case
    structure = find_structure(model, lambda m: m(*batch))
    planted = {}
    for dim in structure.dims:
        most = dim.size - max(1, math.ceil(dim.size * 0.1))
        gone = data.draw(st.integers(0, most))
        if gone:
            order = data.draw(st.permutations(range(dim.size)))
            planted[dim] = ~np.isin(np.arange(dim.size), order[:gone])
    if not planted:
        return
    model = plant(structure, model, planted)
    plan = Shrinking(structure.weights(structure.opened(model)), {}, structure.dims, 0.1)
    left = sum(weight.bytes({dim: int(s.sum()) for dim, s in planted.items()}) for weight in plan.weights)
    pruned = prune(model, [batch], keep=(left + 0.5) / plan.bytes, loss=square_loss)
    assert pruned.after <= left  # nothing was left but what is not zero
    torch.testing.assert_close(output(pruned.model, batch), output(model, batch), rtol=1e-4, atol=1e-4)


def plant(structure, model, planted):
    """The model with zeros in all that belongs to the planted indices."""
    model = copy.deepcopy(model)
    opened = structure.opened(model)
    with torch.no_grad():
        for name, tensor in [*opened.named_parameters(), *opened.named_buffers()]:
            tensor.copy_(masked(tensor, structure.trace.tensors[name], planted))
    return opened


def test_a_share_that_is_no_share_is_refused():
    with pytest.raises(InputError, match="between 0 and 1"):
        prune(torch.nn.Linear(3, 3), [torch.ones(2, 3)], keep=1.5)
