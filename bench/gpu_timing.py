"""What the GPU benchmarks share: times by CUDA events."""

import statistics

import torch


def medians_ms(*functions, repeat=15, warm=3):
    """The functions take turns, so that a GPU that slows down slows all of them."""
    times = [[] for _ in functions]
    for i in range(warm + repeat):
        for f, own in zip(functions, times):
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            a.record()
            f()
            b.record()
            b.synchronize()
            if i >= warm:
                own.append(a.elapsed_time(b))
    return [statistics.median(own) for own in times]


def median_ms(f, repeat=15, warm=3):
    return medians_ms(f, repeat=repeat, warm=warm)[0]
