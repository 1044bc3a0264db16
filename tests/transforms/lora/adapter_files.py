"""The files of an adapter: their names, functions that read and change the configuration, and loading with peft."""

import copy
import json
import warnings
from contextlib import contextmanager

WEIGHTS, CONFIG, DIGESTS = "adapter_model.safetensors", "adapter_config.json", "ftrain_digests.json"


def read_config(directory):
    return json.loads((directory / CONFIG).read_text())


def update_config(directory, **options):
    """Change options in a configuration, whose digest then no longer fits."""
    (directory / CONFIG).write_text(json.dumps({**read_config(directory), **options}))


def make_peft_files(directory, **options):
    """Turn the files of an adapter into files of peft, which have no digests, and change options."""
    (directory / DIGESTS).unlink()
    update_config(directory, **options)


@contextmanager
def without_warnings():
    """Context in which peft and transformers may warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def load_with_peft(peft, model, directory, **options):
    """Return peft's model of a copy of a base, with the adapters in a directory."""
    with without_warnings():
        return peft.PeftModel.from_pretrained(copy.deepcopy(model), directory, **options)
