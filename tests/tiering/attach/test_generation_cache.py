"""The plain cache for ``model.generate``: the same tokens as without it, and nothing computed that the tier has."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from gate import Gate
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.cache_utils import CacheLayerMixin

from kvtier import CapacityError, ConfigError, KVCacheManager, KVLayout, LayerSpec, Request, RequestError, TierConfig
from kvtier.io.faults import FaultKind, FaultOperation, FaultRule, Faults
from kvtier.tiering import readiness
from kvtier.tiering.attach.generation_cache import GenerationCache, _Layer
from kvtier.tiering.attach.transformers import layout_of


@pytest.fixture(scope="session")
def model(tiny_model):
    return copy.deepcopy(tiny_model)  # the other one may be attached


@pytest.fixture
def open_tier(model, tmp_path):
    tiers = []

    def start(primary="40 blocks", secondary="40 blocks", nvme="0 blocks", layout=None, **settings):
        layout = layout or layout_of(model.config, dtype=model.dtype, tokens_per_block=4)
        tier = KVCacheManager(layout, TierConfig(primary=primary, secondary=secondary, nvme=nvme, nvme_free_space_reserve="0B",
                                                 nvme_directory=tmp_path / "nvme", **{"max_seq_len": 256, **settings}),
                              model="tiny@test:0")
        tiers.append(tier)
        return tier

    yield start
    for tier in tiers:
        tier.verify()
        assert tier.stats().leases == tier.stats().sequences == 0
        tier.close(timeout=10)


def generate(model, prompt, new_tokens, **keywords):
    ids = torch.tensor([prompt])
    return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, **{"do_sample": False, **keywords})


def answer(model, tier, number, prompt, new_tokens, load_timeout=30.0, **keywords):
    """Through the cache; returns the new tokens and how many tokens were reused."""
    with GenerationCache(tier, Request(number, prompt), load_timeout=load_timeout) as cache:
        output = generate(model, prompt, new_tokens, cache=cache, **keywords)
        cache.keep(output[0])
    return output[0, len(prompt):].tolist(), cache.reused_tokens


def test_a_conversation_is_answered_as_by_generate_and_goes_on_where_it_ended(model, open_tier, generated, prompts):
    tier = open_tier()
    history = list(prompts[0])
    for turn in range(3):
        tokens, reused = answer(model, tier, turn, history, 9)
        assert tokens == generated(history, 9)
        assert reused == (0 if turn == 0 else len(history) - 4)  # the newest token of the answer, and what was said since
        history += [*tokens, 5, 6, 7]


def test_what_is_reused_is_really_read(model, open_tier, generated, prompts):
    """The comparison above can fail: overwriting one stored block changes the answer."""
    tier = open_tier()
    answer(model, tier, 0, prompts[0], 2)
    tier.pool().primary.tensor.fill_(0.5)
    tokens, reused = answer(model, tier, 1, prompts[0], 9)
    assert reused
    assert tokens != generated(prompts[0], 9)


def test_only_what_is_not_there_is_computed(model, open_tier, prompts):
    tier = open_tier()
    answer(model, tier, 0, prompts[0], 2)
    seen = []
    handle = model.model.embed_tokens.register_forward_hook(lambda _module, arguments, _output: seen.append(arguments[0].shape[1]))
    try:
        _, reused = answer(model, tier, 1, [*prompts[0], 5, 6], 3)
    finally:
        handle.remove()
    assert seen == [len(prompts[0]) + 2 - reused, 1, 1]


@pytest.mark.parametrize("chunks", [{}, {"prefill_chunk_size": 5}])
@pytest.mark.parametrize(("said", "given"), [(slice(0, 37), slice(3, 33)), (slice(0, 30), slice(2, 37)), (slice(0, 30), slice(0, 37)),
                                             (slice(0, 37), slice(0, 30))])
@pytest.mark.parametrize("new_tokens", [1, 4, 12])
@pytest.mark.parametrize("has_prefix", [False, True])
def test_another_prompt_than_the_request_is_not_stored_as_the_requests(model, open_tier, generated, prompts, caplog, said, given,
                                                                        new_tokens, has_prefix, chunks):
    tier = open_tier()
    text = prompts[0]
    assert len(text) == 37
    if has_prefix:
        answer(model, tier, 0, text[:8], 1)
    with GenerationCache(tier, Request(1, text[said])) as cache:
        generate(model, text[given], new_tokens, cache=cache, **chunks)
    tokens, reused = answer(model, tier, 2, [*text[said], 5, 6], 6)
    assert tokens == generated([*text[said], 5, 6], 6)
    assert reused <= 8
    assert "Nothing is stored" in caplog.text


def test_prompts_over_three_levels_come_back_from_each(model, open_tier, generated, prompts):
    tier = open_tier(primary="24 blocks", secondary="10 blocks", nvme="100 blocks")
    for turn in range(2):
        for number, prompt in enumerate(prompts):
            assert answer(model, tier, 10 * turn + number, prompt, 4)[0] == generated(prompt, 4)
        assert tier.flush(timeout=20)
    assert tier.stats().hit_tokens.nvme > 0


@pytest.mark.parametrize("operation", [FaultOperation.COPY, FaultOperation.READ])
def test_what_fails_is_computed_again(model, open_tier, generated, prompts, operation):
    tier = open_tier(primary="24 blocks", secondary="10 blocks", nvme="100 blocks",
                     faults=Faults([FaultRule(FaultKind.FAILURE, operation, rate=0.2)], seed=4))
    for turn in range(3):
        for number, prompt in enumerate(prompts):
            assert answer(model, tier, 10 * turn + number, prompt, 4)[0] == generated(prompt, 4)


def test_what_does_not_come_in_time_is_computed(model, open_tier, generated, prompts, monkeypatch):
    gate = Gate(FaultOperation.COPY)
    tier = open_tier(primary="20 blocks", faults=gate)
    gate.open()
    answer(model, tier, 0, prompts[0], 2)
    answer(model, tier, 1, [100] * 60, 2)  # pushes the first one down
    assert tier.flush()
    gate.close()
    remove = tier.remove_sequence

    def open_and_remove(*given, **wishes):  # it has not come in time
        gate.open()
        remove(*given, **wishes)

    monkeypatch.setattr(tier, "remove_sequence", open_and_remove)
    with GenerationCache(tier, Request(2, prompts[0]), load_timeout=1.0) as cache:
        output = generate(model, prompts[0], 5, cache=cache)
    assert cache.reused_tokens == 0
    assert output[0, len(prompts[0]):].tolist() == generated(prompts[0], 5)


def test_where_a_read_that_hangs_holds_up_its_blocks_a_prompt_is_answered_and_not_stored(model, open_tier, generated, prompts):
    gate = Gate(FaultOperation.READ)
    tier = open_tier(primary="20 blocks", secondary="10 blocks", nvme="100 blocks", faults=gate)
    for number in range(3):  # the first one is on NVMe alone then
        answer(model, tier, number, [prompts[0], [100] * 60, [101] * 60][number], 2)
        assert tier.flush()
    prompt = [*prompts[0], *prompts[4][:40]]  # it needs all blocks, also those that are being read into
    tokens, reused = answer(model, tier, 3, prompt, 3, load_timeout=0.2)
    assert (tokens, reused) == (generated(prompt, 3), 0)
    assert gate.arrived
    gate.open()
    assert tier.flush()
    assert tier.match([*prompt, 5]).reusable_tokens <= len(prompts[0])
    assert answer(model, tier, 4, prompt, 3)[0] == tokens


def test_where_copies_out_of_its_blocks_hang_a_prompt_is_answered_and_not_stored(model, open_tier, generated, prompts, monkeypatch):
    gate = Gate(FaultOperation.COPY)
    tier = open_tier(primary="20 blocks", faults=gate)
    answer(model, tier, 0, prompts[0], 2)
    with monkeypatch.context() as patch:
        patch.setattr(readiness, "STEP_TIMEOUT", 0.1)
        tokens, reused = answer(model, tier, 1, prompts[2], 5, load_timeout=0.1)  # pushes the first one down, which does not end
    gate.open()
    assert (tokens, reused) == (generated(prompts[2], 5), 0)
    assert gate.arrived
    assert tier.flush()
    assert tier.match([*prompts[2], 5]).reusable_tokens == 0
    assert answer(model, tier, 2, prompts[2], 5) == (tokens, 0)


def test_beams_and_several_answers_share_the_prompt(model, open_tier, prompts):
    tier = open_tier()
    for number in range(2):
        with GenerationCache(tier, Request(number, prompts[0])) as cache:
            beams = generate(model, prompts[0], 6, cache=cache, num_beams=3, num_return_sequences=3)
            cache.keep(beams[0])
        assert torch.equal(beams, generate(model, prompts[0], 6, num_beams=3, num_return_sequences=3))
        assert cache.reused_tokens == (0 if number == 0 else len(prompts[0]) - 1)
        assert tier.match(beams[0]).reusable_tokens == 36  # the prompt's full blocks, and not the beams' own tokens
    with GenerationCache(tier, Request(5, prompts[0])) as cache:
        several = generate(model, prompts[0], 4, cache=cache, do_sample=True, num_return_sequences=2)
    assert several.shape == (2, len(prompts[0]) + 4)


def test_a_block_table_that_another_thread_asks_for_meanwhile_changes_nothing(model, open_tier, generated, prompts, monkeypatch):
    """The manager fills one table for all: whoever relied on it would read and write another one's blocks."""
    tier = open_tier()
    other = GenerationCache(tier, Request(100, prompts[2]))
    ask = tier.block_table

    def answer_two(ids, group=0):
        table = ask(ids, group)
        ask([100], group)
        return table

    monkeypatch.setattr(tier, "block_table", answer_two)
    for number in range(2):
        tokens, reused = answer(model, tier, number, prompts[0], 6)
        assert tokens == generated(prompts[0], 6)
        assert reused == 36 * number
    assert generate(model, prompts[2], 6, cache=other)[0, len(prompts[2]):].tolist() == generated(prompts[2], 6)
    other.close()
    assert answer(model, tier, 101, prompts[2], 6) == (generated(prompts[2], 6), 63)


