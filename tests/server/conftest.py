"""An application over a FakeClient, with the sample checkpoint's tokenizer and template."""

from __future__ import annotations

from pathlib import Path

import pytest

from deltaserve.engine.tokenizer import Tokenizer, grammar_vocabulary
from deltaserve.grammar.compiler import Grammars
from deltaserve.server.app import create_app
from deltaserve.server.metrics import Metrics
from deltaserve.server.parsers.formats import Formats
from deltaserve.server.sampling import Limits
from deltaserve.server.served import Served
from deltaserve.server.template import ChatTemplate
from tests.server.fakes import MAX_MODEL_LEN, FakeClient, Http

VOCAB_SIZE = 1024


@pytest.fixture(scope="session")
def tokenizer(sample_checkpoint: Path) -> Tokenizer:
    return Tokenizer(sample_checkpoint)


@pytest.fixture(scope="session")
def template(sample_checkpoint: Path) -> ChatTemplate:
    template = ChatTemplate.from_directory(sample_checkpoint)
    assert template is not None
    return template


@pytest.fixture
def engine(tokenizer: Tokenizer) -> FakeClient:
    return FakeClient(tokenizer, VOCAB_SIZE)


@pytest.fixture
def served(engine: FakeClient, tokenizer: Tokenizer, template: ChatTemplate) -> Served:
    return Served(
        names=("tiny", "tiny-alias"),
        root="/models/tiny",
        version="9.9",
        engine=engine,
        tokenizer=tokenizer,
        template=template,
        formats=Formats.choose("auto", "auto", template.source),
        defaults={"temperature": 0.7, "top_k": 20, "top_p": 0.95},
        limits=Limits(MAX_MODEL_LEN, VOCAB_SIZE, max_logprobs=20),
        metrics=Metrics("tiny"),
        grammars=Grammars(lambda: grammar_vocabulary(tokenizer, VOCAB_SIZE)),
    )


@pytest.fixture
def http(served: Served) -> Http:
    return Http(create_app(served))
