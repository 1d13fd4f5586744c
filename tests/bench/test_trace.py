"""Reading traces: what a good one becomes, and what is said about a bad one."""

from __future__ import annotations

import gzip
import json
import lzma
from pathlib import Path

import pytest

from kvtier.bench.trace import Trace, read_trace
from kvtier.bench.trace_synthetic import SHAPES, synthetic_lines, synthetic_trace, write_synthetic
from kvtier.bench.trace_text import read_chats
from kvtier.errors import ConfigError


def line(timestamp: object = 0, input_length: object = 700, output_length: object = 5, hash_ids: object = (0, 1)) -> str:
    ids = list(hash_ids) if isinstance(hash_ids, tuple) else hash_ids
    return json.dumps({"timestamp": timestamp, "input_length": input_length, "output_length": output_length, "hash_ids": ids}) + "\n"


def read(folder: Path, *lines: str, block: int = 512) -> Trace:
    file = folder / "trace.jsonl"
    file.write_text("".join(lines))
    return read_trace(file, block)


def test_ids_are_numbered_by_their_first_use_and_lengths_kept(tmp_path: Path) -> None:
    trace = read(tmp_path, line(0, 1100, 7, (90, -4, 7)), "\n", line(5, 700, 8, (90, 1 << 70)))
    assert [prompt.tolist() for prompt in trace.prompts()] == [[0, 1, 2], [0, 3]]
    assert trace.reusable_prompts() == [[0, 1], [0]]
    assert trace.parents.tolist() == [-1, 0, 1, 0]
    assert (trace.num_requests, trace.num_unique, trace.input_tokens, trace.seconds) == (2, 4, 1800, 0.005)
    assert trace.output_lengths.tolist() == [7, 8]


@pytest.mark.parametrize("opened", [lzma.open, gzip.open])
def test_compressed_files_are_read_as_they_are(tmp_path: Path, opened: object) -> None:
    file = tmp_path / ("trace.jsonl.xz" if opened is lzma.open else "trace.jsonl.gz")
    with opened(file, "wt") as writing:  # type: ignore[operator]
        writing.write(line())
    assert read_trace(file).num_requests == 1
    file.write_bytes(file.read_bytes()[:-12])
    with pytest.raises(ConfigError, match=r"trace\.jsonl\.(xz|gz): cannot be decompressed"):
        read_trace(file)


@pytest.mark.parametrize(("bad", "said"), [
    ('{"timestamp": 1, "input_len\n', "line 2: not JSON, Unterminated string.*; expected"),
    ('{"timestamp": 1, "input_length": 7', r"line 2: not JSON, .*\(the file ends inside this line\); expected"),
    ("[1]\n", r"line 2: \[1\]; expected an object"),
    ('{"timestamp": 1}\n', "line 2: no hash_ids; expected a list of whole numbers, .* as in {"),
    ('{"timestamp": 1, "hash_ids": null}\n', "line 2: hash_ids=null; expected a list of whole numbers"),
    ('{"timestamp": 1, "messages": []}\n', "line 2: a chat as text, .*--tokenizer FILE, .*tokenizer.json.*--tokenizer bytes"),
    ('{"hash_ids": [1]}\n', "line 2: no timestamp; expected a whole number of at least 0"),
    (line(hash_ids=(0, True)), r"line 2: hash_ids=\[0, true\]; expected a list of whole numbers"),
    (line(timestamp="soon"), 'line 2: timestamp="soon"; expected a whole number of at least 0'),
    (line(input_length=0), "line 2: input_length=0; expected a whole number of at least 1"),
    (line(timestamp=-3), "line 2: timestamp=-3; expected"),
    (line(timestamp=4), "line 2: timestamp 4 after 9; expected requests in the order of arrival"),
    (line(10, 1700), "line 2: 2 hash_ids for input_length 1700; expected 4, one for each 512 tokens.*--block 1024"),
    (line(10, 700, 5, (1, 0)), "line 2: id 1 follows the start of a prompt here and id 0 before"),
    (line(10, 700, 5, (5, 1)), "line 2: id 1 follows id 5 here and id 0 before"),
    (line(10, 1500, 5, (0, 8, 8)), "line 2: id 8 follows id 8 here and id 0 before"),
])
def test_a_bad_line_is_named_with_what_was_expected(tmp_path: Path, bad: str, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"trace\.jsonl, {said}"):
        read(tmp_path, line(9), bad)


