"""What the GPU benchmarks share: times by CUDA events."""

import statistics

import torch


def median_ms(f, repeat=15, warm=3):
    for _ in range(warm):
        f()
    times = []
    for _ in range(repeat):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        f()
        b.record()
        b.synchronize()
        times.append(a.elapsed_time(b))
    return statistics.median(times)
