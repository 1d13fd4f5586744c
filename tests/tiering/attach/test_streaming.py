"""asyncio in front of the loop: many tasks, streams, cancellation at any await point, consumers that stop reading."""

from __future__ import annotations

import asyncio
import threading

import pytest

from kvtier.errors import CapacityError, KVTierError, RequestError, TransferError
from kvtier.tiering.attach.sampling import Sampling
from kvtier.tiering.attach.streaming import AsyncServing
from kvtier.tiering.ledger.request import Request
from kvtier.types import Level


async def collect(stream, tokens=None):
    tokens = [] if tokens is None else tokens
    async for token in stream:
        tokens.append(token)
    return tokens


async def until_nothing_is_held(cache):
    async with asyncio.timeout(20):
        while cache.stats().sequences:
            await asyncio.sleep(0.005)
    assert cache.stats().leases == 0
    assert cache.num_free_blocks(Level.PRIMARY) == cache.pool().primary.num_blocks


class Gate:
    """A model that waits, at each call, for the test to let it through."""

    def __init__(self, model):
        self.model = model
        self.vocabulary_size = model.vocabulary_size
        self.calls = threading.Semaphore(0)
        self.num_calls = 0
        self.fail = False

    def _pass(self):
        self.num_calls += 1
        assert self.calls.acquire(timeout=20)
        if self.fail:
            raise ZeroDivisionError("the model broke")

    def prefill(self, *arguments):
        self._pass()
        return self.model.prefill(*arguments)

    def decode(self, *arguments):
        self._pass()
        return self.model.decode(*arguments)


async def let_go_on(model):
    while True:
        model.calls.release()
        await asyncio.sleep(0.001)


async def test_answers_and_streams_are_those_of_generate(serving, generated, prompts):
    loop = serving()
    async with AsyncServing(loop) as served:
        answers, streams = await asyncio.gather(
            asyncio.gather(*(served.generate(Request(number, prompt, max_new_tokens=6)) for number, prompt in enumerate(prompts))),
            asyncio.gather(*(collect(served.stream(Request(10 + number, prompt, max_new_tokens=6)))
                             for number, prompt in enumerate(prompts))))
    expected = [generated(prompt, 6) for prompt in prompts]
    assert [answer.tokens for answer in answers] == expected
    assert streams == expected


async def test_tokens_come_one_by_one_while_the_model_goes_on(serving, generated, prompts):
    loop = serving(watch=Gate)
    async with asyncio.timeout(20), AsyncServing(loop) as served:
        stream = served.stream(Request(0, prompts[1], max_new_tokens=4))
        tokens = []
        for _ in range(3):
            loop.model.calls.release()
            tokens.append(await anext(stream))
        assert tokens == generated(prompts[1], 4)[:3]
        loop.model.calls.release(5)
        assert tokens + await collect(stream) == generated(prompts[1], 4)


async def test_sampling_and_beams_reach_the_loop(serving, prompts):
    loop = serving(max_beam_width=2)
    async with AsyncServing(loop) as served:
        first = await served.generate(Request(0, prompts[1], max_new_tokens=5), Sampling(1.0, seed=3))
        again = await collect(served.stream(Request(0, prompts[1], max_new_tokens=5), Sampling(1.0, seed=3)))
        beams = await served.generate(Request(1, prompts[1], max_new_tokens=5, beam_width=2))
        assert await collect(served.stream(Request(2, prompts[1], max_new_tokens=5, beam_width=2))) == beams.tokens
    assert first.tokens == again


@pytest.mark.parametrize("way", ["generate", "stream"])
async def test_a_task_can_be_cancelled_at_any_await_point(serving, generated, prompts, way):
    """Cancelled after 0, 1, 2, ... turns of the event loop, then after longer and longer times, until one of them was quick enough to
    finish."""
    loop = serving()
    async with asyncio.timeout(200), AsyncServing(loop) as served:
        def start(number):
            request = Request(number, prompts[0], max_new_tokens=3)
            return asyncio.ensure_future(served.generate(request) if way == "generate" else collect(served.stream(request)))

        number = cancelled = 0
        finished = False
        while not finished:
            other = asyncio.ensure_future(served.generate(Request(10_000, prompts[2], max_new_tokens=2)))
            task = start(number)
            for _ in range(min(number, 5)):
                await asyncio.sleep(0)
            if number > 5:
                await asyncio.sleep(0.001 * 1.2 ** (number - 6))
            finished = task.done()
            task.cancel()
            cancelled += not finished
            result = (await asyncio.gather(task, return_exceptions=True))[0]
            assert finished or isinstance(result, asyncio.CancelledError)
            assert (await other).tokens == generated(prompts[2], 2)
            await until_nothing_is_held(loop.cache)
            number += 1
        assert cancelled > 2
        assert (await served.generate(Request(0, prompts[0], max_new_tokens=3))).tokens == generated(prompts[0], 3)
    loop.cache.verify()


async def test_a_consumer_that_stops_reading_holds_up_nobody(serving, generated, prompts):
    loop = serving(loop_options={"max_batch_size": 2})
    async with asyncio.timeout(30), AsyncServing(loop) as served:
        stopped = served.stream(Request(0, prompts[0], max_new_tokens=50))
        first = await anext(stopped)
        for number in range(1, 5):
            assert (await served.generate(Request(number, prompts[number], max_new_tokens=6))).tokens == generated(prompts[number], 6)
        await until_nothing_is_held(loop.cache)  # the one that nobody reads has been answered too
        assert [first, *await collect(stopped)] == generated(prompts[0], 50)


