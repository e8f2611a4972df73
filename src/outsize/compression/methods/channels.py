"""Channels and heads that leave, through all layers that they connect (`pruning/`).

Dims that meet in a module are one site: they are pruned together, the least important for their bytes first. The whole model is a
site too, with one ranking for all. Scores come from the loss on the user's data.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

from outsize.compression.method import Candidate, Method, Stage, Subject
from outsize.compression.pruning.axes import Dim
from outsize.compression.pruning.choose import Shrinking
from outsize.compression.pruning.prune import LEAST
from outsize.compression.pruning.scores import by_loss
from outsize.compression.pruning.structure import Structure, find_structure
from outsize.compression.pruning.verify import settle, stirred

SHARES = (0.85, 0.7, 0.5, 0.3)
"""Levels: bytes that are left of the tensors of a site."""
BATCHES = 8
"""Batches on which indices are scored."""


class Channels(Method):
    """Channels and heads that really leave."""

    name = "prune"
    stage = Stage.CHANNELS
    fitted = True
    needs = "channels or heads that are not normalised as a whole; the others are named by prune"

    def candidates(self, subject: Subject) -> list[Candidate]:
        run = functools.partial(_run, subject)
        structure = find_structure(subject.model, run)
        opened = structure.opened(subject.model)
        noisy = stirred(opened)
        scores = by_loss(opened, structure.trace.tensors, subject.batches[:BATCHES], subject.loss)
        weights = structure.weights(opened)
        found = []
        for site, dims in sites(structure):
            touches = set().union(*(structure.modules(dim) for dim in dims))
            last: dict[Dim, Any] = {}
            for share in SHARES:
                plan = Shrinking(weights, scores, dims, LEAST)
                own = {id(weight): weight for dim in dims for weight in plan.within[dim]}
                plan.run(plan.bytes - int((1 - share) * sum(weight.bytes({}) for weight in own.values())))
                kept = plan.kept()
                settle(noisy, structure.trace, kept, structure.fixes, run, True)
                if not kept or (kept.keys() == last.keys() and all((kept[dim] == last[dim]).all() for dim in kept)):
                    continue
                last = kept
                fixes = tuple(structure.fixes)
                found.append(self.candidate(site, f"to {share:.0%}", touches, structure.prune, kept=kept, fixes=fixes))
        return found


def _run(subject: Subject, model: Any) -> Any:
    return subject.loss(model, subject.batches[0])


def sites(structure: Structure) -> Iterator[tuple[str, Sequence[Dim]]]:
    """(name, dims) of dims that meet in a module, and of all dims where these are several."""
    groups: list[tuple[list[Dim], frozenset[str]]] = []
    for dim in structure.dims:
        dims, modules = [dim], structure.modules(dim)
        for group in [group for group in groups if group[1] & modules]:
            dims, modules = group[0] + dims, group[1] | modules
            groups.remove(group)
        groups.append((dims, modules))
    for dims, _ in groups:
        yield structure.name(dims[0]).rpartition(".")[0], dims
    if len(groups) > 1:
        yield "", structure.dims