def test_threads_with_prompts_of_their_own_are_answered_as_by_generate(model, open_tier, generated, prompts):
    tier = open_tier(primary="60 blocks", nvme="100 blocks")
    wrong = []

    def talk(number):
        prompt = [*prompts[0][:9 * number], *prompts[2][:40]]
        for turn in range(12):
            tokens, _reused = answer(model, tier, 100 * number + turn, prompt[:len(prompt) - turn], 2)
            if tokens != expected[number][turn]:
                wrong.append((number, turn))

    expected = [[generated([*prompts[0][:9 * number], *prompts[2][:40]][:40 + 9 * number - turn], 2) for turn in range(12)]
                for number in range(3)]
    threads = [threading.Thread(target=talk, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert wrong == []
    assert tier.stats().hit_tokens.primary > 0


def test_another_model_of_the_family_works_too(open_tier, prompts):
    torch.manual_seed(3)
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=199, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
                                         num_key_value_heads=1, initializer_range=0.4)).eval()
    model.generation_config.eos_token_id = None
    tier = open_tier(layout=layout_of(model.config, dtype=model.dtype, tokens_per_block=4))
    for number in range(2):
        tokens, reused = answer(model, tier, number, prompts[0], 6)
        assert tokens == generate(model, prompts[0], 6)[0, len(prompts[0]):].tolist()
    assert reused == len(prompts[0]) - 1


