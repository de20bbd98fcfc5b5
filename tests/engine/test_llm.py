"""Offline generation: text, ids and logprobs of real weights, alone and together."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deltaserve import LLM, EngineConfig, SamplingParams
from deltaserve.core.errors import CheckpointError, ConfigError, ContextLengthError, EngineDeadError, RequestError
from deltaserve.core.types import FinishReason, RequestOptions, TokenChunk
from deltaserve.engine.build import size_pools
from deltaserve.engine.launch import RankJob
from deltaserve.engine.settings import engine_config
from deltaserve.engine.team import Team
from deltaserve.model.config import ModelConfig
from deltaserve.model.sizes import parameter_counts
from deltaserve.runner.runner import ModelRunner
from tests.fakes import make_sizes

GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logprobs=1)


@pytest.fixture(scope="module")
def llm(sample_checkpoint: Path) -> Iterator[LLM]:
    with LLM(sample_checkpoint, max_model_len=512, max_num_seqs=4, num_pages=64, debug_checks=True) as llm:
        yield llm


def is_all_free(llm: LLM) -> bool:
    stats = llm.engine.stats()
    return not llm.engine.has_work and stats.num_available_pages == stats.num_pages


def test_one_prompt_as_text_or_ids_gives_one_completion(llm: LLM) -> None:
    prompt_ids = tuple(llm.tokenizer.encode("hello world"))
    (by_text,) = llm.generate("hello world", GREEDY)
    (by_ids,) = llm.generate(prompt_ids, GREEDY)
    (in_list,) = llm.generate([list(prompt_ids)], [GREEDY])
    assert by_text == by_ids == in_list
    assert by_text.prompt_ids == prompt_ids and by_text.finish_reason is FinishReason.LENGTH
    assert len(by_text.token_ids) == 30 and by_text.text == llm.tokenizer.decode(by_text.token_ids)
    assert by_text.logprobs is not None and [entry.token_id for entry in by_text.logprobs] == by_text.token_ids
    assert by_text.prompt_logprobs is None and by_text.error is None


def test_together_is_as_alone_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [(n, *range(n)) for n in (1, 5, 62, 63, 64, 130, 300)]
    params = [replace(GREEDY, temperature=0.9, seed=n, max_tokens=5 * n % 37 + 1, logprobs=None) for n in range(7)]
    alone = [llm.generate(prompt, own)[0] for prompt, own in zip(prompts, params, strict=True)]
    assert llm.generate(prompts, params) == alone
    assert [len(output.token_ids) for output in alone] == [own.max_tokens for own in params]
    assert is_all_free(llm)


def test_options_are_one_for_all_or_one_for_each(llm: LLM) -> None:
    prompt = [3, 1, 4, 1, 5] * 30

    def num_cached(options: RequestOptions | list[RequestOptions] | None) -> list[int]:
        return [output.num_cached for output in llm.generate([prompt, prompt], GREEDY, options=options)]

    salted = RequestOptions(cache_salt="mine")
    assert num_cached(salted)[0] == 0 < num_cached(salted)[0]
    assert num_cached([salted, RequestOptions(cache_salt="other")]) == [128, 0]
    llm.reset_prefix_cache()
    (output,) = llm.generate([prompt], GREEDY, options=salted)
    assert output.num_cached == 0 and output.cache is not None and output.cache.num_prompt == len(prompt)
    with pytest.raises(RequestError, match="1 prompts but 2 options"):
        llm.generate([prompt], GREEDY, options=[salted, salted])
    with pytest.raises(RequestError, match="options must be RequestOptions"):
        llm.generate([prompt], GREEDY, options={"priority": 1})  # type: ignore[arg-type]


def test_no_prompts_give_nothing(llm: LLM) -> None:
    assert llm.generate([], GREEDY) == []


def test_a_stop_string_cuts_text_ids_and_logprobs_and_frees_the_rest(llm: LLM) -> None:
    (whole,) = llm.generate("hello world", GREEDY)
    stop = whole.text[20:23]
    (cut,) = llm.generate("hello world", replace(GREEDY, stop=(stop,), max_tokens=400))
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert (cut.finish_reason, cut.stop_reason) == (FinishReason.STOP, stop)
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)] and len(cut.token_ids) < 30
    assert cut.logprobs == (whole.logprobs or [])[: len(cut.token_ids)]
    assert is_all_free(llm)


def test_prompt_logprobs_come_once_for_every_prompt_token(llm: LLM) -> None:
    (output,) = llm.generate([(1, 2, 3) * 50], replace(GREEDY, prompt_logprobs=2))
    assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
    rest = output.prompt_logprobs[1:]
    assert [entry.token_id for entry in rest if entry is not None] == [2, 3] + [1, 2, 3] * 49
    assert all(entry is not None and len(entry.top) == 2 for entry in rest)


def test_one_wrong_prompt_stops_the_call_before_it_runs(llm: LLM) -> None:
    before = llm.engine.stats().num_steps
    with pytest.raises(ContextLengthError):
        llm.generate([(1, 2), (1,) * 512], GREEDY)
    with pytest.raises(RequestError, match="2 prompts but 1 params"):
        llm.generate([(1,), (2,)], [GREEDY])
    assert llm.engine.stats().num_steps == before and is_all_free(llm)


@pytest.mark.parametrize(
    ("prompts", "params", "param"),
    [
        (None, GREEDY, "prompts"),
        (5, GREEDY, "prompts"),
        ({"prompt": "a"}, GREEDY, "prompts"),
        ([1.5], GREEDY, "prompt"),
        (["a", None], GREEDY, "prompt"),
        ([[1, "a"]], GREEDY, "prompt"),
        ("a", {"max_tokens": 3}, "params"),
        ("a", [5], "params"),
    ],
    ids=str,
)
def test_wrong_types_are_named(llm: LLM, prompts: Any, params: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        llm.generate(prompts, params)
    assert caught.value.param == param and is_all_free(llm)


def test_a_directory_that_is_not_there_is_named() -> None:
    with pytest.raises(CheckpointError, match="no/model is no directory"):
        LLM("no/model")


def test_cached_tokens_are_counted_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every chunk of tokens tells how much of the prompt was cached."""
    step = llm.engine.step

    def step_after_a_hit() -> list[TokenChunk]:
        return [replace(chunk, num_cached=64) for chunk in step()]

    monkeypatch.setattr(llm.engine, "step", step_after_a_hit)
    assert llm.generate("a", GREEDY)[0].num_cached == 64