async def test_a_stream_that_is_left_early_ends_its_request(serving, prompts):
    loop = serving(watch=Gate)
    async with asyncio.timeout(30), AsyncServing(loop) as served:
        loop.model.calls.release(2)
        async for _ in served.stream(Request(0, prompts[1], max_new_tokens=200)):
            break  # nobody closes it: that is left to the event loop
        going_on = asyncio.ensure_future(let_go_on(loop.model))  # for as many calls as there are before the thread hears of it
        await until_nothing_is_held(loop.cache)
        going_on.cancel()
        assert loop.model.num_calls < 200


async def test_a_cancelled_generate_ends_its_request(serving, prompts):
    loop = serving(watch=Gate)
    async with asyncio.timeout(30), AsyncServing(loop) as served:
        task = asyncio.ensure_future(served.generate(Request(0, prompts[1], max_new_tokens=200)))
        loop.model.calls.release(2)
        while not loop.cache.stats().sequences:
            await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        loop.model.calls.release(3)
        await until_nothing_is_held(loop.cache)


async def test_an_id_can_be_used_again_as_soon_as_its_stream_is_closed(serving, generated, prompts):
    loop = serving()
    async with asyncio.timeout(30), AsyncServing(loop) as served:
        for _ in range(3):
            stream = served.stream(Request(7, prompts[0], max_new_tokens=100))
            await anext(stream)
            await stream.aclose()
        assert (await served.generate(Request(7, prompts[0], max_new_tokens=5))).tokens == generated(prompts[0], 5)


async def test_bad_requests_are_told_and_others_are_answered(serving, generated, prompts):
    loop = serving(primary="20 blocks", secondary="4 blocks", nvme="0 blocks")
    async with AsyncServing(loop) as served:
        too_long, unknown_token, good = await asyncio.gather(
            served.generate(Request(0, [5] * 200, max_new_tokens=4)), collect(served.stream(Request(1, [500], max_new_tokens=4))),
            served.generate(Request(2, prompts[1], max_new_tokens=4)), return_exceptions=True)
        assert isinstance(too_long, CapacityError)
        assert "50 primary blocks of group 0 are needed, the pool has 20" in str(too_long)
        assert isinstance(unknown_token, RequestError)
        assert "tokens[0]=500" in str(unknown_token)
        assert good.tokens == generated(prompts[1], 4)


async def test_an_id_that_is_still_being_answered_is_refused(serving, prompts):
    loop = serving(watch=Gate)
    async with asyncio.timeout(30), AsyncServing(loop) as served:
        first, second = (asyncio.ensure_future(served.generate(Request(3, prompts[1], max_new_tokens=40))) for _ in range(2))
        await asyncio.sleep(0)  # both have asked, in this order
        going_on = asyncio.ensure_future(let_go_on(loop.model))
        with pytest.raises(RequestError, match="request 3 is still being answered"):
            await second
        assert len((await first).tokens) == 40
        going_on.cancel()


async def test_tokens_that_there_are_come_before_the_error(serving, generated, prompts):
    loop = serving(primary="12 blocks", secondary="4 blocks", nvme="0 blocks")  # 48 tokens; the prompt has 37
    async with AsyncServing(loop) as served:
        tokens = []
        with pytest.raises(CapacityError):
            await collect(served.stream(Request(0, prompts[0], max_new_tokens=40)), tokens)
        assert len(tokens) == 12
        assert tokens == generated(prompts[0], 40)[:12]


async def test_closing_ends_what_is_in_flight_with_an_error(serving, prompts):
    loop = serving(watch=Gate)
    async with asyncio.timeout(20):
        async with AsyncServing(loop) as served:
            waiting = [asyncio.ensure_future(served.generate(Request(number, prompts[0], max_new_tokens=50))) for number in range(2)]
            loop.model.calls.release(10)  # too few for a whole answer
            await asyncio.sleep(0)
            going_on = asyncio.ensure_future(let_go_on(loop.model))  # begins when closing has begun
        going_on.cancel()
        results = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(result, RequestError) and "closed before the answer was complete" in str(result) for result in results)
    with pytest.raises(RequestError, match="is not open"):
        await served.generate(Request(5, prompts[0]))
    assert loop.cache.stats().sequences == 0


async def test_an_engine_that_fails_tells_everybody_and_leaves_nothing(serving, prompts):
    loop = serving(watch=Gate)
    loop.model.fail = True
    async with asyncio.timeout(20), AsyncServing(loop) as served:
        waiting = [asyncio.ensure_future(served.generate(Request(number, prompts[0]))) for number in range(3)]
        await asyncio.sleep(0.01)
        loop.model.calls.release(5)
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(result, KVTierError) for result in results)
        assert "the engine failed: ZeroDivisionError('the model broke')" in str(results[0])
        assert loop.cache.stats().sequences == 0


async def test_a_step_that_does_not_end_does_not_hold_up_closing_for_ever(serving, prompts):
    loop = serving(watch=Gate)
    served = await AsyncServing(loop, close_timeout=0.05).__aenter__()
    task = asyncio.ensure_future(served.generate(Request(0, prompts[0])))
    while not loop.model.num_calls:
        await asyncio.sleep(0.001)
    with pytest.raises(TransferError, match="did not end within 0 s"):
        await served.__aexit__(None, None, None)
    loop.model.calls.release(100)
    with pytest.raises(RequestError, match="was closed"):
        await task
    await until_nothing_is_held(loop.cache)
    served._thread.join(20)


async def test_an_argument_that_is_no_argument_ends_its_own_request_only(serving, generated, prompts):
    async with asyncio.timeout(20), AsyncServing(serving()) as served:
        with pytest.raises(RequestError, match="request 0: cannot be submitted"):
            await served.generate(Request(0, prompts[0], max_new_tokens=4), encoder_tokens=7)
        assert (await served.generate(Request(1, prompts[1], max_new_tokens=4))).tokens == generated(prompts[1], 4)
