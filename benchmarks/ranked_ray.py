"""Ray Train as a way into fit: `python benchmarks/ranked_ray.py [--ranks 2]`, on this machine's CPU, with Ray's own library.

Each worker of a `TorchTrainer` prepares the model by `ray.train.torch.prepare_model` (DDP) or by `fully_shard`, and fits it. The
weights after 20 steps are compared with those of one process that has all batches. With `fails`, memory runs out on the last
rank in the second step.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
from typing import Any

STEPS = 20


def train(config: dict[str, Any]) -> None:
    import torch
    from ray import train as ray_train

    torch.set_num_threads(1)
    context = ray_train.get_context()
    for spread in ("ddp", "fsdp"):
        for fails in (False, True):
            row = case(spread, fails, context.get_world_rank(), context.get_world_size())
            if context.get_world_rank() == 0:
                with open(config["out"], "a") as file:
                    file.write(row + "\n")


def case(spread: str, fails: bool, rank: int, count: int) -> str:
    import torch
    from ranked_accelerate import loss, samples
    from ray.train.torch import prepare_model
    from torch import nn

    import outsize

    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 5))
    model = copy.deepcopy(alone)
    if spread == "ddp":
        model = prepare_model(model)
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("cpu", (count,)))
    optimizer, other = (torch.optim.AdamW(one.parameters(), 1e-2) for one in (model, alone))
    plain = outsize.fit(model, loss, optimizer, samples(rank, 0), budget="1GiB", dry_run=True).plan.plain
    fitted = outsize.fit(model, loss, optimizer, samples(rank, 0), budget=int(0.7 * plain))
    slices = fitted.choice.slices
    for step in range(STEPS):
        planted = run_out() if fails and step == 1 and rank == count - 1 else contextlib.nullcontext()
        with planted:
            fitted.step(samples(rank, step))
        parts = [samples(number, step) for number in range(count)]
        loss(alone, {name: torch.cat([part[name] for part in parts]) for name in parts[0]}).backward()
        other.step()
        other.zero_grad()
    whole = [getattr(p, "full_tensor", lambda p=p: p)() for p in model.parameters()]
    pairs = zip(whole, alone.parameters(), strict=True)
    worst = max(float((a - b).detach().abs().max() / b.detach().abs().max()) for a, b in pairs)
    return (
        f"{count} ranks, {spread}, {type(model).__name__}{', fails' if fails else ''}: {slices} slices, then "
        f"{fitted.choice.slices}; weights after {STEPS} steps differ by {worst:.1e}, peak {max(fitted.peaks):,} of "
        f"{fitted.plan.budgets[0].bytes:,}"
    )


class run_out:
    """Memory runs out once inside the block, in the fourth matrix product."""

    def __enter__(self) -> None:
        import torch
        from torch.utils._python_dispatch import TorchDispatchMode

        left = [4]

        class Mode(TorchDispatchMode):
            def __torch_dispatch__(self, function: Any, kinds: Any, given: Any = (), named: Any = None) -> Any:
                product = "mm." in str(function)
                left[0] -= product
                if product and left[0] == 0:
                    raise torch.OutOfMemoryError("out of memory, planted")
                return function(*given, **(named or {}))

        self.mode = Mode()
        self.mode.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.mode.__exit__(*error)


def main() -> None:
    import pathlib
    import sys
    import tempfile

    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    given = parser.parse_args()
    here = str(pathlib.Path(__file__).resolve().parent)
    paths = {"env_vars": {"PYTHONPATH": ":".join([here, *filter(None, sys.path)]), "OMP_NUM_THREADS": "1"}}
    ray.init(num_cpus=given.ranks, include_dashboard=False, log_to_driver=False, logging_level="ERROR", runtime_env=paths,
             object_store_memory=80 << 20)  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "rows"
        trainer = TorchTrainer(
            train, train_loop_config={"out": str(out)}, torch_config=TorchConfig(backend="gloo"),
            scaling_config=ScalingConfig(num_workers=given.ranks), run_config=RunConfig(storage_path=folder),
        )  # fmt: skip
        trainer.fit()
        print(out.read_text(), end="")


if __name__ == "__main__":
    main()