def test_without_keep_the_prompt_alone_is_stored_and_after_an_error_nothing(model, open_tier, prompts):
    tier = open_tier()
    prompt = prompts[0]

    def break_down(number):
        with GenerationCache(tier, Request(number, prompt)) as cache:
            generate(model, prompt, 3, cache=cache)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        break_down(0)
    assert tier.match([*prompt, 5]).reusable_tokens == 0
    with GenerationCache(tier, Request(1, prompt)) as cache:
        output = generate(model, prompt, 9, cache=cache)
    assert tier.match(output[0].tolist()).reusable_tokens == 36
    with GenerationCache(tier, Request(2, prompt)) as cache:
        cache.close()
        cache.close()


def test_an_answer_that_has_no_room_is_left_out_and_the_prompt_is_stored(model, open_tier, generated, prompts):
    tier = open_tier(primary="11 blocks", secondary="0 blocks")
    tokens, _ = answer(model, tier, 0, prompts[0], 20)
    assert tokens == generated(prompts[0], 20)
    assert tier.match([*prompts[0], 5]).reusable_tokens == 36


def drop(cache, length):
    """Crop to so many tokens."""
    cache.crop(length - cache.get_seq_length())


def test_what_takes_the_place_of_cropped_tokens_is_never_found_as_theirs(model, open_tier, generated, prompts):
    tier = open_tier()
    prompt, other = prompts[0], prompts[4]
    with GenerationCache(tier, Request(0, prompt)) as cache:
        generate(model, prompt, 4, cache=cache)
        drop(cache, 20)
        generate(model, [*prompt[:20], *other[:18]], 4, cache=cache)  # as many as the prompt has
    tokens, reused = answer(model, tier, 1, [*prompt, 5, 6], 6)
    assert reused == 20
    assert tokens == generated([*prompt, 5, 6], 6)


