"""Prompts computed in one transformers model and answered in another: the plain cache and the serving loop find what was taken in."""

from __future__ import annotations

import copy
from contextlib import ExitStack

import pytest
import torch

from kvtier import BlockExporter, BlockImporter, HandoverFolder, KVCacheManager, Request, TierConfig
from kvtier.tiering.attach.generation_cache import GenerationCache
from kvtier.tiering.attach.serving_loop import ServingLoop
from kvtier.tiering.attach.transformers import AttachedModel, layout_of


@pytest.fixture
def models(tiny_model):
    """Of two processes."""
    return copy.deepcopy(tiny_model), copy.deepcopy(tiny_model)


@pytest.fixture
def tiers(tiny_model):
    layout = layout_of(tiny_model.config, dtype=tiny_model.dtype, tokens_per_block=4)
    config = TierConfig(primary="60 blocks", secondary="20 blocks", max_batch_size=8, max_seq_len=256)
    made = [KVCacheManager(layout, config, model="tiny@test:0") for _ in range(2)]
    yield made
    for tier in made:
        tier.verify()
        assert tier.stats().leases == tier.stats().sequences == 0
        tier.close(timeout=10)


def export_cached(tier, folder, tokens):
    """Hand over a prompt that is cached: a request that asks for it has it at once."""
    exporter = BlockExporter(tier, folder)
    tier.add_sequence(Request(1000, tokens))
    tier.wait_ready(1000)
    ticket = exporter.export(1000)
    tier.remove_sequence(1000)
    return ticket


def test_generate_goes_on_from_what_another_model_has_computed(models, tiers, generated, prompts, tmp_path):
    folder, prompt = HandoverFolder(tmp_path, "64MiB"), prompts[0]

    def answer(model, tier, tokens, count):
        ids = torch.tensor([tokens])
        with GenerationCache(tier, Request(1, tokens)) as cache:
            output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, cache=cache)
            cache.keep(output[0])
            return output[0].tolist(), cache.reused_tokens

    known, reused = answer(models[0], tiers[0], prompt, 1)
    assert reused == 0
    importer = BlockImporter(tiers[1], folder)
    importer.offer(export_cached(tiers[0], folder, known).to_json())
    assert importer.take_in(Request(2, known)) == len(prompt)
    tokens, reused = answer(models[1], tiers[1], known, 8)
    assert tokens[len(prompt):] == generated(prompt, 9)
    assert reused == len(prompt)


def test_a_serving_loop_goes_on_from_what_another_one_has_computed(models, tiers, generated, prompts, tmp_path):
    folder = HandoverFolder(tmp_path, "64MiB")
    importer = BlockImporter(tiers[1], folder)
    with ExitStack() as stack:
        there, here = (stack.enter_context(ServingLoop(tier, stack.enter_context(AttachedModel(model, [tier.pool(0).primary]))))
                       for model, tier in zip(models, tiers, strict=True))
        known = {}
        for number, prompt in enumerate(prompts):
            answers = there.run([Request(number, prompt, max_new_tokens=1)])
            known[number] = [*prompt, *answers[number].tokens]
            importer.offer(export_cached(tiers[0], folder, known[number]))
            assert importer.take_in(Request(number, known[number])) == len(prompt)
        answers = here.run([Request(number, tokens, max_new_tokens=8) for number, tokens in known.items()])
    for number, prompt in enumerate(prompts):
        assert [known[number][-1], *answers[number].tokens] == generated(prompt, 9)
        assert answers[number].reused_tokens == len(prompt)