def test_the_wrong_block_size_is_noticed_and_the_right_one_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected 44, one for each 16 tokens; .*--block 512"):
        read(tmp_path, line(), block=16)
    with pytest.raises(ConfigError, match="block=0"):
        read(tmp_path, line(), block=0)


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_an_empty_trace_and_a_missing_one_are_refused(tmp_path: Path, content: str) -> None:
    with pytest.raises(ConfigError, match="no requests; expected"):
        read(tmp_path, content)
    with pytest.raises(ConfigError, match=r"nowhere: cannot be read \(No such file"):
        read_trace(tmp_path / "nowhere")


@pytest.mark.parametrize("shape", SHAPES)
def test_made_up_traces_keep_the_format_and_are_the_same_again(tmp_path: Path, shape: str) -> None:
    file = tmp_path / "made.jsonl"
    write_synthetic(file, shape, 60, seed=4)
    trace = read_trace(file)
    assert trace.num_requests > 30
    assert trace.ids.tolist() == synthetic_trace(shape, 60, seed=4).ids.tolist()
    assert synthetic_lines(shape, 60, seed=4) != synthetic_lines(shape, 60, seed=5)


def chats(folder: Path, *requests: object) -> Path:
    file = folder / "chats.jsonl"
    file.write_text("".join(json.dumps(request) + "\n" for request in requests))
    return file


def test_chats_that_go_on_share_the_blocks_of_their_beginning(tmp_path: Path) -> None:
    first = [{"role": "user", "content": "a" * 30}]
    longer = [*first, {"role": "assistant", "content": "b" * 20}, {"role": "user", "content": "c"}]
    file = chats(tmp_path, {"messages": first, "output": "b" * 20}, {"timestamp": 7, "messages": longer, "output_length": 3})
    trace = read_chats(file, "bytes", 8)
    first_ids, longer_ids = (prompt.tolist() for prompt in trace.prompts())
    assert trace.input_lengths.tolist()[0] == len("<|user|>\n") + 31
    assert first_ids == longer_ids[:5]
    assert len(longer_ids) == -(-trace.input_lengths.tolist()[1] // 8)
    assert trace.output_lengths.tolist() == [20, 3]
    assert trace.milliseconds.tolist() == [0, 7]


def test_chats_are_read_with_a_real_tokenizer(tmp_path: Path, chat_model_folder: Path) -> None:
    file = chats(tmp_path, {"messages": [{"role": "user", "content": "What is the weather like?"}]})
    assert 3 < read_chats(file, str(chat_model_folder), 4).input_tokens < len("<|user|>\nWhat is the weather like?\n")


@pytest.mark.parametrize(("request_line", "said"), [
    ({"messages": []}, "line 1: no messages; expected"), ({"text": "x"}, "line 1: no messages"),
    ({"hash_ids": [1]}, "line 1: no messages; .* leave --tokenizer out"),
    ({"messages": [{"role": "user"}]}, "line 1: message 0 has no text"), ({"messages": ["x"]}, "line 1: message 0 has no text"),
    ({"messages": [{"role": "u", "content": "x"}], "timestamp": "y"}, "line 1: timestamp='y'; expected a whole number"),
])
def test_a_bad_chat_is_named(tmp_path: Path, request_line: object, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"chats\.jsonl, {said}"):
        read_chats(chats(tmp_path, request_line), "bytes", 8)


def test_a_tokenizer_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    for name, said in ((str(tmp_path / "no"), "no such file"), (str(tmp_path), "cannot be read")):
        with pytest.raises(ConfigError, match=said):
            read_chats(chats(tmp_path), name, 8)
