"""Safetensors directories in and out, and the two layouts that differ from a plain tensor: MXFP4 experts and the padded A_log."""

import json
import pathlib
import re

import torch

DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "U8": torch.uint8,
          "I64": torch.int64, "I32": torch.int32}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(w[123])\.weight$")


def read_file(path):
    """Every tensor of one safetensors file, in its own dtype: 8 bytes of header length, the JSON header, the data."""
    data = bytearray(pathlib.Path(path).read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    tensors = {}
    for name, entry in json.loads(bytes(data[8:start])).items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            raw = torch.frombuffer(data, dtype=torch.uint8, count=end - begin, offset=start + begin) if end > begin else torch.empty(0, dtype=torch.uint8)
            tensors[name] = raw.clone().view(DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return tensors


def write_file(path, tensors):
    header, offset = {}, 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def dequantise(packed, scale):
    """MXFP4: two E2M1 codes a byte (the low nibble is the even input), one E8M0 scale for 32 inputs. [out, in / 2], [out, in / 32] -> [out, in]."""
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2).long()
    values = E2M1[codes & 7] * torch.where(codes > 7, -1.0, 1.0)
    return (values.unflatten(-1, (-1, 32)) * torch.exp2(scale.double() - 127)[..., None]).flatten(-2)


def load_directory(directory, dtype=torch.float64):
    """All weights of a model directory by their names, in `dtype`; the experts of a layer stacked as `...experts.w1` [E, out, in]."""
    raw = {}
    for path in sorted(pathlib.Path(directory).glob("*.safetensors")):
        raw |= read_file(path)
    weights, experts = {}, {}
    for name, tensor in raw.items():
        if name.endswith(".weight_scale"):
            continue
        if name.endswith(".weight_packed"):
            name = name.removesuffix("_packed")
            tensor = dequantise(tensor, raw[name + "_scale"])
        # transformers writes the dense layer's `mlp` under the name of the MoE
        name = re.sub(r"block_sparse_moe\.(gate_proj|up_proj|down_proj)\.", r"mlp.\1.", name)
        match = EXPERT.match(name)
        if match:
            experts.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = tensor.to(dtype)
        else:
            weights[name] = tensor.to(dtype)
    for name, each in experts.items():
        weights[name] = torch.stack([each[e] for e in range(len(each))])
    return weights


def unstack(tensors):
    """The opposite of the stacking: `...experts.w1` [E, out, in] to `...experts.0.w1.weight`, ..."""
    flat = {}
    for name, tensor in tensors.items():
        match = re.match(r"(.*\.experts)\.(w[123])$", name)
        if match:
            flat |= {f"{match[1]}.{e}.{match[2]}.weight": tensor[e] for e in range(tensor.shape[0])}
        else:
            flat[name] = tensor
    return flat


def save_directory(directory, config, weights, dtype=torch.float32):
    """`config`: the JSON object of config.json."""
    directory = pathlib.Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    write_file(directory / "model.safetensors", {name: tensor.to(dtype) for name, tensor in unstack(weights).items()})
