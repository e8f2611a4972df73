"""Fit against what people do today, on a card whose memory is limited to the budget so that passing it dies.

    python benchmarks/fit_h200.py --out DIR                       # everything
    python benchmarks/fit_h200.py --out DIR --models gpt2 --precisions amp --percents 50
    python benchmarks/fit_h200.py --table DIR/rows.jsonl          # the tables of a run

One process a (model, precision) runs the plain step and the peers, one a budget ours and the finder, in float32 one
more some AdamW steps, plain and ours, and a last one `save_on_cpu`. The card is one process's at a time; all others
are stopped while ours is timed, and under AMP, where launches bind, while anything is. A time is that of the quickest
of five steps, for every way alike. Budgets are parts of what the plain step reserves; in float32 the batch is half as
large. Peers: gradient accumulation over 2, 4, 8 slices, every block checkpointed, `save_on_cpu`, accelerate's finder
(x0.9 until it runs) with accumulation. Gradients of the whole batch are compared with the plain step's, tensor by
tensor, with cuDNN's deterministic kernels and without a limit (its others differ from run to run by 3e-5 in
ResNet-50); in float32 beside those of four slices by hand, and a run of AdamW steps is compared with the plain one,
beside a plain one whose samples are summed in another order.
"""

import argparse
import contextlib
import fcntl
import gc
import importlib
import itertools
import json
import os
import pathlib
import signal
import sys
import time
import traceback
import warnings

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from fit_models import MODELS, WAYS, build, cut_step, finder_sizes

PERCENTS = (50, 100, 25, 70, 35)


class Card:
    """One card for several processes: held for everything but planning. On a CPU it limits nothing."""

    def __init__(self, out, device, quiet=False):
        self.device = device
        self.quiet = quiet
        """Others are stopped while this process has the card."""
        self.lock = (out / "card.lock").open("w")
        self.turn = (out / "card.turn").open("w")
        """Held by whoever waits for the card: those who would share it come after one who wants it alone."""
        self.held = False
        self.waited = 0.0
        """Seconds for which others had the card."""
        self.crowd = out / "processes"
        self.crowd.mkdir(exist_ok=True)

    def join(self):
        """This process may be stopped from now on."""
        (self.crowd / str(os.getpid())).touch()

    def leave(self):
        """This process ends."""
        (self.crowd / str(os.getpid())).unlink(missing_ok=True)

    def tell(self, what):
        """A signal to all others."""
        for path in self.crowd.iterdir():
            if int(path.name) != os.getpid():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(path.name), what)

    def take(self, kind=fcntl.LOCK_EX):
        start = time.perf_counter()
        fcntl.flock(self.lock, fcntl.LOCK_UN)  # else whoever has the turn waits for the card, and this for the turn
        fcntl.flock(self.turn, fcntl.LOCK_EX)
        fcntl.flock(self.lock, kind)
        fcntl.flock(self.turn, fcntl.LOCK_UN)
        self.waited += time.perf_counter() - start
        self.held = True
        if kind == fcntl.LOCK_EX and self.quiet:
            self.tell(signal.SIGSTOP)

    @contextlib.contextmanager
    def shared(self):
        """Others may compute meanwhile: nothing is timed here."""
        self.settle()
        self.tell(signal.SIGCONT)
        self.take(fcntl.LOCK_SH)
        try:
            yield
        finally:
            self.settle()
            self.take()

    def give(self):
        if self.device == "cuda":
            import torch

            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        self.held = False
        self.tell(signal.SIGCONT)
        fcntl.flock(self.lock, fcntl.LOCK_UN)

    @contextlib.contextmanager
    def lent(self):
        """The card is another's while the block runs."""
        held = self.held
        if held:
            self.give()
        start, worked = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            if held:
                stopped = time.perf_counter() - start - (time.process_time() - worked)
                self.waited += max(0.0, stopped)
                self.take()

    def wake(self):
        """Load what every process loads, before the card is taken."""
        if self.device == "cuda":
            import torch

            x = torch.ones(8, 8, 8, 8, device="cuda", requires_grad=True)
            y = torch.nn.functional.conv2d(x, torch.ones(8, 8, 1, 1, device="cuda")).flatten(1)
            (y @ y.T).sum().backward()
            torch.cuda.synchronize()

    def limit(self, size):
        if self.device == "cuda":
            import torch

            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(1.0 if size is None else size / total)

    def clear(self):
        gc.collect()
        if self.device == "cuda":
            import torch

            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def watch(self):
        self.clear()
        if self.device == "cuda":
            import torch

            torch.cuda.reset_peak_memory_stats()

    def settle(self):
        if self.device == "cuda":
            import torch

            torch.cuda.synchronize()

    def peaks(self):
        if self.device != "cuda":
            return {"reserved": 0, "allocated": 0}
        import torch

        return {
            "reserved": torch.cuda.max_memory_reserved(), "allocated": torch.cuda.max_memory_allocated(),
            "retries": torch.cuda.memory_stats().get("num_alloc_retries", 0),
        }  # fmt: skip


