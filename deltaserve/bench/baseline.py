"""transformers' `generate` as users call it: one static batch after the other. The only file that imports it."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from deltaserve.bench.work import Measured, Prompts, Shape
from deltaserve.core.errors import ConfigError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class TransformersTarget:
    """`generate` on one checkpoint, in this process. `num_streams` prompts of equal length make a batch."""

    def __init__(self, directory: Path, dtype: str) -> None:
        try:
            import transformers  # noqa: PLC0415
        except ImportError as error:
            raise ConfigError(
                "transformers is not installed; run scripts/bench, or leave it out of --engines"
            ) from error
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self.name = f"transformers generate, {dtype}"
        self._model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=DTYPES[dtype])
        self._model.generation_config = transformers.GenerationConfig(pad_token_id=0, do_sample=False)

    def run(self, prompts: Prompts, shape: Shape) -> Measured:
        num_tokens = 0
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        for first in range(0, len(prompts), shape.num_streams):
            ids = torch.tensor(prompts[first : first + shape.num_streams])
            with torch.inference_mode():
                output = self._model.generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=shape.output_tokens
                )
            num_tokens += output[:, ids.shape[1] :].numel()
        assert num_tokens == len(prompts) * shape.output_tokens, num_tokens
        return Measured(num_tokens, time.perf_counter() - start_s, time.process_time() - start_cpu_s)

    def close(self) -> None:
        del self._model
