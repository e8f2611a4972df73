"""Memory snapshots in the form of torch's own, for tests."""

MiB = 2**20


def stack(line, name="step"):
    return [
        {"filename": "", "line": 0, "name": "c10::cuda::malloc"},
        {"filename": "/env/lib/python3.11/site-packages/torch/nn/modules/linear.py", "line": 125, "name": "forward"},
        {"filename": "train.py", "line": line, "name": name},
    ]


def make_snapshot(
    segments=8, request=300 * MiB, free=100 * MiB, pool=(0, 0), fail=True, whole=256 * MiB, block=32 * MiB
):
    """Segments got as one block each, cut into pieces of which every second was freed again; then one request too many."""
    trace, held, clock = [], [], 0

    def add(action, address, size, line=0):
        nonlocal clock
        clock += 1
        trace.append(
            {
                "action": action,
                "addr": address,
                "size": size,
                "stream": 0,
                "time_us": clock * 1000,
                "frames": stack(line),
            }
        )

    for number in range(segments):
        base = 2**40 + number * whole * 2
        add("segment_alloc", base, whole)
        add("alloc", base, whole, 5)
        add("free_requested", base, whole)
        add("free_completed", base, whole)
        pieces = range(base, base + whole, block)
        for address in pieces:
            add("alloc", address, block, 10)
        blocks = []
        for index, address in enumerate(pieces):
            state = "active_allocated" if index % 2 == 0 else "inactive"
            blocks.append(
                {
                    "address": address,
                    "size": block,
                    "requested_size": block,
                    "state": state,
                    "frames": stack(10, "keep"),
                }
            )
        held.append(
            {
                "device": 0,
                "address": base,
                "total_size": whole,
                "stream": 0,
                "segment_type": "large",
                "segment_pool_id": pool,
                "is_expandable": False,
                "blocks": blocks,
            }
        )
    for segment in held:
        for piece in segment["blocks"]:
            if piece["state"] == "inactive":
                add("free_requested", piece["address"], block)
                add("free_completed", piece["address"], block)
    if fail:
        add("oom", free, request, 33)
        trace[-1]["device_free"] = free
    return {"segments": held, "device_traces": [trace]}