def test_another_answer_to_the_same_prompt_is_not_found_as_the_kept_one(model, open_tier, generated, prompts):
    tier = open_tier()
    with GenerationCache(tier, Request(0, prompts[0])) as cache:
        first = generate(model, prompts[0], 8, cache=cache)
        cache.keep(first[0])
        drop(cache, len(prompts[0]) - 1)
        second = generate(model, prompts[0], 8, cache=cache, do_sample=True, temperature=5.0)
    assert not torch.equal(first, second)
    history = [*first[0].tolist(), 5, 6]
    tokens, reused = answer(model, tier, 1, history, 6)
    assert reused == 36
    assert tokens == generated(history, 6)


def test_what_is_kept_is_what_the_cache_held_then(model, open_tier, generated, prompts):
    """The newest token is not computed yet; another one may come in its place."""
    tier = open_tier()
    with GenerationCache(tier, Request(0, prompts[0])) as cache:
        first = generate(model, prompts[0], 8, cache=cache)[0].tolist()
        cache.keep([*first, 5, 6, 7])
        generate(model, [*first[:-1], *prompts[4][:6]], 3, cache=cache)
    tokens, reused = answer(model, tier, 1, [*first, 5, 6, 7, 8], 6)
    assert reused == len(first) - 1
    assert tokens == generated([*first, 5, 6, 7, 8], 6)


def test_a_cache_that_was_reset_is_empty_and_stores_what_is_kept_alone(model, open_tier, generated, prompts):
    tier = open_tier()
    answer(model, tier, 0, prompts[0], 4)
    prompt, other = [*prompts[0], 9, 9, 9, 9], prompts[4]
    with GenerationCache(tier, Request(1, prompt)) as cache:
        assert cache.reused_tokens == 37
        generate(model, prompt, 4, cache=cache)
        cache.reset()
        assert generate(model, other, 4, cache=cache)[0, len(other):].tolist() == generated(other, 4)
    assert tier.match([*prompt, 5]).reusable_tokens <= 37
    with GenerationCache(tier, Request(2, prompt)) as cache:
        cache.reset()
        cache.keep(generate(model, prompt, 4, cache=cache)[0])
    tokens, reused = answer(model, tier, 3, [*prompt, 5, 6], 6)
    assert reused >= 40
    assert tokens == generated([*prompt, 5, 6], 6)


@pytest.mark.parametrize("assisted", [{"prompt_lookup_num_tokens": 4}, {"assistant_model": True}])
def test_assisted_decoding_is_right_without_reuse_and_refused_with_it(model, open_tier, generated, prompts, assisted):
    """Its first forward pass is of the whole prompt, whatever the cache has."""
    assisted = {name: model if wanted is True else wanted for name, wanted in assisted.items()}
    tier, prompt = open_tier(), prompts[0]
    assert answer(model, tier, 0, prompt, 9, **assisted) == (generated(prompt, 9), 0)
    history = [*prompt, *generated(prompt, 9), 5]
    with pytest.raises(ValueError, match="can be cropped"):
        answer(model, tier, 1, history, 9, **assisted)
    with GenerationCache(tier, Request(2, history, skip_read=True)) as cache:
        output = generate(model, history, 9, cache=cache, **assisted)
        cache.keep(output[0])
    assert output[0, len(history):].tolist() == generated(history, 9)
    history = [*output[0].tolist(), 5, 6]
    tokens, reused = answer(model, tier, 3, history, 6)
    assert tokens == generated(history, 6)
    assert reused == len(history) - 3


def test_a_prompt_that_was_given_twice_is_never_stored(model, open_tier, generated, prompts, caplog):
    tier, prompt = open_tier(), prompts[0]
    answer(model, tier, 0, prompt[:20], 1)
    with GenerationCache(tier, Request(1, prompt)) as cache:
        model(torch.tensor([prompt]), cache=cache)
        cache.keep([*prompt, 5, 6, 7, 8])
    assert "skip_read=True" in caplog.text
    tokens, reused = answer(model, tier, 2, prompt, 6)
    assert reused == 20
    assert tokens == generated(prompt, 6)


