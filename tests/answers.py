"""Answers of every kind, made up, for tests of pages and of what is written elsewhere."""

import outsize
from outsize.core.cards import CARDS
from outsize.core.failure import Exactness, Remedy
from outsize.core.fitting import FitPlan
from outsize.core.footprint import Amount, Footprint, Layers, Phase
from outsize.core.memory import HOST, Allowance, Part, Pool
from outsize.core.noun import Known
from outsize.core.outcomes.recording import (
    AllocatorSample,
    Finding,
    GpuSample,
    Head,
    HostSample,
    Mark,
    Note,
    ProcessSample,
    Recording,
    Sample,
)  # fmt: skip
from outsize.core.plan import Peak, Step

MiB, GiB = 2**20, 2**30


def footprint(name="a step"):
    def amount(size):
        return Amount(bytes=size, bound=size + MiB, known=Known.ESTIMATE)

    kinds = ("weights", "gradients", "activations")
    moments = tuple(
        Layers(
            time=10 * number, label=f"step {number // 100 + 1} forward", reserved=900 * MiB, line=f"train.py:{number % 7} in go",
            bytes=(100 * MiB, 0, (number % 100) * 4 * MiB),
        )
        for number in range(400)
    )  # fmt: skip
    parts = (
        Part(name="weights", bytes=100 * MiB, known=Known.EXACT),
        Part(name=name, bytes=400 * MiB, known=Known.EXACT),
    )
    return Footprint(
        name=name, pool=Pool(kind="device", index=0), steps=3, peak_requested=amount(496 * MiB), kinds=kinds, timeline=moments,
        peak_allocated=amount(500 * MiB), peak_reserved=amount(900 * MiB), device_use=amount(2 * GiB), parts=parts,
        modules=parts, lines=parts, peak_label="step 2 forward", card=CARDS[0], capacity=10 * GiB, fits=True,
        phases=(Phase(name="build", allocated=1, reserved=2 * MiB),), notes=(name,),
    )  # fmt: skip


def recording():
    samples = tuple(
        Sample(
            time=number / 10, step=number // 5 if number % 5 == 0 else None, phase="train" if number < 80 else "evaluate",
            host=HostSample(
                rss=(300 + number) * MiB, anonymous=(200 + number) * MiB, shared=10 * MiB, used=(220 + number) * MiB,
                limit=512 * MiB, limit_name="container", page_cache=MiB,
            ),
            gpus=(GpuSample(index=0, name="a card", used=GiB, free=GiB, total=2 * GiB),),
            allocators=(
                AllocatorSample(
                    pid=7, framework="torch", device="cuda:0", requested=100 * MiB, allocated=120 * MiB, reserved=200 * MiB,
                    tensors=("400.00 MiB float32[...]",),
                ),
            ),
            processes=(ProcessSample(pid=7, name="python", anonymous=200 * MiB),), process_count=1,
        )
        for number in range(100)
    )  # fmt: skip
    finding = Finding(
        kind="list", device="host", text="`losses` keeps 400 tensors", advice="append loss.item()", where="train.py:41",
        per_step=5.0 * MiB, full_in=372.0,
    )  # fmt: skip
    marks = (
        Mark(time=0.0, kind="phase", name="train"),
        Mark(time=8.0, kind="phase", name="evaluate"),
        Mark(time=9.9, kind="end", name="ended"),
    )
    head = Head(command=("python", "/home/me/train.py"), pid=7, started=1.8e9, interval=0.1)
    return Recording(
        head=head, samples=samples, marks=marks, findings=(finding,), notes=(Note(time=1.0, text="a note"),)
    )


def array_plan():
    x = outsize.array.ones((3000, 4000))
    return ((x - x.mean(axis=0)) / x.std(axis=0)).plan(budget="16MiB")


def fit_plan():
    remedy = Remedy(
        name="recompute", saves=GiB, known=Known.ESTIMATE, costs="time", exactness=Exactness.BITWISE, how="recompute()"
    )  # fmt: skip
    step = Step(name="backward", peaks=(Peak(pool=HOST, bytes=3 * GiB, known=Known.BOUND),))
    return FitPlan(
        name="a fit", steps=(step,), budgets=(Allowance(pool=HOST, bytes=2 * GiB, reason="yours"),), smallest=None,
        remedies=(remedy,), slow_down=1.2, plain=4 * GiB, away=0, place="host",
    )  # fmt: skip


MESSAGE = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 39.50 GiB of which "
    "1.25 GiB is free. Including non-PyTorch memory, this process has 38.20 GiB memory in use. Of the allocated memory 27.00 "
    "GiB is allocated by PyTorch, and 10.70 GiB is reserved by PyTorch but unallocated."
)