def test_progress_is_shown_when_asked_for(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a", "b"], GREEDY, show_progress=True)
    assert "generating" in capsys.readouterr().out
    llm.generate(["a", "b"], GREEDY)
    assert capsys.readouterr().out == ""


def test_a_closed_llm_says_so(sample_checkpoint: Path) -> None:
    llm = LLM(sample_checkpoint, max_model_len=128, load_format="dummy")
    llm.close()
    with pytest.raises(EngineDeadError, match="closed"):
        llm.generate("a")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"max_model_len": 1 << 20}, "--max-model-len 1048576 is more than the 8192 positions"),
        ({"tensor_parallel_size": 3}, "--tensor-parallel-size 3 does not divide"),
        ({"max_num_seq": 3}, "did you mean max_num_seqs"),
        ({"num_pages": 2, "max_model_len": 8192}, "--num-pages 2"),
        ({"dtype": "bfloat16"}, "--dtype bfloat16"),
    ],
)
def test_settings_that_cannot_be_served_are_sentences(
    sample_checkpoint: Path, settings: dict[str, int | str], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        LLM(sample_checkpoint, **settings)


def test_auto_takes_what_the_pools_hold(sample_checkpoint: Path) -> None:
    short = LLM(sample_checkpoint, num_pages=5).engine.info
    assert short.max_model_len == 5 * 64 and "--num-pages 5" in short.notes[-1]
    whole = LLM(sample_checkpoint, max_num_seqs=1).engine.info
    assert whole.max_model_len == 8192 and not any("pages hold" in note for note in whole.notes)


def test_a_directory_without_a_model_is_a_checkpoint_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing"):
        LLM(tmp_path)


def test_weights_beyond_memory_are_refused(sample_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltaserve.engine.build.available_memory_bytes", lambda: 1 << 20)
    with pytest.raises(ConfigError, match=r"of memory are free"):
        LLM(sample_checkpoint)


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_tied_head_is_counted_beside_the_token_table(
    sample_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, is_tied: bool
) -> None:
    """Tied or not, both are in memory: an exact fit fits, and a byte less does not."""
    config = engine_config(sample_checkpoint, {"num_pages": 128})
    untied = replace(ModelConfig.from_directory(sample_checkpoint), tie_word_embeddings=False)
    shape = replace(untied, tie_word_embeddings=is_tied)
    needed_bytes = 4 * parameter_counts(untied).total + size_pools(config, untied).total_bytes
    monkeypatch.setattr("deltaserve.engine.build.available_memory_bytes", lambda: needed_bytes)
    size_pools(config, shape)
    monkeypatch.setattr("deltaserve.engine.build.available_memory_bytes", lambda: needed_bytes - 1)
    with pytest.raises(ConfigError, match="are free"):
        size_pools(config, shape)


def test_two_ranks_give_the_tokens_of_one_and_leave_together(llm: LLM, sample_checkpoint: Path) -> None:
    prompts = [(1, 2, 3), (4,) * 100]
    alone = llm.generate(prompts, GREEDY)
    teams: list[Team] = []
    with pytest.MonkeyPatch.context() as patch, llm_with_team(patch, teams, sample_checkpoint) as two:
        both = two.generate(prompts, GREEDY)
        assert [output.token_ids for output in both] == [output.token_ids for output in alone]
        (team,) = teams
        assert team.ranks.failure() is None
    assert team.ranks.failure() == "rank 1 exited with code 0"


def test_after_a_broken_step_the_other_rank_ends_and_a_new_team_can_be_made(sample_checkpoint: Path) -> None:
    """Rank 0 breaks off half-way, so that rank 1 waits in an exchange that never comes."""
    for is_broken in (True, False):
        teams: list[Team] = []
        with pytest.MonkeyPatch.context() as patch, llm_with_team(patch, teams, sample_checkpoint) as two:
            if is_broken:
                patch.setattr("deltaserve.model.qwen3_5.Qwen3_5.logits", break_off)
                with pytest.raises(EngineDeadError, match="ZeroDivisionError"):
                    two.generate("a", GREEDY)
            else:
                assert len(two.generate("a", GREEDY)[0].token_ids) == 30
        assert teams[0].ranks.failure() == f"rank 1 {'was ended by SIGKILL' if is_broken else 'exited with code 0'}"


def break_off(*_: object) -> None:
    raise ZeroDivisionError


def llm_with_team(patch: pytest.MonkeyPatch, teams: list[Team], directory: Path) -> LLM:
    """An LLM of two ranks; the team it makes is put into `teams`."""

    def keep(*arguments: object, **settings: object) -> Team:
        teams.append(Team(*arguments, **settings))  # type: ignore[arg-type]
        return teams[-1]

    patch.setattr("deltaserve.engine.build.Team", keep)
    return LLM(directory, max_model_len=512, num_pages=64, tensor_parallel_size=2)


def test_a_host_tier_larger_than_the_free_memory_is_refused(
    sample_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"max_model_len": 256, "max_num_seqs": 2, "num_pages": 8, "host_cache_bytes": 1 << 24}
    config, shape = engine_config(sample_checkpoint, settings), ModelConfig.from_directory(sample_checkpoint)
    roomy = 1 << 30
    monkeypatch.setattr("deltaserve.engine.build.available_memory_bytes", lambda: roomy)
    sizes = size_pools(config, shape)
    assert 0 < sizes.host_bytes <= 1 << 24
    two = size_pools(replace(config, tensor_parallel_size=2), shape)
    assert two.host_bytes <= 1 << 23, "the budget is that of all ranks"
    weights_bytes = 4 * parameter_counts(shape).total
    monkeypatch.setattr("deltaserve.engine.build.available_memory_bytes", lambda: weights_bytes + (1 << 24))
    with pytest.raises(ConfigError, match=r"--host-cache-bytes 16777216 .* is more than the host has"):
        size_pools(config, shape)


def test_bytes_that_changed_in_the_cache_end_the_engine(sample_checkpoint: Path) -> None:
    """In debug mode nothing is answered from a block that is not what was published."""
    prompt = [2, 7, 1, 8] * 40
    with LLM(sample_checkpoint, max_model_len=512, num_pages=64, debug_checks=True) as llm:
        llm.generate([prompt], GREEDY)
        runner = llm.engine._runner
        assert isinstance(runner, ModelRunner)
        runner._pools.pages[1:] += 1
        with pytest.raises(EngineDeadError, match=r"bytes restored differ from bytes saved: page \d+"):
            llm.generate([prompt], GREEDY)


@pytest.mark.parametrize("num_drafts", [0, 2])
def test_two_ranks_move_their_own_blocks(sample_checkpoint: Path, num_drafts: int) -> None:
    """Pages for two prompts and few snapshots, seen again and again: hits from both tiers, on both ranks."""
    prompts = [[n, *range(100 + n, 300 + n)] for n in range(6)] * 2
    params = replace(GREEDY, max_tokens=8, logprobs=None)
    with LLM(sample_checkpoint, max_model_len=512, max_num_seqs=4, num_pages=64, enable_prefix_caching=False) as plain:
        expected = plain.generate(prompts[:6], params)
    settings = {"num_pages": 9, "num_snapshots": 1, "host_cache_bytes": 1 << 23, "num_drafts": num_drafts}
    with LLM(
        sample_checkpoint, max_model_len=512, max_num_seqs=2, tensor_parallel_size=2, debug_checks=True, **settings
    ) as two:
        found = two.generate(prompts, params)
        cache = two.engine.stats().cache
    assert found == expected * 2
    assert min(cache.pages_saved, cache.pages_restored, cache.snapshots_restored, cache.num_hit) > 0, cache


def test_ranks_with_different_settings_refuse_to_start(
    sample_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 believes in another seed than it has told rank 1."""
    digest = RankJob.digest

    def with_own_seed(job: RankJob) -> int:
        return digest(replace(job, config=replace(job.config, seed=job.config.seed + 1)))

    monkeypatch.setattr(RankJob, "digest", with_own_seed)
    with pytest.raises(ConfigError, match="different settings or pool sizes"):
        LLM(sample_checkpoint, max_model_len=256, num_pages=8, tensor_parallel_size=2)


def test_a_follower_that_cannot_start_ends_the_wait_for_it(sample_checkpoint: Path) -> None:
    config = engine_config(sample_checkpoint, {"tensor_parallel_size": 2})
    lost = replace(config, model=Path("/nonexistent"))
    with pytest.raises(EngineDeadError, match="rank 1 exited with code 1"):
        Team(lost, make_sizes(8, 2))


LAZY = """
import sys
import deltaserve
assert not [name for name in sys.modules if name.split(".")[0] in {"torch", "numpy", "zmq", "msgspec", "fastapi"}]
assert deltaserve.SamplingParams(seed=1).seed == 1 and deltaserve.EngineConfig("x").seed == 0
assert "torch" not in sys.modules
import deltaserve.engine.client, deltaserve.engine.text, deltaserve.engine.tokenizer
assert "torch" not in sys.modules and "transformers" not in sys.modules
deltaserve.LLM
assert "torch" in sys.modules
"""
LAZY_LLM = """
import sys
from deltaserve import LLM
found = {name.split(".")[0] for name in sys.modules} & {"zmq", "msgspec", "fastapi", "uvicorn", "transformers", "rich"}
assert not found, found
assert "torch._dynamo" not in sys.modules and "torch._inductor" not in sys.modules
"""


@pytest.mark.parametrize("code", [LAZY, LAZY_LLM])
def test_nobody_imports_what_it_does_not_need(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_the_public_surface() -> None:
    import deltaserve

    assert {"LLM", "EngineConfig", "SamplingParams", "RequestOptions"} <= set(dir(deltaserve))
    assert deltaserve.RequestOptions is RequestOptions
    assert deltaserve.EngineConfig is EngineConfig
    with pytest.raises(AttributeError, match="no attribute 'Engine'"):
        _ = deltaserve.Engine  # type: ignore[attr-defined]