def test_a_prompt_cut_into_chunks_is_answered_as_in_one(model, open_tier, generated, prompts):
    tier = open_tier()
    for number in range(2):
        tokens, reused = answer(model, tier, number, prompts[0], 6, prefill_chunk_size=7)
        assert tokens == generated(prompts[0], 6)
        assert reused == (0 if number == 0 else len(prompts[0]) - 1)


@pytest.mark.parametrize("change", [lambda cache: cache.batch_repeat_interleave(3), lambda cache: cache.reorder_cache(torch.tensor([0])),
                                    lambda cache: cache.batch_select_indices(torch.tensor([0])), lambda cache: cache.crop(-5),
                                    lambda cache: cache.crop(0), lambda cache: cache.crop(-99)])
def test_what_is_reused_can_be_changed_before_the_first_forward_pass(model, open_tier, generated, prompts, change):
    tier = open_tier()
    answer(model, tier, 0, prompts[0], 1)
    with GenerationCache(tier, Request(1, prompts[0])) as cache:
        change(cache)
        assert cache.get_seq_length() in (36, 31, 0)
        assert generate(model, prompts[0], 6, cache=cache)[0, len(prompts[0]):].tolist() == generated(prompts[0], 6)
    tokens, reused = answer(model, tier, 2, [*prompts[0], 5], 6)
    assert reused >= 36
    assert tokens == generated([*prompts[0], 5], 6)


def test_a_request_of_several_beams_has_the_prompt_alone_stored(model, open_tier, prompts):
    tier = open_tier(max_beam_width=3)
    answer(model, tier, 0, prompts[0], 4)
    with GenerationCache(tier, Request(1, [5, *prompts[0]], beam_width=3)) as cache:
        cache.keep(generate(model, [5, *prompts[0]], 4, cache=cache)[0])
    assert tier.match([5, *prompts[0], 5]).reusable_tokens == 36


def test_tokens_that_do_not_belong_to_the_prompt_are_refused(model, open_tier, prompts):
    expected = pytest.raises(RequestError, match="do not begin with the prompt's 37")
    with GenerationCache(open_tier(), Request(0, prompts[0])) as cache, expected:
        cache.keep([1, 2, 3])


def test_a_prompt_longer_than_the_pool_is_refused_and_nothing_is_held(open_tier):
    tier = open_tier(primary="10 blocks", secondary="0 blocks")
    with pytest.raises(CapacityError):
        GenerationCache(tier, Request(0, [5] * 100))


def test_an_answer_longer_than_the_tiers_sequences_is_stored_as_far_as_it_goes(model, open_tier, prompts):
    tier = open_tier(max_seq_len=len(prompts[0]) + 4)
    with GenerationCache(tier, Request(0, prompts[0])) as cache:
        output = generate(model, prompts[0], 9, cache=cache)
        cache.keep(output[0])
    assert tier.match(prompts[0]).reusable_blocks > 0


def test_layouts_that_a_plain_cache_cannot_hold_are_refused(open_tier):
    layout = KVLayout([LayerSpec.attention(2, 8, window=8), LayerSpec.attention(2, 8)], "float32", 4)
    with pytest.raises(ConfigError, match="full attention alone"):
        GenerationCache(open_tier(layout=layout), Request(0, [5, 6]))


def test_a_model_of_another_shape_is_told_so(model, open_tier):
    tier = open_tier(layout=KVLayout.uniform(2, 1, 8, "float32", 4))
    with pytest.raises(ConfigError, match=r"the cache holds .* of 1 heads"), GenerationCache(tier, Request(0, [5, 6])) as cache:
        generate(model, [5, 6], 1, cache=cache)


def test_our_layer_has_all_that_the_installed_transformers_asks_of_one():
    """Contract test: nothing abstract is left, and what generate looks up is there."""
    assert not getattr(_Layer, "__abstractmethods__", None)
    assert issubclass(_Layer, CacheLayerMixin)
    layer = _Layer(torch.zeros(2, 3, 8), torch.zeros(2, 3, 8))
    assert layer.get_seq_length() == 3
    assert layer.get_mask_sizes(2) == (5, 0)
    assert layer.get_max_length() == -1
