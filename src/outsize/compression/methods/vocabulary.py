"""Embedding rows that the data never ask for share one row, their mean. A head that shares the embedding's weights follows.

Nothing is lost on tokens that the data use, and everything on those they do not. So this method is used only where the user names
it, and the data must hold every token that will ever come.
"""

from __future__ import annotations

import functools
from typing import Any

from outsize.compression.codecs import Rows
from outsize.compression.derived import as_parameters, derive
from outsize.compression.evaluation import evaluate_hooked
from outsize.compression.method import Candidate, Method, Stage, Subject
from outsize.compression.weights import get
from outsize.model.torch_port.objects import parameter_table


class Vocabulary(Method):
    """Embeddings without the rows that the data do not use."""

    name = "vocabulary"
    stage = Stage.ROWS
    needs = "an Embedding with rows that the data do not use"

    def candidates(self, subject: Subject) -> list[Candidate]:
        found = []
        for name, used in _used_rows(subject).items():
            table = get(subject.model, name)
            assert table is not None
            rows = table.weight.shape[0]
            if len(used) + 1 >= rows:
                continue
            holders = [
                (holder, key)
                for holder, module in subject.model.named_modules()
                for key, tensor in parameter_table(module).items()
                if tensor is table.weight
            ]
            level, touched = f"{len(used):,} of {rows:,} rows", [holder for holder, _ in holders]
            found.append(self.candidate(name, level, touched, keep_rows, holders=tuple(holders), used=used, rows=rows))
        return found


def _used_rows(subject: Subject) -> dict[str, Any]:
    """Embedding -> the rows that the data ask for, in order."""
    import torch

    found: dict[str, Any] = {}

    def look(module: Any, inputs: Any, name: str) -> None:
        if inputs and isinstance(inputs[0], torch.Tensor):
            seen = inputs[0].unique()
            found[name] = seen if name not in found else torch.cat([found[name], seen]).unique()

    tables = {name: module for name, module in subject.model.named_modules() if type(module) is torch.nn.Embedding}
    hooks = [module.register_forward_pre_hook(functools.partial(look, name=name)) for name, module in tables.items()]
    evaluate_hooked(subject, hooks)
    return found


def keep_rows(model: Any, holders: tuple[tuple[str, str], ...], used: Any, rows: int) -> Any:
    """Only the used rows, and one more for all others."""
    import torch

    stored: dict[str, Any] | None = None
    for name, key in holders:
        module = get(model, name)
        tensor = None if module is None else parameter_table(module).get(key)
        if tensor is None or tensor.shape[0] != rows:
            continue
        if stored is None:
            others = torch.ones(rows, dtype=torch.bool, device=tensor.device)
            others[used] = False
            mean = tensor.detach()[others].mean(0, keepdim=True)
            index = torch.full((rows,), len(used), dtype=torch.int32, device=tensor.device)
            index[used] = torch.arange(len(used), dtype=torch.int32, device=tensor.device)
            parts = {"rows": torch.cat([tensor.detach()[used], mean]), "index": index}
            stored = as_parameters(Rows("rows"), parts, tensor.requires_grad)
        derive(module, key, Rows("rows"), stored)
    return model
