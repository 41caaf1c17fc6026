"""Plugin for vLLM-Omni: MiMo-Audio's tokenizer as a service beside the engine, under an unmodified engine.

vLLM-Omni finds `register` through the entry-point group `vllm_omni.general_plugins` and calls it in every process. With
an address set, in MIMO_AUDIO_TOKENIZER_ADDRESS or in the deploy YAML, no engine process loads the tokenizer; without
one, only what this engine is known to do wrong is repaired. `deploy/engine/README.md` tells how to use it.
"""

from ._engine import UnfamiliarEngine
from ._plugin import register

__all__ = ["UnfamiliarEngine", "register"]
