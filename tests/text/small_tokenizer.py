"""A tokenizer of single characters and a few marks, saved as a folder."""

from __future__ import annotations

import json

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

MARKS = ["<s>", "</s>", "<turn>"]


def save_tokenizer(folder, *, letters="abc \n?", adds_bos=False, config=None):
    folder.mkdir(exist_ok=True)
    vocabulary = {token: index for index, token in enumerate([*MARKS, *letters])}
    core = Tokenizer(models.WordLevel(vocabulary))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    if adds_bos:
        core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    core.add_special_tokens(MARKS)
    core.save(str(folder / "tokenizer.json"))
    entries = {"bos_token": "<s>", "eos_token": "</s>", **(config or {})}
    (folder / "tokenizer_config.json").write_text(json.dumps(entries))
    return folder