class Case:
    """One model in one precision."""

    def __init__(self, name, precision, percent, kind, given, card):
        self.name, self.precision, self.given, self.card = name, precision, given, card
        self.percent, self.kind = percent, kind
        self.peers = name not in given.alone
        self.out = pathlib.Path(given.out)
        self.rows = []

    def write(self, **row):
        row = {"model": self.name, "precision": self.precision, "at": round(time.time() - self.given.start, 1), **row}
        self.rows.append(row)
        with (self.out / "rows.jsonl").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(json.dumps(row) + "\n")

    def late(self, **what):
        """True, and said, where the time is over."""
        if time.time() < self.given.deadline:
            return False
        self.write(**what, failed="not run: the time was over")
        return True

    def run(self):
        import torch

        torch.set_num_threads(2)
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
        self.card.wake()
        if self.kind != "peers":
            self.base, self.reserved = self.wait_for_plain()
        self.card.take()
        try:
            self._run(torch)
        finally:
            self.card.give()

    def _run(self, torch):
        with self.card.shared():
            model, plain_loss, batch = build(self.name, self.card.device, self.given.tiny)
            if self.precision == "fp32" and not self.given.tiny:  # twice the bytes and four times the time
                batch = {key: value[: value.shape[0] // 2].clone() for key, value in batch.items()}
            self.first = [p.detach().to("cpu", copy=True) for p in model.parameters()]
            self.buffers = [b.detach().clone() for b in model.buffers()]

        def loss(m, b):
            with torch.autocast(self.card.device, dtype=torch.bfloat16, enabled=self.precision == "amp"):
                return plain_loss(m, b)

        self.model, self.loss, self.batch = model, loss, batch
        self.count = next(iter(batch.values())).shape[0]
        {"peers": self.run_peers, "ours": self.run_ours, "course": self.run_course, "host": self.run_host}[self.kind]()

    def run_peers(self):
        """The plain step and what people do today, `save_on_cpu` and the finder left for later."""
        self.plain()
        for way in WAYS:
            if way != "save_on_cpu" and self.peers and not self.late(way=way):
                self.peer(way)
        with self.card.shared():
            self.reset()
            self.plain_gradients, _ = self.gradients(None)
            given, self.batch = self.batch, {key: value.flip(0) for key, value in self.batch.items()}
            other, _ = self.gradients(None)
            self.batch = given
            self.write(way="noise", other="plain, samples in another order", **self.against_plain(other))
            if self.precision == "fp32" and self.peers:
                self.write(way="noise", other="four slices by hand", **self.against_plain(self.gradients_by_hand(4)))

    def run_ours(self):
        """Ours and the finder at one budget."""
        if self.late(way="outsize", percent=self.percent):
            return
        with self.card.shared():
            self.reset()
            self.plain_gradients, self.plain_value = self.gradients(None)
        self.ours(self.percent)
        if self.percent < 100 and self.peers and not self.late(way="finder", percent=self.percent):
            self.finder(self.percent)

    def run_host(self):
        """Everything that autograd saves to the host."""
        if not self.late(way="save_on_cpu"):
            self.peer("save_on_cpu")

    def wait_for_plain(self):
        """(seconds, reserved bytes) of the plain step, from the process that runs it."""
        while time.time() < self.given.deadline + 120:
            row = self.told("plain")
            if row:
                return row["seconds"], row["reserved"]
            time.sleep(0.2)
        raise TimeoutError("the plain step has not come")

    def told(self, way):
        """What a process of the same model wrote about a way without a limit."""
        path = self.out / "rows.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        mine = (self.name, self.precision, way)
        found = (r for r in rows if (r["model"], r["precision"], r.get("way")) == mine and "percent" not in r)
        return next((row for row in found if "seconds" in row), None)

    def hopeless(self, size, budget):
        """True where slices of so many samples hand out more than the budget, by the line through two that were measured."""
        one, two = self.told("plain"), self.told("micro2")
        if not one or not two:
            return False
        each = (one["allocated"] - two["allocated"]) / (self.count - -(-self.count // 2))
        return one["allocated"] - each * (self.count - size) > 1.05 * budget

    def optimizer(self):
        import torch

        return torch.optim.AdamW(self.model.parameters(), 1e-4)

    def reset(self):
        """Weights and buffers as at the start."""
        import torch

        with torch.no_grad():
            for parameter, value in zip(self.model.parameters(), self.first, strict=True):
                parameter.copy_(value)
                parameter.grad = None
            for buffer, value in zip(self.model.buffers(), self.buffers, strict=True):
                buffer.copy_(value)

    def clock(self, step, warm=1, count=None, fresh=True):
        """Seconds of the quickest of some steps, and peaks; `fresh`: from an empty cache."""
        if fresh:
            self.card.watch()
        for _ in range(warm):
            step()
        self.card.settle()
        times = []
        for _ in range(count or self.given.steps):
            start = time.perf_counter()
            step()
            self.card.settle()
            times.append(time.perf_counter() - start)
            if sum(times) > 1.5 and len(times) > 1:
                break
        return {"seconds": min(times), "times": [round(t, 5) for t in times], **self.card.peaks()}

    def attempt(self, make, way, **what):
        """Run a way; a failure is a result too."""
        optimizer, row = self.optimizer(), {}
        try:
            row = make(optimizer)
        except Exception as error:
            row = {"failed": f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"}
            if way not in (*WAYS, "finder") and type(error).__name__ != "BudgetError":
                row["trace"] = traceback.format_exc()[-1500:]
        del optimizer
        for parameter in self.model.parameters():
            parameter.grad = None
        self.card.limit(None)
        self.card.clear()
        self.write(way=way, **what, **row)
        return row

    def plain(self):
        def make(optimizer):
            row = self.clock(cut_step(self.model, self.loss, optimizer, self.batch, self.count), 2)
            if self.card.device == "cpu":
                import outsize

                fitted = outsize.fit(self.model, self.loss, optimizer, self.batch, budget="100GiB", dry_run=True)
                row["reserved"] = row["allocated"] = fitted.plan.plain
            return row

        row = self.attempt(make, way="plain")
        self.base, self.reserved = row["seconds"], row["reserved"]

    def peer(self, way):
        slices, around = WAYS[way]

        def make(optimizer):
            with around(self.model):
                step = cut_step(self.model, self.loss, optimizer, self.batch, -(-self.count // slices))
                return self.clock(step, count=1 if way == "save_on_cpu" else None)

        row = self.attempt(make, way=way)
        for percent in PERCENTS:  # allocated fits, reserved does not: under the limit it may run
            budget = self.reserved * percent // 100
            if row.get("allocated", 0) and row["allocated"] <= budget < row["reserved"] and percent < 100:
                self.card.limit(budget)
                self.attempt(make, way=way, percent=percent, budget=budget)

    def finder(self, percent):
        budget = self.reserved * percent // 100

        def make(optimizer):
            for size in finder_sizes(self.count):
                if size > 1 and self.hopeless(size, budget):
                    continue
                self.card.limit(budget)
                try:
                    step = cut_step(self.model, self.loss, optimizer, self.batch, size)
                    return {**self.clock(step, 2), "size": size}
                except Exception as error:
                    if "out of memory" not in str(error):
                        raise
                optimizer.zero_grad(set_to_none=True)
                self.card.clear()
            return {"failed": "no batch size runs"}

        self.attempt(make, way="finder", percent=percent, budget=budget)

    # gradients and courses

    def run_course(self):
        """Some AdamW steps: plain, ours in half of the memory, and plain with samples in another order; nothing is timed."""
        import torch

        import outsize

        if self.late(way="trajectory"):
            return
        torch.backends.cudnn.deterministic = True  # else two plain courses of a network with BatchNorm differ
        with self.card.shared():
            plain = self.course(lambda o: cut_step(self.model, self.loss, o, self.batch, self.count))
            fits = []

            def make(optimizer):
                fits.append(outsize.fit(self.model, self.loss, optimizer, self.batch, budget=self.reserved // 2))
                return lambda: fits[0].step(self.batch)

            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                ours = self.course(make)
            self.write(way="trajectory", other="outsize, 50 %", choice=str(fits[0].choice)[:300], **apart(ours, plain))
            fits[0].undo()
            order = {key: value.flip(0) for key, value in self.batch.items()}
            other = self.course(lambda o: cut_step(self.model, self.loss, o, order, self.count))
            self.write(way="trajectory", other="plain, samples in another order", **apart(other, plain))

    def course(self, make):
        """(losses, final weights) of some steps from the first weights; weights are kept on the host, out of the way."""
        self.reset()
        step = make(self.optimizer())
        losses = [float(step()) for _ in range(self.given.trajectory)]
        return losses, [p.detach().to("cpu", copy=True) for p in self.model.parameters()]

    def gradients(self, fitted):
        """Gradients of the whole batch on the host, by the plain step or as a fitted one makes them; and the loss."""
        from dataclasses import replace

        import torch

        from outsize.model.fitting.learn.findings import preserved
        from outsize.model.fitting.learn.gradients_equal import collect

        wanted = self.compared()
        self.card.limit(None)
        torch.backends.cudnn.deterministic = True
        if fitted is None:
            with preserved(self.model):
                value = self.loss(self.model, self.batch)
                value.backward()
                found = [p.grad.detach().to("cpu", copy=True) for p in wanted]
                value = float(value.detach())
            torch.backends.cudnn.deterministic = False
            return found, value
        runner = fitted._now
        choice = replace(fitted.choice, in_backward=False, state_away=False, gradients_away=True)
        with preserved(self.model):
            kept = collect(runner.work, choice, self.batch, runner.weights.store)
            found = []
            for parameter in wanted:
                gradient = kept.take(parameter)
                self.card.settle()
                found.append(None if gradient is None else gradient.detach().to("cpu", copy=True))
        del kept
        torch.backends.cudnn.deterministic = False
        with torch.no_grad():
            self.card.clear()
        return found, None

    def gradients_by_hand(self, slices):
        """Gradients of the whole batch as gradient accumulation makes them."""
        from outsize.model.fitting.learn.findings import preserved

        with preserved(self.model):
            for start, stop in cut_rows(self.count, slices):
                part = {key: value[start:stop] for key, value in self.batch.items()}
                (self.loss(self.model, part) * ((stop - start) / self.count)).backward()
            return [p.grad.detach().to("cpu", copy=True) for p in self.compared()]

    def compared(self):
        """Parameters whose gradients are compared: all of them, of a model of more than a billion one in eight."""
        parameters = list(self.model.parameters())
        return parameters[:: 8 if sum(p.numel() for p in parameters) > 10**9 else 1]

    def against_plain(self, got):
        """How far gradients are from the plain step's; compared where there is room, whatever the budget."""
        self.card.limit(None)
        names = {id(p): name for name, p in self.model.named_parameters()}
        row = compare_gradients([names[id(p)] for p in self.compared()], self.card.device, got, self.plain_gradients)
        self.card.clear()
        return row

    # ours

    def ours(self, percent):
        budget = self.reserved * percent // 100
        self.reset()
        self.card.limit(budget)
        self.attempt(lambda o: self._ours(o, budget, percent), way="outsize", percent=percent, budget=budget)

    def _ours(self, optimizer, budget, percent):
        import outsize

        self.card.watch()
        self.parts.clear()
        waited, start = self.card.waited, time.perf_counter()
        fitted = outsize.fit(self.model, self.loss, optimizer, self.batch, budget=budget)
        row = {"planning": time.perf_counter() - start - (self.card.waited - waited)}
        row["parts"] = dict(self.parts)
        plan = fitted.plan
        row |= {
            "projected": plan.peak(plan.budgets[0].pool),
            "predicted": plan.slow_down,
            "away": plan.away,
            "choice": fitted.choice.to_dict(),
        }
        with (self.out / "plans.txt").open("a") as file:
            file.write(f"\n=== {self.name} {self.precision} {percent} %\n{plan}\n")
        with self.card.shared():
            got, _ = self.gradients(fitted)
            row |= self.against_plain(got)
            del got
        self.card.watch()
        self.card.limit(budget)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            losses = [float(fitted.step(self.batch)) for _ in range(3)]
            before = self.card.peaks()
            self.card.tell(signal.SIGSTOP)
            try:
                row |= self.clock(lambda: fitted.step(self.batch), 1, fresh=False)
            finally:
                self.card.tell(signal.SIGCONT)
            row["retries"] = row.get("retries", 0) - before.get("retries", 0)
            row["first_loss"] = [losses[0], self.plain_value]
            row["notes"] = list(fitted.plan.notes)
            row["final"] = fitted.choice.to_dict() == row["choice"]
            self.card.limit(None)  # the model as it was given needs more than the budget
            fitted.undo()
        row["tightened"] = sum("passed its memory" in str(w.message) for w in caught)
        return row


def cut_rows(rows, slices):
    """(start, stop) of nearly equal slices."""
    bounds = [rows * number // slices for number in range(slices + 1)]
    return [(a, b) for a, b in itertools.pairwise(bounds) if b > a]


def compare_gradients(names, device, got, expected):
    """The largest relative difference of a gradient, whose it is, and the largest relative to all gradients together."""
    whole = sum(float(e.to(device).norm()) ** 2 for e in expected if e is not None) ** 0.5
    rows = []
    for name, a, b in zip(names, got, expected, strict=True):
        if a is None or b is None:
            if a is not b:
                rows.append((float("inf"), float("inf"), name))
            continue
        a, b = a.to(device), b.to(device)
        difference, size = float((a - b).norm()), float(b.norm())
        rows.append((difference / max(size, 1e-30), difference / max(whole, 1e-30), name))
    worst = max(rows)
    return {
        "gradient": worst[0], "gradient_of": worst[2], "gradient_to_all": max(r[1] for r in rows),
        "above": [[r[2], r[0]] for r in sorted(rows, reverse=True)[:4] if r[0] > 1e-5],
    }  # fmt: skip


def apart(one, other):
    """How far two courses are from each other."""
    losses = max(abs(a - b) / max(abs(b), 1e-12) for a, b in zip(one[0], other[0], strict=True))
    weights = max(float((a - b).norm() / b.norm().clamp_min(1e-12)) for a, b in zip(one[1], other[1], strict=True))
    total = sum(float((a - b).double().square().sum()) for a, b in zip(one[1], other[1], strict=True)) ** 0.5
    size = sum(float(b.double().square().sum()) for b in other[1]) ** 0.5
    return {
        "steps": len(one[0]),
        "losses": losses,
        "worst_weight": weights,
        "weights": total / size,
        "last": one[0][-1],
    }


# all of them


def time_parts(card):
    """Seconds of each part of `outsize.fit`, waits for the card left out; parts without a clock share the card."""
    from outsize.model.fitting import training as verb

    untimed = ("look", "_differs")

    parts = {}

    def timed(owner, name):
        inner = getattr(owner, name)

        def run(*args, **kwargs):
            start, waited = time.perf_counter(), card.waited
            try:
                with card.shared() if name in untimed and card.held else contextlib.nullcontext():
                    return inner(*args, **kwargs)
            finally:
                took = time.perf_counter() - start - (card.waited - waited)
                parts[name] = round(parts.get(name, 0.0) + took, 2)

        setattr(owner, name, run)

    for owner, name in (
        (verb, "look"), (verb, "measure_times"), (verb.TrainingSearch, "run"),
        (verb.TrainingPlanner, "_fastest"), (verb.TrainingPlanner, "_differs"),
    ):  # fmt: skip
        timed(owner, name)
    return parts


def lend_while_planning(card):
    """Projections need no card: others have it meanwhile."""
    from outsize.model.fitting import training as verb
    from outsize.model.fitting.plan.dry_run import Stage

    def lend(owner, name):
        inner = getattr(owner, name)

        def lent(self, *args, **kwargs):
            with card.lent():
                return inner(self, *args, **kwargs)

        setattr(owner, name, lent)

    lend(Stage, "project")
    lend(verb.TrainingSearch, "run")
    lend(verb.TrainingSearch, "another")


def work(name, precision, percent, kind, given):
    """A process's whole life."""
    out = pathlib.Path(given.out)
    card = Card(out, given.device, quiet=precision == "amp")
    case = Case(name, precision, percent, kind, given, card)
    try:
        lend_while_planning(card)
        case.parts = time_parts(card)
        card.join()
        case.run()
    except Exception as error:
        case.write(failed=f"{type(error).__name__}: {error}", trace=traceback.format_exc()[-3000:])
    finally:
        card.leave()


def everything(given):
    """Fork a process a case, so that libraries are loaded once."""
    import torch
    import transformers
    from transformers import GPT2LMHeadModel, LlamaForCausalLM, T5ForConditionalGeneration  # noqa: F401

    with contextlib.suppress(ImportError):
        import torchvision  # noqa: F401
    import outsize
    from outsize.model.fitting import fit  # noqa: F401

    print(f"torch {torch.__version__}, transformers {transformers.__version__}, outsize {outsize.__version__}")
    out = pathlib.Path(given.out)
    out.mkdir(parents=True, exist_ok=True)
    given.start = time.time()
    given.deadline = given.start + given.seconds
    warm_up()
    cases = [case for precision in given.precisions for name in given.models for case in cut(name, precision, given)]
    order = [*given.percents, *PERCENTS]
    kinds = ("peers", "ours", "course", "host")
    cases.sort(key=lambda case: (kinds.index(case[3]), order.index(case[2])))
    crowd = Card(out, given.device)
    running = {}
    start = time.time()
    while cases or running:
        while cases and len(running) < given.processes:
            case = cases.pop(0)
            pid = os.fork()
            if not pid:
                try:
                    work(*case, given)
                finally:
                    os._exit(0)
            running[pid] = case
        pid, status = os.wait()
        (crowd.crowd / str(pid)).unlink(missing_ok=True)
        if status:  # it may have been killed with the card in its hands
            crowd.tell(signal.SIGCONT)
        print(f"{time.time() - start:7.1f} s  {running.pop(pid)} ended ({status})", flush=True)
    (out / "card.lock").unlink(missing_ok=True)
    (out / "card.turn").unlink(missing_ok=True)
    crowd.crowd.rmdir()
    print(table(out / "rows.jsonl"))


def cut(name, precision, given):
    """The processes of a model; one a budget, since cuDNN stays with what had room first."""
    every = [
        *given.percents,
        *(["course"] if precision == "fp32" else []),
        *(["host"] if name not in given.alone else []),
    ]
    wanted = given.only.get((name, precision), []) if given.only else every
    if not wanted:
        return []
    kinds = {"course": (name, precision, 50, "course"), "host": (name, precision, 100, "host")}
    return [(name, precision, 100, "peers"), *(kinds.get(w) or (name, precision, int(w), "ours") for w in wanted)]


def read_only(text):
    """{(model, precision): percents, "course" or "host"} of "gpt2/amp:35,25 t5-small/fp32:50,course"."""
    pairs = (word.split(":") for word in text.split())
    return {tuple(case.split("/")): wanted.split(",") for case, wanted in pairs}


def warm_up():
    """What a projection loads, loaded once for all; nothing here may ask for a card, or forked processes could not."""
    for name in (
        "torch._dynamo", "torch._decomp", "torch._meta_registrations", "torch._refs", "torch._prims", "sympy", "torchvision.ops",
        "torch.fx.experimental.symbolic_shapes", "torch.utils.flop_counter", "torch.utils.checkpoint",
    ):  # fmt: skip
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def table(path):
    """Time ratios to the plain step, a line a case; the figures of ours beside."""
    rows = [json.loads(line) for line in pathlib.Path(path).read_text().splitlines()]
    ways = [*WAYS, "finder", "outsize"]
    lines = [f"| model | precision | budget | {' | '.join(ways)} | held / projected / budget | gradients | planning |"]
    lines.append("|---" * (len(ways) + 6) + "|")
    for name, precision in dict.fromkeys((r["model"], r["precision"]) for r in rows):
        mine = [r for r in rows if (r["model"], r["precision"]) == (name, precision)]
        plain = next((r for r in mine if r.get("way") == "plain" and "seconds" in r), None)
        if plain is None:
            continue
        lines.append(
            f"| {name} | {precision} | plain | {1e3 * plain['seconds']:.1f} ms, {plain['reserved'] / 2**30:.2f} GiB |"
        )
        for percent in sorted({r["percent"] for r in mine if r.get("way") == "outsize"}, reverse=True):
            lines.append(_line(mine, plain, name, precision, percent, ways))
    return "\n".join(lines)


def _line(mine, plain, name, precision, percent, ways):
    budget = plain["reserved"] * percent // 100
    said = []
    for way in ways:
        limited = next((r for r in mine if r.get("way") == way and r.get("percent") == percent), None)
        free = next((r for r in mine if r.get("way") == way and "percent" not in r), None)
        row = limited or (free if free and free.get("reserved", budget + 1) <= budget else None)
        took = row and row.get("seconds")
        said.append(f"{took / plain['seconds']:.2f}x" if took else "-")
    ours = next(r for r in mine if r.get("way") == "outsize" and r.get("percent") == percent)
    if "seconds" not in ours:
        return f"| {name} | {precision} | {percent} % | {' | '.join(said)} | {ours.get('failed', '')[:160]} | | |"
    held = " / ".join(f"{size / 2**30:.2f}" for size in (ours["reserved"], ours["projected"], budget))
    return (
        f"| {name} | {precision} | {percent} % | {' | '.join(said)} | {held} GiB | {ours['gradient']:.1e} | "
        f"{ours['planning']:.1f} s |"
    )


OTHER_STEP = {"resnet50": ("micro2", "micro4", "micro8", "finder")}
"""Ways that change the training: statistics of a slice are not those of the batch."""


def newest(paths):
    """The newest measurement of every case, with the fastest of the other ways that fits and gives the same step."""
    rows = [json.loads(line) for path in paths for line in pathlib.Path(path).read_text().splitlines()]
    lines = [
        "| model, plain step | precision | " + " | ".join(f"{p} %" for p in sorted(PERCENTS)[::-1]) + " |",
        "|---" * 7 + "|",
    ]
    for name, precision in dict.fromkeys((r["model"], r["precision"]) for r in rows):
        mine = [r for r in rows if (r["model"], r["precision"]) == (name, precision)]
        plains = {r["run"]: r for r in mine if r.get("way") == "plain" and "seconds" in r}
        cells = [_newest_cell(mine, plains, name, percent) for percent in sorted(PERCENTS)[::-1]]
        last = plains[max(plains)]
        lines.append(
            f"| {name}, {1e3 * last['seconds']:.0f} ms, {last['reserved'] / 2**30:.2f} GiB | {precision} | {' | '.join(cells)} |"
        )
    return "\n".join(lines)


def _newest_cell(mine, plains, name, percent):
    done = [r for r in mine if (r.get("way"), r.get("percent")) == ("outsize", percent) and "seconds" in r]
    done = [r for r in done if r["run"] in plains]
    if not done:
        return ""
    ours = max(done, key=lambda r: (r["run"], r.get("at", 0)))
    plain = plains[ours["run"]]
    budget = plain["reserved"] * percent // 100
    peers = {}
    for row in mine:
        way, same = row.get("way"), row["run"] == ours["run"]
        if (
            way not in (*WAYS, "finder")
            or way in OTHER_STEP.get(name, ())
            or "seconds" not in row
            or row["run"] not in plains
        ):
            continue
        if row["reserved"] <= budget if "percent" not in row else row["percent"] == percent:
            key, took = (way, not same), row["seconds"] / plains[row["run"]]["seconds"]
            peers[key] = min(took, peers.get(key, took))
    beside = {way: took for (way, other), took in peers.items() if not other or (way, False) not in peers}
    best = min(beside, key=beside.get, default=None)
    said = f"{best} {beside[best]:.2f}x" if best else "none"
    held = f"{ours['reserved'] / 2**30:.2f} of {budget / 2**30:.2f}"
    return f"**{ours['seconds'] / plain['seconds']:.2f}x** ({said}) {held}, run {ours['run']}"


def main():
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="fit_h200")
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(MODELS))
    parser.add_argument("--precisions", type=lambda text: text.split(","), default=["amp", "fp32"])
    parser.add_argument("--percents", type=lambda text: [int(p) for p in text.split(",")], default=list(PERCENTS))
    parser.add_argument(
        "--only", type=read_only, default={}, help="these alone: gpt2/amp:35,25 t5-small/fp32:50,course (quoted)"
    )
    parser.add_argument("--steps", type=int, default=5, help="timed steps")
    parser.add_argument("--trajectory", type=int, default=20, help="AdamW steps that are compared")
    parser.add_argument("--seconds", type=float, default=420.0, help="no case begins after so many")
    parser.add_argument("--processes", type=int, default=12)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="models too small to mean anything, to try the script out")
    parser.add_argument("--alone", type=lambda text: text.split(","), default=[], help="models without their peers")
    parser.add_argument("--table", help="print the table of a file of rows")
    parser.add_argument("--newest", nargs="+", help="print the newest measurement of every case of some files of rows")
    given = parser.parse_args()
    if given.newest:
        print(newest(given.newest))
    elif given.table:
        print(table(given.table))
    else:
        everything(given)


if __name__ == "__main__":
    main()
