"""Short forms of python/load_test.py and python/soak_test.py on a tiny model: many streams at once, and clients that misbehave."""

import pathlib
import subprocess
import sys

SCRIPTS = pathlib.Path(__file__).resolve().parents[2] / "python"

for script, *args in (["load_test.py", "--preset", "tiny", "--clients", "48", "--tokens", "24"], ["soak_test.py", "--clients", "300", "--at-once", "32"]):
    subprocess.run([sys.executable, SCRIPTS / script, *args], check=True)
