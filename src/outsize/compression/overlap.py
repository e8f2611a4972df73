"""Batches that are in `training` and in `data`: none is trained on and measured on.

A training lowers the loss of its own batches also where it learns them by heart, so on those a healing that overfits looks good.
Batches are known by what they hold, so a second loader over the same data is seen too, unless it shuffles.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

from outsize.compression.evaluation import FEW_BATCHES, fingerprint
from outsize.compression.healing import Healing
from outsize.compression.method import Subject
from outsize.core.errors import InputError
from outsize.model.fitting.user_errors import in_users_code


def separate(subject: Subject, healing: Healing) -> tuple[Subject, Healing, list[str]]:
    """The subject and the healing without a batch in common, and a note where they had some: as many are left out of the training
    as leave it a half of its batches, and the loss is not measured on the others."""
    reach = healing.steps + len(subject.batches)  # as far as the training comes where it leaves batches out
    with in_users_code("going through training"):
        trained = {fingerprint(batch) for batch in itertools.islice(iter(healing.batches), reach)}
    keys = [fingerprint(batch) for batch in subject.batches]
    shared = list(dict.fromkeys(key for key in keys if key in trained))
    if not shared:
        return subject, healing, []
    left_out = frozenset(shared[: len(trained) // 2])
    judged = [batch for key, batch in zip(keys, subject.batches, strict=True) if key in left_out or key not in trained]
    if not judged:
        raise InputError(
            "training holds only the batches that the loss is measured on: give other batches, for what a model learned by heart "
            "says nothing"
        )
    healing = replace(healing, left_out=left_out)
    healing = replace(healing, seen=list(itertools.islice(healing.walk(), FEW_BATCHES)))
    note = f"{len(shared)} batches are in training and in data: {len(left_out)} are left out of the training"
    if len(left_out) < len(shared):
        note += f", and the loss is not measured on the other {len(shared) - len(left_out)}"
    return replace(subject, batches=judged), healing, [note]
