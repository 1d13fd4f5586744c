"""A tiny random chat model with a tokenizer of its own, as transformers saves them: no download, no second to spare."""

from __future__ import annotations

import pytest
import torch

from kvtier.bench.demo_text import SYSTEM_PROMPT, USERS

TEMPLATE = ("{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")


@pytest.fixture(scope="session")
def chat_model_folder(tmp_path_factory):
    """A model and tokenizer as save_pretrained leaves them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=1500, special_tokens=["<|end|>", "<|im_start|>", "<|im_end|>"], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    bpe.train_from_iterator([SYSTEM_PROMPT, *(turn for user in USERS for turn in user.turns)], trainer)
    folder = tmp_path_factory.mktemp("tiny-model")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", bos_token="<|im_start|>", pad_token="<|end|>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(str(folder))
    torch.manual_seed(3)
    LlamaForCausalLM(LlamaConfig(
        vocab_size=1500, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=4096, pad_token_id=0, bos_token_id=1, eos_token_id=2, initializer_range=0.4)).save_pretrained(str(folder))
    return folder
