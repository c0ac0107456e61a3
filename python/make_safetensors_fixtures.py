"""Writes tests/fixtures/safetensors/ with the reference implementation (pip install torch safetensors).

    python python/make_safetensors_fixtures.py           writes python_types.safetensors and the directory python_sharded/
    python python/make_safetensors_fixtures.py --check   reads godwit_types.safetensors, which io_tests writes, and compares

Byte i of the tensor number t is (7 i + 13 t) mod 251, mod 2 for BOOL; tests/io/safetensors_test.cpp uses the same rule.
"""

import argparse
import json
import pathlib

import torch
from safetensors import safe_open
from safetensors.torch import save_file

FOLDER = pathlib.Path(__file__).resolve().parent.parent / "tests" / "fixtures" / "safetensors"

# Number, name, type, shape: every element type, a scalar, an empty tensor, a name beyond ASCII.
TENSORS = [
    ("f64", torch.float64, [2, 3]),
    ("f32", torch.float32, [5]),
    ("f16", torch.float16, [3, 1, 2]),
    ("bf16", torch.bfloat16, [7]),
    ("i64", torch.int64, [2]),
    ("i32", torch.int32, [3]),
    ("i16", torch.int16, [5]),
    ("i8", torch.int8, [9]),
    ("u64", torch.uint64, [1]),
    ("u32", torch.uint32, [3]),
    ("u16", torch.uint16, [3]),
    ("u8", torch.uint8, [3, 5]),
    ("bool", torch.bool, [6]),
    ("f8_e4m3", torch.float8_e4m3fn, [11]),
    ("f8_e5m2", torch.float8_e5m2, [4]),
    ("f8_e8m0", torch.float8_e8m0fnu, [4]),
    ("scalar", torch.float32, []),
    ("empty", torch.float32, [3, 0, 2]),
    ("größe.層", torch.uint8, [4]),
]
METADATA = {"format": "pt", "note": 'quotes " and \\ and ü'}


def pattern(number, dtype, shape):
    count = 1
    for dim in shape:
        count *= dim
    size = count * torch.empty(0, dtype=dtype).element_size()
    values = [(7 * i + 13 * number) % 251 for i in range(size)]
    if dtype == torch.bool:
        return torch.tensor([v % 2 == 1 for v in values]).reshape(shape)
    return torch.tensor(values, dtype=torch.uint8).view(dtype).reshape(shape)


def tensors():
    return {name: pattern(number, dtype, shape) for number, (name, dtype, shape) in enumerate(TENSORS)}


def write():
    FOLDER.mkdir(parents=True, exist_ok=True)
    everything = tensors()
    save_file(everything, FOLDER / "python_types.safetensors", METADATA)
    folder = FOLDER / "python_sharded"
    folder.mkdir(exist_ok=True)
    names = list(everything)
    weight_map = {}
    for shard in range(3):
        file = f"model-{shard + 1:05d}-of-00003.safetensors"
        part = {name: everything[name] for name in names[shard::3]}
        save_file(part, folder / file, {"format": "pt"})
        weight_map.update({name: file for name in part})
    total = sum(t.numel() * t.element_size() for t in everything.values())
    index = {"metadata": {"total_size": total, "total_parameters": 17.0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def check():
    expected = tensors()
    with safe_open(FOLDER / "godwit_types.safetensors", "pt") as file:
        assert file.metadata() == METADATA, file.metadata()
        assert set(file.keys()) == set(expected), file.keys()
        for name, want in expected.items():
            got = file.get_tensor(name)
            assert got.dtype == want.dtype and got.shape == want.shape, name
            assert torch.equal(got.reshape(-1).view(torch.uint8), want.reshape(-1).view(torch.uint8)), name
    print(f"{len(expected)} tensors equal")


parser = argparse.ArgumentParser()
parser.add_argument("--check", action="store_true")
if parser.parse_args().check:
    check()
else:
    write()
