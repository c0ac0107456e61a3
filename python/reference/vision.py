"""MoonViT-V2 and its projector, item by item in plain PyTorch: the other side of the vision agreement test.

Written from the Kimi K3 report, the released vision_config and tensor names; not from Godwit's sources. One item is `frames` pictures of rows x columns
patches of p x p pixels; a still has one frame. Legend: W tower width, H heads, d head width.
"""

import dataclasses
import json
import pathlib

import torch
import torch.nn.functional as F

from .model import rms_norm

EPS = 2.0**-23  # none is named in the release: PyTorch's RMSNorm then takes that of fp32
THETA = 10000.0


@dataclasses.dataclass
class VisionConfig:
    vt_num_hidden_layers: int
    vt_hidden_size: int
    vt_intermediate_size: int
    vt_num_attention_heads: int
    qkv_hidden_size: int
    text_hidden_size: int
    patch_size: int = 14
    init_pos_emb_height: int = 64
    init_pos_emb_width: int = 64
    init_pos_emb_time: int = 4
    pos_emb_interpolation_mode: str = "bilinear"
    merge_kernel_size: tuple = (2, 2)
    projector_ln_eps: float = 1e-5
    vision_time: str = "joint"  # or "factorised"

    @classmethod
    def read(cls, path):
        top = json.loads((pathlib.Path(path) / "config.json").read_text())
        names = {field.name for field in dataclasses.fields(cls)}
        keys = {**top["vision_config"], **top.get("godwit", {})}
        return cls(**{k: v for k, v in keys.items() if k in names and v is not None})


def vision_shapes(c):
    """Every parameter by its released name."""
    W, p = c.vt_hidden_size, c.patch_size
    out = {"vision_tower.patch_embed.proj.weight": (W, 3, p, p),
           "vision_tower.patch_embed.pos_emb.weight": (c.init_pos_emb_height, c.init_pos_emb_width, W)}
    for i in range(c.vt_num_hidden_layers):
        b = f"vision_tower.encoder.blocks.{i}."
        out |= {b + "norm0.weight": (W,), b + "norm1.weight": (W,), b + "wqkv.weight": (3 * c.qkv_hidden_size, W),
                b + "wo.weight": (W, c.qkv_hidden_size), b + "mlp.fc0.weight": (c.vt_intermediate_size, W),
                b + "mlp.fc1.weight": (W, c.vt_intermediate_size)}
    merged = W * c.merge_kernel_size[0] * c.merge_kernel_size[1]
    return out | {"vision_tower.encoder.final_layernorm.weight": (W,), "mm_projector.proj.0.weight": (merged, merged),
                  "mm_projector.proj.2.weight": (c.text_hidden_size, merged), "mm_projector.post_norm.weight": (c.text_hidden_size,)}


class Tower:
    def __init__(self, config, weights):
        self.c, self.w = config, weights

    def norm(self, x, name, eps=EPS):
        return rms_norm(x, self.w[name + ".weight"], eps)

    def embed(self, pixels, frames, rows, columns):
        """pixels [frames rows columns, 3, p, p] -> [frames, rows columns, W]."""
        x = F.conv2d(pixels, self.w["vision_tower.patch_embed.proj.weight"], stride=self.c.patch_size).flatten(1)
        grid = self.w["vision_tower.patch_embed.pos_emb.weight"]
        if (rows, columns) != tuple(grid.shape[:2]):
            grid = F.interpolate(grid.permute(2, 0, 1)[None], (rows, columns), mode=self.c.pos_emb_interpolation_mode, align_corners=False)[0].permute(1, 2, 0)
        x = x.unflatten(0, (frames, rows * columns)) + grid.flatten(0, 1)
        if frames > 1:
            rate = THETA ** (-torch.arange(self.c.vt_hidden_size // 2, dtype=x.dtype) / (self.c.vt_hidden_size // 2))
            for t in range(frames):
                x[t] = x[t] + torch.cat([(t * rate).sin(), (t * rate).cos()])
        return x

    def turn(self, x, rows, columns):
        """Rotates neighbouring channels of x [frames, rows columns, H, d]: even pairs by the column, odd pairs by the row."""
        d = x.shape[-1]
        out = torch.empty_like(x)
        for pair in range(d // 2):
            place = torch.arange(rows * columns, dtype=x.dtype)
            place = place % columns if pair % 2 == 0 else torch.div(place, columns, rounding_mode="floor")
            angle = (place * THETA ** (-4 * (pair // 2) / d))[:, None]
            a, b = x[..., 2 * pair], x[..., 2 * pair + 1]
            out[..., 2 * pair] = a * angle.cos() - b * angle.sin()
            out[..., 2 * pair + 1] = a * angle.sin() + b * angle.cos()
        return out

    def attend(self, x, block, rows, columns, over):
        """x [frames, rows columns, W]. `over`: "item", "frame" or "time"."""
        c, (frames, places, _) = self.c, x.shape
        heads, d = c.vt_num_attention_heads, c.qkv_hidden_size // c.vt_num_attention_heads
        q, k, v = F.linear(self.norm(x, block + "norm0"), self.w[block + "wqkv.weight"]).unflatten(-1, (3, heads, d)).unbind(-3)
        q, k = self.turn(q, rows, columns), self.turn(k, rows, columns)
        if over == "item":
            q, k, v = (y.flatten(0, 1)[None] for y in (q, k, v))
        elif over == "time":
            q, k, v = (y.transpose(0, 1) for y in (q, k, v))
        scores = torch.einsum("bihd,bjhd->bhij", q, k) * d**-0.5
        o = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v).flatten(-2)
        if over == "time":
            o = o.transpose(0, 1)
        return F.linear(o.reshape(frames, places, -1), self.w[block + "wo.weight"])

    def item(self, pixels, frames, rows, columns):
        """[rows columns / m, text width]."""
        c = self.c
        x = self.embed(pixels, frames, rows, columns)
        for i in range(c.vt_num_hidden_layers):
            block = f"vision_tower.encoder.blocks.{i}."
            if c.vision_time == "joint":
                x = x + self.attend(x, block, rows, columns, "item")
            else:
                x = x + self.attend(x, block, rows, columns, "frame")
                if frames > 1:
                    x = x + self.attend(x, block, rows, columns, "time")
            inner = F.gelu(F.linear(self.norm(x, block + "norm1"), self.w[block + "mlp.fc0.weight"]), approximate="tanh")
            x = x + F.linear(inner, self.w[block + "mlp.fc1.weight"])
        x = self.norm(x, "vision_tower.encoder.final_layernorm").mean(0)
        down, right = c.merge_kernel_size
        x = x.reshape(rows // down, down, columns // right, right, -1).transpose(1, 2).reshape(-1, down * right * c.vt_hidden_size)
        inner = F.gelu(F.linear(x, self.w["mm_projector.proj.0.weight"]))
        return self.norm(F.linear(inner, self.w["mm_projector.proj.2.weight"]), "mm_projector.post_norm", c.projector_ln_eps)

    def forward(self, pixels, grids):
        """pixels [P, 3, p, p] of all items one after another, grids [(frames, rows, columns)] -> [vectors, text width]."""
        out, begin = [], 0
        for frames, rows, columns in grids:
            count = frames * rows * columns
            out.append(self.item(pixels[begin:begin + count], frames, rows, columns))
            begin += count
        return torch.cat(out)
