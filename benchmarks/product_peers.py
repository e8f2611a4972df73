"""How a product past a card's memory is done without us: a careful torch loop, and square tiles as cuBLASXt cuts them."""

from __future__ import annotations

import torch

from outsize.array.device import torch_kernels


def torch_loop(a, b, c, budget):
    """A block of rows of A and of C stays; panels of B stream, twice-buffered, on a stream of their own."""
    edge = a.shape[0]
    count = 1
    while True:
        rows, panel = -(-edge // count), max(64, edge // 64)
        if (2 * rows * edge + 2 * panel * edge) * 4 + (64 << 20) <= budget:
            break
        count += 1
    host_a, host_b, host_c = (torch.from_numpy(x) for x in (a, b, c))
    copying, leaving = torch.cuda.Stream(), torch.cuda.Stream()
    left, block = (torch.empty(rows, edge, device="cuda") for _ in range(2))
    panels = [torch.empty(panel, edge, device="cuda") for _ in range(2)]
    freed = [torch.cuda.Event() for _ in range(2)]
    gone = torch.cuda.Event()
    main, step = torch.cuda.current_stream(), 0
    for low in range(0, edge, rows):
        high = min(edge, low + rows)
        copying.wait_stream(main)
        with torch.cuda.stream(copying):
            left[: high - low].copy_(host_a[low:high], non_blocking=True)
        main.wait_event(gone)
        for start in range(0, edge, panel):
            place = step % 2
            with torch.cuda.stream(copying):
                if step >= 2:
                    copying.wait_event(freed[place])
                panels[place].copy_(host_b[start : start + panel], non_blocking=True)
            main.wait_stream(copying)
            mine = block[: high - low]
            if start:
                torch.addmm(mine, left[: high - low, start : start + panel], panels[place], out=mine)
            else:
                torch.mm(left[: high - low, start : start + panel], panels[place], out=mine)
            freed[place].record(main)
            step += 1
        leaving.wait_stream(main)
        with torch.cuda.stream(leaving):
            host_c[low:high].copy_(block[: high - low], non_blocking=True)
            gone.record(leaving)
    torch.cuda.synchronize()


def square_tiles(a, b, c, tile):
    """Tiles of C in turn on two streams, tiles of A and B copied for each, as cuBLASXt does."""
    edge = a.shape[0]
    streams = [torch.cuda.Stream() for _ in range(2)]
    room = [[torch.empty(tile, tile, device="cuda") for _ in range(3)] for _ in streams]
    number = 0
    for i in range(0, edge, tile):
        for j in range(0, edge, tile):
            which = number % 2
            left, right, block = room[which]
            with torch.cuda.stream(streams[which]):
                for k in range(0, edge, tile):
                    torch_kernels.copy_rows(left, a[i : i + tile, k : k + tile], inwards=True)
                    torch_kernels.copy_rows(right, b[k : k + tile, j : j + tile], inwards=True)
                    if k:
                        torch.addmm(block, left, right, out=block)
                    else:
                        torch.mm(left, right, out=block)
                torch_kernels.copy_rows(block, c[i : i + tile, j : j + tile], inwards=False)
            number += 1
    torch.cuda.synchronize()
