"""An independent implementation of the Kimi K3 and Kimi-Linear decoders in plain PyTorch: the other side of every agreement test.

Written from the Kimi K3 report (arXiv:2607.24653), Kimi Linear (arXiv:2510.26692), Attention Residuals (arXiv:2603.15031) and the released
configuration and tensor names, not from Godwit's sources. In fp64 with the recurrence it is the oracle; in fp32 with chunks and grouped experts it
is the peer that the training step is timed against. Needs nothing but torch.
"""

from .config import Config
from .model import Kimi, Output
from .vision import Tower, VisionConfig
from .weights import load_directory, save_directory

__all__ = ["Config", "Kimi", "Output", "Tower", "VisionConfig", "load_directory", "save_directory"]
