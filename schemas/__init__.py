"""What each model family looks like in MaxText and in Hugging Face: `SCHEMAS`, by architecture."""

from mtx2vllm.schemas.deepseek import DEEPSEEK3
from mtx2vllm.schemas.gemma import GEMMA2, GEMMA3, GEMMA4
from mtx2vllm.schemas.gpt_oss import GPT_OSS
from mtx2vllm.schemas.llama import LLAMA, LLAMA4, MIXTRAL
from mtx2vllm.schemas.olmo import OLMO3
from mtx2vllm.schemas.qwen import QWEN2, QWEN3, QWEN3_MOE
from mtx2vllm.schemas.qwen_next import QWEN3_5_MOE, QWEN3_NEXT
from mtx2vllm.schemas.rules import Schema

FAMILIES: tuple[Schema, ...] = (
    QWEN2, QWEN3, QWEN3_MOE, QWEN3_5_MOE, QWEN3_NEXT, LLAMA, MIXTRAL, LLAMA4, GEMMA2, GEMMA3, GEMMA4, DEEPSEEK3,
    GPT_OSS, OLMO3,
)  # fmt: skip
SCHEMAS: dict[str, Schema] = {name: schema for schema in FAMILIES for name in schema.architectures}

__all__ = ["FAMILIES", "SCHEMAS", "Schema"]
