"""Counter-based random numbers: every draw is a pure function of a key, the same bits on every device."""

from ftrain.random.host_keys import fold_in_key_data as fold_in_key_data
from ftrain.random.host_keys import key_data as key_data
from ftrain.random.host_keys import seed_of as seed_of
from ftrain.random.host_keys import step_key_data as step_key_data
from ftrain.random.host_keys import stock_key_data as stock_key_data
from ftrain.random.host_keys import update_key_data as update_key_data
from ftrain.random.host_keys import wrap_key_data as wrap_key_data
from ftrain.random.keys import bernoulli as bernoulli
from ftrain.random.keys import bits as bits
from ftrain.random.keys import dropout as dropout
from ftrain.random.keys import exponential as exponential
from ftrain.random.keys import fold_in as fold_in
from ftrain.random.keys import for_examples as for_examples
from ftrain.random.keys import keep_scale as keep_scale
from ftrain.random.keys import key as key
from ftrain.random.keys import normal as normal
from ftrain.random.keys import permutation as permutation
from ftrain.random.keys import randint as randint
from ftrain.random.keys import split as split
from ftrain.random.keys import to_device as to_device
from ftrain.random.keys import uniform as uniform

__all__ = [
    "bernoulli",
    "bits",
    "dropout",
    "exponential",
    "fold_in",
    "for_examples",
    "key",
    "normal",
    "permutation",
    "randint",
    "split",
    "uniform",
]
